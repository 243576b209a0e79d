"""Read logs, and what the tracks are."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from speedrun import TRACKS
from speedrun.process import ToolError as ToolError

RULE = "=" * 100
HEADER_BYTES, TOKEN_BYTES = 1024, 2  # of a shard
# What reading a damaged file may raise
DAMAGED = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError


def quote(text: str, length: int = 60) -> str:
    """Quote text of a file in a message: on one line, without control characters, not longer than `length`."""
    return ascii(text if len(text) <= length else text[: length - 3] + "...")


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_json(path: Path) -> dict:
    try:
        return dict(json.loads(read_text(path)))
    except DAMAGED as error:
        raise ToolError(f"{path}: no JSON object ({quote(str(error))}); take the file as it was written") from None


def digest(script: str) -> str:
    """Return the SHA-256 of the file that holds this script."""
    return hashlib.sha256(f"{script}\n".encode()).hexdigest()


def script_in(path: Path) -> str:
    """Return the script in a file, or in the log that begins with it."""
    return read_text(path).partition(f"\n{RULE}\n")[0]


def load_script(path: Path) -> ModuleType:
    """Import the script in a file or a log."""
    sys.modules[str(path)] = module = ModuleType(str(path))  # dataclasses look it up
    module.__file__ = str(path)
    exec(compile(script_in(path), path, "exec"), vars(module))  # noqa: S102 (importlib takes no log)
    return module


class Log:
    """A log. What it does not state is None; train_shards are (name, number of tokens).

    It begins with its script. A record's log has the script's SHA-256 instead, and `source` is empty.
    """

    def __init__(self, path: Path, text: str | None = None):
        """Read the file, or this text of it. Raise ToolError if it is no log, or holds a line that no run wrote."""
        self.path, self.name = path, path.name
        try:
            self.read(read_text(path) if text is None else text)
        except DAMAGED as error:
            raise ToolError(f"{path}: cut short or edited ({quote(repr(error))}); run it again") from None

    def read(self, text: str) -> None:
        source, *rest = re.split(f"^{RULE}$\n?", text, flags=re.MULTILINE)
        if len(rest) < 2:
            message = "not a log, or cut short: a log has two lines of 100 '='; name the .txt of a run"
            raise ToolError(f"{self.path}: {message}")
        is_hash = re.fullmatch("[0-9a-f]{64}\n", source)
        self.source = "" if is_hash else source.rstrip("\n")
        self.sha256 = source.strip() if is_hash else digest(self.source)
        self.stored = f"{self.sha256}\n{text[len(source) :]}"  # as records keep it
        self.text = "\n".join(rest)
        self.starts = len(rest) // 2  # of which each writes script, machine and flags
        self.ended = self.find(r"((?:stopped:|interrupted:|resumed).*)")  # says that this is not one whole run
        self.read_steps("\n".join(rest[1:]))
        self.read_header()

    def read_steps(self, text: str) -> None:
        self.curve: dict[int, tuple[float, float]] = {}  # loss, and train time in ms, of the validations, by step
        self.last_step, self.num_steps, self.train_time = 0, 0, 0.0
        for line in re.findall("^(step:.*)\n", text, re.MULTILINE):  # a run may be writing the last one
            fields = dict(field.split(":", 1) for field in line.split())
            step, self.num_steps = map(int, fields["step"].split("/"))
            ms = float(fields["train_time"].removesuffix("ms"))
            if math.isfinite(loss := float(fields.get("val_loss", "nan"))):
                self.curve[step] = loss, ms
            self.last_step, self.train_time = max(self.last_step, step), max(self.train_time, ms)
        if not self.num_steps:
            raise ToolError(f"{self.path}: no step lines ({quote(self.ended or 'never started')}); leave it out")

    def read_header(self) -> None:
        self.configuration: dict = self.find("configuration: (.*)", json.loads) or {}
        self.flags = [str(flag) for flag in self.find("flags: (.*)", json.loads) or []]
        self.track: str | None = self.configuration.get("preset")
        self.seed = self.find(r"seed: (\d+)\b.*", int)
        shards = re.findall(r"^train shard: (.+), (\d{1,15}) bytes$", self.text, re.MULTILINE)
        self.train_shards = [(Path(name).name, (int(size) - HEADER_BYTES) // TOKEN_BYTES) for name, size in shards]
        self.val_tokens = self.find(r"validation tokens: (\d+), sha256 .*", int)
        self.val_sha256 = self.find(r"validation tokens: \d+, sha256 ([0-9a-f]{64})\b.*")
        self.recompiles = self.find(r"recompiles after the clock started: (\d+)", int)
        self.peak_mib = self.find(r"peak memory(?: allocated)?: (\d+) MiB.*", int)
        counts = re.search(r"^(\d{1,6}) processes, (\d{1,6}) threads each, \d+ cores$", self.text, re.MULTILINE)
        processes, threads = (int(counts[1]), int(counts[2])) if counts else (None, None)
        self.num_threads = processes and threads and processes * threads
        gpu = self.find(r"\|\s+\d+\s+(NVIDIA .+?)\s{2,}.*")  # the first that nvidia-smi lists
        device = self.configuration.get("device") or ("cuda" if gpu else "cpu")
        self.hardware = None
        if device == "cuda":
            self.hardware = f"{processes or 1}x {gpu or 'GPU'}"
        elif processes:
            self.hardware = f"{self.find(r' *Model name: +(.+)') or 'CPU'}, {processes} processes of {threads} threads"

    def find(self, pattern: str, convert: Callable[[str], Any] = str) -> Any:
        """Return the group of the first line that matches, or None."""
        match = re.search(f"^{pattern}$", self.text, re.MULTILINE)
        return match and convert(match[1].strip())

    @property
    def val_loss(self) -> float:
        """Return the last validation's loss, of a log without a problem."""
        return self.curve[self.num_steps][0]

    @property
    def problem(self) -> str | None:
        """Say why this is not the log of one whole run that agrees with itself, or return None."""
        if self.starts > 1:
            return f"was started {self.starts} times: not one whole run; run it again"
        if self.ended is not None:
            return f"has the line {quote(self.ended)}: not one whole run; run it again"
        if self.num_steps not in self.curve or self.last_step != self.num_steps:
            last = f"ends at step {self.last_step} of {self.num_steps}"
            return f"{last} without the last validation: cut short; run it again"
        return None

    @property
    def other_tokens(self) -> str | None:
        """Say how the tokens that it read are not those of its track, or return None."""
        if self.track not in TRACKS:
            return f"its preset is {quote(str(self.track))}; the tracks are {', '.join(TRACKS)}"
        track = TRACKS[self.track]
        if (self.val_tokens, self.val_sha256) != (track.val_tokens, track.val_sha256 or self.val_sha256):
            return f"validates on other tokens: {self.val_tokens} of sha256 {self.val_sha256}; get the track's data"
        numbers = range(track.first_shard, track.first_shard + max(len(self.train_shards), 1))
        shards = [(Path(track.shard.format(number)).name, track.shard_tokens) for number in numbers]
        if self.train_shards != shards:
            read = quote(str(self.train_shards))
            return f"trains on {read}, the track on {shards[0]} and the next; get the track's data"
        return None
