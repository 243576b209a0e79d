"""What run.sh starts: check machine and flags, get the data, and train. python -m speedrun run SCRIPT [flags]"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from packaging.version import Version

import train_gpt
from speedrun import ROOT
from speedrun.process import PIP, PYTHON, available_cores, printable
from train_gpt import PRESETS, Hyperparameters, UserError


def tell(line: str) -> None:
    print(f"run.sh: {printable(line.partition(chr(10))[0])}", file=sys.stderr, flush=True)


def gpu_problem(given: Hyperparameters, is_cpu_named: bool) -> str:
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


def fit(cfg: Hyperparameters, processes: int) -> list[str]:
    """Return the flags with which a process fits into a GPU: without CUDA graphs, or with fewer n-grams, too."""
    free = min(torch.cuda.mem_get_info(i)[0] for i in range(processes))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in train_gpt.GPT(cfg).parameters())
    # Bytes of gpt2's compiled code: graphs keep buffers of their own. Below capability 9.0 its MLP has no kernel
    longest = max(schedule.seq_len for schedule in cfg.step_schedules)
    factor = 1 if torch.cuda.get_device_capability() >= (9, 0) else 1.3
    buffers = factor * max(22.7 * longest, 3.75 * cfg.val_seq_len) * len(cfg.layers) * cfg.model_dim
    row = cfg.model_dim * getattr(torch, cfg.dtype).itemsize
    fetched = 2 * max(4 * longest * cfg.batch_sequences // processes, cfg.val_seq_len)
    fixed = 2**30 + 7 * parameters + 13 * parameters / processes
    halvings = range(9 if cfg.ngram_rows == PRESETS[cfg.preset].ngram_rows else 1)
    for i, has_graphs in [(i, on) for i in halvings for on in (True, False) if on <= cfg.cuda_graphs]:
        rows = cfg.ngram_rows // (2 << i) * 2
        need = fixed + buffers * (1 + has_graphs) + rows * (row + 4) / processes + 2 * min(fetched, rows) * row
        flags = ["--no-cuda_graphs"] * (has_graphs < cfg.cuda_graphs) + [f"--ngram_rows={rows}"] * (i > 0)
        told = f"a process takes {need / 2**30:.1f} GiB of {free / 2**30:.1f} (estimated)"
        if need <= free:
            if flags:
                tell(f"not the record's, but fits: {' '.join(flags)}; {told}; a quarter of the rows costs 0.005")
            return flags
    raise UserError(f"{told}: free some, or halve --train_seq_len and --val_seq_len")


def get(command: str) -> bool:
    """Run a command that gets data, and return whether all is well."""
    tell(f"getting data: {PYTHON} {command}")
    return subprocess.run([sys.executable, *command.split()], stdout=sys.stderr).returncode == 0


def get_data(cfg: Hyperparameters) -> None:
    """Get a preset's shards where they are missing or damaged."""
    preset = PRESETS[cfg.preset]
    try:
        train_gpt.check_data(cfg)
    except UserError:
        if (cfg.train_files, cfg.val_files) != (preset.train_files, preset.val_files):
            raise
        shards = math.ceil(1.5 * train_gpt.num_tokens(cfg.num_iterations, cfg) / 10**8)  # cut documents lose a third
        if not get(f"data/cached_fineweb10B.py {shards}" if cfg.preset == "gpt2" else "data/pack_nano.py"):
            raise UserError("the data could not be fetched: see above, then run this again") from None
        train_gpt.check_data(cfg)


def prepare(flags: list[str], is_root: bool) -> tuple[int, list[str]]:
    """Check all, get the data, and return the number of processes and flags that suit this machine."""
    parser = train_gpt.FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--device")
    named = [f"--{name}={value}" for name, value in vars(parser.parse_known_args(flags)[0]).items() if value]
    given = train_gpt.parse_args(flags if is_root else named)  # another script's flags are its own
    if problem := gpu_problem(given, is_cpu_named=given.device == "cpu" and bool(named)):
        raise UserError(f"{problem}; --preset nano trains on a CPU")
    cfg = train_gpt.resolve(given)
    gpus = torch.cuda.device_count() if cfg.device == "cuda" else 0
    possible = [n for n in range(1, (gpus or cfg.batch_sequences) + 1) if cfg.batch_sequences % n == 0]
    processes = os.environ.get("NPROC") or str(possible[-1] if gpus else 1)
    if processes not in map(str, possible):
        raise UserError(f"NPROC={processes}: expected one of {possible}; sequences a step: {cfg.batch_sequences}")
    own = list[str]()
    if gpus and is_root:
        own += fit(cfg, int(processes))
        hangs = torch.cuda.get_device_capability() == (8, 9) and Version(torch.__version__) < Version("2.12")
        own += ["--no-layers_fp8"] * hangs  # FP8 products may: pytorch issues 177651 and 192707
        if given.canon_file and not cfg.canon_file:  # the mask of the last validation
            if Path(sys.prefix) == ROOT / ".venv":  # nothing is added elsewhere
                subprocess.run(["bash", "-c", "source speedrun/environment.sh; find_python tiktoken"])
            if not get("data/gpt2_canonical.py"):
                tell("see above; without this mask the loss of the last validation is 0.0017 higher")
    get_data(cfg)
    return int(processes), own


def main(argv: list[str] | None = None) -> int:
    """Return the exit code, unless torchrun or another script takes the place of this process."""
    flags = sys.argv[1:] if argv is None else [*argv]
    script = os.environ.get("SCRIPT", "") if flags[:1] == ["--check"] else flags.pop(0)
    is_root = Path(script).resolve() == Path(train_gpt.__file__).resolve()
    processes, own, launcher = 1, list[str](), list[str]()
    try:
        if not {"-h", "--help"} & {*flags}:
            processes, own = prepare([flag for flag in flags if flag != "--check"], is_root)
    except (UserError, OSError, torch.AcceleratorError, KeyboardInterrupt) as error:
        tell((str(error) or "interrupted").replace("./run.sh --check says what to do", "data/pack_text.py packs text"))
        return 130 if isinstance(error, KeyboardInterrupt) else 2
    if "--check" in flags:
        print(f"ready to start {processes} process{'es' * (processes > 1)}", *own)
        return 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    if processes == 1 and is_root:
        return train_gpt.cli([*flags, *own])
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, but it says so at length
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(-(-available_cores() // processes), 32)))
        # Without --local-addr the ranks look for this machine by its name, for ten minutes where that does not resolve
        launcher = f"-m torch.distributed.run --standalone --local-addr localhost --nproc_per_node {processes}".split()
        launcher.append("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU")
    os.execv(sys.executable, [sys.executable, *launcher, script, *flags, *own])


if __name__ == "__main__":
    sys.exit(main())
