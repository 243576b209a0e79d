"""Find, verify, submit and list records."""

import datetime
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import ROOT
from speedrun.logs import TRACKS, Log, ToolError, Track, digest, quote, read_json, read_text, script_in
from speedrun.process import printable
from speedrun.race import ALPHA, OWN_FLAGS, RACE, Race, Sample, interval, read_race, summary

RECORDS = ROOT / "records"
PUBLIC = RECORDS / "public.json"  # the public speedrun's history, which was not measured here
SCRIPT, PAGE, INFO, RUNS = "train_gpt.py", "README.md", "record.json", "runs.txt"
FOLDER_NAME = re.compile(r"\d+[a-z]?_[\w.-]+", re.ASCII)  # of a record, in the order of its track's line
LOG_NAME = re.compile(r"^==> (.+) <==\n", re.MULTILINE)  # before each log of RUNS, as `tail -n +1` writes it
PLACEHOLDER = re.compile(r"<say[^>\n]*>?")
BEGIN = "<!-- table leaderboards: python -m speedrun table -->"
END = "<!-- end of table -->"
COLUMNS = "record|what|steps|val_loss, mean|p|train time (s)|times the one before (95%)|times the first"
COLUMNS += "|peak memory (MiB)|hardware"
NEW_PAGE = "# {}\n\n## What changed\n\n<say what the script does now>\n\n## Why\n\n<say what you measured>\n"


# ---- Find and read


class RecordInfo(NamedTuple):
    """The content of record.json: RULES.md has the kinds, `evidence` belongs to some of them."""

    date: str
    what: str
    kind: str
    after: str | None
    ranked: bool
    evidence: str = ""


def read_info(folder: Path) -> RecordInfo:
    try:
        return RecordInfo(**read_json(folder / INFO))
    except (TypeError, FileNotFoundError):
        raise ToolError(f"{folder / INFO}: needs date, what, kind, after and ranked; write it") from None


def source_of(info: RecordInfo) -> str:
    """Say where a record that was not timed comes from."""
    return info.evidence if info.kind == "milestone" else info.kind


def record_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*/*") if path.is_dir() and FOLDER_NAME.fullmatch(path.name))


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def short_name(folder: Path) -> str:
    """Return the name of a record without its number."""
    return folder.name.partition("_")[2]


def read_logs(folder: Path, beside: str = "") -> list[Log]:
    """Read the logs of a ranked record's runs, or those that it keeps beside them, such as `curve`."""
    _, *parts = LOG_NAME.split(read_text(folder / RUNS))
    logs = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if name.rpartition("/")[0] == beside:
            logs.append(Log(folder / name, text.removesuffix("\n")))
    if logs or beside:
        return logs
    raise ToolError(f"{folder / RUNS}: has no logs; take the file as submit wrote it")


def find_record(name: str, root: Path) -> Path:
    """Return the file or folder that `name` is, or the record of this name, such as LongSteps."""
    if Path(name).exists():
        return Path(name)
    folders = {short_name(folder): folder for folder in record_folders(root)}
    if name in folders:
        return folders[name]
    raise ToolError(f"{quote(name)} is neither a file nor a record; the records are {', '.join(folders) or 'none yet'}")


def read_script(name: str, root: Path) -> tuple[str, str]:
    """Return a label and the script that `name` names: a record's, a log's, or a file's."""
    path = find_record(name, root)
    if path.is_dir():
        return name_of(path), read_text(path / SCRIPT).rstrip("\n")
    return str(path), script_in(path).rstrip("\n")


def hash_of(folder: Path) -> str:
    return digest(read_text(folder / SCRIPT).rstrip("\n"))


def diff(a: tuple[str, str], b: tuple[str, str]) -> tuple[list[str], int, int]:
    """Return the unified diff of two (label, script), and how many lines it removes and adds."""
    lines = list(difflib.unified_diff(a[1].split("\n"), b[1].split("\n"), a[0], b[0], lineterm=""))
    removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
    return lines, removed, added


# ---- The line of records, and boards


def board_of(log: Log) -> str:
    """Name the leaderboard of a log: of a track for GPUs each kind of hardware has its own."""
    is_for_gpus = log.track in TRACKS and not TRACKS[log.track].max_threads
    return f"{log.track} on {log.hardware or 'unknown hardware'}" if is_for_gpus else str(log.track)


def missing_part(folder: Path) -> str | None:
    """Say what a record lacks, such as what submit leaves to be written, or return None."""
    for name in (SCRIPT, PAGE, *([RUNS] if read_info(folder).ranked else [])):
        if not (folder / name).is_file():
            return f"{name} is missing; a record has one"
    for name in (INFO, PAGE):
        if placeholders := PLACEHOLDER.findall(read_text(folder / name)):
            return f"{name}: write what {quote(', '.join(placeholders))} asks for"
    return None


def lineage(root: Path) -> list[Path]:
    """Return the whole records in order, as each names the one before, and name the others on stderr."""
    followers, left_out, line = dict[str | None, Path](), dict[Path, str](), list[Path]()
    for folder in record_folders(root):
        try:
            if problem := missing_part(folder):
                left_out[folder] = problem
            elif followers.setdefault(after := read_info(folder).after, folder) != folder:
                left_out[folder] = f"{INFO}: {name_of(followers[after])} comes after {after}, too; mend `after`"
        except ToolError as error:
            left_out[folder] = str(error)
    name = None
    while name in followers:
        line.append(followers.pop(name))
        name = name_of(line[-1])
    left_out |= dict.fromkeys(followers.values(), f"{INFO}: no whole records lead there; mend `after`")
    for folder, problem in left_out.items():
        print(printable(f"{name_of(folder)} is left out: {problem}"), file=sys.stderr)
    return line


def race_before(folder: Path, line: Sequence[Path]) -> tuple[Path, Race, dict] | None:
    """Return the newest record in `line` on this one's board, their race and comparison; None if it opens the board."""
    board, path = board_of(read_logs(folder)[0]), folder / RACE
    ranked = (other for other in reversed(line) if read_info(other).ranked)
    older = next((other for other in ranked if board_of(read_logs(other)[0]) == board), None)
    if older is None:
        return None
    if not path.is_file():
        raise ToolError(f"{path}: is missing; race the script against {name_of(older)}, and put the {RACE} there")
    race, hashes = read_race(path), [hash_of(folder), hash_of(older)]
    for script, sha256 in zip((folder, older), hashes, strict=True):
        if sha256 not in race.hashes:
            raise ToolError(f"{path}: lacks the script of {name_of(script)}; race it as it is")
    if [(run.seed, run.script) for run in race.runs] != race.order:
        raise ToolError(f"{path}: has {len(race.runs)} runs, not {race.pairs} of each script in turn; finish the race")
    race.check(path)
    return older, race, race.compare(*map(race.hashes.index, hashes))


# ---- Verify


def track_of(log: Log) -> Track:
    if log.track in TRACKS:
        return TRACKS[log.track]
    raise ToolError(f"{log.path}: its preset is {quote(str(log.track))}; the tracks are {', '.join(TRACKS)}")


def log_problems(log: Log, sha256: str) -> Iterator[str]:
    """Yield what the rules forbid of one run, whose script should have this hash."""
    track = track_of(log)
    if log.problem:
        yield log.problem
        return
    if log.sha256 != sha256:
        yield f"the script of the log is not the folder's {SCRIPT}; put there the one that ran, or run it again"
    if (log.val_tokens, log.val_sha256) != (track.val_tokens, track.val_sha256 or log.val_sha256):
        yield f"validates on other tokens: {log.val_tokens} of sha256 {log.val_sha256}; get the track's data"
    numbers = range(track.first_shard, track.first_shard + max(len(log.train_shards), 1))
    shards = [(Path(track.shard.format(number)).name, track.shard_tokens) for number in numbers]
    if log.train_shards != shards:
        yield f"trains on {quote(str(log.train_shards))}, the track on {shards[0]} and the next; get the track's data"
    names = {flag.partition("=")[0] for flag in log.flags if flag.startswith("--")}
    for name in sorted(names - OWN_FLAGS - {f"--{name}" for name in track.flags}):
        yield f"has the flag {name}: put settings into the script, run it without"
    if log.recompiles != 0:
        yield f"recompiles after the clock started: {log.recompiles}; cover them in the warm-up, then run it again"
    if track.max_threads and not 0 < (log.num_threads or 0) <= track.max_threads:
        yield f"uses {log.num_threads} CPU threads; run it with --cpu_threads {track.max_threads}, the track's most"


def verify_runs(folder: Path, kind: str, line: Sequence[Path], failures: list[str]) -> str:
    """Check the logs and the race of a ranked record after `line`; add to `failures`, and return a summary."""
    logs, sha256 = read_logs(folder), hash_of(folder)
    failures += [f"{log.name}: {problem}" for log in logs for problem in log_problems(log, sha256)]
    if any(log.problem for log in logs):
        return ""
    if len({log.seed for log in logs}) < len(logs):
        failures.append("two of its runs have one seed: leave one out, or run another --seed")
    target = track_of(logs[0]).target
    sample = Sample([log.val_loss for log in logs], target)
    result = f"{sample} p={sample.p:.2g} ({board_of(logs[0])}, {logs[0].num_steps} steps)"
    if sample.mean > target:
        failures.append(f"mean {sample.mean:.4f} is above the target {target}; train better or longer")
    elif kind != "form" and not sample.p < ALPHA:
        failures.append(f"n too small: p={sample.p:.2g} is not below {ALPHA} at n={sample.n}; race with more pairs")
    if raced := race_before(folder, line):
        older, race, comparison = raced
        outcome = f"{summary(comparison)}, against {name_of(older)}"
        if kind == "idea" and comparison["verdict"] != "faster":  # a public record gained elsewhere
            failures.append(f"{RACE}: {outcome}")
        runs = {(run.seed, run.val_loss, run.train_time) for run in race.runs_of(race.hashes.index(sha256))}
        if {(log.seed, log.val_loss, log.train_time) for log in logs} != runs:
            problem = f"its {len(runs)} runs of the script are not the {len(logs)} logs: submit all those"
            failures.append(f"{RACE}: {problem}")
        result += f"; {outcome}"
    return result


def verify(folder: Path, line: Sequence[Path], failures: list[str]) -> str:
    """Check a record by its files and those before it in `line`; add to `failures`, and return a summary."""
    info, before = read_info(folder), line[: line.index(folder)] if folder in line else line
    if problem := missing_part(folder):
        failures.append(problem)
    elif folder not in line:
        failures.append(f"{INFO}: no whole records lead here, or another one comes after {info.after}; mend `after`")
    if info.ranked:
        return verify_runs(folder, info.kind, before, failures)
    return f"not ranked: script and page; {source_of(info)}"


def verify_records(names: Sequence[str], root: Path) -> tuple[list[str], int]:
    """Verify these records, or all; return lines, and how many fail."""
    root, lines, failed = root.resolve(), [], 0
    line = lineage(root)
    others = [folder for folder in record_folders(root) if folder not in line]
    for folder in [find_record(name, root).resolve() for name in names] or line + others:
        failures = list[str]()
        try:
            result = verify(folder, line, failures)
        except (ToolError, OSError) as error:
            failures.append(str(error).removeprefix(f"{folder}{os.sep}"))
        lines += [f"FAIL {name_of(folder)}: {failure}" for failure in failures] or [f"ok {name_of(folder)}: {result}"]
        failed += bool(failures)
    return lines, failed


# ---- Submit


def write_record(name: str, paths: Sequence[str], root: Path, race: Path | None) -> Path:
    """Make a record's folder, the newest, from the logs of one script and its race; return it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ToolError(f"{quote(name)} is no name for a record: take letters, digits, '-' and '.'")
    logs = [Log(Path(path)) for path in paths]
    for log in logs:
        if log.problem or log.sha256 != logs[0].sha256:
            raise ToolError(f"{log.path}: {log.problem or f'is of another script than {logs[0].path}'}")
    line, track, folders = lineage(root), track_of(logs[0]), record_folders(root)
    if same := [folder for folder in folders if short_name(folder).lower() == name.lower()]:
        raise ToolError(f"{same[0]} is there: take another name, or remove it")
    last = max((folder.name for folder in folders if folder.parent.name == track.name), default="00_")
    number, letter = re.findall(r"^(\d+)([a-z]?)_", last)[0]
    number = number + chr(ord(letter or "a") + 1) if track.lettered else f"{int(number) + 1:02}"
    what, after = "<say in one line what it is>", name_of(line[-1]) if line else None
    info = RecordInfo(str(datetime.date.today()), what, "idea", after, ranked=True)
    texts = {
        PAGE: NEW_PAGE.format(name),
        SCRIPT: logs[0].source + "\n",
        INFO: json.dumps(info._asdict(), indent=1) + "\n",
        RUNS: "".join(f"==> {log.name} <==\n{log.stored}\n" for log in logs),
    }
    if race:
        read_race(race)
        texts[RACE] = read_text(race)
    folder = root / track.name / f"{number}_{name}"
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


# ---- Table


def cell(text: str) -> str:
    """Quote text of a log or a page for a cell of a Markdown table."""
    return re.sub(r"[&<>|\\`\[\]\n]", lambda match: f"&#{ord(match[0])};", printable(text))


def link(folder: Path) -> str:
    return f"[{short_name(folder)}]({name_of(folder)})"


def markdown_table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown; head has the columns' names, with | between them."""
    names = head.split("|")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def board_row(folder: Path, logs: Sequence[Log], ratio: str, product: float) -> list[str]:
    """Return a record's row of its leaderboard."""
    sample = Sample([log.val_loss for log in logs], track_of(logs[0]).target)
    times = Sample([log.train_time / 1000 for log in logs])
    return [
        link(folder),
        cell(read_info(folder).what),
        f"{logs[0].num_steps:,}",
        f"{sample.mean:.4f} (sd {sample.sd:.4f}, n={sample.n})",
        f"{sample.p:.1g}",
        f"{times.mean:.2f} (sd {times.sd:.2f})",
        ratio,
        f"{product:.3f}",
        f"{max(log.peak_mib or 0 for log in logs):,}",
        cell("; ".join(sorted({log.hardware or "not stated" for log in logs}))),
    ]


def leaderboards(root: Path) -> str:
    """Return the tables of all leaderboards, and of the records that were not timed."""
    line, boards, untimed = lineage(root), dict[str, list[list[str]]](), dict[str, list[list[str]]]()
    products: dict[str, float] = {}  # of each board, the train time of its newest record in times of the first's
    for i, folder in enumerate(line):
        info = read_info(folder)
        if not info.ranked:
            untimed.setdefault(folder.parent.name, []).append([link(folder), cell(info.what), source_of(info)])
            continue
        logs, raced, ratio = read_logs(folder), race_before(folder, line[:i]), ""
        board = board_of(logs[0])
        if raced:
            times = raced[2]["train_time"]
            ratio, products[board] = interval(times, ".3f"), products[board] * times["ratio"]
        else:
            products[board] = 1.0
        boards.setdefault(board, []).append(board_row(folder, logs, ratio, products[board]))
    parts = []
    for board in sorted(boards, reverse=True):
        track = TRACKS[board.split()[0]]
        goal = f"at most {track.target} nats per {track.unit} of {track.text}"
        parts += [f"### {cell(board)}: {goal}, measured here", markdown_table(COLUMNS, boards[board])]
    for name, rows in untimed.items():
        parts += [f"### {name}: ported, not run on eight GPUs", markdown_table("record|what|of", rows)]
    return "\n\n".join(parts)


def update_boards(root: Path, check_only: bool = False) -> bool:
    """Write the boards into the page of the records, unless `check_only`. Return whether they were out of date."""
    path = root / PAGE
    text = read_text(path)
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ToolError(f"{path} lacks the lines {BEGIN} and {END}; put them where the boards go")
    new = f"{before}{begin}\n{leaderboards(root)}\n\n{end}{after}"
    if new != text and not check_only:
        path.write_text(new, encoding="utf-8")
    return new != text
