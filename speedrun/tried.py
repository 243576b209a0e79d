"""List what was raced: a row for each comparison of the races below logs/ and records/, the newest last."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from speedrun.logs import ToolError, printable, read_text
from speedrun.proof import Race, interval, read_race
from speedrun.store import RACE, read_card, short_name

COLUMNS = "date", "script", "against", "n", "time", "loss", "verdict", "note"


def short(name: str) -> str:
    """Return what tells a script from others: its record's name or its file's, and its own flags."""
    script, _, flags = name.partition(" ")
    path = Path(script)
    script = path.parent.name if path.name == "train_gpt.py" and path.parent.name else path.stem
    return f"{short_name(script)} {flags}".strip()


def rows(race: Race, date: str, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for (a, b), found in race.compared():
        figures = str(found["n"][0]), interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
        row = race.date or date, names[a], names[b], *figures, found["verdict"], race.note
        yield tuple(printable(cell).replace("\n", " ") for cell in row)


def table(root: Path) -> str:
    """Return the table. Races that cannot be read are named on stderr."""
    races, scripts = list[tuple[Race, str]](), defaultdict[str, set[str]](set)
    paths = sorted({*Path("logs").glob(f"**/{RACE}"), *root.glob(f"*/*/{RACE}")})
    for path in {read_text(path): path for path in paths}.values():  # several records may have the same race
        try:
            races.append((read_race(path), read_card(path.parent).date if path.is_relative_to(root) else ""))
        except ToolError as error:
            print(printable(str(error)), file=sys.stderr)
    for script in chain(*(race.scripts for race, _ in races)):
        scripts[short(script.name)].add(script.sha256)
    found = set[tuple[str, ...]]()
    for race, date in races:  # of several scripts of one name each has the beginning of its SHA-256 beside it
        names = [short(it.name) + f" {it.sha256[:6]}" * (len(scripts[short(it.name)]) > 1) for it in race.scripts]
        found |= {*rows(race, date, names)}
    if not found:
        raise ToolError(f"no race has a pair yet below logs and {root}")
    table = [COLUMNS, *sorted(found)]
    widths = *(max(map(len, column)) for column in [*zip(*table, strict=True)][:-2]), 0, 0
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in table)
