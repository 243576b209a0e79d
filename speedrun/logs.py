"""Read logs, ours and the public speedrun's."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

RULE = "=" * 100
NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
OTHERS = r"(?: (?!train_loss|val_loss:|train_time|step_avg)\w+:\S+)*"  # fields that some public logs have
STEP_LINE = re.compile(
    rf"step:(\d{{1,9}})/(\d{{1,9}})(?: train_loss:(?:{NUMBER}|nan|inf))?(?: val_loss:(?:{NUMBER}|nan|inf))?{OTHERS}"
    rf" train_time:{NUMBER}(m?s) step_avg:\S+ms{OTHERS}\s*"
)
HEADER_BYTES, TOKEN_BYTES = 1024, 2  # of a shard
ODD = ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError  # of text that is odd


class ToolError(Exception):
    """What the user has to mend, in one line. Exit code 2."""


def shown(text: str, length: int = 60) -> str:
    """Quote text of a file in a message: on one line, without control characters, not longer than `length`."""
    return ascii(text if len(text) <= length else text[: length - 3] + "...")


def printable(text: str) -> str:
    """Replace control characters, such as the escape sequences of a terminal, but no line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def markdown(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown; head has the columns' names, with | between them."""
    names = head.split("|")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


class Line(NamedTuple):
    """A step line, times in ms; that of a training step has no val_loss."""

    step: int
    total: int
    train_loss: float | None
    val_loss: float | None
    time: float


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_json(path: Path) -> dict:
    try:
        return dict(json.loads(read_text(path)))
    except ODD as error:
        raise ToolError(f"{path}: no JSON object ({shown(str(error))}); take the file as it was written") from None


def digest(script: str) -> str:
    """Return the SHA-256 of the file that holds this script."""
    return hashlib.sha256(f"{script}\n".encode()).hexdigest()


class Log:
    """Read a log. What it does not state is None, and a number 0; train_shards are (name, tokens).

    It begins with its script. A record's log has the script's SHA-256 instead, and `source` is empty.
    """

    def __init__(self, path: Path, text: str | None = None):
        """Read the file, or this text of it. Raise ToolError if it is no log, or holds a line that no run wrote."""
        self.path, self.name = path, path.name
        try:
            self.read(read_text(path) if text is None else text)
        except ODD as error:
            why = shown(repr(error))
            raise ToolError(f"{path}: cannot be read ({why}): cut short or edited; run it again") from None

    def read(self, text: str) -> None:
        source, *rest = re.split(f"^{RULE}$\n?", text, flags=re.MULTILINE)
        if len(rest) < 2:
            raise ToolError(
                f"{self.path}: not a log, or cut short: a log has two lines of 100 '='; name the .txt of a run"
            )
        is_stated = re.fullmatch("[0-9a-f]{64}\n", source)
        self.source = "" if is_stated else source.rstrip("\n")
        self.sha256 = source.strip() if is_stated else digest(self.source)
        self.text = "\n".join(rest)
        self.stored = f"{self.sha256}\n{text[len(source) :]}"  # as records keep it
        ended = re.search(r"^(?:stopped:|interrupted:|resumed).*", self.text, re.MULTILINE)
        self.ended = ended and ended[0].strip()  # says that this is not one whole run
        self.starts = len(rest) // 2  # of which each writes script, machine and flags
        self.lines = self.read_lines("\n".join(rest[1:]))
        self.num_steps, self.train_time = self.lines[-1].total, self.lines[-1].time
        # Loss, and train time in ms, of the validations, by step
        self.curve = {line.step: (line.val_loss, line.time) for line in self.lines if line.val_loss is not None}
        self.training = [line for line in self.lines if line.val_loss is None]
        self.train_losses = [line.train_loss for line in self.training if line.train_loss is not None]
        self.configuration: dict = self.find("configuration: (.*)", json.loads) or {}  # the public form has none
        self.flags = [*map(str, self.find("flags: (.*)", json.loads) or [])]
        self.environment = dict(self.find("environment: (.*)", json.loads) or {})  # older logs have none
        self.track, device = (self.configuration.get(name) for name in ("preset", "device"))
        names = "batch_tokens", "train_seq_len", "cpu_threads"
        self.batch_tokens, self.train_seq_len, self.cpu_threads = (int(self.configuration.get(it) or 0) for it in names)
        stages = self.configuration.get("stages") or [[1, 1, 0]]  # rows of share, batch, max_doc_len and others
        self.is_packed = any(row[1:3] != [1, 0] for row in stages)  # documents or batches decide where one begins
        self.seed = self.find(r"seed: (\d+)\b.*", int)
        shards = re.findall(r"^train shard: (.+), (\d{1,15}) bytes$", self.text, re.MULTILINE)
        self.train_shards = [(Path(name).name, (int(size) - HEADER_BYTES) // TOKEN_BYTES) for name, size in shards]
        self.val_tokens = self.find(r"validation tokens: (\d+), sha256 .*", int)
        self.val_sha256 = self.find(r"validation tokens: \d+, sha256 ([0-9a-f]{64})\b.*")
        self.training_tokens = self.find(r"training tokens: (\d+, sha256 [0-9a-f]{64})")
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
        found = re.search(f"^{pattern}$", self.text, re.MULTILINE)
        return found and kind(found[1].strip())

    def read_lines(self, text: str) -> list[Line]:
        lines = []
        for line in re.findall("^(step:.*)\n", text, re.MULTILINE):  # a run may write at the last one yet
            if (found := STEP_LINE.fullmatch(line)) is None:
                raise ToolError(f"{self.path}: {shown(line)} is no step line: cut short or edited; run it again")
            train_loss, val_loss = (float(loss) if loss else None for loss in (found[3], found[4]))
            time = round(float(found[5]) * (1000 if found[6] == "s" else 1), 6)
            lines.append(Line(int(found[1]), int(found[2]), train_loss, val_loss, time))
        if not lines:
            raise ToolError(f"{self.path}: no step lines ({shown(self.ended or 'never started')}); leave it out")
        # A training loss is printed a few steps late, perhaps after the validation of a later step
        return sorted(lines, key=lambda line: (line.step, line.val_loss is not None))

    @property
    def val_loss(self) -> float:
        """Return the last validation's loss, of a log without a problem."""
        return self.curve[self.num_steps][0]

    @property
    def problem(self) -> str | None:
        """Say why this is not the log of one whole run that agrees with itself, or return None."""
        last, steps = self.lines[-1], [line.step for line in self.training]
        if self.starts > 1:
            return f"was started {self.starts} times: not one whole run; run it again"
        if self.ended is not None:
            return f"has the line {shown(self.ended)}: not one whole run; run it again"
        if last.val_loss is None or last.step != last.total:
            return f"ends at step {last.step} of {last.total} without the last validation: cut short; run it again"
        # Public logs may have lines of validations alone
        if (steps or self.configuration) and (len(steps) < last.total or steps != [*range(1, last.total + 1)]):
            return f"lacks a step line of 1 to {last.total}, or has one twice; run it again"
        return None
