"""Find, verify, submit and list records."""

import datetime
import difflib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import ROOT, TRACKS, Track
from speedrun.logs import Log, ToolError, digest, quote, read_json, read_text, script_in
from speedrun.process import printable
from speedrun.race import ALPHA, OWN_FLAGS, RACE, Race, Sample, interval, read_race, report, summary

RECORDS = ROOT / "records"
PUBLIC = RECORDS / "public.json"  # the public speedrun's history, which was not measured here
SCRIPT, PAGE, INFO, RUNS = "train_gpt.py", "README.md", "record.json", "runs.txt"
FOLDER_NAME = re.compile(r"\d+[a-z]?_[\w.-]+", re.ASCII)  # of a record: its place in its track's line, and its name
LOG_NAME = re.compile(r"^==> (.+) <==\n", re.MULTILINE)  # before each log of RUNS, as `tail -n +1` writes it
PLACEHOLDER = re.compile(r"<say[^>\n]*>?")
BEGIN = "<!-- table leaderboards: python -m speedrun table -->"
END = "<!-- end of table -->"
COLUMNS = "record|what|steps|val_loss, mean|p|train time (s)|times the one before (95%)|times the first"
MOST_LINES = 200  # that an idea may change


# ---- Find and read


class RecordInfo(NamedTuple):
    """The content of record.json: RULES.md has the kinds, `evidence` belongs to some of them."""

    date: str
    what: str
    kind: str
    ranked: bool
    evidence: str = ""


def read_info(folder: Path) -> RecordInfo:
    try:
        return RecordInfo(**read_json(folder / INFO))
    except (TypeError, FileNotFoundError):
        raise ToolError(f"{folder / INFO}: has date, what, kind, ranked and, for some, evidence; mend it") from None


def source_of(info: RecordInfo) -> str:
    """Say where a record that was not timed comes from."""
    return info.evidence if info.kind == "milestone" else info.kind


def place_in_line(folder: Path) -> tuple[str, int, str]:
    """Return the track of a record and, from its folder's name, the number and the letter."""
    [(number, letter)] = re.findall(r"^(\d+)([a-z]?)_", folder.name)
    return folder.parent.name, int(number), letter


def record_folders(root: Path) -> list[Path]:
    """Return the folders of records, line by line."""
    folders = [path for path in root.glob("*/*") if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]
    return sorted(folders, key=place_in_line)


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
    label = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path  # names no home folder
    return str(label), script_in(path).rstrip("\n")


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
    """Return the whole records, line by line, each in the order of its numbers, and name the others on stderr."""
    line = []
    for folder in record_folders(root):
        try:
            problem = missing_part(folder)
        except ToolError as error:
            problem = str(error)
        if problem:
            print(printable(f"{name_of(folder)} is left out: {problem}"), file=sys.stderr)
        else:
            line.append(folder)
    return line


def record_before(folder: Path, line: Sequence[Path]) -> Path | None:
    """Return what a record is compared with: the one before in its line, or before a ranked one on its board."""
    older = [it for it in line if it.parent == folder.parent and place_in_line(it) < place_in_line(folder)]
    if not read_info(folder).ranked:
        return older[-1] if older else None
    board, ranked = board_of(read_logs(folder)[0]), (it for it in reversed(older) if read_info(it).ranked)
    return next((it for it in ranked if board_of(read_logs(it)[0]) == board), None)


def race_against(older: Path, folder: Path, line: Sequence[Path]) -> tuple[Race, dict] | None:
    """Return the race of a ranked record against the one before, and their comparison; None for a form without a race.

    A race lies with the newest record that it has a script of.
    """
    hashes = [hash_of(folder), hash_of(older)]
    behind = [it for it in line if it.parent == folder.parent and place_in_line(it) > place_in_line(folder)]
    for path in [it / RACE for it in (folder, *behind) if (it / RACE).is_file()]:
        race = read_race(path)
        if not {*hashes} <= {*race.hashes}:
            continue
        if [(run.seed, run.script) for run in race.runs] != race.order:
            raise ToolError(f"{path}: {len(race.runs)} runs, not {race.pairs} of each script in turn; finish the race")
        race.check(path)
        return race, race.compare(*map(race.hashes.index, hashes))
    if read_info(folder).kind == "form":
        return None
    raise ToolError(f"no {RACE} has its script and that of {name_of(older)}; race both as they are")


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
    if log.other_tokens:
        yield log.other_tokens
    names = {flag.partition("=")[0] for flag in log.flags if flag.startswith("--")}
    for name in sorted(names - OWN_FLAGS - {f"--{name}" for name in track.flags}):
        yield f"has the flag {name}: put settings into the script, run it without"
    if log.recompiles != 0:
        yield f"recompiles after the clock started: {log.recompiles}; cover them in the warm-up, then run it again"
    if track.max_threads and not 0 < (log.num_threads or 0) <= track.max_threads:
        yield f"uses {log.num_threads} CPU threads; run it with --cpu_threads {track.max_threads}, the track's most"


def verify_runs(folder: Path, info: RecordInfo, line: Sequence[Path], failures: list[str]) -> str:
    """Check the logs and the race of a ranked record; add to `failures`, and return a summary."""
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
    elif info.kind != "form" and not sample.p < ALPHA:
        failures.append(f"n too small: p={sample.p:.2g} is not below {ALPHA} at n={sample.n}; race with more pairs")
    if not (older := record_before(folder, line)):
        return result
    if info.kind == "idea" and not info.evidence:  # which names another script that it changed
        changed = max(diff(*(read_script(str(it), folder.parent) for it in (older, folder)))[1:])
        if changed > MOST_LINES:
            failures.append(f"changes {changed} lines of {name_of(older)}, {MOST_LINES} at most: race what it changed")
    if not (raced := race_against(older, folder, line)):
        return result
    race, comparison = raced
    outcome = f"{summary(comparison)}, against {name_of(older)}"
    if info.kind == "idea" and comparison["verdict"] != "faster":  # a public record gained elsewhere
        failures.append(f"{RACE}: {outcome}")
    runs = {(run.seed, run.val_loss, run.train_time) for run in race.runs_of(race.hashes.index(sha256))}
    if {(log.seed, log.val_loss, log.train_time) for log in logs} != runs:
        failures.append(f"{RACE}: its {len(runs)} runs of the script are not the {len(logs)} logs: submit all those")
    return f"{result}; {outcome}"


def verify(folder: Path, line: Sequence[Path], failures: list[str]) -> str:
    """Check a record by its files and the others of its line; add to `failures`, and return a summary."""
    info = read_info(folder)
    if problem := missing_part(folder):
        failures.append(problem)
    if info.kind in ("form", "milestone") and not info.evidence:
        failures.append(f"{INFO}: a {info.kind} needs evidence; RULES.md says which")
    if info.ranked:
        return verify_runs(folder, info, line, failures)
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


def read_race_folder(folder: Path) -> tuple[Race | None, list[list[Log]]]:
    """Return the race in a folder, if there is one, and the logs of each script; without a race, of one script."""
    race = read_race(folder / RACE) if (folder / RACE).is_file() else None
    logs = [[Log(path) for path in sorted(folder.glob("*.txt"))]]
    if race:
        names = [[f"{race.run_id(run.seed, i)}.txt" for run in race.runs_of(i)] for i in range(len(race.scripts))]
        logs = [[Log(folder / name) for name in of_script] for of_script in names]
        if not race.comparisons:
            raise ToolError(f"{folder}: {len(race.runs)} of {len(race.order)} runs are done; repeat the race's command")
    for log in [log for of_script in logs for log in of_script]:
        if log.problem or (not race and log.sha256 != logs[0][0].sha256):
            raise ToolError(f"{log.path}: {log.problem or f'is of another script than {logs[0][0].path}'}")
    if not logs[0]:
        raise ToolError(f"{folder}: has no logs; name the folder of a race")
    return race, logs


def hunks(a: tuple[str, str], b: tuple[str, str]) -> Iterator[str]:
    """Yield for each hunk of a diff of two (label, script) its line in the second, and what is defined there."""
    lines = b[1].split("\n")
    for hunk in difflib.unified_diff(a[1].split("\n"), lines, n=0, lineterm=""):
        if start := re.match(r"@@ .*\+(\d+)", hunk):
            above = "\n".join(lines[: int(start[1])])
            names = re.findall(r"^ *(?:class|def) (\w+)|^(\w+)(?:: [^=\n]+)? = ", above, re.MULTILINE)
            yield f"line {start[1]}, `{''.join(names[-1])}`" if names else f"line {start[1]}"


def write_folder(folder: Path, kind: str, logs: Sequence[Log], curves: Sequence[Log], asked: Iterable[str], told: str):
    """Write a record's folder: a page that asks what changed at each of some places, and all that is known."""
    info = dict(date=str(datetime.date.today()), what="<say in one line what it is>", kind=kind, ranked=True)
    info |= dict(evidence="<say which test and commit show that it trains the same>") if kind == "form" else {}
    changes = "".join(f"- {place}: <say what changed, and why>\n" for place in asked)
    runs = [(log.name, log) for log in logs] + [(f"curve/{log.name}", log) for log in curves]
    texts = {
        PAGE: f"# {short_name(folder)}\n\n## What changed\n\n{changes}\n## What we measured\n\n{told}",
        SCRIPT: logs[0].source + "\n",
        INFO: json.dumps(info, indent=1) + "\n",
        RUNS: "".join(f"==> {name} <==\n{log.stored}\n" for name, log in runs),
    }
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def write_record(name: str, raced: Path, root: Path) -> list[Path]:
    """Make the newest record of the first script of a race, from the race's folder; return the new folders.

    It is compared with the second script. If that is in no record, it becomes one, a form, before. What differs by more
    lines than an idea may is a form, too.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ToolError(f"{quote(name)} is no name for a record: take letters, digits, '-' and '.'")
    race, logs = read_race_folder(raced)
    track, folders = track_of(logs[0][0]), record_folders(root)
    line = [folder for folder in folders if folder.parent.name == track.name]
    entries, asked = [(name, "idea", logs[0])], iter(["the script"])
    if race:
        older, newer = ((race.scripts[i].name, logs[i][0].source) for i in (1, 0))
        if max(diff(older, newer)[1:]) > MOST_LINES:
            entries = [(name, "form", logs[0])]
        else:
            asked = hunks(older, newer)
        if race.hashes[1] not in map(hash_of, line):
            entries.insert(0, (f"Before{name}", "form", logs[1]))
    for new, _, _ in entries:
        if same := [folder for folder in folders if short_name(folder).lower() == new.lower()]:
            raise ToolError(f"{same[0]} is there: take another name, or remove it")
    told = "<say what you measured>"
    if race:
        command = f"python -m speedrun race {' '.join(script.name for script in race.scripts)} --pairs {race.pairs}"
        command += f" --seed {race.seed} -- {' '.join(race.flags)}"
        told = textwrap.indent(f"{command}    # {race.runs[0].hardware}\n\n{report(race)}", "    ")
    curves = [Log(path) for path in sorted(raced.glob("curve/*.txt"))]
    for new, kind, runs in entries:
        _, number, letter = place_in_line(line[-1]) if line else ("", 0, "")
        place = f"{number}{chr(ord(letter or 'a') + 1)}" if track.lettered else f"{number + 1:02}"
        line.append(root / track.name / f"{place}_{new}")
        mine = [log for log in curves if log.sha256 == runs[0].sha256]
        write_folder(line[-1], kind, runs, mine, asked if new == name else ["the script"], f"{told}\n")
    if race:
        (line[-1] / RACE).write_text(read_text(raced / RACE), encoding="utf-8")
    return line[-len(entries) :]


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
    ]


def leaderboards(root: Path) -> str:
    """Return the tables of all leaderboards, and of the records that were not timed."""
    line, boards, untimed = lineage(root), dict[str, list[list[str]]](), dict[str, list[list[str]]]()
    machines = dict[str, set[str]]()
    products: dict[str, float] = {}  # of each board, the train time of its newest record in times of the first's
    for folder in line:
        info = read_info(folder)
        if not info.ranked:
            untimed.setdefault(folder.parent.name, []).append([link(folder), cell(info.what), source_of(info)])
            continue
        logs, older = read_logs(folder), record_before(folder, line)
        board = board_of(logs[0])
        ratio = "not raced" if older else ""
        products.setdefault(board, 1.0)
        if older and (raced := race_against(older, folder, line)):
            times = raced[1]["train_time"]
            ratio, products[board] = interval(times, ".3f"), products[board] * times["ratio"]
        boards.setdefault(board, []).append(board_row(folder, logs, ratio, products[board]))
        machines.setdefault(board, set()).update(log.hardware or "hardware that no log states" for log in logs)
    parts = []
    for board in sorted(boards, reverse=True):
        track = TRACKS[board.split()[0]]
        goal = f"at most {track.target} nats per {track.unit} of {track.text}"
        machine = cell(" or ".join(sorted(machines[board])))
        parts += [f"### {cell(board)}: {goal}, measured here on {machine}", markdown_table(COLUMNS, boards[board])]
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
