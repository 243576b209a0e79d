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

RULE = "=" * 100
RECORDS = Path(__file__).resolve().parents[1] / "records"
RECORD_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}_[\w.-]+", re.ASCII)
NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
OTHERS = r"(?: (?!train_loss|val_loss:|train_time|step_avg)\w+:\S+)*"  # fields that some public logs have
STEP_LINE = re.compile(
    rf"step:(\d{{1,9}})/(\d{{1,9}})(?: train_loss:(?:{NUMBER}|nan|inf))?(?: val_loss:(?:{NUMBER}|nan|inf))?{OTHERS}"
    rf" train_time:{NUMBER}(m?s) step_avg:(?:{NUMBER}|nan|inf)ms{OTHERS}\s*"
)
# Kinds of JSON values, see `check`: what a log states of its run, as far as these tools use it
TEXT, FLAGS, COUNT = re.compile(r"\S[\s\S]*"), [re.compile(r"[\s\S]*")], range(10**12)
CONFIGURATION = {"preset?": re.compile(r"\w+"), "device?": TEXT, "stages?": [[object]]}
CONFIGURATION |= {f"{name}?": COUNT for name in ("batch_tokens", "train_seq_len", "cpu_threads")}
HEADER_BYTES, TOKEN_BYTES = 1024, 2  # of a shard


class ToolError(Exception):
    """What the user has to mend, in one line. Exit code 2."""


class Unreadable(ToolError):
    """A file that others wrote has a field of another type than its program writes."""


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


class Log:
    """A log. What it does not state is None; train_shards are (name, tokens)."""

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
        self.flags: list = self.find("flags: (.*)", json.loads) or []
        check(path, self.configuration, CONFIGURATION, "configuration")
        check(path, self.flags, FLAGS, "flags")
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
        device = self.configuration.get("device")
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
        except (ValueError, RecursionError):
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

    def number(self, name: str) -> int:
        """Return a number of the configuration, or 0."""
        return self.configuration.get(name) or 0

    @property
    def num_steps(self) -> int:
        return self.lines[-1].total

    @property
    def track(self) -> str:
        """Return the preset; a log of the public form states none, and the public speedrun has one track."""
        return self.configuration.get("preset", "gpt2")

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


def check(path: Path, value: Any, kind: Any, field: str = "") -> None:
    """Raise Unreadable, which names the field, unless a value of a JSON document at `path` is of this kind.

    A kind is a range for whole numbers, float for numbers above 0, a regular expression for texts, [kind] for a list, a
    tuple for a row of these kinds, a dict for an object with these fields ("name?" may be lacking or null), or object.
    """
    inner: list[tuple[str, Any, Any]] = []
    match kind:
        case range():
            fits, wanted = type(value) is int and value in kind, f"a whole number from {kind[0]} to {kind[-1]}"
        case re.Pattern():
            fits, wanted = isinstance(value, str) and bool(kind.fullmatch(value)), f"text of the form {kind.pattern}"
        case list() | tuple():
            fits, wanted = isinstance(value, list), "a list"
            if isinstance(kind, tuple):
                fits, wanted = fits and len(value) == len(kind), f"a list of {len(kind)}"
            items = enumerate(value if fits else [])
            inner = [(f"{field}[{i}]", item, kind[i % len(kind)]) for i, item in items]
        case dict():
            fits, wanted = isinstance(value, dict), "an object"
            names = [name for name in kind if fits and not (name[-1] == "?" and value.get(name[:-1]) is None)]
            inner = [(f"{field}.{name.rstrip('?')}", value.get(name.rstrip("?")), kind[name]) for name in names]
        case _:
            is_number = type(value) in (int, float) and 0 < value < 1e15
            fits, wanted = kind is object or is_number, "a number above 0"
    if not fits:
        told = "null or missing" if value is None else shown(json.dumps(value))
        field = field.lstrip(".") or "all of it"
        raise Unreadable(f"{path}: {field} is {told}, not {wanted}; take the file as it was written")
    for name, item, its_kind in inner:
        check(path, item, its_kind, name)


def read_json(path: Path, kind: dict) -> dict:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON ({shown(str(error))}); get the file of the run again") from None
    check(path, document, kind)
    return document


def record_folders(root: Path) -> list[Path]:
    """Return all records by name."""
    return sorted(path for path in root.iterdir() if path.is_dir() and RECORD_FOLDER.fullmatch(path.name))


def page_row(folder: Path, name: str) -> str | None:
    """Return the second cell of the row of this name in the table of a record's page, without the link."""
    page = folder / "README.md"
    found = re.search(rf"^\| {name} \| (.*) \|$", read_text(page), re.MULTILINE) if page.is_file() else None
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", found[1]) if found else None


def lineage(root: Path) -> list[Path]:
    """Return all records in order. The row "after" of a page names the record before; the first one's has none."""
    line, followers = list[Path](), dict[str | None, Path]()
    for folder in record_folders(root):
        before = page_row(folder, "after")
        if before in followers:
            names = f"{followers[before].name} and {folder.name}"
            raise ToolError(f"{names} both come after {before or 'none'}; mend the row | after | of a page")
        followers[before] = folder
    while followers.get(line[-1].name if line else None):
        line.append(followers.pop(line[-1].name if line else None))
    if followers:
        names = ", ".join(folder.name for folder in followers.values())
        raise ToolError(f"{names}: by the rows | after | of their pages no line leads there from the first; mend them")
    return line


def rivals(line: Sequence[Path], board: str) -> list[tuple[str, str]]:
    """Return name and script of those that a record after `line` may race: the newest on its board, and the newest."""
    ranked = [folder for folder in line if is_on_board(folder, board)]
    return [read_script(str(folder), folder.parent) for folder in dict.fromkeys([*ranked[-1:], *line[-1:]])]


def board_of(log: Log) -> str:
    """Name the leaderboard of a log: its track and, as gpt2 has one for each kind of machine, the hardware."""
    if log.track != "gpt2":
        return log.track
    is_node = re.match(r"8x NVIDIA H100\b", log.hardware or "")
    return "gpt2 on 8xH100" if is_node else f"gpt2 on {log.hardware or 'unknown hardware'}"


def is_on_board(folder: Path, board: str) -> bool:
    """Return whether a record is timed on a leaderboard whose name begins with `board`."""
    return is_ranked(folder) and all(board_of(Log(path)).startswith(board) for path in log_paths(folder)[:1])


def is_ranked(folder: Path) -> bool:
    """Return whether the record is timed: its page's row "track" does not say "not ranked"."""
    return "not ranked" not in (page_row(folder, "track") or "")


def find_record(name: str, root: Path) -> Path:
    """Return the record of this name, or the only one whose name has it as a part, in small or capital letters.

    Any folder with logs will do where it is named by its path.
    """
    path = Path(name)
    if path.is_dir() and (RECORD_FOLDER.fullmatch(path.name) or log_paths(path)):
        return path
    folders, wanted = record_folders(root), name.lower()
    exact = [folder for folder in folders if wanted in (folder.name.lower(), folder.name[11:].lower())]
    found = exact or [folder for folder in folders if wanted in folder.name.lower()]
    if len(found) == 1:
        return found[0]
    names = ", ".join(folder.name for folder in found or folders) or "none"
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
        return folder.name, read_text(folder / "train_gpt.py").rstrip("\n")
    text = read_text(path)
    return str(path), script_of(path, text.split(f"\n{RULE}\n")[0])


def diff(a: tuple[str, str], b: tuple[str, str]) -> tuple[list[str], int, int]:
    """Return the unified diff of two (label, script), and how many lines it removes and adds."""
    lines = list(difflib.unified_diff(a[1].split("\n"), b[1].split("\n"), a[0], b[0], lineterm=""))
    removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
    return lines, removed, added


def differences(logs: list[Log]) -> Iterator[str]:
    """Say where runs are not of one experiment, each with its own seed."""
    for i, log in enumerate(logs):
        for other in logs[:i]:
            if log.seed is not None and log.seed == other.seed:
                yield f"{log.name}: has seed {log.seed}, as {other.name} has; leave one out, or run another --seed"
            elif log.train_losses and log.train_losses == other.train_losses:
                yield f"{log.name}: has all training losses of {other.name}: does the script use its seed?"
    stated = [log.configuration | {"steps": log.num_steps, "validation tokens": log.val_sha256} for log in logs]
    for log, mine in zip(logs, stated, strict=True):
        keys = {key for key in mine | stated[0] if mine.get(key) != stated[0].get(key)} - {"seed", "run_id", "log_dir"}
        if keys:
            unlike = f"unlike {logs[0].name} in {', '.join(sorted(keys))}"
            yield f"{log.name}: {unlike}; run all with the same flags and data"


def require_one_experiment(logs: list[Log]) -> None:
    """Raise ToolError unless the logs are whole runs of one script and configuration, each with its own seed."""
    for log in logs:
        if log.incomplete:
            raise ToolError(f"{log.path}: {log.incomplete}")
        if log.source != logs[0].source:
            both = f"{log.path} and {logs[0].path}"
            raise ToolError(f"{both} are of different scripts: see `diff`, and name logs of one")
    for problem in differences(logs):
        raise ToolError(problem)
