"""Check what a record must fulfil. Every failure is one line that says what to do."""

import ast
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun import proof, store
from speedrun.logs import HEADER_BYTES, TOKEN_BYTES, Log, ToolError, digest, read_json, read_text, shown
from speedrun.needs import PYTHON
from speedrun.process import ROOT
from speedrun.store import HISTORY, OLDER, PAGE, RACE, RUNS, SCRIPT, TRACKS, Card, Track, name_of, track_of

PLACEHOLDER = re.compile(r"<say[^>\n]*>?")
COMPILER_SETTING = re.compile(
    r"\b_(inductor|dynamo)\b(?!\.utils)|\bTORCH(INDUCTOR|DYNAMO|_COMPILE)(?!_COMPILE_THREADS|_CACHE_DIR)\w*"
)
HARMLESS = {"TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"}  # variables of the compiler
ONE_CARD = "measured on one card"  # the kind of ideas for speed that have no whole run yet
OPEN = re.compile(r"open proposal \d+")  # the kind of a script with the mathematics of a public pull request
MAX_CHANGED = 200  # lines, removed and added, of a script that carries an idea


def compiler_flags(source: str) -> Iterator[str]:
    """Yield what a script plainly does to the compiler beyond torch.compile(..., fullgraph=, dynamic=)."""
    for found in COMPILER_SETTING.finditer(source):
        yield f"line {source.count(chr(10), 0, found.start()) + 1} uses {found[0]}"
    try:
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="compile"), keywords=words):
                    names = [word.arg or "**" for word in words if word.arg not in ("fullgraph", "dynamic")]
                    yield from (f"line {node.lineno} uses torch.compile({name}=)" for name in names)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the latter two: nested too deeply
        yield f"is not one Python script ({shown(str(error) or type(error).__name__)}); take the one that ran"


@dataclass
class Verdict:
    """What verify found out about a record."""

    folder: Path
    failures: list[str]
    summary: str = ""

    def __str__(self) -> str:
        lines = [f"FAIL {name_of(self.folder)}: {failure}" for failure in self.failures]
        return "\n".join(lines or [f"ok {name_of(self.folder)}: {self.summary}"])


def allowed_flags(track: Track, is_one_gpu: bool) -> set[str]:
    return {f"--{name}" for name in track.flags + track.flags_on_one_gpu * is_one_gpu}


@functools.cache
def nano_shard() -> bytes:
    """Return the tokens of the nano track's training shard, or nothing if data/nano lacks it."""
    path = ROOT / "data" / "nano" / TRACKS["nano"].shard.format(0)
    data = path.read_bytes() if path.is_file() else b""
    return data[HEADER_BYTES:] if hashlib.sha256(data).hexdigest() == TRACKS["nano"].shard_sha256 else b""


def training_tokens(log: Log) -> str | None:
    """Return what a log should state of its training tokens, or None where this tool cannot know."""
    length, total = log.train_seq_len, log.batch_tokens * log.num_steps
    shard = nano_shard() if log.track == "nano" and not log.is_packed else b""
    if length < 1 or not 0 < total * TOKEN_BYTES < len(shard):
        return None
    size, digest = length * TOKEN_BYTES, hashlib.sha256()
    for begin in range(0, total * TOKEN_BYTES, size):  # with the last target, which begins the next one
        digest.update(shard[begin : begin + size + TOKEN_BYTES])
    return f"{total}, sha256 {digest.hexdigest()}"


def validation_problem(log: Log, track: Track) -> str | None:
    """Say that the losses are of other tokens than the target, or return None."""
    if log.val_tokens != track.val_tokens:
        return f"validates on {log.val_tokens} tokens, the track on {track.val_tokens}; run it without --val_tokens"
    if track.val_sha256 not in ("", log.val_sha256):
        return f"other validation tokens, sha256 {log.val_sha256}, than the track's; get the track's data, run it again"
    return None


def data_problems(log: Log, track: Track, script: str) -> Iterator[str]:
    """Check that validation tokens and training stream are the track's."""
    yield from filter(None, [validation_problem(log, track)])
    touched = "the training stream is not the track's"
    if log.training_tokens is None and "training tokens: " in script:  # older scripts do not state them
        yield "states no training tokens; run the script as it is"
    if log.training_tokens and (expected := training_tokens(log)) not in (None, log.training_tokens):
        yield f"{touched}: its tokens are {log.training_tokens}, in order they are {expected}; get the data again"
    shards = max(len(log.train_shards), 1)
    names = [track.shard.format(track.first_shard + i) for i in range(shards)]
    if log.train_shards != [(name, track.shard_tokens) for name in names]:
        found = shown(", ".join(f"{name} of {tokens} tokens" for name, tokens in log.train_shards))
        yield f"{touched}: its shards are {found}, not those from {names[0]} on of {track.shard_tokens} tokens"
    if log.first_batch != f"{names[0]} position 0":
        yield f"{touched}: the first batch is {log.first_batch}; train on all batches in order"
    total = int((log.training_tokens or f"{log.num_steps * log.batch_tokens},").partition(",")[0])
    used = total - log.largest_batch - (shards - 1) * track.shard_tokens  # of the last shard, before the last batch
    name, _, position = (log.last_batch or " position 0").partition(" position ")
    if name != names[-1] or not used <= int(position) < track.shard_tokens:
        yield f"{touched}: the last batch cannot be {log.last_batch}; train on each token once, in order"


def log_problems(log: Log, track: Track, script: str) -> Iterator[str]:
    if script and log.sha256 != digest(script):
        yield "the script of the log is not the folder's train_gpt.py; put there the one that ran, or run it again"
    board = store.board_of(log)
    if track.name == "gpt2" and not re.match(r"gpt2 on (8xH100$|1x NVIDIA (?!.* or NVIDIA))", board):
        yield f"ran {board.removeprefix('gpt2 ')}; gpt2's tracks are 8xH100, and one GPU that the log names"
    yield from data_problems(log, track, script)
    allowed = allowed_flags(track, board != "gpt2 on 8xH100") | proof.OWN_FLAGS
    for name in [flag.partition("=")[0] for flag in log.flags if flag.startswith("--")]:
        if name not in allowed:
            yield f"has the flag {name}: put settings into the script, run it without"
    if flags := [name for name in log.environment if name.startswith("TORCHINDUCTOR_") and name not in HARMLESS]:
        yield f"ran with {', '.join(flags)}: the track allows no compiler flags; unset it and run it again"
    if log.recompiles != 0:
        count = "does not say how many graphs" if log.recompiles is None else f"{log.recompiles} graphs"
        yield f"{count} compiled after the clock started; cover them in the warm-up, then run it again"
    if log.seed is None:
        yield "states no seed; run the track's train_gpt.py with --seed"
    if track.max_threads:
        used = max(log.num_threads or 0, log.cpu_threads)
        if log.num_threads is None or used > track.max_threads:
            told = "an unknown number of" if log.num_threads is None else used
            yield f"uses {told} CPU threads, the track at most {track.max_threads}; run it with --cpu_threads 2"
        if log.has_gpu:
            yield "ran on a GPU, the track is for CPUs; run it with --device cpu"


def kind_problems(folder: Path, card: Card, before: Path | None, page: str) -> Iterator[str]:
    """Check the kind of a record: RULES.md says what each allows."""
    numbers = [record["number"] for record in read_json(store.PUBLIC)["records"] if record["date"] == card.date]
    match card.kind:
        case "idea" if not card.evidence:
            script = store.read_script(str(folder), folder.parent)
            if problem := too_different(script, before or folder, folder.parents[2] / SCRIPT):
                yield f"{SCRIPT}: {problem}"
        case "idea" | "form":
            if not re.fullmatch(r"[\w./-]+ at commit [0-9a-f]{7,40}", card.evidence):
                yield "record.json: evidence names no step (of an idea) or test (of a form) 'at commit HASH'; mend it"
        case "milestone":
            if card.evidence not in [f"public record {number}" for number in numbers]:
                yield "record.json: evidence is not 'public record N' of its date; mend one of the two"
        case kind if OPEN.fullmatch(kind):
            if card.ranked or "not merged" not in page:
                yield f"a record of the kind {kind!r} is not ranked, and its page says 'not merged'; mend them"
        case kind if kind == ONE_CARD:
            if card.ranked or "measured on one" not in page.lower():
                yield f"a record of the kind {ONE_CARD!r} is not ranked, and its page says 'measured on one'; mend them"
        case _:
            kinds = f"idea, form, milestone, open proposal N or {ONE_CARD}"
            yield f"record.json: its kind is {shown(card.kind)}; take {kinds}"


def page_problems(page: str, script: str, what: str) -> Iterator[str]:
    """Check what every record has: a script and a written page."""
    for problem in sorted(set(compiler_flags(script))):
        yield f"train_gpt.py: {problem}; the track allows no compiler flags: take it out"
    for name, text in (("train_gpt.py", script), ("README.md", page)):
        if not text:
            yield f"{name} is missing; a record has one"
    for where, text in (("record.json", what), ("README.md", page)):
        for placeholder in PLACEHOLDER.findall(text):
            yield f"{where}: write what {shown(placeholder)} asks for"


def verify(folder: Path, root: Path) -> Verdict:
    """Check all that the files of a record allow; of one in the history, script and page."""
    files = (folder / name for name in (SCRIPT, PAGE))
    script, page = (read_text(path).rstrip("\n") if path.is_file() else "" for path in files)
    if folder.parent.name == HISTORY:
        return Verdict(folder, [*page_problems(page, script, "")], "left the tree: script and page")
    before = itertools.takewhile(lambda other: not other.samefile(folder), store.lineage(root))
    line = [*before]
    card = store.read_card(folder)
    verdict = Verdict(folder, [*page_problems(page, script, card.what)])
    if page and script:
        verdict.failures += kind_problems(folder, card, line[-1] if line else None, page)
    if not card.ranked:
        verdict.summary = f"not ranked: script and page; {card.evidence if card.kind == 'milestone' else card.kind}"
        return verdict
    try:
        whole, others = whole_logs(verdict, "", script), whole_logs(verdict, OLDER, "")
        verdict.failures += differences(others)
        if not whole and not verdict.failures:
            raise ToolError("has no logs; submit puts those of its race there")
        if whole:
            check_together(verdict, whole, card.kind == "form")
        board = store.board_of(whole[0]) if whole else ""
        if any(store.is_on_board(other, board) for other in line):  # or else it opens its leaderboard
            name, found = record_race(folder, line, board, whole, others)
            verdict.summary += f"; {proof.standing(found)}, against {name}"
            if card.kind == "idea" and found["verdict"] != "faster":  # a public record gained elsewhere
                raise ToolError(f"{RACE}: against {name} {proof.standing(found)}")
    except ToolError as error:
        verdict.failures.append(str(error).removeprefix(f"{folder}{os.sep}"))
    return verdict


def whole_logs(verdict: Verdict, beside: str, script: str) -> list[Log]:
    """Return the record's logs of whole runs, and add what is wrong with each log to the verdict."""
    whole = []
    for path, text in store.texts_of(verdict.folder).items():
        if path.parent != verdict.folder / beside:
            continue
        try:
            log = Log(path, text)
            problems = [log.problem] if log.problem else [*log_problems(log, track_of(log), script)]
            whole += [] if log.problem else [log]
        except ToolError as error:
            problems = [str(error).removeprefix(f"{path}: ")]
        verdict.failures += [f"{path.relative_to(verdict.folder)}: {problem}" for problem in problems]
    return whole


def check_together(verdict: Verdict, whole: list[Log], is_form: bool) -> None:
    """Check what the logs of a record show together, and sum it up."""
    verdict.failures += differences(whole)
    track = track_of(whole[0])
    sample = proof.describe([log.val_loss for log in whole], track.target)
    if sample.mean > track.target:
        verdict.failures.append(f"mean {sample.mean:.4f} is above the target {track.target}; train better or longer")
    elif not is_form and not sample.p < proof.ALPHA:
        few = f"n too small: p={sample.p:.2g} is not below {proof.ALPHA} at n={sample.n}"
        verdict.failures.append(f"{few}; `stats` says how many runs it is likely to take")
    if len(boards := {store.board_of(log) for log in whole}) > 1:
        verdict.failures.append(f"its logs are of {' and '.join(sorted(boards))}: run all on one kind of machine")
    note = ""
    if any(log.training_tokens and training_tokens(log) is None for log in whole):
        note = "; training tokens not checked" + f": first run {PYTHON} data/pack_nano.py" * (track.name == "nano")
    verdict.summary = f"{sample} p={sample.p:.2g} ({store.board_of(whole[0])}, {whole[0].num_steps} steps{note})"


def obstacle(race: proof.Race, before: Sequence[Path]) -> str | None:
    """Say why no record can come of this race against one of those before, or return None."""
    if race.trains("mini"):
        return "mini has no leaderboard"
    is_nano = race.trains("nano")
    allowed = allowed_flags(TRACKS["nano" if is_nano else "gpt2"], race.nproc_per_node == 1 and not is_nano)
    names = [{word.split("=")[0] for word in words if word.startswith("--")} for words in (race.flags, race.own_flags)]
    if others := names[0] - allowed | names[1]:
        return f"flags {', '.join(sorted(others))}: put settings into the script, race without"
    if before and not any(sha256_of(folder) in race.hashes for folder in before):
        older = [store.short_name(folder.name) for folder in before]
        return f"none of its scripts is {' or '.join(older)}: race YOUR_SCRIPT {older[0]}"
    few = f"fewer than {proof.MIN_PAIRS} pairs are a screen: race with --pairs {proof.MIN_PAIRS}"
    return few if race.pairs < proof.MIN_PAIRS else None


def sha256_of(folder: Path) -> str:
    return digest(store.read_script(str(folder), folder.parent)[1])


def too_different(newer: tuple[str, str], *olders: Path) -> str | None:
    """Say that more lines change than an idea may, or return None.

    olders: the record before, and the root's script, which trains the same and may be written in another way.
    """
    others = [store.read_script(str(path), path.parent) for path in olders if path.exists()]
    changed, name = min((sum(store.diff(other, newer)[1:]), other[0]) for other in others)
    told = f"{changed} lines change against {name}, for an idea at most {MAX_CHANGED}: take out what it can spare"
    return told if changed > MAX_CHANGED else None


def record_race(
    folder: Path, line: Sequence[Path], board: str, own: Sequence[Log] | None = None, others: Sequence[Log] = ()
) -> tuple[str, dict]:
    """Compare a record of a leaderboard with one of those before it, `line`, by its race.json; also return its name.

    Raise ToolError if the race proves nothing, or not by these logs: the record's own, and others of the script before.
    """
    path, before, newer = folder / RACE, store.rivals(line, board), sha256_of(folder)
    if not path.is_file():
        names = " or ".join(map(name_of, before))
        raise ToolError(f"{path}: is missing; race the script against {names}, and put the {RACE} there")
    race = proof.read_race(path)
    if newer not in race.hashes:
        raise ToolError(f"{path}: lacks this record's script, SHA-256 {newer}; race it as it is")
    if problem := obstacle(race, before):
        raise ToolError(f"{path}: {problem}")
    race.check_order(path)
    if len(race.runs) != len(race.order):
        raise ToolError(f"{path}: has {len(race.runs)} runs, not {race.pairs} of each script; finish the race")
    rival = next(rival for rival in before if sha256_of(rival) in race.hashes)
    a, b = (race.of(race.hashes.index(sha256)) for sha256 in (newer, sha256_of(rival)))
    if own is not None:
        others = [log for log in [*others, *store.logs_of(rival)] if log.sha256 == sha256_of(rival) and not log.problem]
        if len(own) != len(a):
            raise ToolError(f"{path}: has {len(a)} runs of the script, there are {len(own)} sound logs: leave none out")
        problem = run_problem(race, a, own, f"its {RUNS}")
        problem = problem or run_problem(race, b, others, f"its {RUNS}, nor in that of {name_of(rival)}")
        if problem:
            raise ToolError(f"{path}: {problem}")
    return name_of(rival), race.compare(a, b)


def run_problem(race: proof.Race, runs: Sequence[proof.Run], found: Sequence[Log], where: str) -> str | None:
    """Say that one of the race's runs has no log that says the same, or return None."""
    for run in runs:
        run_id = race.run_id(run.seed, run.script)
        own = [log for log in found if log.flags[4:] == ["--run_id", run_id, *race.flags]]
        if not own:
            return f"no sound log of its run {run_id}, with the race's flags, is in {where}"
        if not any(proof.Run(run.script, log.seed, **proof.figures_of(log)) == run for log in own):
            return f"the log of its run {run_id} says otherwise; take the files that `race` left"
    return None


def differences(found: list[Log]) -> Iterator[str]:
    """Yield where the run of a log is not one of the others' experiment with a seed of its own."""
    for i, log in enumerate(found):
        for other in found[:i]:
            if log.seed is not None and log.seed == other.seed:
                yield f"{log.name}: has seed {log.seed}, as {other.name} has; leave one out, or run another --seed"
            elif log.train_losses and log.train_losses == other.train_losses:
                yield f"{log.name}: has all training losses of {other.name}: does the script use its seed?"
    stated = [log.configuration | {"steps": log.num_steps, "validation tokens": log.val_sha256} for log in found]
    for log, mine in zip(found, stated, strict=True):
        keys = {key for key in mine | stated[0] if mine.get(key) != stated[0].get(key)} - {"seed", "run_id", "log_dir"}
        if keys:
            told = ", ".join(sorted(keys))
            yield f"{log.name}: unlike {found[0].name} in {told}; run all with the same flags and data"


def require_one_experiment(found: list[Log]) -> None:
    """Raise ToolError unless the logs are whole runs of one script and configuration, each with its own seed."""
    for log in found:
        if log.problem:
            raise ToolError(f"{log.path}: {log.problem}")
        if log.sha256 != found[0].sha256:
            both = f"{log.path} and {found[0].path}"
            raise ToolError(f"{both} are of different scripts: see `diff`, and name logs of one")
    for problem in differences(found):
        raise ToolError(problem)
