"""Check what a record must fulfil. Every failure is one line that says what to do."""

import ast
import functools
import hashlib
import itertools
import os
import re
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from speedrun import logs
from speedrun.logs import (
    Card,
    Log,
    ToolError,
    board_of,
    is_on_board,
    log_paths,
    read_script,
    read_text,
    shown,
)
from speedrun.needs import PYTHON
from speedrun.process import ROOT
from speedrun.proof import ALPHA, Sample, describe, public_history, standing
from speedrun.race import FILE, OLDER, ON_ONE_GPU, SAME_TRAINING, record_race, too_different

PLACEHOLDER = re.compile("<say[^>]*>?")
COMPILER_SETTING = re.compile(
    r"\b_(inductor|dynamo)\b(?!\.utils)|\bTORCH(INDUCTOR|DYNAMO|_COMPILE)(?!_COMPILE_THREADS|_CACHE_DIR)\w*"
)
HARMLESS = {"TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"}  # variables of the compiler
UNMEASURED = "speed, unmeasured"  # the kind of a record of several ideas for speed that nobody has timed
IN_HISTORY = "idea, after a step in the history"  # that step is its evidence

# target: a mean validation loss in nats; val_sha256 None: no hash is known to this tool yet
Track = namedtuple("Track", "name target val_tokens val_sha256 shard_name shard_tokens max_threads")
NANO_VAL = "e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33"
NANO_SHARD = "c468b0dbbe20b2eb747b07e8c3667cf914c15c64686145fc1bf28cc8d3614497"  # SHA-256 of the training shard
TRACKS = {
    "nano": Track("nano", 1.45, 262_144, NANO_VAL, "nano_train_{:06d}.bin", 43_511_879, max_threads=2),
    "gpt2": Track("gpt2", 3.28, 10_485_760, None, "fineweb_train_{:06d}.bin", 100_000_000, max_threads=None),
}


def track_of(log: Log) -> Track:
    if log.track not in TRACKS:
        what = f"preset {shown(log.track)} is no track" if log.track else "states no preset, so no track"
        raise ToolError(f"{log.path}: {what}; the tracks are {', '.join(TRACKS)}")
    return TRACKS[log.track]


def board_order(board: str) -> tuple[bool, bool, str]:
    return board != "nano", board != "gpt2 on 8xH100", board


def hardware_problem(log: Log) -> str | None:
    """Say that no track is for the hardware of a log of gpt2, or return None."""
    if log.track != "gpt2" or re.match(r"gpt2 on (8xH100$|1x NVIDIA (?!.* or NVIDIA))", board := board_of(log)):
        return None
    return f"ran {board.removeprefix('gpt2 ')}; gpt2's tracks are 8xH100, and one GPU that the log names: run it there"


def compiler_flags(source: str) -> Iterator[str]:
    """Yield what a script plainly does to the compiler beyond torch.compile(..., fullgraph=, dynamic=)."""
    for found in COMPILER_SETTING.finditer(source):
        yield f"line {source.count(chr(10), 0, found.start()) + 1} uses {found[0]}"
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError) as error:
        yield f"is not one Python script ({shown(str(error))})"
        return
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile":
            words = [word.arg or "**" for word in node.keywords if word.arg not in ("fullgraph", "dynamic")]
            yield from (f"line {node.lineno} uses torch.compile({word}=)" for word in words)


@dataclass
class Verdict:
    """What verify found out about a record: failures, each of a log of this name, or with "" of the record."""

    folder: Path
    failures: list[tuple[str, str]]
    summary: str = ""

    def __str__(self) -> str:
        kinds: dict[str, list[tuple[str, str]]] = {}  # failures that differ in numbers alone are of one kind
        for name, problem in self.failures:
            kinds.setdefault(re.sub(r"\d+", "", problem) if name else problem, []).append((name, problem))
        lines = []
        for (name, problem), *others in kinds.values():
            more = len({other for other, _ in others} - {name})
            name = f"{more + 1} logs, first {name}" if more else name
            lines.append(f"FAIL {logs.name_of(self.folder)}: {f'{name}: ' if name else ''}{problem}")
        return "\n".join(lines or [f"ok {logs.name_of(self.folder)}: {self.summary}"])


def clock_problems(log: Log) -> Iterator[str]:
    for before, line in itertools.pairwise(log.lines):
        if line.time < before.time:
            fall = f"train_time falls from {before.time:.0f} to {line.time:.0f} ms at step {line.step}"
            yield f"{fall}: the clock went wrong; run it again"
            return


def flag_problems(log: Log) -> Iterator[str]:
    allowed = {*SAME_TRAINING, "--seed", "--log_dir", "--run_id"}
    if board_of(log) not in ("nano", "gpt2 on 8xH100"):
        allowed |= ON_ONE_GPU
    for name in [flag.partition("=")[0] for flag in log.flags if flag.startswith("--")]:
        if name not in allowed:
            yield f"has the flag {name}: put settings into the script, run it without"


@functools.cache
def nano_shard() -> bytes:
    """Return the tokens of the nano track's training shard, or nothing if data/nano lacks it."""
    path = ROOT / "data" / "nano" / TRACKS["nano"].shard_name.format(0)
    data = path.read_bytes() if path.is_file() else b""
    return data[logs.HEADER_BYTES :] if hashlib.sha256(data).hexdigest() == NANO_SHARD else b""


def training_tokens(log: Log) -> str | None:
    """Return what a log should state of its training tokens, or None where this tool cannot know."""
    length, total = log.train_seq_len, log.batch_tokens * log.num_steps
    shard = nano_shard() if log.track == "nano" and not log.is_packed else b""
    if length < 1 or not 0 < total * logs.TOKEN_BYTES < len(shard):
        return None
    size, digest = length * logs.TOKEN_BYTES, hashlib.sha256()
    for begin in range(0, total * logs.TOKEN_BYTES, size):  # with the last target, which begins the next one
        digest.update(shard[begin : begin + size + logs.TOKEN_BYTES])
    return f"{total}, sha256 {digest.hexdigest()}"


def validation_problem(log: Log, track: Track) -> str | None:
    """Say that the losses are of other tokens than the target, or return None."""
    if log.val_tokens != track.val_tokens:
        return f"validates on {log.val_tokens} tokens, the track on {track.val_tokens}; run it without --val_tokens"
    if track.val_sha256 not in (None, log.val_sha256):
        return f"other validation tokens, sha256 {log.val_sha256}, than the track's; get the track's data, run it again"
    return None


def data_problems(log: Log, track: Track) -> Iterator[str]:
    """Check that validation tokens and training stream are the track's."""
    yield from filter(None, [validation_problem(log, track)])
    touched = "the training stream is not the track's"
    if log.training_tokens is None and "training tokens: " in log.source:  # older scripts do not state them
        yield "states no training tokens; run the script as it is"
    if log.training_tokens and (expected := training_tokens(log)) not in (None, log.training_tokens):
        yield f"{touched}: its tokens are {log.training_tokens}, in order they are {expected}; get the data again"
    shards = max(len(log.train_shards), 1)
    names = [track.shard_name.format(i + (track.name == "gpt2")) for i in range(shards)]  # FineWeb's 0: validation
    if log.train_shards != [(name, track.shard_tokens) for name in names]:
        found = shown(", ".join(f"{name} of {tokens} tokens" for name, tokens in log.train_shards))
        yield f"{touched}: its shards are {found}, not those from {names[0]} on of {track.shard_tokens} tokens"
    if log.first_batch != f"{names[0]} position 0":
        yield f"{touched}: the first batch is {log.first_batch}; train on all batches in order"
    used = (log.num_steps - 1) * log.batch_tokens - (shards - 1) * track.shard_tokens  # of the last shard
    name, _, position = (log.last_batch or " position 0").partition(" position ")
    if name != names[-1] or not used <= int(position) < track.shard_tokens:
        yield f"{touched}: the last batch cannot be {log.last_batch}; train on each token once, in order"


def log_problems(log: Log, track: Track, script: str) -> Iterator[str]:
    if script and log.source != script:
        yield "the script in the log is not the folder's train_gpt.py; put there the one that ran, or run it again"
    yield from filter(None, [hardware_problem(log)])
    yield from data_problems(log, track)
    yield from flag_problems(log)
    yield from clock_problems(log)
    if flags := [name for name in log.environment if name.startswith("TORCHINDUCTOR_") and name not in HARMLESS]:
        yield f"ran with {', '.join(flags)}: the track allows no compiler flags; unset it and run it again"
    if log.recompiles != 0:
        count = "does not say how many graphs" if log.recompiles is None else f"{log.recompiles} graphs"
        yield f"{count} compiled after the clock started; cover them in the warm-up, then run it again"
    if log.seed is None:
        yield "states no seed; run the track's train_gpt.py with --seed"
    if track.max_threads is not None:
        used = max(log.num_threads or 0, log.cpu_threads)
        if log.num_threads is None or used > track.max_threads:
            told = "an unknown number of" if log.num_threads is None else used
            yield f"uses {told} CPU threads, the track at most {track.max_threads}; run it with --cpu_threads 2"
        if log.has_gpu:
            yield "ran on a GPU, the track is for CPUs; run it with --device cpu"


def target_problem(sample: Sample, target: float, is_form: bool) -> str | None:
    if sample.mean > target:
        return f"mean {sample.mean:.4f} is above the target {target}; train better or longer"
    if is_form or (sample.p is not None and sample.p < ALPHA):
        return None
    p = "no p for one run" if sample.p is None else f"p={sample.p:.2g}"
    return f"n too small: {p} is not below {ALPHA} at n={sample.n}; `stats` says how many runs it is likely to take"


def kind_problems(folder: Path, card: Card, before: Path | None, page: str) -> Iterator[str]:
    """Check the kind of a record: RULES.md says what each allows."""
    numbers = [record["number"] for record in public_history()["records"] if record["date"] == card.date]
    if card.kind == "form":
        is_tested = re.fullmatch(r"tests/test_\w+\.py", card.evidence) and (ROOT / card.evidence).is_file()
        if not is_tested and not re.fullmatch(r"tests/test_\w+\.py at commit [0-9a-f]{7,40}", card.evidence):
            yield "record.json: evidence names no test that is there; name the one that shows this form to be equal"
    elif card.kind == IN_HISTORY:
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}_[\w.-]+", card.evidence):
            yield f"record.json: evidence is {shown(card.evidence)}, not the name of a step; mend it"
    elif card.kind == UNMEASURED:
        if card.ranked or "unmeasured" not in page.lower():
            yield f"a record of the kind {UNMEASURED!r} is not ranked, and its page says 'unmeasured'; mend them"
    elif card.kind == "idea":
        if before and (problem := too_different(*(read_script(str(path), path.parent) for path in (folder, before)))):
            yield f"train_gpt.py: {problem}"
    elif card.kind not in (f"public record {number}" for number in numbers):
        kinds = f"idea, form, {UNMEASURED}, or public record N of its date"
        yield f"record.json: its kind is {shown(card.kind)}; take one of: {kinds}"


def page_problems(page: str, script: str, card: Card) -> Iterator[str]:
    """Check what every record has: a script and a written page."""
    for problem in sorted(set(compiler_flags(script))):
        yield f"train_gpt.py: {problem}; the track allows no compiler flags: take it out"
    for name, text in (("train_gpt.py", script), ("README.md", page)):
        if not text:
            yield f"{name} is missing; a record has one"
    places = enumerate(page.split("\n"), start=1)
    for where, line in [("record.json", card.what), *((f"README.md line {number}", line) for number, line in places)]:
        for placeholder in PLACEHOLDER.findall(line):
            yield f"{where}: write what {shown(placeholder)} asks for"


def verify(folder: Path, root: Path) -> Verdict:
    """Check all that the files of a record allow."""
    line = [*itertools.takewhile(lambda other: not other.samefile(folder), logs.lineage(root))]  # the records before it
    files = (folder / name for name in ("train_gpt.py", "README.md"))
    script, page = (read_text(path).rstrip("\n") if path.is_file() else "" for path in files)
    card = logs.read_card(folder)
    problems = [*page_problems(page, script, card)]
    if page and script:
        problems += kind_problems(folder, card, line[-1] if line else None, page)
    verdict = Verdict(folder, [("", problem) for problem in problems])
    if not card.ranked:
        verdict.summary = f"not ranked: script and page; {card.kind}"
        return verdict
    whole, others = whole_logs(verdict, folder, script), whole_logs(verdict, folder / OLDER, "")
    verdict.failures += logs.differences(others)
    if not log_paths(folder):
        verdict.failures.append(("", "has no logs; put the .txt of its runs there"))
    if whole:
        check_together(verdict, whole, card.kind == "form")
    try:
        board = board_of(whole[0]) if whole else ""
        if any(is_on_board(other, board) for other in line):  # or else it opens its leaderboard
            name, found = record_race(folder, line, board, whole, others)
            verdict.summary += f"; {standing(found)}, against {name}"
            if card.kind.startswith("idea") and found["verdict"] != "faster":  # a public record gained elsewhere
                raise ToolError(f"{FILE}: against {name} {standing(found)}")
    except ToolError as error:
        verdict.failures.append(("", str(error).removeprefix(f"{folder}{os.sep}")))
    return verdict


def whole_logs(verdict: Verdict, folder: Path, script: str) -> list[Log]:
    """Return the folder's logs of whole runs, and add what is wrong with each log to the verdict."""
    whole = []
    for path in log_paths(folder):
        try:
            log = Log(path)
            problems = [log.incomplete] if log.incomplete else [*log_problems(log, track_of(log), script)]
            whole += [] if log.incomplete else [log]
        except ToolError as error:
            problems = [str(error).removeprefix(f"{path}: ")]
        verdict.failures += [(str(path.relative_to(verdict.folder)), problem) for problem in problems]
    return whole


def check_together(verdict: Verdict, whole: list[Log], is_form: bool) -> None:
    """Check what the logs of a record show together, and sum it up."""
    verdict.failures += logs.differences(whole)
    track = track_of(whole[0])
    sample = describe([log.val_loss for log in whole], track.target)
    problems = [target_problem(sample, track.target, is_form)]
    if len(boards := {board_of(log) for log in whole}) > 1:
        problems.append(f"its logs are of {' and '.join(sorted(boards))}: run all on one kind of machine")
    verdict.failures += [("", problem) for problem in problems if problem]
    p = "p waived: a form" if is_form else f"p={sample.p:.2g}" if sample.p is not None else "p unknown"
    note = ""
    if any(log.training_tokens and training_tokens(log) is None for log in whole):
        note = "; training tokens not checked" + f": first run {PYTHON} data/pack_nano.py" * (track.name == "nano")
    verdict.summary = f"{sample} {p} ({board_of(whole[0])}, {whole[0].num_steps} steps{note})"
