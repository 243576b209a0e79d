"""Checks a run in one plain process before it starts, and gets the data that it lacks.

    python check.py [the flags of train_gpt.py]     what run.sh does before it launches
    ./run.sh --check [the flags of train_gpt.py]    the checks alone, and what they found

torchrun would turn every refusal into exit code 1 behind a report of its own. Here it is exit code 2, and a line for
each problem says what to mend: all at once. torch is not imported; that takes longer than the checks. Exit codes: 0
nothing is in the way, 2 something has to be mended first, 130 interrupted.

On success the last line of stdout is how many processes to start: as many as there are GPUs and as divide a step's
sequences, or NPROC. On a CPU it is one: with both threads it took 0.90 to 0.95 of the time of two with one each (nano
with 2 sequences a step, 3 interleaved pairs of 40 steps). Memory and time are estimates; `peak_bytes` and `check_time`
say from what.
"""

from __future__ import annotations  # an old Python shall get as far as the line that refuses it

import ast
import contextlib
import glob
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train_gpt import Hyperparameters

ROOT = Path(__file__).resolve().parent
# Taken from train_gpt.py, with all that they name
TAKEN = "UserError HEAD_MULTIPLE parse_args is_on_cuda check_world find_shards plan_batches data_command".split()
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
# By the major version of torch's CUDA (docs.nvidia.com/deploy/cuda-compatibility)
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# Compute capabilities with 160 KB of shared memory per block, or more; the others have 64 to 99
LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0))
FINEWEB_SHARD_BYTES, NANO_BYTES = 200e6, 92e6


@dataclass
class Findings:
    """What the checks found: problems, which stop the run, and facts; those marked True are worth a note."""

    problems: list[str] = field(default_factory=list)
    facts: list[tuple[str, bool]] = field(default_factory=list)
    processes: int = 1

    def fact(self, line: str, note: bool = False) -> None:
        self.facts.append((line, note))


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi. `free`: bytes of memory, None where it does not say."""

    name: str
    free: int | None
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True)
class Run:
    """A run to check. `trainer`: see load_trainer; `cfg`: its Hyperparameters; `gpus`: those that torch can use."""

    trainer: types.ModuleType
    cfg: Hyperparameters
    gpus: Sequence[Gpu]
    processes: int = 1

    @property
    def on_cuda(self) -> bool:
        return self.trainer.is_on_cuda(self.cfg)

    @property
    def is_bf16(self) -> bool:
        """Whether activations and embeddings are bf16, as `activation_dtype` of train_gpt.py decides."""
        return self.cfg.dtype == "bfloat16" or (self.cfg.dtype == "auto" and (self.on_cuda or has_native_bf16()))


def has_native_bf16() -> bool:
    """Whether this processor multiplies bf16 itself, with AVX512-BF16 or AMX; only Linux says so."""
    with contextlib.suppress(OSError):
        return not {"avx512_bf16", "amx_tile"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return False


def readable(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


# ----------------------------------------------------------------------------------------------------------------------
# The machine


def check_versions(found: Findings) -> None:
    """Python, and the packages of requirements.txt: missing, too old, or others than were tested."""
    fix = "pip install -r requirements.txt"
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        found.problems.append(f"Python {python}: expected 3.11 or newer; name one: PYTHON=/path/to/python ./run.sh")
    installed, others = [f"Python {python}"], []
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, _, pin = line.partition("==")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.problems.append(f"{name} is not installed: {fix}")
            continue
        installed.append(f"{name} {version}")
        if name == "torch" and tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
            found.problems.append(f"torch {version}: expected 2.11 or newer; {fix}")
        elif version.partition("+")[0] != pin:
            others.append(f"{name} {version} instead of {pin}")
    found.fact(f"versions: {', '.join(installed)}")
    if others:
        found.fact(f"not the tested versions: {', '.join(others)}; {fix}", note=True)


def torch_cuda() -> str:
    """The version of CUDA that the installed torch was built for, such as 13.0; empty for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return match[1] if match else ""


def list_gpus() -> dict[str, Gpu]:
    """The GPUs of this machine by "index uuid". Raises RuntimeError if nvidia-smi is there but gives no answer."""
    columns = "index,uuid,name,memory.free,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"nvidia-smi fails: {error}") from None
    if done.returncode:
        raise RuntimeError(f"nvidia-smi fails: {' '.join((done.stdout + done.stderr).split())}")
    gpus = {}
    for line in done.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != 6 or not re.fullmatch(r"\d+\.\d+ \d+[\d.]*", " ".join(values[4:])):
            raise RuntimeError(f"nvidia-smi answers {line!r} when asked for {columns}")
        free = int(values[3]) * 2**20 if values[3].isdecimal() else None
        major, minor = map(int, values[4].split("."))
        gpus[f"{values[0]} {values[1]}"] = Gpu(values[2], free, (major, minor), values[5])
    return gpus


def find_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that torch can use; if there is none, why."""
    try:
        gpus = list_gpus()
    except RuntimeError as error:
        return [], str(error)
    if not gpus:
        return [], "there is no NVIDIA GPU"
    visible, wish = list(gpus.values()), os.environ.get("CUDA_VISIBLE_DEVICES")
    if wish is not None:
        visible = []
        for entry in wish.replace(" ", "").split(","):
            matching = [gpu for key, gpu in gpus.items() if entry == key.split()[0] or f" {entry}" in key]
            if entry.startswith("MIG-"):  # a part of a GPU, and how large is not asked here
                matching = [replace(gpu, free=None) for gpu in gpus.values()]
            if not matching or not entry:
                break  # as CUDA does: whatever follows does not count
            visible.append(matching[0])
    if not visible:
        return [], f"CUDA_VISIBLE_DEVICES={wish} hides every GPU"
    cuda = torch_cuda()
    if not cuda:
        return [], "the installed torch is a CPU build; pip install --force-reinstall -r requirements.txt"
    driver, oldest = visible[0].driver, OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(driver.partition(".")[0]) < oldest:
        return [], f"driver {driver} is too old for torch's CUDA {cuda}; update it to {oldest} or newer"
    return visible, ""


# ----------------------------------------------------------------------------------------------------------------------
# The configuration


def load_trainer(num_gpus: int) -> types.ModuleType:
    """What TAKEN names, out of train_gpt.py but without its import of torch: no number or rule is written twice.

    Those definitions, and all that they name, are compiled from its source. `torch` and `World` are stand-ins of as
    much as they need: how many GPUs there are, and the type of an argument.
    """
    path = ROOT / "train_gpt.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = types.ModuleType("train_gpt_without_torch", ast.get_docstring(tree))
    cuda = types.SimpleNamespace(is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus)
    vars(module).update(torch=types.SimpleNamespace(cuda=cuda), World=types.SimpleNamespace)

    def defined(node: ast.stmt) -> Iterable[str]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

    definitions = {name: node for node in tree.body for name in defined(node)}
    for name in TAKEN:
        assert name in definitions, f"{path} does not define {name}, which check.py takes from it"
    wanted, needed = list(TAKEN), set()
    while wanted:
        name = wanted.pop()
        node = definitions.get(name)
        if node is not None and node not in needed and not hasattr(module, name):
            needed.add(node)
            wanted += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    tree.body = [node for node in tree.body if node in needed]
    exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
    return module


def configure(trainer: types.ModuleType, argv: Sequence[str]) -> tuple[Hyperparameters, list[str]]:
    """The configuration that the flags ask for, and what is wrong with them: not only the first thing.

    A refused flag is left out and the others are read again; what is then refused for the lack of it is not reported.
    """
    groups: list[list[str]] = []  # a flag and its values
    for argument in argv:
        if argument.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(argument)
    problems: list[str] = []
    left_out: set[str] = set()
    while True:
        try:
            return trainer.parse_args([argument for group in groups for argument in group]), problems
        except trainer.UserError as error:
            message = str(error)
        if left_out.isdisjoint(re.findall(r"\w+", message)):
            problems.append(message)
        # At fault are the flags that stand before what was expected; if those are the preset's, those that stand behind
        for text in message.partition(": expected")[0], message:
            named = set(re.findall(r"--([\w-]+)", text))
            kept = [group for group in groups if group[0].partition("=")[0][2:] not in named]
            if len(kept) < len(groups):
                break
        if len(kept) == len(groups) or "preset" in named:
            return trainer.parse_args([]), problems
        groups, left_out = kept, left_out | named.intersection(trainer.Hyperparameters.__dataclass_fields__)


def count_processes(run: Run, found: Findings) -> int:
    """Processes to start on this machine: NPROC, or the most that fit."""
    limit = len(run.gpus) if run.on_cuda else 1
    fitting = max(size for size in range(1, max(limit, 1) + 1) if run.cfg.batch_sequences % size == 0)
    wish = os.environ.get("NPROC")
    if wish is None:
        return fitting
    if not wish.isdecimal() or int(wish) < 1:
        found.problems.append(f"NPROC={wish}: expected a number of processes of at least 1")
        return fitting
    try:
        run.trainer.check_world(run.cfg, run.trainer.World(size=int(wish), local_size=0))
    except run.trainer.UserError as error:
        found.problems.append(f"NPROC={wish}: {error}")
    if run.on_cuda and run.gpus and int(wish) > limit:
        found.problems.append(f"NPROC={wish}: there are {limit} GPUs; set NPROC={fitting}, or leave it out")
    return int(wish)


# ----------------------------------------------------------------------------------------------------------------------
# The run on the machine


def parameters(run: Run) -> tuple[int, int, int]:
    """Numbers of parameters: embeddings, head, matrices of the blocks; without the few scalars."""
    cfg = run.cfg
    value_embeds = 1 + max((int(digit) for digit in cfg.value_embed_layout if digit != "."), default=-1)
    width, heads = cfg.model_dim, cfg.num_heads * cfg.head_dim
    rows = -(-cfg.vocab_size // run.trainer.HEAD_MULTIPLE) * run.trainer.HEAD_MULTIPLE
    attention = sum(letter != "-" for letter in cfg.attention_layout)
    blocks = attention * 4 * width * heads + len(cfg.attention_layout) * 8 * width**2
    embeddings = cfg.vocab_size * (width + value_embeds * heads) + cfg.bigram_rows * width
    return embeddings, rows * width, blocks


def model_bytes(run: Run) -> tuple[int, int]:
    """Bytes of the parameters, and of the optimizers' state over all processes: two moments for Adam, one for Muon."""
    full = 8 if run.cfg.dtype == "float64" else 4
    embeddings, head, blocks = parameters(run)
    adam, muon = embeddings * (2 if run.is_bf16 else full) + head * full, blocks * full
    return adam + muon, 2 * adam + muon


def peak_bytes(run: Run) -> dict[str, float]:
    """Estimated peak memory of a process in training and in validation, by the flag that lowers it.

    The parameters four times (values, gradients, gathered gradients, the largest buffers in between), this process's
    share of the optimizers' state, the logits of a slice at 6 bytes, and for each token of a sequence, in bf16: in
    training 31 bytes per layer and dimension (13.7 GB for gpt2: the tensors that the compiler's graph of the forward
    pass keeps for the backward), in validation 48 per dimension. That makes 21 GB for gpt2 on one GPU and 20 on 8, and
    is not measured on any. On a CPU: about three times as much per token, and 0.4 GB for torch:
    for nano 0.58 GB, measured 0.46.
    """
    cfg = run.cfg
    values, state = model_bytes(run)
    fixed, factor, per_score = 4 * values + state / run.processes, 1 if run.is_bf16 else 2, 0
    if not run.on_cuda:
        fixed, factor = fixed + 0.4e9, 3 * factor
    elif cfg.compile is False:
        per_score = 8 * cfg.num_heads  # FlexAttention that is not compiled writes every score down
    rows, layers = parameters(run)[1] / cfg.model_dim, len(cfg.attention_layout)
    fixed += 6 * factor * rows * cfg.lm_head_slice
    training, validation = 31 * cfg.model_dim * layers, 48 * cfg.model_dim
    return {
        "train_seq_len": fixed + (factor * training + per_score * cfg.train_seq_len) * cfg.train_seq_len,
        "val_seq_len": fixed + (factor * validation + per_score * cfg.val_seq_len) * cfg.val_seq_len,
    }


def check_memory(run: Run, found: Findings) -> None:
    """The estimated peaks against the memory that is free: of the fullest GPU, or of the machine."""
    free = None
    if run.on_cuda:
        free = min((gpu.free for gpu in run.gpus[: run.processes] if gpu.free is not None), default=None)
    else:
        with contextlib.suppress(OSError, KeyError):  # other systems than Linux
            lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            free = int(lines["MemAvailable"].split()[0]) * 1024 // run.processes
    peaks = peak_bytes(run)
    have = f"{readable(free)} are free" if free is not None else "how much is free is not known"
    found.fact(f"memory: about {readable(max(peaks.values()))} for a process (an estimate), {have}")
    for flag, peak in peaks.items():
        if free is None or peak <= free:
            continue
        options = [("leave out --no-compile", replace(run.cfg, compile=True))] if run.on_cuda else []
        length = getattr(run.cfg, flag)
        while length % (2 * run.cfg.block_size) == 0:
            length //= 2
            options.append((f"--{flag} {length}", replace(run.cfg, **{flag: length})))
        fits = (fix for fix, cfg in options if peak_bytes(replace(run, cfg=cfg))[flag] <= free)
        fix = next(fits, "train a smaller model (--model_dim), or free some")
        what = "training" if flag == "train_seq_len" else "validation"
        found.problems.append(f"{what} takes about {readable(peak)} of memory a process, {have}: {fix}")


def check_precision(run: Run, found: Findings) -> None:
    """What follows from the compute capability. train_gpt.py decides it for itself, alike."""
    gpu = min(run.gpus[: run.processes], key=lambda gpu: gpu.capability)
    this = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    dtype = "bfloat16" if run.is_bf16 else run.cfg.dtype
    if run.cfg.compile is not False and gpu.capability < (7, 0):
        found.problems.append(f"{this}: torch.compile needs 7.0 or newer; --device cpu")
    elif run.cfg.compile is not False and gpu.capability < (8, 0) and run.is_bf16:
        found.problems.append(f"{this}: torch.compile needs 8.0 or newer for bfloat16; --dtype float32")
    head = "FP8" if run.cfg.lm_head_fp8 and gpu.capability >= (8, 9) else dtype
    tiles = "large" if gpu.capability in LARGE_SHARED_MEMORY else "small"
    found.fact(f"precision: {dtype}, head in training {head}, {tiles} attention tiles ({this})", note=True)


def check_time(run: Run, found: Findings) -> None:
    """Estimates the training time: a preset's, in proportion to the tokens and to the weights in matmuls.

    gpt2: 0.1 s a step on 8 H100, published, and 8 / n times that on n, which is not measured. nano: 0.025 s a step
    on 2 cores with native bf16, measured; without it twice that.
    """
    if run.on_cuda:
        preset, step_seconds = "gpt2", 0.1 * 8 / run.processes
        basis = f"on {run.processes} H100, longer on smaller GPUs"
    else:
        preset, step_seconds = "nano", 0.025 if has_native_bf16() else 0.05
        basis = f"on 2 cores {'with' if has_native_bf16() else 'without'} native bf16"
    work, preset_work = (
        r.cfg.batch_tokens * sum(parameters(r)[1:]) for r in (run, replace(run, cfg=run.trainer.PRESETS[preset]))
    )
    seconds = run.cfg.num_iterations * step_seconds * work / preset_work
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
    size, unit = next((size, unit) for size, unit in units if seconds >= 2 * size or size == 1)
    is_record = run.on_cuda and run.processes == 8
    found.fact(f"time: about {max(seconds / size, 1):.0f} {unit} of training {basis} (an estimate)", note=not is_record)


def check_disk(run: Run, fetches: bool, found: Findings) -> None:
    """Room for log, checkpoints, model, and for the data if they are to be fetched; and a log that is not there yet."""
    cfg = run.cfg
    need = 1e5 + 200 * cfg.num_iterations
    if cfg.checkpoint_every:
        need += 2 * sum(model_bytes(run))  # the last one stays until the next is complete
    if cfg.save_checkpoint:
        need += model_bytes(run)[0]
    wanted = [("logs", Path(cfg.log_dir), need, "choose another --log_dir")]
    if fetches:
        size, shards = NANO_BYTES, run.trainer.data_command(cfg).split()[-1]
        if shards.isdecimal():  # of FineWeb, and one for validation; those that are there stay
            there = [path for files in (cfg.train_files, cfg.val_files) for path in glob.glob(files)]
            size = FINEWEB_SHARD_BYTES * (int(shards) + 1) - sum(map(os.path.getsize, filter(os.path.exists, there)))
        wanted.append(("data", Path(cfg.train_files).parent, size, "link it to a place with more"))
    for what, folder, need, fix in wanted:
        parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
        free = shutil.disk_usage(parent).free
        found.fact(f"disk: {readable(free)} free for {what}")
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            found.problems.append(f"{folder}: {parent} is not a folder to write to; {fix}")
        elif free < need:
            found.problems.append(
                f"{folder}: {what} need {readable(need)}, {readable(free)} are free; make room, or {fix}"
            )
    log = Path(cfg.log_dir) / f"{cfg.run_id}.txt"
    if cfg.run_id and not cfg.resume and os.path.exists(log):
        found.problems.append(f"{log} is another run's log: choose another --run_id, or leave it out")


def check_data(run: Run, found: Findings, is_whole: bool = True) -> list[str]:
    """Whether the shards are there, sound, and last for the run; what is skipped at their ends is counted.

    Returns the problems that the command for the preset's data would mend; all others go to `found`. With `is_whole`
    false some flags were refused, and how much data the run needs is not known.
    """
    cfg, fix = run.cfg, run.trainer.data_command(run.cfg)
    preset = run.trainer.PRESETS[cfg.preset]
    is_presets = (cfg.train_files, cfg.val_files) == (preset.train_files, preset.val_files)
    mendable: list[str] = []
    held: list[str] = []
    for role, pattern, batch_tokens, num_batches, flag in (
        ("training", cfg.train_files, cfg.batch_tokens, cfg.num_iterations, "num_iterations"),
        ("validation", cfg.val_files, cfg.val_seq_len, cfg.val_tokens // cfg.val_seq_len, "val_tokens"),
    ):
        shards, unsound = [], []
        paths = sorted(glob.glob(pattern, recursive=True))
        for path in map(glob.escape, paths) if paths else [pattern]:
            try:
                shards += run.trainer.find_shards(path, fix)
            except run.trainer.UserError as error:
                unsound.append(str(error))
        (mendable if is_presets else found.problems).extend(unsound)
        held.append(f"{sum(shard.num_tokens for shard in shards):,} tokens for {role}")
        planned = len(run.trainer.plan_batches(shards, batch_tokens, num_batches))
        if unsound or not is_whole or planned == num_batches:
            continue
        # The command gets as many training shards as it says; more of the rest there are not
        wanted = fix.split()[-1] if role == "training" else ""
        can_get = is_presets and wanted.isdecimal() and int(wanted) > len(shards)
        more = "" if is_presets and not can_get else f"get more: {fix}; or "
        holds = f"the {len(shards)} shards of {pattern} hold {planned} batches of {batch_tokens} tokens"
        line = f"{holds}, the run needs {num_batches}; {more}lower --{flag}"
        (mendable if can_get else found.problems).append(line)
    found.fact(f"data: {mendable[0]} (run.sh does)" if mendable else f"data: {', '.join(held)}")
    return mendable


def get_data(run: Run, found: Findings) -> None:
    """Runs the command that gets the preset's data, and checks it."""
    command = run.trainer.data_command(run.cfg)
    print(f"getting the data: {command}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, *shlex.split(command)[1:]], stdout=sys.stderr).returncode:
        found.problems.append("the data could not be fetched: see above; then run this again")
    else:
        found.problems += check_data(run, found)


def preflight(argv: Sequence[str], fetch: bool) -> Findings:
    """All checks of a run with the flags `argv`. With `fetch`, and nothing wrong, gets the preset's data if missing."""
    found = Findings()
    check_versions(found)
    if sys.version_info < OLDEST_PYTHON or importlib.util.find_spec("numpy") is None:
        return found  # train_gpt.py's configuration cannot be read
    gpus, why_none = find_gpus()
    trainer = load_trainer(len(gpus))
    cfg, refused = configure(trainer, argv)
    found.problems += refused
    run = Run(trainer, cfg, gpus)
    if gpus:
        names = [gpu.name for gpu in gpus]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found.fact(f"hardware: {counted}, driver {gpus[0].driver}")
    else:
        found.fact(f"hardware: {os.cpu_count()} CPU cores")
        if cfg.device == "cuda":
            found.problems.append(f"--device cuda: {why_none}; or use --device cpu")
        elif cfg.device == "auto" and shutil.which("nvidia-smi"):
            found.fact(f"training on the CPU although there is nvidia-smi: {why_none}", note=True)
    run = replace(run, processes=count_processes(run, found))
    found.processes = run.processes
    mendable = check_data(run, found, is_whole=not refused)
    if refused:
        return found
    if run.on_cuda and gpus:
        check_precision(run, found)
    check_memory(run, found)
    check_time(run, found)
    check_disk(run, bool(mendable), found)
    if mendable and fetch and not found.problems:
        get_data(run, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what `preflight` found; see above. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    checks_only = "--check" in argv
    found = preflight([flag for flag in argv if flag != "--check"], fetch=not checks_only)
    for line, is_note in found.facts:
        if checks_only:
            print(line, flush=True)
        elif is_note:
            print(f"note: {line}", file=sys.stderr)
    for problem in found.problems:
        print(f"check.py: {problem}", file=sys.stderr)
    if found.problems:
        return 2
    print(f"processes: {found.processes}" if checks_only else found.processes)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while data are fetched
        sys.exit(130)
