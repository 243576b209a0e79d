"""List what was raced: a row for each comparison of the races below logs/ and records/, the newest last."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun.logs import ToolError, printable
from speedrun.proof import Race, read_race
from speedrun.store import RACE, read_card, short_name

COLUMNS = dict(date=8, script=13, against=13, n=3, time=12, loss=15, verdict=9, note=99)  # and their widths


def short(name: str) -> str:
    """Return what tells a script from others: its record's name or its file's, and its own flags."""
    script, _, flags = name.partition(" ")
    path = Path(script)
    script = path.parent.name if path.name == "train_gpt.py" and path.parent.name else path.stem
    return f"{short_name(script)} {flags}"


def with_error(figures: dict) -> str:
    """Return a ratio or a difference with half the width of its interval, if it has one."""
    if "ratio" in figures:
        error = f" ±{(figures['high'] / figures['low']) ** 0.5 - 1:.1%}" if "low" in figures else ""
        return f"{figures['ratio']:.3f}{error}"
    error = f" ±{(figures['high'] - figures['low']) / 2:.4f}" if "low" in figures else ""
    return f"{figures['difference']:+.4f}{error}"


def rows(race: Race, date: str) -> Iterator[tuple[str, ...]]:
    for (a, b), found in race.compared():
        names = (short(race.scripts[i].name) for i in (a, b))
        verdict = "loss high" if "loss" in found["verdict"] else found["verdict"].split()[0].strip(",")
        figures = with_error(found["train_time"]), with_error(found["val_loss"])
        yield (race.date or date)[2:], *names, str(found["n"][0]), *figures, verdict, race.note


def line(cells: Sequence[str], width: int) -> str:
    clean = (" ".join(printable(cell).split()) for cell in cells)
    return " ".join(cell[:wide].ljust(wide) for cell, wide in zip(clean, COLUMNS.values(), strict=True))[
        :width
    ].rstrip()


def table(root: Path) -> str:
    """Return the table, as wide as the terminal. Races that cannot be read are named on stderr."""
    found: dict[tuple[str, ...], str] = {}  # dates; several records may have the same race
    for path in sorted({*Path("logs").glob(f"**/{RACE}"), *root.glob(f"*/*/{RACE}")}, reverse=True):
        try:
            for date, *row in rows(read_race(path), read_card(path.parent).date if path.is_relative_to(root) else ""):
                found.setdefault(tuple(row), date)
        except ToolError as error:
            print(printable(str(error)), file=sys.stderr)
    if not found:
        raise ToolError(f"no race has a pair yet below logs and {root}")
    dated = sorted([date, *row] for row, date in found.items())
    return "\n".join(line(row, shutil.get_terminal_size((100, 24)).columns) for row in [[*COLUMNS], *dated])
