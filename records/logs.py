"""Reads logs, ours and the public speedrun's, and finds records. What a log does not state is None."""

import itertools
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RULE = "=" * 100
RECORDS = Path(__file__).resolve().parent
RECORD_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}_[\w.-]+", re.ASCII)
# Digits are bounded so that no garbage makes a number that int or float cannot hold
STEP_LINE = re.compile(
    r"step:(?P<step>\d{1,9})/(?P<total>\d{1,9})(?: train_loss:(?:(?P<train_loss>\d{1,9}(?:\.\d{1,17})?)|nan|inf))?"
    r"(?: val_loss:(?P<val_loss>\d{1,9}(?:\.\d{1,17})?))?"
    r" train_time:(?P<time>\d{1,12}(?:\.\d{1,9})?)ms step_avg:(?:(?P<average>\d{1,12}(?:\.\d{1,9})?)|nan|inf)ms\s*",
    re.ASCII,
)
SHARD_LINE = re.compile(r"train shard: (.+), (\d{4,15}) bytes", re.ASCII)
HEADER_BYTES, TOKEN_BYTES = 1024, 2


class ToolError(Exception):
    """What the user has to mend, in one line. Exit code 2."""


def shown(text: str, length: int = 60) -> str:
    """Text of a file for a message: on one line, without control characters, not longer than `length`."""
    return ascii(text if len(text) <= length else text[: length - 3] + "...")


def printable(text: str) -> str:
    """Replace control characters, such as the escape sequences of a terminal, but no line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


@dataclass(frozen=True)
class Line:
    """A step line, times in ms. Without val_loss it is the line of a training step, which may state train_loss."""

    step: int
    total: int
    time: float
    average: float | None
    train_loss: float | None
    val_loss: float | None


@dataclass(frozen=True)
class Log:
    """A log; `ended` is the line that says that it was stopped, interrupted or resumed; shards are (name, tokens)."""

    path: Path
    source: str
    lines: tuple[Line, ...]
    configuration: dict | None
    ended: str | None
    python: str | None
    torch: str | None
    hardware: str | None
    has_gpu: bool
    num_threads: int | None
    seed: int | None
    train_shards: tuple[tuple[str, int], ...]
    val_tokens: int | None
    val_sha256: str | None
    first_batch: tuple[str, int] | None
    last_batch: tuple[str, int] | None
    recompiles: int | None
    stated_step_time: float | None
    peak_mib: int | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def num_steps(self) -> int:
        return self.lines[-1].total

    @property
    def track(self) -> str | None:
        """The preset; a log of the public form states none, and the public speedrun has one track."""
        if self.configuration is None:
            return "gpt2"
        preset = self.configuration.get("preset")
        return preset if isinstance(preset, str) else None

    @cached_property
    def curve(self) -> dict[int, tuple[float, float]]:
        """Loss, and train time in ms, of the validations, by step."""
        return {line.step: (line.val_loss, line.time) for line in self.lines if line.val_loss is not None}

    @cached_property
    def training(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.val_loss is None)

    @property
    def val_loss(self) -> float:
        """Of the last validation; only for logs whose `incomplete` is None."""
        return self.curve[self.num_steps][0]

    @property
    def train_time(self) -> float:
        return self.lines[-1].time

    @property
    def step_time(self) -> float | None:
        """The median ms of a step, from the differences of the step lines; None with fewer than two lines.

        The lines are rounded to 1 ms, so this is the median of grouped data, which tells tenths.
        """
        times = [line.time for line in self.training]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median_grouped(gaps, 1) if gaps else None

    @property
    def incomplete(self) -> str | None:
        """Why this is not the log of a whole run, or None."""
        last, steps = self.lines[-1], [line.step for line in self.training]
        if self.ended is not None:
            return f"has the line {shown(self.ended)}: not one whole run; run it again"
        if last.total == 0:
            return "trains no step; run it with --num_iterations"
        if last.val_loss is None or last.step != last.total:
            return f"ends at step {last.step} of {last.total} without the last validation: cut short; run it again"
        if steps != list(range(1, last.total + 1)):
            wrong = next((i for i, step in enumerate(steps, start=1) if step != i), len(steps) + 1)
            return (
                f"does not have the step lines 1 to {last.total} once and in order, first at step {wrong}; run it again"
            )
        return None


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}; name a log, a script or a record") from None


def read_json(path: Path) -> dict:
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{path}: not JSON ({shown(str(error))}); get the file of the run again") from None
    if not isinstance(found, dict):
        raise ToolError(f"{path}: not a JSON object; get the file of the run again")
    return found


def read_log(path: Path) -> Log:
    """Raises ToolError where the file is no log, or holds a line that no run wrote."""
    source, *rest = re.split(f"^{RULE}$\n?", read_text(path), flags=re.MULTILINE)
    if len(rest) < 2:
        raise ToolError(f"{path}: not a log, or cut short: a log has two lines of 100 '='; name the .txt of a run")
    environment, after = rest[0], "\n".join(rest[1:])
    lines = []
    for text in after.split("\n"):
        if not text.startswith("step:"):
            continue
        found = STEP_LINE.fullmatch(text)
        if found is None:
            raise ToolError(f"{path}: {shown(text)} is no step line: cut short or edited; run it again")
        average, train_loss, val_loss = (
            None if found[key] is None else float(found[key]) for key in ("average", "train_loss", "val_loss")
        )
        lines.append(Line(int(found["step"]), int(found["total"]), float(found["time"]), average, train_loss, val_loss))
    # A training loss is printed a few steps late, perhaps after the validation of a later step
    lines.sort(key=lambda line: (line.step, line.val_loss is not None))
    ended = re.search(r"^(?:stopped:|interrupted:|resumed).*", f"{environment}\n{after}", re.MULTILINE)
    if not lines:
        why = shown(ended[0]) if ended else "the run never started, or was cut short"
        raise ToolError(f"{path}: no step lines ({why}); leave it out")
    if len({line.total for line in lines}) > 1:
        raise ToolError(f"{path}: its step lines count to different numbers of steps; run it again")

    def find(pattern: str, text: str = environment) -> re.Match | None:
        return re.search(f"^{pattern}$", text, re.MULTILINE | re.ASCII)

    def batch(which: str) -> tuple[str, int] | None:
        found = find(rf"{which} batch: (.+) position (\d{{1,15}})", after)
        return (Path(found[1]).name, int(found[2])) if found else None

    def text_of(found: re.Match | None) -> str | None:
        return printable(found[1].strip()) if found else None

    def number_of(found: re.Match | None) -> int | None:
        return int(found[1]) if found else None

    configuration = None
    if stated := find("configuration: (.*)"):
        try:
            configuration = json.loads(stated[1])
        except (ValueError, RecursionError):
            configuration = None
        if not isinstance(configuration, dict):
            raise ToolError(f"{path}: its configuration line is no JSON object: cut short or edited; run it again")
    count = find(r"(\d{1,6}) processes, (\d{1,6}) threads each, \d{1,6} cores")
    model = find(r" *Model name: +(.+)")  # of lscpu
    gpus = re.findall(r"^\|\s+\d+\s+(NVIDIA .+?)\s{2,}", environment, re.MULTILINE)  # of nvidia-smi
    device = configuration.get("device") if configuration else None
    has_gpu = device == "cuda" if device in ("cpu", "cuda") else bool(gpus)
    hardware = None
    if has_gpu:
        hardware = f"{count[1] if count else len(gpus) or 1}x {gpus[0] if gpus else 'GPU'}"
    elif count:
        hardware = f"{model[1] if model else 'CPU'}, {count[1]} processes of {count[2]} threads"
    tokens = find(r"validation tokens: (\d{1,15}), sha256 ([0-9a-f]{64})(?: .*)?")
    step_time = find(r"step time: median (\d{1,9}\.\d{1,9})ms.*", after)
    return Log(
        path=path,
        source=source.rstrip("\n"),
        lines=tuple(lines),
        configuration=configuration,
        ended=ended[0] if ended else None,
        python=text_of(find(r"Running Python ([^\s(]+).*")),
        torch=text_of(find(r"Running PyTorch ([^\s,]+).*")),
        hardware=hardware and printable(hardware),
        has_gpu=has_gpu,
        num_threads=int(count[1]) * int(count[2]) if count else None,
        seed=number_of(find(r"seed: (\d{1,20})\b.*", f"{environment}\n{after}")),
        train_shards=tuple(
            (Path(name).name, (int(size) - HEADER_BYTES) // TOKEN_BYTES)
            for name, size in SHARD_LINE.findall(environment)
        ),
        val_tokens=number_of(tokens),
        val_sha256=tokens[2] if tokens else None,
        first_batch=batch("first"),
        last_batch=batch("last"),
        recompiles=number_of(find(r"recompiles after the clock started: (\d{1,9})", after)),
        stated_step_time=float(step_time[1]) if step_time else None,
        peak_mib=number_of(find(r"peak memory(?: allocated)?: (\d{1,9}) MiB.*", after)),
    )


def record_folders(root: Path) -> list[Path]:
    """Return all records by name."""
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and RECORD_FOLDER.fullmatch(path.name))
    except OSError as error:
        raise ToolError(f"{root}: {error.strerror}; name the folder of the records with --root") from None


def page_row(folder: Path, name: str) -> str | None:
    """Return the second cell of the row of this name in the table of a record's page, without the link."""
    page = folder / "README.md"
    found = re.search(rf"^\| {name} \| (.*) \|$", read_text(page), re.MULTILINE) if page.is_file() else None
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", found[1]) if found else None


def lineage(root: Path) -> list[Path]:
    """Return all records in order. The row "after" of a page names the record before; the first one's has none."""
    folders, follower = {path.name: path for path in record_folders(root)}, dict[str | None, str]()
    mend = "mend the row | after | RECORD | of its page"
    for name, folder in folders.items():
        before = page_row(folder, "after")
        if before not in (None, *folders):
            raise ToolError(f"{name} comes after {shown(str(before))}, which is no record in {root}: {mend}")
        if before in follower:
            where = f"come after {before}" if before else "have no row | after |: one record is the first"
            raise ToolError(f"{follower[before]} and {name} both {where}; {mend}")
        follower[before] = name
    order: list[str] = []
    while name := follower.get(order[-1] if order else None):
        order.append(name)
    if astray := sorted(folders.keys() - set(order)):
        raise ToolError(f"{', '.join(astray)}: come after each other in a circle; {mend}")
    return [folders[name] for name in order]


def ranked_before(root: Path) -> dict[Path, Path | None]:
    """Map each ranked record, resolved and in order, to the ranked one before."""
    ranked = [folder.resolve() for folder in lineage(root) if is_ranked(folder)]
    return dict(zip(ranked, [None, *ranked], strict=False))


def is_ranked(folder: Path) -> bool:
    """Return whether the record is timed: its page's row "track" does not say "not ranked"."""
    return "not ranked" not in (page_row(folder, "track") or "")


def find_record(name: str, root: Path) -> Path:
    """The record of this name, or the only one whose name has it as a part; small and capital letters are one.

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
    logs = [read_log(path) for path in log_paths(folder)]
    if not logs:
        raise ToolError(f"{folder.name} has no logs: name another record, or put the .txt of its runs there")
    return logs


def read_logs(names: Iterable[str], root: Path) -> list[Log]:
    """The logs that `names` name: files, or records with all of theirs."""
    logs = []
    for name in names:
        logs += [read_log(Path(name))] if Path(name).is_file() else record_logs(find_record(name, root))
    return logs


def read_script(name: str, root: Path) -> tuple[str, str]:
    """A label and the script that `name` names: a record's, a log's, or a file's."""
    path = Path(name)
    if not path.is_file():
        folder = find_record(name, root)
        return folder.name, read_text(folder / "train_gpt.py").rstrip("\n")
    text = read_text(path)
    return str(path), (text.split(f"\n{RULE}\n")[0] if f"\n{RULE}\n" in text else text).rstrip("\n")


def require_one_experiment(logs: list[Log]) -> None:
    """Raises ToolError unless the logs are whole runs of one script and number of steps, each with its own seed."""
    first = logs[0]
    seeds: dict[int, Path] = {}
    for log in logs:
        if log.incomplete:
            raise ToolError(f"{log.path}: {log.incomplete}")
        if log.source != first.source:
            raise ToolError(f"{log.path} and {first.path} are of different scripts: see `diff`, and name logs of one")
        if log.num_steps != first.num_steps:
            counts = f"{log.num_steps} steps, {first.path} has {first.num_steps}"
            raise ToolError(f"{log.path} has {counts}: name logs of one number of steps")
        if log.track != first.track:
            raise ToolError(f"{log.path} and {first.path} are of different tracks: name logs of one")
        if log.seed is None:
            continue
        if log.seed in seeds:
            raise ToolError(f"{log.path} and {seeds[log.seed]} have the same seed {log.seed}: leave one of them out")
        seeds[log.seed] = log.path
