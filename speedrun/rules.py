"""Check what a record must fulfil. Every failure is one line that says what to do."""

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun import proof, store
from speedrun.logs import HEADER_BYTES, TOKEN_BYTES, Log, ToolError, digest, read_text, shown
from speedrun.process import ROOT
from speedrun.store import OLDER, PAGE, RACE, SCRIPT, TRACKS, Card, Track, name_of, track_of

PLACEHOLDER = re.compile(r"<say[^>\n]*>?")
COMPILER_SETTING = re.compile(
    r"\b_(?:inductor|dynamo)\b(?!\.utils)|\bTORCH(?:INDUCTOR|DYNAMO|_COMPILE)(?!_COMPILE_THREADS|_CACHE_DIR)\w*"
    r"|\btorch\.compile\((?:[^()]|\([^()]*\))*?\b(?:mode|options|backend|disable)="
)
ONE_CARD = "measured on one card"
KINDS = {  # of records, with what matches the evidence, and what the page of an unranked one says
    "idea": (r"|[\w./-]+ at commit [0-9a-f]{7,40}", ""),
    "form": (r"[\w./-]+ at commit [0-9a-f]{7,40}", ""),
    "milestone": (r"public record \d+", ""),
    r"open proposal \d+": ("", "not merged"),
    ONE_CARD: ("", "measured on one"),
}
MAX_CHANGED = 200  # lines, removed and added, of a script that carries an idea


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
def tokens_of(shard: str, sha256: str) -> bytes:
    """Return the tokens of a shard with this hash, or nothing."""
    data = path.read_bytes() if sha256 and (path := ROOT / shard).is_file() else b""
    return data[HEADER_BYTES:] if hashlib.sha256(data).hexdigest() == sha256 else b""


def training_tokens(log: Log, track: Track) -> str | None:
    """Return what a log should state of its training tokens, or None where this tool cannot know."""
    length, total = log.train_seq_len, log.batch_tokens * log.num_steps
    shard = b"" if log.is_packed else tokens_of(track.shard.format(track.first_shard), track.shard_sha256)
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


def log_problems(log: Log, script: str) -> Iterator[str]:
    track = track_of(log)
    if log.problem:
        yield log.problem
        return
    if log.sha256 != digest(script):
        yield "the script of the log is not the folder's train_gpt.py; put there the one that ran, or run it again"
    patterns = [pattern for _, pattern in track.machines]
    if patterns and not any(re.match(pattern, log.hardware or "") for pattern in patterns):
        yield f"ran on {log.hardware}; the machines of {track.name} are {' and '.join(map(repr, patterns))}"
    if problem := validation_problem(log, track):
        yield problem
    touched = "the training stream is not the track's"
    if log.training_tokens and (expected := training_tokens(log, track)) not in (None, log.training_tokens):
        yield f"{touched}: its tokens are {log.training_tokens}, in order they are {expected}; get the data again"
    names = [Path(track.shard.format(track.first_shard + i)).name for i in range(max(len(log.train_shards), 1))]
    if log.train_shards != [(name, track.shard_tokens) for name in names]:
        found = shown(", ".join(f"{name} of {tokens} tokens" for name, tokens in log.train_shards))
        yield f"{touched}: its shards are {found}, not those from {names[0]} on of {track.shard_tokens} tokens"
    allowed = allowed_flags(track, (log.hardware or "").startswith("1x ")) | proof.OWN_FLAGS
    for name in [flag.partition("=")[0] for flag in log.flags if flag.startswith("--")]:
        if name not in allowed:
            yield f"has the flag {name}: put settings into the script, run it without"
    if flags := [name for name in log.environment if re.match("TORCHINDUCTOR_(?!COMPILE_THREADS|CACHE_DIR)", name)]:
        yield f"ran with {', '.join(flags)}: the track allows no compiler flags; unset it and run it again"
    if log.recompiles != 0:
        yield f"recompiles after the clock started: {log.recompiles}; cover them in the warm-up, then run it again"
    used = log.num_threads and max(log.num_threads, log.cpu_threads)
    if track.max_threads and not 0 < (used or 0) <= track.max_threads:
        yield f"uses {used} CPU threads; run it with --cpu_threads {track.max_threads}, the most that the track allows"
    if track.max_threads and log.has_gpu:
        yield "ran on a GPU, the track is for CPUs; run it with --device cpu"


def kind_problems(folder: Path, card: Card, before: Path | None, page: str) -> Iterator[str]:
    """Check the kind of a record: RULES.md says what each allows."""
    evidence, said = next((rule for kind, rule in KINDS.items() if re.fullmatch(kind, card.kind)), (None, ""))
    if evidence is None:
        yield f"record.json: its kind is {shown(card.kind)}; take one of {', '.join(KINDS)}"
    elif not re.fullmatch(evidence, card.evidence):
        yield f"record.json: the evidence of this kind has to match {evidence!r}; mend it"
    if said and (card.ranked or said not in page.lower()):
        yield f"a record of the kind {card.kind!r} is not ranked, and its page says {said!r}; mend them"
    if card.kind == "idea" and not card.evidence:
        script = store.read_script(str(folder), folder.parent)
        if problem := too_different(script, before or folder, folder.parents[2] / SCRIPT):
            yield f"{SCRIPT}: {problem}"


def page_problems(page: str, script: str, what: str) -> Iterator[str]:
    """Check what every record has: a script without compiler flags, and a written page."""
    for found in COMPILER_SETTING.finditer(script):
        used = f"line {script.count(chr(10), 0, found.end()) + 1} uses {shown(found[0])}"
        yield f"train_gpt.py: {used}; the track allows no compiler flags: take it out"
    for name, text in (("train_gpt.py", script), ("README.md", page)):
        if not text:
            yield f"{name} is missing; a record has one"
    for where, text in (("record.json", what), ("README.md", page)):
        for placeholder in PLACEHOLDER.findall(text):
            yield f"{where}: write what {shown(placeholder)} asks for"


def verify(folder: Path, root: Path) -> Verdict:
    """Check all that the files of a record allow."""
    script, page = (read_text(it).rstrip("\n") if it.is_file() else "" for it in (folder / SCRIPT, folder / PAGE))
    line = [*itertools.takewhile(lambda other: not other.samefile(folder), store.lineage(root))]
    card = store.read_card(folder)
    verdict = Verdict(folder, [*page_problems(page, script, card.what)])
    if page and script:
        verdict.failures += kind_problems(folder, card, line[-1] if line else None, page)
    if not card.ranked:
        verdict.summary = f"not ranked: script and page; {card.evidence if card.kind == 'milestone' else card.kind}"
        return verdict
    try:
        logs = store.record_logs(folder)
        verdict.failures += [f"{log.name}: {problem}" for log in logs for problem in log_problems(log, script)]
        if whole := [log for log in logs if not log.problem]:
            check_together(verdict, whole, card.kind == "form")
            board = store.board_of(whole[0])
            if any(store.is_on_board(other, board) for other in line):  # or else it opens its leaderboard
                name, found = record_race(folder, line, board, whole)
                verdict.summary += f"; {proof.standing(found)}, against {name}"
                if card.kind == "idea" and found["verdict"] != "faster":  # a public record gained elsewhere
                    raise ToolError(f"{RACE}: against {name} {proof.standing(found)}")
    except ToolError as error:
        verdict.failures.append(str(error).removeprefix(f"{folder}{os.sep}"))
    return verdict


def check_together(verdict: Verdict, whole: list[Log], is_form: bool) -> None:
    """Check what the logs of a record show together, and sum it up."""
    track, boards = track_of(whole[0]), sorted({store.board_of(log) for log in whole})
    sample = proof.Sample([log.val_loss for log in whole], track.target)
    verdict.failures += differences(whole)
    if sample.mean > track.target:
        verdict.failures.append(f"mean {sample.mean:.4f} is above the target {track.target}; train better or longer")
    elif not is_form and not sample.p < proof.ALPHA:
        few = f"n too small: p={sample.p:.2g} is not below {proof.ALPHA} at n={sample.n}"
        verdict.failures.append(f"{few}; `stats` says how many runs it is likely to take")
    if len(boards) > 1:
        verdict.failures.append(f"its logs are of {' and '.join(boards)}: run all on one kind of machine")
    unknown = any(log.training_tokens and training_tokens(log, track) is None for log in whole)
    note = "; training tokens not checked" if unknown else ""
    verdict.summary = f"{sample} p={sample.p:.2g} ({boards[0]}, {whole[0].num_steps} steps{note})"


def obstacle(race: proof.Race, before: Sequence[Path]) -> str | None:
    """Say why no record can come of this race against one of those before, or return None."""
    if race.preset not in TRACKS:
        return f"{shown(race.preset)} has no leaderboard"
    allowed = allowed_flags(TRACKS[race.preset], race.nproc_per_node == 1)
    given, own = (
        [word.split("=")[0] for word in words if word.startswith("--")] for words in (race.flags, race.own_flags)
    )
    if others := sorted({*given} - allowed) + own:
        return f"flags {', '.join(others)}: put settings into the script, race without"
    if before and not any(sha256_of(folder) in race.hashes for folder in before):
        older = [store.short_name(folder.name) for folder in before]
        return f"none of its scripts is {' or '.join(older)}: race YOUR_SCRIPT {older[0]}"
    told = f"fewer than {proof.MIN_PAIRS} pairs are a screen: race with --pairs {proof.MIN_PAIRS}"
    return told if race.pairs < proof.MIN_PAIRS else None


def sha256_of(folder: Path) -> str:
    return digest(store.read_script(str(folder), folder.parent)[1])


def too_different(newer: tuple[str, str], *olders: Path) -> str | None:
    """Say that more lines change against each of the older scripts than an idea may, or return None."""
    others = [store.read_script(str(path), path.parent) for path in olders if path.exists()]
    changed, name = min((sum(store.diff(other, newer)[1:]), other[0]) for other in others)
    told = f"{changed} lines change against {name}, for an idea at most {MAX_CHANGED}: take out what it can spare"
    return told if changed > MAX_CHANGED else None


def record_race(folder: Path, line: Sequence[Path], board: str, own: Sequence[Log] = ()) -> tuple[str, dict]:
    """Return the name of a record before, in `line`, and the race against it, which `own` logs have to prove."""
    path, before, newer = folder / RACE, store.rivals(line, board), sha256_of(folder)
    if not path.is_file():
        names = " or ".join(map(name_of, before))
        raise ToolError(f"{path}: is missing; race the script against {names}, and put the {RACE} there")
    race = proof.read_race(path)
    if newer not in race.hashes:
        raise ToolError(f"{path}: lacks this record's script, SHA-256 {newer}; race it as it is")
    unfinished = f"has {len(race.runs)} runs, not {race.pairs} of each script; finish the race"
    if problem := obstacle(race, before) or (unfinished if len(race.runs) != len(race.order) else None):
        raise ToolError(f"{path}: {problem}")
    race.check_order(path)
    rival = next(rival for rival in before if sha256_of(rival) in race.hashes)
    a, b = (race.of(race.hashes.index(sha256)) for sha256 in (newer, sha256_of(rival)))
    if own and len(own) != len(a):
        raise ToolError(f"{path}: has {len(a)} runs of the script, there are {len(own)} sound logs: leave none out")
    logs = [*own, *store.logs_of(folder, beside=OLDER), *store.logs_of(rival)] if own else []
    for run in a + b if own else ():
        run_id, sha256 = race.run_id(run.seed, run.script), race.hashes[run.script]
        its = [log for log in logs if log.sha256 == sha256 and log.flags[4:] == ["--run_id", run_id, *race.flags]]
        if not its:
            raise ToolError(f"{path}: no log of its run {run_id}, with the race's flags, is there")
        if all(log.problem or proof.Run(run.script, log.seed, **proof.figures_of(log)) != run for log in its):
            raise ToolError(f"{path}: the log of its run {run_id} says otherwise; take the files that `race` left")
    return name_of(rival), race.compare(a, b)


def differences(found: list[Log]) -> Iterator[str]:
    """Yield where the run of a log is not one of the others' experiment with a seed of its own."""
    for other, log in itertools.combinations(found, 2):
        if log.seed is not None and log.seed == other.seed:
            yield f"{log.name}: has seed {log.seed}, as {other.name} has; leave one out, or run another --seed"
        elif log.train_losses and log.train_losses == other.train_losses:
            yield f"{log.name}: has all training losses of {other.name}: does the script use its seed?"
    stated = [log.configuration | {"steps": log.num_steps, "validation tokens": log.val_sha256} for log in found]
    for log, mine in zip(found, stated, strict=True):
        keys = {key for key in mine | stated[0] if mine.get(key) != stated[0].get(key)} - {"seed", "run_id", "log_dir"}
        if told := ", ".join(sorted(keys)):
            yield f"{log.name}: unlike {found[0].name} in {told}; run all with the same flags and data"


def require_one_experiment(found: list[Log]) -> None:
    """Raise ToolError unless the logs are whole runs of one script and configuration, each with its own seed."""
    for log in found:
        if problem := log.problem or ("is of another script" if log.sha256 != found[0].sha256 else None):
            raise ToolError(f"{log.path}: {problem}")
    for problem in differences(found):
        raise ToolError(problem)
