"""Check machine and flags, get missing data, and train: what ./run.sh starts.

    python -m speedrun run [--check] [flags of the script]

--check does all but the training. Environment: SCRIPT names another script than train_gpt.py, NPROC the number of
processes. Every script is asked for its own presets, flags, batches and files. Exit codes: those of the script.
"""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from speedrun import ROOT, process
from speedrun.logs import load_script, script_in
from speedrun.process import PIP, PYTHON, ToolError, available_cores, defined_names, packages, printable

ROOT_SCRIPT = ROOT / "train_gpt.py"
NEEDED = {"UserError", "PRESETS", "parse_args", "resolve"}  # what a script defines that is checked
SOURCES = {"data/fineweb10B": "data/cached_fineweb10B.py", "data/nano": "data/pack_nano.py"}  # what fills each folder


def tell(line: str) -> None:
    print(f"run.sh: {printable(line)}", file=sys.stderr, flush=True)


def load(path: Path) -> ModuleType | None:
    """Import a script. Return None for a foreign one, which might train while it is imported."""
    if path.resolve() == ROOT_SCRIPT:
        with packages():
            import train_gpt
        return train_gpt
    if missing := NEEDED - defined_names(script_in(path), str(path)):
        tell(f"{path} defines no {', '.join(sorted(missing))}: its flags, data and memory are not checked")
        return None
    return load_script(path)


def gpu_problem(given: Any, is_cpu_named: bool) -> str:
    """Say why GPUs cannot train, or why a run on the CPU would be a surprise."""
    if torch.cuda.is_available():
        is_old = given.device != "cpu" and torch.cuda.get_device_capability() < (8, 0)
        return "gpt2 needs GPUs of compute capability 8.0 or newer (A100, RTX 30)" if is_old else ""
    status, told = subprocess.getstatusoutput("nvidia-smi -L")  # noqa: S605
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or told.startswith("No devices")
    if status != 127 and not is_hidden and not is_cpu_named:  # 127: there is no such program
        wheels = f"{PIP} --force-reinstall --index-url https://download.pytorch.org/whl/cu126 torch"
        return f"torch sees no GPU, nvidia-smi says {told.splitlines()[:1]}: update the driver to 580, or {wheels}"
    is_needed = given.device == "cuda" or (given.device, given.preset) == ("auto", "gpt2")
    return "there is no NVIDIA GPU" if is_needed else ""


def fit(script: ModuleType, cfg: Any, processes: int) -> list[str]:
    """Return the flags with which a process fits into a GPU: without CUDA graphs, or with fewer n-grams, too."""
    free = min(torch.cuda.mem_get_info(i)[0] for i in range(processes))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in script.GPT(cfg).parameters())
    # Bytes of gpt2's compiled code: graphs keep buffers of their own. Below capability 9.0 its MLP has no kernel
    longest = max(schedule.seq_len for schedule in cfg.step_schedules)
    factor = 1 if torch.cuda.get_device_capability() >= (9, 0) else 1.3
    buffers = factor * max(22.7 * longest, 3.75 * cfg.val_seq_len) * len(cfg.layers) * cfg.model_dim
    row = cfg.model_dim * getattr(torch, cfg.dtype).itemsize
    fetched = 2 * max(4 * longest * cfg.batch_sequences // processes, cfg.val_seq_len)
    fixed = 2**30 + 7 * parameters + 13 * parameters / processes
    halvings = range(9 if cfg.ngram_rows == script.PRESETS[cfg.preset].ngram_rows else 1)
    for i, has_graphs in [(i, on) for i in halvings for on in (True, False) if on <= cfg.cuda_graphs]:
        rows = cfg.ngram_rows // (2 << i) * 2
        need = fixed + buffers * (1 + has_graphs) + rows * (row + 4) / processes + 2 * min(fetched, rows) * row
        flags = ["--no-cuda_graphs"] * (has_graphs < cfg.cuda_graphs) + [f"--ngram_rows={rows}"] * (i > 0)
        told = f"a process takes {need / 2**30:.1f} GiB of {free / 2**30:.1f} (estimated)"
        if need <= free:
            if flags:
                tell(f"not the record's, but fits: {' '.join(flags)}; {told}; a quarter of the rows costs 0.005")
            return flags
    raise ToolError(f"{told}: free some, or halve --train_seq_len and --val_seq_len")


def get(command: str) -> bool:
    """Run a command that gets data, and return whether all is well."""
    tell(f"getting data: {PYTHON} {command}")
    return subprocess.run([sys.executable, *command.split()], stdout=sys.stderr).returncode == 0


def get_data(script: ModuleType, cfg: Any) -> None:
    """Get the shards that a run reads where they are missing or damaged."""
    check = getattr(script, "check_data", None) or script.plan_data  # as records before 2026-11-29 call it
    try:
        check(cfg)
    except script.UserError as error:
        folder = os.path.dirname(cfg.train_files)
        if folder not in SOURCES or folder != os.path.dirname(cfg.val_files):
            told = str(error).replace("./run.sh --check says what to do", "data/pack_text.py packs text")
            raise ToolError(told) from None
        # The oldest records have no num_tokens, and sequences of one length
        steps, seq_len = cfg.num_iterations, getattr(script, "train_seq_len", lambda _, cfg: cfg.train_seq_len)
        tokens = cfg.batch_sequences * sum(seq_len(step, cfg) for step in range(steps))
        if hasattr(script, "num_tokens"):
            tokens = script.num_tokens(steps, cfg)
        count = f" {math.ceil(1.5 * tokens / 10**8)}" if folder == "data/fineweb10B" else ""  # a third is cut off
        if not get(SOURCES[folder] + count):
            raise ToolError("the data could not be fetched: see above, then run this again") from None
        check(cfg)


def prepare(path: Path, flags: Sequence[str]) -> tuple[int, list[str]]:
    """Check all, get the data, and return the number of processes and flags that suit this machine."""
    script = load(path)
    if {"-h", "--help"} & {*flags}:
        print(__doc__, flush=True)
        return 1, []
    gpus, wanted, own = torch.cuda.device_count(), int(os.environ.get("NPROC") or 0), list[str]()
    if not script:
        return wanted or gpus or 1, own
    given = script.parse_args(flags)
    is_cpu_named = given.device == "cpu" and any(flag.startswith(("--preset", "--device")) for flag in flags)
    if problem := gpu_problem(given, is_cpu_named):
        raise ToolError(f"{problem}; --preset nano trains on a CPU")
    cfg = script.resolve(given)
    sequences, gpus = cfg.batch_sequences, gpus if cfg.device == "cuda" else 0
    possible = [n for n in range(1, (gpus or sequences) + 1) if sequences % n == 0]
    processes = wanted or (possible[-1] if gpus else 1)
    if processes not in possible:
        raise ToolError(f"NPROC={processes}: expected one of {possible}; sequences a step: {sequences}")
    if gpus and not hasattr(cfg, "step_schedules"):
        tell(f"{path} has no step_schedules: whether it fits into memory is not checked")
    elif gpus:
        own += fit(script, cfg, processes)
        hangs = torch.cuda.get_device_capability() == (8, 9) and torch.__version__ < "2.12"
        own += ["--no-layers_fp8"] * (hangs and cfg.layers_fp8)  # FP8 products may: pytorch issues 177651 and 192707
        if given.canon_file and not cfg.canon_file:  # the mask of the last validation
            if Path(sys.prefix) == ROOT / ".venv":  # nothing is added elsewhere
                subprocess.run(["bash", "-c", "source speedrun/environment.sh; find_python tiktoken"])
            if not get("data/gpt2_canonical.py"):
                tell("see above; without this mask the loss of the last validation is 0.0017 higher")
    get_data(script, cfg)
    return processes, own


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code, unless torchrun or another script takes the place of this process."""
    argv = sys.argv[1:] if argv is None else argv
    path, flags = Path(os.environ.get("SCRIPT") or ROOT_SCRIPT), [flag for flag in argv if flag != "--check"]
    ready, launcher = list[tuple[int, list[str]]](), list[str]()
    code = process.run("run.sh", lambda _: ready.extend([prepare(path, flags)]))
    if code or not ready:
        return code
    [(processes, own)] = ready
    if "--check" in argv:
        print(f"ready to start {processes} process{'es' * (processes > 1)}", *own)
        return 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    if processes == 1 and path.resolve() == ROOT_SCRIPT:
        import train_gpt

        return train_gpt.cli([*flags, *own])
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, but it says so at length
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(-(-available_cores() // processes), 32)))
        # Without --local-addr the ranks look for this machine by its name, for ten minutes where that does not resolve
        launcher = f"-m torch.distributed.run --standalone --local-addr localhost --nproc_per_node {processes}".split()
        launcher.append("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU")
    os.execv(sys.executable, [sys.executable, *launcher, str(path), *flags, *own])
