"""Check a run in one plain process before it starts, and get the data it lacks.

    python -m speedrun.check [flags of train_gpt.py]    what run.sh does before it launches
    ./run.sh --check [flags of train_gpt.py]            only the checks, with all that they find

Exit codes: 0 ready, 2 something has to be mended first (a line for each thing), 130 interrupted. When ready, the last
line of stdout is the number of processes to start: NPROC, or as many as there are GPUs and divide a step's sequences.
"""

import dataclasses
import glob
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import needs

with needs.packages():
    import numpy
    import torch

    import train_gpt
    from train_gpt import GPT, PRESETS, Hyperparameters, Ranks, UserError

NO_GPU = "there is no NVIDIA GPU"
CPU_RUNS = "--preset nano or --preset mini trains on a CPU"
CAPABILITY = "gpt2 needs a GPU of compute capability 8.0 or newer (A100, RTX 30)"
SHARD_TOKENS, PACKING = 10**8, 1.5  # 1.5: tokens for one that packing keeps, assumed
# MiB that gpt2 needs beside parameters, gradients and optimizers, by `python -m gpu_proof gpu_graphs`, in the step that
# needs most (of stage 2) and in validation: what a slice of the head's logits takes, and what grows with the sequence
BUFFER_MIB = {"train_seq_len": (1_763, 12_600), "val_seq_len": (0, 4_690)}
SPARE_MIB = 1_000  # for NCCL, cuBLAS and gaps; CUDA itself is there while the free memory is looked at
# Useful TFLOP/s, 6 FLOP per weight and token, by a part of the GPU's name. H100, 4090 and A100: by the roofline,
# calibrated (gpu_proof/README.md). Others: 32% of their peak, as the H100.
TFLOPS = {"MIG": 0, "B200": 723, "H200": 318, "H100 PCIe": 243, "H100": 318, "A100": 128, "4090": 75, "3090": 22}


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    free: int  # bytes of memory


class Report:
    """Collect problems, and tell facts: on stdout for --check, else as notes on stderr if they matter all the same."""

    def __init__(self, is_full: bool):
        self.is_full = is_full
        self.problems: list[str] = []

    def fact(self, line: str, note: bool = False) -> None:
        if self.is_full or note:
            print(line if self.is_full else f"note: {line}", file=None if self.is_full else sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Return the first line of a message, without what train_gpt.py advises to do about data."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition("; ./run.sh")[0][:300]


def try_gpu(i: int) -> Gpu:
    """Run a kernel. Raise RuntimeError if the GPU is broken, full, or none that this torch was built for."""
    gpu = Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i), torch.cuda.mem_get_info(i)[0])
    if gpu.capability >= (8, 0):  # older ones are refused, and some have no kernels in torch
        torch.ones(1, device=f"cuda:{i}").add_(1).item()
    return gpu


def why_no_gpu() -> tuple[str, bool]:
    """Say why torch sees no GPU, and whether that has to be mended."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every GPU", False
    if shutil.which("nvidia-smi") is None:
        return NO_GPU, False
    command = ["nvidia-smi", "--query-gpu=compute_cap,driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
        told = (done.stdout + done.stderr).strip() or "No devices"
    except (OSError, subprocess.SubprocessError) as error:  # it hangs where the driver does
        told = str(error)
    if told.startswith("No devices"):
        return "nvidia-smi finds no GPU", False
    if not (gpus := re.findall(r"(?m)^(\d+\.\d), (\d+)[\d.]*, (.+)$", told)):
        return f"nvidia-smi fails: {told.splitlines()[0][:200]}: install or update the driver, to 580 or newer", True
    capability, driver, name = max((float(capability), int(driver), name) for capability, driver, name in gpus)
    if capability < 8:
        return f"{name} is too old: {CAPABILITY}", True
    fix = "update the driver to 580 or newer, restart the machine, or unset CUDA_VISIBLE_DEVICES"
    if driver >= 525 and (torch.version.cuda is None or (driver < 580 and torch.version.cuda >= "13")):
        version, wheels = torch.__version__.partition("+")[0], "cu126" if driver < 580 else "cu130"
        fix = f"{needs.PIP} --index-url https://download.pytorch.org/whl/{wheels} torch=={version}+{wheels}"
    return f"torch {torch.__version__} cannot use the {name} with driver {driver}: {fix}", True


def find_gpus(cfg: Hyperparameters, is_for_cpu: bool, report: Report) -> list[Gpu]:
    """Return the GPUs that work, and report those that do not. Raise UserError if there should be one."""
    gpus: list[Gpu] = []
    if not torch.cuda.is_available():
        why, is_problem = why_no_gpu()
        if cfg.device == "cuda" or (is_problem and not is_for_cpu):
            raise UserError(f"{why}; {CPU_RUNS}")
        if cfg.preset == "gpt2" and cfg.device != "cpu":
            raise UserError(f"gpt2 needs a GPU, and {why}; {CPU_RUNS}")
        report.fact(f"hardware: {os.cpu_count()} CPU cores, {why}", note=why != NO_GPU)
    elif cfg.device != "cpu":
        for index in range(torch.cuda.device_count()):
            try:
                gpus.append(try_gpu(index))
            except RuntimeError as error:
                fix = "free or reset it, or leave it out with CUDA_VISIBLE_DEVICES"
                report.problems.append(f"GPU {index} does not work: {reason(error)}: {fix}")
    if gpus:
        gpu = min(gpus, key=lambda gpu: gpu.capability)
        this = f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        report.fact(f"hardware: {len(gpus)} x {this}", note=True)
        if gpu.capability < (8, 0):
            report.problems.append(f"{this} is too old: {CAPABILITY}; CUDA_VISIBLE_DEVICES leaves it out; {CPU_RUNS}")
    return gpus


def check_compiler(is_for_cpu: bool, report: Report) -> None:
    """Look for what torch.compile needs: Triton builds a Python module in C, and a CPU's kernels are C++."""
    variable, usual = ("CXX", "clang++" if sys.platform == "darwin" else "g++") if is_for_cpu else ("CC", "gcc clang")
    names = os.environ.get(variable, usual)
    if not any(map(shutil.which, names.split())):
        report.problems.append(f"torch.compile finds no {names} ({variable}): Debian, Ubuntu: apt install g++")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Debian has its headers
    if not (header := Path(sysconfig.get_path("include", scheme), "Python.h")).exists():
        report.problems.append(f"torch.compile needs {header}: apt install python3.{sys.version_info.minor}-dev")


def contradictions(cfg: Hyperparameters, gpus: list[Gpu], processes: int) -> Iterator[str]:
    """Yield a line for what would be trained otherwise in silence, or fail only once all processes have started."""
    for i, layer in enumerate(cfg.layers):
        unused = [name for name in ("xsa", "head_gate", "dc") if getattr(layer, name)]
        unused += ["reads"] * (layer.reads is not None)
        if layer.attention == "none" and unused:
            yield f"layer {i} has no attention: {' and '.join(unused)} needs it"
        if not {layer.reads, layer.skip, *layer.mudd} <= {None, *range(i)}:
            yield f"layer {i} has reads {layer.reads}, skip {layer.skip}, mudd {layer.mudd}: expected earlier layers"
    if cfg.adam_every > cfg.num_iterations:
        yield f"--adam_every {cfg.adam_every}: expected at most num_iterations, or the head is never trained"
    if cfg.batch_sequences % processes or 0 < len(gpus) < processes:
        told = f"NPROC={processes}: {cfg.batch_sequences} sequences a step, {len(gpus) or 'no'} GPUs: another number"
        fitting = math.lcm(cfg.batch_sequences, processes) * cfg.train_seq_len
        yield told + f", or --preset {cfg.preset} --batch_tokens {fitting}" * (not gpus)


def build(cfg: Hyperparameters, processes: int) -> tuple[GPT, list]:
    """Build model and optimizers on no device, and run sequences through. Raise UserError if that fails."""
    cfg = dataclasses.replace(cfg, device="cpu", lm_head_fp8=False, mlp_fp8=False)
    try:
        with torch.device("meta"):
            gpt = train_gpt.GPT(cfg)
            optimizers = train_gpt.build_optimizers(gpt, Ranks(0, processes, 0, processes))
            windows = torch.zeros(len(train_gpt.attention_windows(0, cfg)), dtype=torch.int32)
            for length in cfg.val_seq_len, cfg.train_seq_len:
                tokens = torch.zeros(length, dtype=torch.int32)
                loss = gpt(tokens, tokens[:, None].long(), windows, torch.zeros(1))
            loss.backward()
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"rows of layers and groups, or sizes, do not fit each other: {told}") from None
    if unused := [name for name, p in gpt.named_parameters() if p.grad is None]:
        raise UserError(f"rows of layers: nothing uses {unused[0]}")
    return gpt, optimizers


def check_memory_and_time(cfg: Hyperparameters, gpus: list[Gpu], processes: int, report: Report) -> None:
    """Estimate both on GPUs, from the model itself and gpt2's buffers and speed. Compare free memory."""
    gpt, optimizers = build(cfg, processes)
    if not gpus:
        return
    tensors = [t for o in optimizers for t in (*o.params, o.grad_buffer, o.grad_shard, *o.state.values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}  # some share one
    fixed = sum(storages.values()) + sum(p.nbytes for p in gpt.parameters())  # and their gradients
    gpt2, free = PRESETS["gpt2"], min(gpu.free for gpu in gpus[:processes])
    for name, (slice_mib, length_mib) in BUFFER_MIB.items():
        length, growth = getattr(cfg, name) / getattr(gpt2, name), 1.0
        if name == "train_seq_len":
            growth = max(stage.batch for stage in cfg.stages) / max(stage.batch for stage in gpt2.stages)
        size = len(cfg.layers) * cfg.model_dim / (len(gpt2.layers) * gpt2.model_dim)
        logits = cfg.lm_head_slice * cfg.vocab_size / (gpt2.lm_head_slice * gpt2.vocab_size)
        need = fixed + (SPARE_MIB + logits * slice_mib + size * length_mib * growth * length) * 2**20
        told = f"--{name} {getattr(cfg, name)} takes {need / 2**30:.1f} GiB a process (estimated), "
        told += f"{free / 2**30:.1f} are free"
        report.fact(f"memory: {told}")
        if need > free:
            report.problems.append(f"{told}: free some, or halve --{name}")
    weights = sum(p.numel() for name, p in gpt.named_parameters() if p.ndim > 1 and "embed" not in name)
    flop = 6 * weights * train_gpt.num_tokens(cfg.num_iterations, cfg)
    rate = 1e12 * processes * min(next((n for part, n in TFLOPS.items() if part in gpu.name), 0) for gpu in gpus)
    minutes = f"about {flop / rate / 60:.1f} minutes" if rate else "unknown"
    report.fact(f"time: {minutes} of training on {processes} x {gpus[0].name} (estimated)", note=not report.problems)


def wrong_shard(path: str, cfg: Hyperparameters) -> str | None:
    """Say what is wrong with a shard, by its header and its first million tokens."""
    try:
        train_gpt.find_documents(path, cfg, True)
        tokens = train_gpt.read_numbers(path, "<u2", 2**20, 1024)
    except (UserError, OSError, ValueError) as error:  # what is no shard at all has no header to read
        return reason(error)
    highest = tokens.max(initial=0)
    if highest >= cfg.vocab_size or 0 < highest <= 256 < cfg.vocab_size - 1:
        return f"{path}: has tokens up to {highest}, not of {cfg.vocab_size} (--vocab_size)"
    if cfg.stages[0].max_doc_len and cfg.eot_token not in tokens:
        return f"{path}: no document begins in it, with --eot_token {cfg.eot_token}"
    return None


def data_problems(cfg: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the shards, and the command that gets them, empty if there is none."""
    gpt2, nano = ((PRESETS[name].train_files, PRESETS[name].val_files) for name in ("gpt2", "nano"))
    tokens = train_gpt.num_tokens(cfg.num_iterations, cfg) if cfg.train_files in gpt2 else 0
    shards = math.ceil(PACKING * tokens / SHARD_TOKENS)
    commands = dict.fromkeys(gpt2, f"data/cached_fineweb10B.py {shards}") | dict.fromkeys(nano, "data/pack_nano.py")
    is_sound = True
    for files in (cfg.train_files, cfg.val_files):
        paths = sorted(glob.glob(files, recursive=True))
        problems = [*filter(None, (wrong_shard(path, cfg) for path in paths))]
        if problems or not paths:
            is_sound = False
            problem = [*problems, f"no shards match {files} in {os.getcwd()}"][0]
            command = commands.get(files, "")
            yield problem + "; data/pack_text.py packs text" * (not command), command
    if not is_sound:
        return
    try:
        train_gpt.plan_data(cfg)
    except UserError as error:
        is_train = (problem := reason(error)).startswith(cfg.train_files)
        if is_train and len(glob.glob(cfg.train_files)) < shards:
            yield problem, commands[cfg.train_files]
        else:
            flag = "num_iterations" if is_train else "val_tokens"
            yield problem + f"; lower --{flag}" * ("the run needs" in problem), ""


def check_machine(argv: list[str], report: Report) -> tuple[Hyperparameters, int]:
    """Check all but the data. Return configuration and processes. Raise UserError where more checks are pointless."""
    report.fact(f"versions: Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {numpy.__version__}")
    wish, is_root = os.environ.get("NPROC") or "0", os.environ.get("SCRIPT") in (None, "", "train_gpt.py")
    if not is_root:  # its flags are its own: check the machine and a preset's data only
        argv = re.findall(r"--(?:preset|device)=\w+", re.sub(r"(--\w+) ", r"\1=", " ".join(argv)))
    if not re.fullmatch("[0-9]{1,4}", wish):
        raise UserError(f"NPROC={wish}: expected a number of processes")
    cfg = train_gpt.parse_args(argv)
    is_for_cpu = cfg.device == "cpu" and any(flag.startswith(("--preset", "--device")) for flag in argv)
    gpus = find_gpus(cfg, is_for_cpu, report)
    if report.problems:
        return cfg, 0
    cfg = train_gpt.resolve(cfg)
    processes = int(wish) or next(n for n in range(max(1, len(gpus)), 0, -1) if cfg.batch_sequences % n == 0)
    if cfg.compile:
        check_compiler(not gpus, report)
    if is_root:
        report.problems += (found := [*contradictions(cfg, gpus, processes)])
        if not found:
            train_gpt.parse_args(argv, processes)  # refuses to choose a preset for several without a GPU
            check_memory_and_time(cfg, gpus, processes, report)
    return cfg, processes


def examine(argv: list[str], report: Report) -> int:
    """Check everything, get the data, and return the number of processes."""
    cfg, processes = check_machine(argv, report)
    found = [*data_problems(cfg)] if processes else []
    commands = {command for _, command in found}
    is_fetched = bool(commands) and "" not in commands and not report.problems and not report.is_full
    if is_fetched:
        for command in sorted(commands):
            print(f"getting the data: {needs.PYTHON} {command}", file=sys.stderr, flush=True)
            if subprocess.run([sys.executable, *command.split()], stdout=sys.stderr).returncode:
                raise UserError("the data could not be fetched: see above, then run this again")
        found = [*data_problems(cfg)]
    for problem, command in found:
        if command and not is_fetched:
            report.fact(f"data: {problem}; run.sh gets them: {needs.PYTHON} {command}")
        else:
            report.problems.append(problem)
    return processes


def main(argv: Sequence[str] | None = None) -> int:
    argv, processes = list(sys.argv[1:] if argv is None else argv), 0
    report = Report("--check" in argv)
    warnings.simplefilter("ignore")  # torch's, about drivers: check.py says it in one line
    try:
        processes = examine([flag for flag in argv if flag != "--check"], report)
    except (UserError, OSError) as error:  # the latter: a shard that cannot be read
        report.problems.append(str(error))
    except KeyboardInterrupt:  # while data are fetched
        return 130
    for problem in report.problems:
        print("check: " + "".join(c if c.isprintable() else "?" for c in problem), file=sys.stderr)
    if not report.problems:
        print(f"processes: {processes}" if report.is_full else processes)
    return 2 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
