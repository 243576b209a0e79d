"""Keep a table of what was raced, in logs/tried.tsv: a row for each comparison of a race that has ended."""

import datetime
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from speedrun.logs import ToolError, printable, read_text, shown
from speedrun.proof import interval

TABLE = Path("logs/tried.tsv")
SHA256, FIGURE = "[0-9a-f]{12}", r"[+-]?\d+\.\d+( \(.+ to .+\))?"
COLUMNS = dict(date=r"\d{4}-\d\d-\d\d", script=".+", sha256=SHA256, against=".+", against_sha256=SHA256, flags=".*")
COLUMNS |= dict(first_seed=r"\d+", n=r"\d+", loss=FIGURE, time=FIGURE, verdict=".+", note=".*")


def append(document: dict, matches: Sequence[tuple[int, int]], note: str) -> None:
    """Add the comparisons of a race's document, of these scripts, unless they are there. Several races may do so."""
    rows = []
    for pair, found in zip(matches, document["comparisons"], strict=True):
        row: list = [datetime.date.today()]
        for script in map(document["scripts"].__getitem__, pair):
            row += [script["name"], script["sha256"][:12]]
        row += [shlex.join(document["flags"]), document["seed"], found["n"][0], interval(found["val_loss"], "+.4f")]
        row += [interval(found["train_time"], ".4f"), found["verdict"], note]
        rows.append([" ".join(printable(str(cell)).split()) for cell in row])
    try:
        import fcntl

        TABLE.parent.mkdir(exist_ok=True)
        with open(TABLE, "a+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            there = [line.split("\t")[1:-1] for line in text.splitlines()]
            new = [row for row in rows if row[1:-1] not in there]  # or else a race was resumed that had ended
            lines = ["\t".join(row) + "\n" for row in ([] if text else [[*COLUMNS]]) + new]
            file.write("\n" * (text[-1:] not in ("", "\n")) + "".join(lines))  # another one may have been killed at it
    except OSError as error:
        print(f"not noted in {TABLE}: {error}", file=sys.stderr)


def read() -> list[list[str]]:
    """Return the rows. Damaged ones are named on stderr, and stay in the file."""
    if not TABLE.is_file():
        raise ToolError(f"{TABLE} is not there: no race has ended yet that was started in this folder")
    rows = []
    for number, line in enumerate(read_text(TABLE).splitlines(), start=1):
        cells = line.split("\t")
        if len(cells) == len(COLUMNS) and all(map(re.fullmatch, COLUMNS.values(), cells)):
            rows.append(cells)
        elif cells not in ([*COLUMNS], [""]):
            print(f"{TABLE}, line {number}: {shown(line)} is no row of this table: mend it", file=sys.stderr)
    return rows
