"""Find and read tracks and records."""

import difflib
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun.logs import RULE, Log, ToolError, read_json, read_text, shown
from speedrun.process import ROOT

RECORDS = ROOT / "records"
PUBLIC = RECORDS / "public.json"  # the public speedrun's history, which was not measured here
SCRIPT, RUNS, CARD, PAGE, RACE = "train_gpt.py", "runs.txt", "record.json", "README.md", "race.json"
OLDER, CURVE = "older", "curve"  # begin names of logs of the script before, and of runs that validated often
RECORD_FOLDER = re.compile(r"\d+[a-z]?_[\w.-]+", re.ASCII)  # of a track, in the order of its line
HEAD = re.compile(r"^==> (.+) <==\n", re.MULTILINE)  # before each log of RUNS, as `tail -n +1` writes it

Track = types.SimpleNamespace  # as tracks.toml has it, with its name
TRACKS = {name: Track(name=name, **row) for name, row in tomllib.loads(read_text(RECORDS / "tracks.toml")).items()}
DEFAULT = next(iter(TRACKS))


def track_of(log: Log) -> Track:
    if log.track not in TRACKS:
        what = f"preset {shown(log.track)} is no track" if log.track else "states no preset, so no track"
        raise ToolError(f"{log.path}: {what}; the tracks are {', '.join(TRACKS)}; `stats` takes --target LOSS")
    return TRACKS[log.track]


class Card(NamedTuple):
    """What record.json says of a record: rules.py has the kinds, `evidence` belongs to some of them."""

    date: str
    what: str
    kind: str
    after: str | None
    ranked: bool
    evidence: str = ""


def read_card(folder: Path) -> Card:
    try:
        return Card(**read_json(folder / CARD))
    except (TypeError, FileNotFoundError):
        raise ToolError(f"{folder / CARD}: needs date, what, kind, after and ranked; write it") from None


def record_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*/*") if path.is_dir() and RECORD_FOLDER.fullmatch(path.name))


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def short_name(name: str) -> str:
    """Return the name of a record's folder without its number."""
    return name.partition("_")[2] if name[:1].isdigit() else name


def lineage(root: Path) -> list[Path]:
    """Return all records in order: each names the one before."""
    line, followers = list[Path](), dict[str | None, Path]()
    for folder in record_folders(root):
        before = read_card(folder).after
        if other := followers.get(before):
            raise ToolError(f"{name_of(other)} and {name_of(folder)} both come after {before}: mend a record.json")
        followers[before] = folder
    while (before := name_of(line[-1]) if line else None) in followers:
        line.append(followers.pop(before))
    for folder in followers.values():
        raise ToolError(f"{name_of(folder)}: no line leads there from the first record: mend after in record.json")
    return line


def rivals(line: Sequence[Path], board: str) -> list[Path]:
    """Return those that a record after `line` may race: the newest on its board, and the newest."""
    ranked = [folder for folder in line if is_on_board(folder, board)]
    return [*dict.fromkeys([*ranked[-1:], *line[-1:]])]


def board_of(log: Log) -> str:
    """Name the leaderboard of a log: its track and, where that has one for each machine, the hardware."""
    track, hardware = TRACKS.get(log.track or ""), log.hardware or "unknown hardware"
    if track is None or not track.machines:
        return log.track or "unknown track"
    names = [name for name, pattern in track.machines if name and re.match(pattern, hardware)]
    return f"{track.name} on {names[0] if names else hardware}"


def is_on_board(folder: Path, board: str) -> bool:
    """Return whether a record is timed on a leaderboard whose name begins with `board`."""
    ranked = logs_of(folder, 1) if read_card(folder).ranked else []
    return any(log.track == board.split()[0] and board_of(log).startswith(board) for log in ranked)


def texts_of(folder: Path) -> dict[Path, str]:
    """Return the logs of a record, or those that lie in another folder, by name."""
    path = folder / RUNS
    if not path.is_file():
        return {path: read_text(path) for path in sorted(folder.glob("*.txt"))}
    parts = HEAD.split(read_text(path))[1:]
    texts = {folder / name: text.removesuffix("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return texts | {path: read_text(path) for path in sorted(folder.glob(f"{CURVE}/*.txt"))}  # what came later


def joined(texts: Mapping[str, str]) -> str:
    """Return what texts_of reads."""
    return "".join(f"==> {name} <==\n{text}\n" for name, text in texts.items())


def logs_of(folder: Path, most: int | None = None, beside: str = "") -> list[Log]:
    """Read the logs of a record, or with `beside` those whose names begin so."""
    texts = [(path, text) for path, text in texts_of(folder).items() if path.parent == folder / beside]
    return [Log(path, text) for path, text in texts[:most]]


def record_logs(path: Path) -> list[Log]:
    """Read a log, or those of a record, which has some."""
    if logs := [Log(path)] if path.is_file() else logs_of(path):
        return logs
    raise ToolError(f"{name_of(path)} has no logs: submit puts those of its race there")


def find_record(name: str, root: Path) -> Path:
    """Return a file, a folder with logs, or the record of this number, name, or part of a name, in any letters."""
    path = Path(name)
    if path.is_file() or (path.is_dir() and (RECORD_FOLDER.fullmatch(path.name) or texts_of(path))):
        return path
    folders, wanted = record_folders(root), name.lower().removesuffix(f"/{SCRIPT}").rstrip("/").rpartition("/")[2]
    found = [path for path in folders if wanted in (path.name.lower(), *path.name.lower().split("_", 1))]
    found = found or [path for path in folders if wanted in path.name.lower()]
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(name_of, found or folders)) or "none"
    problem = f"is part of {len(found)} names" if found else f"is neither a file nor a record in {root}"
    history = f"git show COMMIT:records/... has those that left the tree, records/{PAGE} names the commits"
    raise ToolError(f"{shown(name)} {problem}; name one of: {names}; {history}")


def read_script(name: str, root: Path) -> tuple[str, str]:
    """Return a label and the script that `name` names: a record's, a log's, or a file's."""
    path = find_record(name, root)
    if path.is_dir():
        return name_of(path), read_text(path / SCRIPT).rstrip("\n")
    return str(path), read_text(path).partition(f"\n{RULE}\n")[0].rstrip("\n")


def diff(a: tuple[str, str], b: tuple[str, str]) -> tuple[list[str], int, int]:
    """Return the unified diff of two (label, script), and how many lines it removes and adds."""
    lines = list(difflib.unified_diff(a[1].split("\n"), b[1].split("\n"), a[0], b[0], lineterm=""))
    removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
    return lines, removed, added
