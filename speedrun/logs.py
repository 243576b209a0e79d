"""Read logs, ours and the public speedrun's, and find records."""

import difflib
import hashlib
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.process import ROOT

RULE = "=" * 100
RECORDS = ROOT / "records"
RECORD_FOLDER = re.compile(r"\d+[a-z]?_[\w.-]+", re.ASCII)  # of a track, in the order of its line
NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
OTHERS = r"(?: (?!train_loss|val_loss:|train_time|step_avg)\w+:\S+)*"  # fields that some public logs have
STEP_LINE = re.compile(
    rf"step:(\d{{1,9}})/(\d{{1,9}})(?: train_loss:(?:{NUMBER}|nan|inf))?(?: val_loss:(?:{NUMBER}|nan|inf))?{OTHERS}"
    rf" train_time:{NUMBER}(m?s) step_avg:(?:{NUMBER}|nan|inf)ms{OTHERS}\s*"
)
HEADER_BYTES, TOKEN_BYTES = 1024, 2  # of a shard
ODD = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)  # JSON of another form


class ToolError(Exception):
    """What the user has to mend, in one line. Exit code 2."""


def shown(text: str, length: int = 60) -> str:
    """Quote text of a file in a message: on one line, without control characters, not longer than `length`."""
    return ascii(text if len(text) <= length else text[: length - 3] + "...")


def printable(text: str) -> str:
    """Replace control characters, such as the escape sequences of a terminal, but no line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


class Line(NamedTuple):
    """A step line, times in ms; that of a training step has no val_loss."""

    step: int
    total: int
    train_loss: float | None
    val_loss: float | None
    time: float

    @classmethod
    def of(cls, text: str) -> "Line | None":
        """Read a line of a log; None if it is no step line, or not whole."""
        if (found := STEP_LINE.fullmatch(text)) is None:
            return None
        train_loss, val_loss = (None if found[i] is None else float(found[i]) for i in (3, 4))
        time = float(found[5]) * (1000 if found[6] == "s" else 1)
        return cls(int(found[1]), int(found[2]), train_loss, val_loss, round(time, 6))


def digest(script: str) -> str:
    """Return the SHA-256 of the file that holds this script."""
    return hashlib.sha256(f"{script}\n".encode()).hexdigest()


def without_script(text: str, script: str) -> str:
    """Return the text of a log of this script with its SHA-256 in its place, as records keep it."""
    return digest(script) + text[text.find(f"\n{RULE}\n") :]


def script_of(log: Path, text: str) -> str:
    """Return the script that a log begins with. A record's log states its SHA-256, and the script lies beside it."""
    text, beside = text.rstrip("\n"), log.with_name("train_gpt.py")
    if re.fullmatch("[0-9a-f]{64}", text) and beside.is_file():
        script = read_text(beside).rstrip("\n")
        if digest(script) == text:
            return script
    return text


def has_packed_batches(configuration: dict) -> bool:
    """Return whether documents or growing batches decide where a batch begins."""
    if configuration.get("stages"):  # rows of share, batch, max_doc_len and others
        return any(row[1:3] != [1, 0] for row in configuration["stages"])
    lengths, factors = configuration.get("max_doc_len"), configuration.get("batch_factors")  # of older scripts
    return lengths not in (None, 0, [0]) or factors not in (None, [1])


class Log:
    """A log. What it does not state is None, and a number 0; train_shards are (name, tokens)."""

    def __init__(self, path: Path):
        """Raise ToolError where the file is no log, or holds a line that no run wrote."""
        source, *rest = re.split(f"^{RULE}$\n?", read_text(path), flags=re.MULTILINE)
        if len(rest) < 2:
            raise ToolError(f"{path}: not a log, or cut short: a log has two lines of 100 '='; name the .txt of a run")
        self.path, self.name, self.source, self.text = path, path.name, script_of(path, source), "\n".join(rest)
        ended = re.search(r"^(?:stopped:|interrupted:|resumed).*", self.text, re.MULTILINE)
        self.ended = ended and ended[0].strip()  # says that this is not one whole run
        self.lines = self.read_lines("\n".join(rest[1:]))
        self.configuration: dict = self.find("configuration: (.*)", json.loads) or {}  # the public form has none
        try:
            self.flags = [*map(str, self.find("flags: (.*)", json.loads) or [])]
            self.environment = dict(self.find("environment: (.*)", json.loads) or {})  # older logs have none
            preset, device = (self.configuration.get(name) for name in ("preset", "device"))
            names = "batch_tokens", "train_seq_len", "cpu_threads"
            self.batch_tokens, self.train_seq_len, self.cpu_threads = (
                int(self.configuration.get(name) or 0) for name in names
            )
            self.is_packed = has_packed_batches(self.configuration)
        except ODD as error:
            why = shown(repr(error))
            raise ToolError(f"{path}: its configuration, flags or environment are odd ({why}): run it again") from None
        self.track = None if preset is None else str(preset)
        self.seed = self.find(r"seed: (\d+)\b.*", int)
        shards = re.findall(r"^train shard: (.+), (\d{1,15}) bytes$", self.text, re.MULTILINE)
        self.train_shards = [(Path(name).name, (int(size) - HEADER_BYTES) // TOKEN_BYTES) for name, size in shards]
        self.val_tokens = self.find(r"validation tokens: (\d+), sha256 .*", int)
        self.val_sha256 = self.find(r"validation tokens: \d+, sha256 ([0-9a-f]{64})\b.*")
        self.training_tokens = self.find(r"training tokens: (\d+, sha256 [0-9a-f]{64})")
        self.first_batch = self.find(r"first batch: (?:.*/)?(.+ position \d{1,15})")
        self.last_batch = self.find(r"last batch: (?:.*/)?(.+ position \d{1,15})")
        self.recompiles = self.find(r"recompiles after the clock started: (\d+)", int)
        self.peak_mib = self.find(r"peak memory(?: allocated)?: (\d+) MiB.*", int)
        count = re.search(r"^(\d{1,6}) processes, (\d{1,6}) threads each, \d+ cores$", self.text, re.MULTILINE)
        processes, threads = (int(count[1]), int(count[2])) if count else (None, None)
        self.num_threads = processes and threads and processes * threads
        gpus = re.findall(r"^\|\s+\d+\s+(NVIDIA .+?)\s{2,}", self.text, re.MULTILINE)  # of nvidia-smi
        self.has_gpu = device == "cuda" if device in ("cpu", "cuda") else bool(gpus)
        self.hardware = None
        if self.has_gpu:
            self.hardware = f"{processes or len(gpus) or 1}x {' or '.join(dict.fromkeys(gpus)) or 'GPU'}"
        elif processes:
            models = re.findall(r"^ *Model name: +(.+)", self.text, re.MULTILINE)  # of lscpu, for each kind of core
            self.hardware = f"{models[0].strip() if models else 'CPU'}, {processes} processes of {threads} threads"

    def find(self, pattern: str, kind: Callable[[str], Any] = str) -> Any:
        """Return the group of the first line that matches, or None."""
        if (found := re.search(f"^{pattern}$", self.text, re.MULTILINE)) is None:
            return None
        try:
            return kind(found[1].strip())
        except ODD:
            raise ToolError(f"{self.path}: cannot read {shown(found[0])}: cut short or edited; run it again") from None

    def read_lines(self, text: str) -> list[Line]:
        lines = []
        for line in re.findall("^(step:.*)\n", text, re.MULTILINE):  # a run may write at the last one yet
            if (found := Line.of(line)) is None:
                raise ToolError(f"{self.path}: {shown(line)} is no step line: cut short or edited; run it again")
            lines.append(found)
        if not lines:
            why = shown(self.ended) if self.ended else "the run never started, or was cut short"
            raise ToolError(f"{self.path}: no step lines ({why}); leave it out")
        # A training loss is printed a few steps late, perhaps after the validation of a later step
        return sorted(lines, key=lambda line: (line.step, line.val_loss is not None))

    @property
    def num_steps(self) -> int:
        return self.lines[-1].total

    @cached_property
    def curve(self) -> dict[int, tuple[float, float]]:
        """Return loss, and train time in ms, of the validations, by step."""
        return {line.step: (line.val_loss, line.time) for line in self.lines if line.val_loss is not None}

    @cached_property
    def training(self) -> list[Line]:
        return [line for line in self.lines if line.val_loss is None]

    @property
    def train_losses(self) -> list[float]:
        return [line.train_loss for line in self.training if line.train_loss is not None]

    @property
    def val_loss(self) -> float:
        """Return the last validation's loss; only for logs whose `incomplete` is None."""
        return self.curve[self.num_steps][0]

    @property
    def train_time(self) -> float:
        return self.lines[-1].time

    @property
    def step_time(self) -> float | None:
        """Return the median ms of a step, that of grouped data, as step lines are rounded to 1 ms; None without any."""
        times = [0.0, *(line.time for line in self.training)]
        steps = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median_grouped(steps, 1) if steps else None

    @property
    def incomplete(self) -> str | None:
        """Say why this is not the log of a whole run, or return None."""
        last, steps = self.lines[-1], [line.step for line in self.training]
        if self.ended is not None:
            return f"has the line {shown(self.ended)}: not one whole run; run it again"
        if last.val_loss is None or last.step != last.total:
            return f"ends at step {last.step} of {last.total} without the last validation: cut short; run it again"
        # Public logs may have lines of validations alone
        if (steps or self.configuration) and (len(steps) < last.total or steps != [*range(1, last.total + 1)]):
            return f"lacks a step line of 1 to {last.total}, or has one twice; run it again"
        return None


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_json(path: Path) -> dict:
    try:
        return dict(json.loads(read_text(path)))
    except ODD as error:
        raise ToolError(f"{path}: no JSON object ({shown(str(error))}); take the file as it was written") from None


class Card(NamedTuple):
    """What record.json says of a record: rules.py has the kinds, `evidence` belongs to some of them."""

    date: str
    what: str
    kind: str
    after: str | None
    ranked: bool
    evidence: str = ""


def read_card(folder: Path) -> Card:
    path = folder / "record.json"
    found = read_json(path) if path.is_file() else {}
    try:
        card = Card(**found)
        if all(isinstance(value, str) for value in (card.date, card.what, card.kind, card.after or "", card.evidence)):
            return card
    except TypeError:
        pass
    raise ToolError(f"{path}: needs date, what, kind, after (null: none) and ranked (true or false); write it")


def record_folders(root: Path) -> list[Path]:
    """Return the records of all tracks by name."""
    return sorted(path for path in root.glob("*/*") if path.is_dir() and RECORD_FOLDER.fullmatch(path.name))


def name_of(folder: Path) -> str:
    """Name a record by its track and folder."""
    return f"{folder.parent.name}/{folder.name}"


def lineage(root: Path) -> list[Path]:
    """Return all records in order: "after" in record.json names the record before; the first one has none."""
    line, followers = list[Path](), dict[str | None, Path]()
    for folder in record_folders(root):
        before = read_card(folder).after
        if before in followers:
            names = f"{name_of(followers[before])} and {name_of(folder)}"
            raise ToolError(f"{names} both come after {before or 'none'}: mend after in a record.json")
        followers[before] = folder
    while (before := name_of(line[-1]) if line else None) in followers:
        line.append(followers.pop(before))
    if followers:
        names = ", ".join(map(name_of, followers.values()))
        raise ToolError(f"{names}: no line leads there from the first record: mend after in record.json")
    return line


def rivals(line: Sequence[Path], board: str) -> list[tuple[str, str]]:
    """Return name and script of those that a record after `line` may race: the newest on its board, and the newest."""
    ranked = [folder for folder in line if is_on_board(folder, board)]
    return [read_script(str(folder), folder.parent) for folder in dict.fromkeys([*ranked[-1:], *line[-1:]])]


def board_of(log: Log) -> str:
    """Name the leaderboard of a log: its track and, as gpt2 has one for each kind of machine, the hardware."""
    if log.track != "gpt2":
        return log.track or "unknown track"
    is_node = re.match(r"8x NVIDIA H100\b", log.hardware or "")
    return "gpt2 on 8xH100" if is_node else f"gpt2 on {log.hardware or 'unknown hardware'}"


def is_on_board(folder: Path, board: str) -> bool:
    """Return whether a record is timed on a leaderboard whose name begins with `board`."""
    return read_card(folder).ranked and all(board_of(Log(path)).startswith(board) for path in log_paths(folder)[:1])


def find_record(name: str, root: Path) -> Path:
    """Return the record of this number or name, or the only one whose name has it as a part, in any letters.

    Names of before, with a date, will do, and any folder with logs that is named by its path.
    """
    path = Path(name)
    if path.is_dir() and (RECORD_FOLDER.fullmatch(path.name) or log_paths(path)):
        return path
    folders, wanted = record_folders(root), name.lower().removesuffix("/train_gpt.py").rstrip("/").rpartition("/")[2]
    wanted = re.sub(r"^\d{4}-\d{2}-\d{2}_", "", wanted)
    exact = [path for path in folders if wanted in (path.name.lower(), *path.name.lower().split("_", 1))]
    found = exact or [path for path in folders if wanted in path.name.lower()]
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(name_of, found or folders)) or "none"
    problem = f"is part of {len(found)} names" if found else f"is neither a file nor a record in {root}"
    raise ToolError(f"{shown(name)} {problem}; name one of: {names}")


def log_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.txt"))


def record_logs(folder: Path) -> list[Log]:
    logs = [Log(path) for path in log_paths(folder)]
    if not logs:
        raise ToolError(f"{folder.name} has no logs: name another record, or put the .txt of its runs there")
    return logs


def read_logs(names: Iterable[str], root: Path) -> list[Log]:
    """Read the logs that `names` name: files, or records with all of theirs."""
    logs = []
    for name in names:
        logs += [Log(Path(name))] if Path(name).is_file() else record_logs(find_record(name, root))
    return logs


def read_script(name: str, root: Path) -> tuple[str, str]:
    """Return a label and the script that `name` names: a record's, a log's, or a file's."""
    path = Path(name)
    if not path.is_file():
        folder = find_record(name, root)
        return name_of(folder), read_text(folder / "train_gpt.py").rstrip("\n")
    text = read_text(path)
    return str(path), script_of(path, text.split(f"\n{RULE}\n")[0])


def diff(a: tuple[str, str], b: tuple[str, str]) -> tuple[list[str], int, int]:
    """Return the unified diff of two (label, script), and how many lines it removes and adds."""
    lines = list(difflib.unified_diff(a[1].split("\n"), b[1].split("\n"), a[0], b[0], lineterm=""))
    removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
    return lines, removed, added


def differences(logs: list[Log]) -> Iterator[tuple[str, str]]:
    """Yield the name of a log, and where its run is not one of the others' experiment with a seed of its own."""
    for i, log in enumerate(logs):
        for other in logs[:i]:
            if log.seed is not None and log.seed == other.seed:
                yield log.name, f"has seed {log.seed}, as {other.name} has; leave one out, or run another --seed"
            elif log.train_losses and log.train_losses == other.train_losses:
                yield log.name, f"has all training losses of {other.name}: does the script use its seed?"
    stated = [log.configuration | {"steps": log.num_steps, "validation tokens": log.val_sha256} for log in logs]
    for log, mine in zip(logs, stated, strict=True):
        keys = {key for key in mine | stated[0] if mine.get(key) != stated[0].get(key)} - {"seed", "run_id", "log_dir"}
        if keys:
            yield log.name, f"unlike {logs[0].name} in {', '.join(sorted(keys))}; run all with the same flags and data"


def require_one_experiment(logs: list[Log]) -> None:
    """Raise ToolError unless the logs are whole runs of one script and configuration, each with its own seed."""
    for log in logs:
        if log.incomplete:
            raise ToolError(f"{log.path}: {log.incomplete}")
        if log.source != logs[0].source:
            both = f"{log.path} and {logs[0].path}"
            raise ToolError(f"{both} are of different scripts: see `diff`, and name logs of one")
    for problem in differences(logs):
        raise ToolError(": ".join(problem))
