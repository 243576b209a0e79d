"""List what was raced: a row for each comparison of the races below logs/ and records/, the newest last."""

import sys
from collections.abc import Iterator
from pathlib import Path

from speedrun.logs import ToolError, printable, read_text
from speedrun.proof import Race, Script, interval, read_race
from speedrun.store import RACE, SCRIPT, read_card, short_name

COLUMNS = "date", "script", "against", "n", "time", "loss", "verdict", "note"


def told(script: Script) -> str:
    """Return a script's record or file, the beginning of its SHA-256, and its own flags."""
    name, _, flags = script.name.partition(" ")
    path = Path(name)
    name = path.parent.name if path.name == SCRIPT and path.parent.name else path.stem
    return f"{short_name(name)} {script.sha256[:6]} {flags}".strip()


def rows(race: Race, date: str) -> Iterator[tuple[str, ...]]:
    for (a, b), found in race.compared():
        figures = str(found["n"][0]), interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
        row = race.date or date, told(race.scripts[a]), told(race.scripts[b]), *figures, found["verdict"], race.note
        yield tuple(cell.replace("\n", " ") for cell in row)


def table(root: Path) -> str:
    """Return the table. Races that cannot be read are named on stderr."""
    found = set[tuple[str, ...]]()
    paths = sorted({*Path("logs").glob(f"**/{RACE}"), *root.glob(f"*/*/{RACE}")})
    for path in {read_text(path): path for path in paths}.values():  # several records may have the same race
        try:
            found |= {*rows(read_race(path), read_card(path.parent).date if path.is_relative_to(root) else "")}
        except ToolError as error:
            print(printable(str(error)), file=sys.stderr)
    if not found:
        raise ToolError(f"no race has a pair yet below logs and {root}")
    table = [COLUMNS, *sorted(found)]
    widths = *(max(map(len, column)) for column in [*zip(*table, strict=True)][:-2]), 0, 0
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in table)
