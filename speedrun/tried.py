"""List what was raced: a row for each comparison of the races below logs/ and records/, the newest last."""

import sys
from collections.abc import Iterator
from pathlib import Path

from speedrun.logs import ToolError, printable, read_text
from speedrun.proof import Race, interval, read_race
from speedrun.store import RACE, read_card, short_name

FORM = "{:10} {:16} {:16} {:>2} {:22} {:28} {} {}"
COLUMNS = FORM.format("date", "script", "against", "n", "time", "loss", "verdict", "note")


def short(name: str) -> str:
    """Return what tells a script from others: its record's name or its file's, and its own flags."""
    script, _, flags = name.partition(" ")
    path = Path(script)
    script = path.parent.name if path.name == "train_gpt.py" and path.parent.name else path.stem
    return f"{short_name(script)} {flags}".strip()


def rows(race: Race, date: str) -> Iterator[str]:
    for (a, b), found in race.compared():
        names = (short(race.scripts[i].name)[:16] for i in (a, b))
        figures = interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
        row = FORM.format(race.date or date, *names, found["n"][0], *figures, found["verdict"], race.note)
        yield " ".join(printable(row).split("\n")).rstrip()


def table(root: Path) -> str:
    """Return the table. Races that cannot be read are named on stderr."""
    found: set[str] = set()
    paths = sorted({*Path("logs").glob(f"**/{RACE}"), *root.glob(f"*/*/{RACE}")})
    for path in {read_text(path): path for path in paths}.values():  # several records may have the same race
        try:
            found |= {*rows(read_race(path), read_card(path.parent).date if path.is_relative_to(root) else "")}
        except ToolError as error:
            print(printable(str(error)), file=sys.stderr)
    if not found:
        raise ToolError(f"no race has a pair yet below logs and {root}")
    return "\n".join([COLUMNS, *sorted(found)])
