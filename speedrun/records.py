"""Find, verify, submit and list records."""

import datetime
import difflib
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import ROOT
from speedrun.logs import RULE, TRACKS, Log, ToolError, Track, digest, quote, read_json, read_text
from speedrun.process import printable
from speedrun.race import ALPHA, MIN_PAIRS, OWN_FLAGS, RACE, Race, Sample, Script, interval, read_race, summary

RECORDS = ROOT / "records"
PUBLIC = RECORDS / "public.json"  # the public speedrun's history, which was not measured here
SCRIPT, PAGE, INFO, RUNS = "train_gpt.py", "README.md", "record.json", "runs.txt"
FOLDER_NAME = re.compile(r"\d+[a-z]?_[\w.-]+", re.ASCII)  # of a record, in the order of its track's line
LOG_NAME = re.compile(r"^==> (.+) <==\n", re.MULTILINE)  # before each log of RUNS, as `tail -n +1` writes it
PLACEHOLDER = re.compile(r"<say[^>\n]*>?")
COMPILER_SETTING = re.compile(
    r"\b_(?:inductor|dynamo)\b(?!\.utils)|\bTORCH(?:INDUCTOR|DYNAMO|_COMPILE)(?!_COMPILE_THREADS|_CACHE_DIR)\w*"
    r"|\btorch\.compile\((?:[^()]|\([^()]*\))*?\b(?:mode|options|backend|disable)="
)
MAX_CHANGED = 200  # lines, removed and added, of a script that carries an idea
BEGIN = "<!-- table leaderboards: python -m speedrun table -->"
END = "<!-- end of table -->"
NEW_PAGE = """# {}

## What changed

<say what the script does that the one before did not>

## Why

<say why it is faster, and how you know: what you measured, what did not work, whose idea it was>
"""


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


def short_name(name: str) -> str:
    """Return the name of a record's folder without its number."""
    return name.partition("_")[2] if name[:1].isdigit() else name


def read_logs(folder: Path, beside: str = "") -> Iterator[Log]:
    """Read the logs of a record, or with `beside` those in a folder of this name, such as `curve`."""
    texts = {path: read_text(path) for path in sorted((folder / beside).glob("*.txt")) if path.name != RUNS}
    if (path := folder / RUNS).is_file():
        _, *parts = LOG_NAME.split(read_text(path))
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            texts[folder / name] = text.removesuffix("\n")
    for path, text in texts.items():
        if path.parent == folder / beside:
            yield Log(path, text)


def record_logs(path: Path) -> list[Log]:
    """Read a log, or those of a record, which has some."""
    if logs := [Log(path)] if path.is_file() else [*read_logs(path)]:
        return logs
    raise ToolError(f"{name_of(path)} has no logs: submit puts those of its race there")


def find_record(name: str, root: Path) -> Path:
    """Return a file, a folder with logs, or the record of this number, name, or part of a name, in any letters."""
    path = Path(name)
    if path.is_file() or (path.is_dir() and (FOLDER_NAME.fullmatch(path.name) or [*path.glob("*.txt")])):
        return path
    folders, wanted = record_folders(root), Path(name.removesuffix(f"/{SCRIPT}")).name.lower()
    matches = [path for path in folders if wanted in (path.name.lower(), *path.name.lower().split("_", 1))]
    matches = matches or [path for path in folders if wanted in path.name.lower()]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(map(name_of, matches or folders)) or "none"
    problem = f"is part of {len(matches)} names" if matches else f"is neither a file nor a record in {root}"
    raise ToolError(f"{quote(name)} {problem}; name one of: {names}; {root.name}/{PAGE} says where older ones are")


def read_script(name: str, root: Path) -> tuple[str, str]:
    """Return a label and the script that `name` names: a record's, a log's, or a file's."""
    path = find_record(name, root)
    if path.is_dir():
        return name_of(path), read_text(path / SCRIPT).rstrip("\n")
    return str(path), read_text(path).partition(f"\n{RULE}\n")[0].rstrip("\n")


def read_entrant(words: str, root: Path) -> tuple[Script, str]:
    """Read a script for a race, perhaps with flags that it has alone: "my.py --muon_lr 0.1"."""
    try:
        name, *flags = [words] if os.path.exists(words) else shlex.split(words)
    except ValueError:
        raise ToolError(f"{quote(words)} names no script; name a record, a log, a script, or 'SCRIPT FLAGS'") from None
    label, source = read_script(name, root)
    return Script(shlex.join([label, *flags]), digest(source), flags), source


def hash_of(folder: Path) -> str:
    return digest(read_text(folder / SCRIPT).rstrip("\n"))


def diff(a: tuple[str, str], b: tuple[str, str]) -> tuple[list[str], int, int]:
    """Return the unified diff of two (label, script), and how many lines it removes and adds."""
    lines = list(difflib.unified_diff(a[1].split("\n"), b[1].split("\n"), a[0], b[0], lineterm=""))
    removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
    return lines, removed, added


# ---- The line of records, and boards


def board_of(log: Log) -> str:
    """Name the leaderboard of a log: its track and, where that has one for each machine, the hardware."""
    track, hardware = TRACKS.get(log.track or ""), log.hardware or "unknown hardware"
    if track is None or not track.machines:
        return log.track or "unknown track"
    names = [name for name, pattern in track.machines if name and re.match(pattern, hardware)]
    return f"{track.name} on {names[0] if names else hardware}"


def board_of_record(folder: Path) -> str:
    for log in read_logs(folder):  # the first says it
        return board_of(log)
    raise ToolError(f"{folder / RUNS}: has no logs; take the file as submit wrote it")


def newest_ranked(line: Sequence[Path], board: str) -> Path | None:
    """Return the newest record that is timed on a leaderboard whose name begins so."""
    for folder in reversed(line):
        if read_info(folder).ranked and board_of_record(folder).startswith(board):
            return folder
    return None


def missing_parts(folder: Path) -> Iterator[str]:
    """Yield what a record lacks that submit has begun."""
    for name in (SCRIPT, PAGE, *([RUNS] if read_info(folder).ranked else [])):
        if not (folder / name).is_file():
            yield f"{name} is missing; a record has one"
            return
    for name in (INFO, PAGE):
        for placeholder in PLACEHOLDER.findall(read_text(folder / name)):
            yield f"{name}: write what {quote(placeholder)} asks for"


def sort_records(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the whole records in order, as each names the one before; and what is wrong with the others."""
    line, left_out, after = list[Path](), dict[Path, str](), dict[Path, str | None]()
    for folder in record_folders(root):
        try:
            after[folder] = read_info(folder).after
        except ToolError as error:
            left_out[folder] = str(error)
    name = None
    while followers := [folder for folder, before in after.items() if before == name]:
        for folder in followers:
            del after[folder]
            try:
                for problem in missing_parts(folder):
                    raise ToolError(problem)
                if read_info(folder).ranked:
                    race_before(folder, line)
            except ToolError as error:
                left_out[folder] = str(error).removeprefix(f"{folder}{os.sep}")
        whole = [folder for folder in followers if folder not in left_out]
        for other in whole[1:]:
            left_out[other] = f"{INFO}: comes after {name}, as {name_of(whole[0])} does; mend `after`"
        line += whole[:1]
        name = name_of((whole or followers)[0])
    left_out |= dict.fromkeys(after, f"{INFO}: no line leads there from the first record; mend `after`")
    return line, left_out


def lineage(root: Path) -> list[Path]:
    """Return all whole records in order, and name the others on stderr."""
    line, left_out = sort_records(root)
    for folder, problem in left_out.items():
        print(printable(f"{name_of(folder)} is left out: {problem}"), file=sys.stderr)
    return line


def race_before(folder: Path, line: Sequence[Path]) -> tuple[Path, Race] | None:
    """Return the newest record in `line` on the board of this one, and their race; None if it opens its board.

    Raise ToolError if there is no such race that is whole.
    """
    older, path = newest_ranked(line, board_of_record(folder)), folder / RACE
    if older is None:
        return None
    if not path.is_file():
        raise ToolError(f"{path}: is missing; race the script against {name_of(older)}, and put the {RACE} there")
    race, sha256 = read_race(path), hash_of(folder)
    if sha256 not in race.hashes:
        raise ToolError(f"{path}: lacks this record's script, SHA-256 {sha256}; race it as it is")
    if problem := obstacle(race, older):
        raise ToolError(f"{path}: {problem}")
    if len(race.runs) != len(race.order):
        raise ToolError(f"{path}: has {len(race.runs)} runs, not {race.pairs} of each script; finish the race")
    race.check(path)
    return older, race


def obstacle(race: Race, older: Path | None) -> str | None:
    """Say why no record can come of this race against an older one, or return None."""
    if race.preset not in TRACKS:
        return f"{quote(str(race.preset))} has no leaderboard"
    forbidden = forbidden_flags(race.flags, TRACKS[race.preset], race.nproc_per_node == 1)
    if forbidden + race.own_flags:
        return f"flags {', '.join(forbidden + race.own_flags)}: put settings into the script, race without"
    if older and hash_of(older) not in race.hashes:
        name = short_name(older.name)
        return f"none of its scripts is {name}: race YOUR_SCRIPT {name}"
    if race.pairs < MIN_PAIRS:
        return f"fewer than {MIN_PAIRS} pairs are a screen: race with --pairs {MIN_PAIRS}"
    return None


def obstacle_ahead(race: Race, newest: str, root: Path) -> str | None:
    """Say before a race of this newest script why no record can come of it, or return None."""
    line, track, board = lineage(root), TRACKS.get(race.preset), str(race.preset)
    if track and track.machines:
        board += f" on {race.nproc_per_node}x"
    return obstacle(race, newest_ranked(line, board)) or too_different(newest, line, root.parent)


def forbidden_flags(flags: Sequence[str], track: Track, is_one_gpu: bool) -> list[str]:
    """Return the flags that a record's runs may not have."""
    allowed = {*track.flags, *(track.flags_on_one_gpu if is_one_gpu else [])}
    names = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    return [name for name in names if name.removeprefix("--") not in allowed]


def too_different(newer: str, line: Sequence[Path], top: Path) -> str | None:
    """Say that more lines change against the record before and the root's script than an idea may, or return None."""
    olders = [read_script(str(path), path.parent) for path in (*line[-1:], top / SCRIPT) if path.exists()]
    changed, name = min(((sum(diff(older, ("", newer))[1:]), older[0]) for older in olders), default=(0, ""))
    if changed <= MAX_CHANGED:
        return None
    return f"{changed} lines change against {name}, for an idea at most {MAX_CHANGED}: take out what it can spare"


# ---- Verify


def track_of(log: Log) -> Track:
    if log.track in TRACKS:
        return TRACKS[log.track]
    raise ToolError(f"{log.path}: its preset is {quote(str(log.track))}; the tracks are {', '.join(TRACKS)}")


def validation_problem(log: Log, track: Track) -> str | None:
    """Say that the losses are of other tokens than the target, or return None."""
    if log.val_tokens != track.val_tokens:
        return f"validates on {log.val_tokens} tokens, the track on {track.val_tokens}; run it without --val_tokens"
    if track.val_sha256 not in ("", log.val_sha256):
        return f"other validation tokens, sha256 {log.val_sha256}, than the track's; get the track's data, run it again"
    return None


def log_problems(log: Log, sha256: str) -> Iterator[str]:
    """Yield what the rules forbid of one run, whose script should have this hash."""
    track, hardware = track_of(log), log.hardware or "unknown hardware"
    if log.problem:
        yield log.problem
        return
    if log.sha256 != sha256:
        yield f"the script of the log is not the folder's {SCRIPT}; put there the one that ran, or run it again"
    if problem := validation_problem(log, track):
        yield problem
    numbers = range(track.first_shard, track.first_shard + max(len(log.train_shards), 1))
    shards = [(Path(track.shard.format(number)).name, track.shard_tokens) for number in numbers]
    if log.train_shards != shards:
        yield f"trains on {quote(str(log.train_shards))}, the track on {shards[0]} and the next; get the track's data"
    flags = [flag for flag in log.flags if flag.partition("=")[0] not in OWN_FLAGS]
    for name in forbidden_flags(flags, track, hardware.startswith("1x ")):
        yield f"has the flag {name}: put settings into the script, run it without"
    for name in log.environment:
        if re.match("TORCHINDUCTOR_(?!COMPILE_THREADS|CACHE_DIR)", name):
            yield f"ran with {name}: the track allows no compiler flags; unset it and run it again"
    if log.recompiles != 0:
        yield f"recompiles after the clock started: {log.recompiles}; cover them in the warm-up, then run it again"
    if track.max_threads and not 0 < (log.num_threads or 0) <= track.max_threads:
        yield f"uses {log.num_threads} CPU threads; run it with --cpu_threads {track.max_threads}, the track's most"


def differences(logs: Sequence[Log]) -> Iterator[str]:
    """Yield where the run of a log is not one of the others' experiment with a seed of its own."""
    for other, log in itertools.combinations(logs, 2):
        if log.seed is not None and log.seed == other.seed:
            yield f"{log.name}: has seed {log.seed}, as {other.name} has; leave one out, or run another --seed"
    stated = [
        log.configuration | {"steps": log.num_steps, "validation tokens": log.val_sha256, "hardware": log.hardware}
        for log in logs
    ]
    for log, mine in zip(logs, stated, strict=True):
        unequal = {key for key in mine | stated[0] if mine.get(key) != stated[0].get(key)}
        if names := ", ".join(sorted(unequal - {"seed", "run_id", "log_dir"})):
            yield f"{log.name}: unlike {logs[0].name} in {names}; run all with the same flags and data, on one machine"


def verify_runs(folder: Path, kind: str, line: Sequence[Path]) -> tuple[list[str], str]:
    """Check the logs and the race of a ranked record after `line`; return failures and a summary."""
    logs, sha256 = record_logs(folder), hash_of(folder)
    failures = [f"{log.name}: {problem}" for log in logs for problem in log_problems(log, sha256)]
    if any(log.problem for log in logs):
        return failures, ""
    failures += differences(logs)
    target = track_of(logs[0]).target
    sample = Sample([log.val_loss for log in logs], target)
    result = f"{sample} p={sample.p:.2g} ({board_of(logs[0])}, {logs[0].num_steps} steps)"
    if sample.mean > target:
        failures.append(f"mean {sample.mean:.4f} is above the target {target}; train better or longer")
    elif kind != "form" and not sample.p < ALPHA:
        failures.append(f"n too small: p={sample.p:.2g} is not below {ALPHA} at n={sample.n}; race with more pairs")
    if raced := race_before(folder, line):
        older, race = raced
        comparison = race.compare(race.runs_of(sha256), race.runs_of(hash_of(older)))
        result += f"; {summary(comparison)}, against {name_of(older)}"
        if kind == "idea" and comparison["verdict"] != "faster":  # a public record gained elsewhere
            failures.append(f"{RACE}: against {name_of(older)} {summary(comparison)}")
        runs = {(run.seed, run.val_loss, run.train_time) for run in race.runs_of(sha256)}
        if {(log.seed, log.val_loss, log.train_time) for log in logs} != runs:
            failures.append(
                f"{RACE}: its {len(runs)} runs of the script are not the {len(logs)} logs: submit all those"
            )
    return failures, result


def verify(folder: Path, line: Sequence[Path]) -> tuple[list[str], str]:
    """Check a record by its files and those before it in `line`; return failures and a summary."""
    failures, result = list[str](), ""
    try:
        info, names = read_info(folder), [name_of(other) for other in line]
        before = line[: names.index(info.after) + 1] if info.after in names else []
        failures += missing_parts(folder)
        script = read_script(str(folder), folder.parent)[1]
        for match in COMPILER_SETTING.finditer(script):
            place = f"line {script.count(chr(10), 0, match.end()) + 1} uses {quote(match[0])}"
            failures.append(f"{SCRIPT}: {place}; the track allows no compiler flags: take it out")
        is_compared = info.kind == "idea" and not info.evidence  # or that names the script, which has left the tree
        if is_compared and (problem := too_different(script, before, folder.parents[2])):
            failures.append(f"{SCRIPT}: {problem}")
        result = f"not ranked: script and page; {source_of(info)}"
        if info.ranked:
            more, result = verify_runs(folder, info.kind, before)
            failures += more
    except (ToolError, FileNotFoundError) as error:
        if not failures:
            failures.append(str(error).removeprefix(f"{folder}{os.sep}"))
    return failures, result


def verify_records(names: Sequence[str], root: Path) -> tuple[list[str], int]:
    """Verify these records, or all; return lines, and how many fail."""
    line, left_out = sort_records(root.resolve())
    folders = [find_record(name.removesuffix(f"/{SCRIPT}"), root).resolve() for name in names] or [*line, *left_out]
    lines, failed = [], 0
    for folder in folders:
        failures, result = verify(folder, line)
        if folder in left_out and not failures:
            failures = [left_out[folder]]
        lines += [f"FAIL {name_of(folder)}: {failure}" for failure in failures] or [f"ok {name_of(folder)}: {result}"]
        failed += bool(failures)
    return lines, failed


# ---- Submit


def write_record(name: str, paths: Sequence[str], root: Path, race: Path | None) -> Path:
    """Make a record's folder, the newest, from the logs of one script and its race; return it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ToolError(f"{quote(name)} is no name for a record: take letters, digits, '-' and '.'")
    if not paths:
        raise ToolError("name the logs of its runs")
    logs = [Log(Path(path)) for path in paths]
    problems = [f"{log.path}: {log.problem}" for log in logs if log.problem]
    problems += [f"{log.path}: is of another script" for log in logs if log.sha256 != logs[0].sha256]
    for problem in problems or differences(logs):
        raise ToolError(problem)
    line, track = lineage(root), track_of(logs[0])
    last = max((folder.name for folder in record_folders(root) if folder.parent.name == track.name), default="00_")
    number, letter = re.findall(r"^(\d+)([a-z]?)_", last)[0]
    number = number + chr(ord(letter or "a") + 1) if track.lettered else f"{int(number) + 1:02}"
    info = dict(
        date=str(datetime.date.today()),
        what="<say in one line what it is>",
        kind="idea",
        after=name_of(line[-1]) if line else None,
        ranked=True,
    )
    texts = {
        PAGE: NEW_PAGE.format(name),
        SCRIPT: logs[0].source + "\n",
        INFO: json.dumps(info, indent=1) + "\n",
        RUNS: "".join(f"==> {log.name} <==\n{log.stored}\n" for log in logs),
    }
    if race:
        read_race(race)
        texts[RACE] = read_text(race)
    folder = root / track.name / f"{number}_{name}"
    part = folder.with_name(f".{folder.name}.part")  # until it is whole
    part.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (part / file).write_text(text, encoding="utf-8")
    return part.rename(folder)


# ---- Table


def cell(text: str) -> str:
    """Quote text of a log or a page for a cell of a Markdown table."""
    return re.sub(r"[&<>|\\`\[\]\n]", lambda match: f"&#{ord(match[0])};", printable(text))


def link(folder: Path) -> str:
    return f"[{short_name(folder.name)}]({name_of(folder)})"


def markdown_table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown; head has the columns' names, with | between them."""
    names = head.split("|")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def board_row(folder: Path, logs: Sequence[Log], ratio: str, product: float) -> list[str]:
    """Return a record's row of its leaderboard."""
    sample = Sample([log.val_loss for log in logs], track_of(logs[0]).target)
    times = Sample([log.train_time / 1000 for log in logs])
    peak_mib = max(log.peak_mib or 0 for log in logs)
    return [
        link(folder),
        cell(read_info(folder).what),
        f"{logs[0].num_steps:,}",
        f"{sample.mean:.4f} (sd {sample.sd:.4f}, n={sample.n})",
        f"{sample.p:.1g}",
        f"{times.mean:.2f} (sd {times.sd:.2f})",
        ratio,
        f"{product:.3f}",
        f"{peak_mib:,}" if peak_mib else "",
        cell("; ".join(sorted({log.hardware or "not stated" for log in logs}))),
    ]


def leaderboards(root: Path) -> str:
    """Return the tables of all leaderboards, of the records that were not timed, and of the public history."""
    line, boards, untimed = lineage(root), dict[str, list[list[str]]](), dict[str, list[list[str]]]()
    products: dict[str, float] = {}  # of each board, the train time of its newest record in times of the first's
    for i, folder in enumerate(line):
        info = read_info(folder)
        if not info.ranked:
            untimed.setdefault(folder.parent.name, []).append([link(folder), cell(info.what), source_of(info)])
            continue
        try:
            logs, raced = record_logs(folder), race_before(folder, line[:i])
        except ToolError as error:
            print(printable(f"{name_of(folder)} is left out: {error}"), file=sys.stderr)
            continue
        board, ratio = board_of(logs[0]), ""
        products.setdefault(board, 1.0)
        if raced:
            older, race = raced
            times = race.compare(race.runs_of(hash_of(folder)), race.runs_of(hash_of(older)))["train_time"]
            ratio = interval(times, ".3f")
            products[board] *= times["ratio"]
        boards.setdefault(board, []).append(board_row(folder, logs, ratio, products[board]))
    parts = []
    head = "record|what|steps|val_loss, mean|p|train time (s)|times the one before (95%)|times the first"
    head += "|peak memory (MiB)|hardware"
    for board in sorted(boards, reverse=True):
        target = TRACKS[board.split()[0]].target
        parts += [f"### {cell(board)}: at most {target}, measured here", markdown_table(head, boards[board])]
    for track, rows in untimed.items():
        parts += [f"### {track}: ported, not run on eight GPUs", markdown_table("record|what|of", rows)]
    public = read_json(PUBLIC)
    source = f"[{public['credit']}]({public['url']})"
    parts.append(f"### Public history, {public['hardware']}: figures of {source}, not measured here")
    head = "#|date|name|steps|tokens per step|step_avg (ms)|train time (s)|official time (min)|val_loss"
    formats = "{number}|{date}|{name}|{steps:,}|{tokens_per_step:,}|{step_avg_ms:.2f}|{train_time_s:.2f}"
    formats += "|{official_minutes:g}|{val_loss:.4f} ({val_loss_of})"
    parts.append(markdown_table(head, [formats.format(**record).split("|") for record in public["records"]]))
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
