"""Check a run in one plain process before it starts, and get the data it lacks.

    python check.py [flags of train_gpt.py]     what run.sh does before it launches
    ./run.sh --check [flags of train_gpt.py]    only the checks, with all that they find

Exit codes: 0 ready, 2 something has to be mended first (a line for each thing), 130 interrupted. When ready, the last
line of stdout is the number of processes to start: NPROC, or as many as there are GPUs and divide a step's sequences.
"""

from __future__ import annotations  # lets an old Python get as far as the line that refuses it

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
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import get_args


from speedrun import needs

with needs.packages("requirements.txt"):
    import importlib.metadata

    import numpy as np
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "huggingface_hub", "tqdm")}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise ImportError(f"torch {torch.__version__} is older than 2.11")
    import train_gpt
    from shards import shard_problem
    from train_gpt import GPT, OPTIMIZERS, PRESETS, Hyperparameters, Layer, Ranks, UserError

FINEWEB_SHARDS, SHARD_TOKENS, PACKING = 103, 10**8, 1.5  # 1.5: tokens for one that packing keeps, assumed
# MiB that gpt2 needs beside parameters, gradients and optimizers, by `python -m gpu_proof gpu_graphs`, in the step that
# needs most (of stage 2) and in validation: what a slice of the head's logits takes, and what grows with the sequence
BUFFER_MIB = {"train_seq_len": (1_763, 12_600), "val_seq_len": (0, 4_690)}
SPARE_MIB = 1_000  # for NCCL, cuBLAS and gaps; CUDA itself is there while the free memory is looked at
# Useful TFLOP/s, 6 FLOP per weight and token, by a part of the GPU's name. H100, 4090 and A100: by the roofline,
# calibrated (gpu_proof/README.md). Others: 32% of their peak, as the H100.
TFLOPS = {"MIG": 0, "B200": 723, "H200": 318, "H100 PCIe": 243, "H100": 318, "A100": 128, "4090": 75, "3090": 22}
SIZES = "model_dim num_heads head_dim block_size lm_head_slice lm_head_softcap".split()
Gpu = namedtuple("Gpu", "name capability free")  # free: bytes of memory


class Report:
    """Collect problems, and tell facts: on stdout for --check, else as notes on stderr if they matter all the same."""

    def __init__(self, is_full: bool):
        self.is_full, self.problems = is_full, list[str]()

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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every GPU", False
    gpu = needs.find_gpu()
    if gpu.trouble:
        return gpu.trouble, gpu.is_serious
    cuda, version = torch.version.cuda, torch.__version__.split("+")[0]
    fix = f"CUDA_VISIBLE_DEVICES={visible} may name none" if visible else "restart the machine or its driver"
    if cuda is None or (cuda >= "13" and gpu.wheels):
        wheels = gpu.wheels or "cu130"
        fix = f"{needs.PIP} --index-url https://download.pytorch.org/whl/{wheels} torch=={version}+{wheels}"
    return f"torch {torch.__version__} cannot use the {gpu.name} with driver {gpu.driver}: {fix}", True


def contradictions(cfg: Hyperparameters, gpus: list[Gpu], processes: int) -> Iterator[str]:
    """Yield a line for each row and flag that torch would answer with a traceback, or nobody would notice."""
    width, K, sequences = cfg.num_heads * cfg.head_dim, cfg.model_dim, cfg.batch_sequences
    has_mudd, most = any(layer.mudd for layer in cfg.layers), 2 * min(K, width)
    halves = any(layer.attention == "paired" or (layer.mudd and layer.value_embed) for layer in cfg.layers)
    kinds = get_args(Layer.__annotations__["attention"])
    if not cfg.layers:
        yield "layers (): expected a row at least"
    for i, layer in enumerate(cfg.layers):
        needy = [name for name in ("value_embed", "xsa", "head_gate", "dc") if getattr(layer, name)]
        needy += ["reads"] * (layer.reads is not None) + ["the first layer"] * (i == 0)
        if layer.attention not in kinds:
            yield f"layer {i} has attention {layer.attention!r}: expected {' or '.join(kinds)}"
        if layer.attention == "none" and needy:
            yield f"layer {i} has no attention: {' and '.join(needy)} needs it"
        if not {layer.reads, layer.skip, *layer.mudd} <= {None, *range(i)}:
            yield f"layer {i} has reads {layer.reads}, skip {layer.skip}, mudd {layer.mudd}: expected earlier layers"
    for group in cfg.groups:
        if group.optimizer not in OPTIMIZERS:
            yield f"group {group.names} has optimizer {group.optimizer!r}: expected {' or '.join(OPTIMIZERS)}"
    rules = [
        *((name, not getattr(cfg, name), "more than 0") for name in SIZES),
        ("num_heads", has_mudd and width != K, f"num_heads * head_dim = model_dim {K}, for mudd"),
        ("num_heads", halves and cfg.num_heads % 2, "an even number, for paired heads, or value_embed with mudd"),
        ("head_dim", cfg.head_dim % 4, "a multiple of 4"),
        ("value_gate_inputs", cfg.value_gate_inputs not in range(0, most + 1, 2), f"an even number up to {most}"),
        ("smear_gate_inputs", cfg.smear_gate_inputs > K, f"at most model_dim {K}"),
        ("bigram_rows", cfg.bigram_rows < 2, "at least 2"),
        ("block_size", gpus and cfg.block_size % 128, "a multiple of 128 on a GPU"),
        ("model_dim", (cfg.mlp_fp8 or cfg.lm_head_fp8) and K % 16, "a multiple of 16, for FP8"),
        ("lm_head_slice", cfg.lm_head_fp8 and cfg.lm_head_slice % 16, "a multiple of 16, for FP8"),
        ("adam_every", cfg.adam_every > cfg.num_iterations, "at most num_iterations, or the head is never trained"),
        *((name, getattr(cfg, name) % max(1, cfg.block_size), "a multiple of block_size") for name in BUFFER_MIB),
    ]
    wrong = {name: expected for name, is_wrong, expected in reversed(rules) if is_wrong}  # the first of each flag
    yield from (f"--{name} {getattr(cfg, name)}: expected {expected}" for name, expected in wrong.items())
    if sequences % processes or 0 < len(gpus) < processes:
        told = f"NPROC={processes}: {sequences} sequences a step, {len(gpus) or 'no'} GPUs: another number"
        fitting = math.lcm(sequences, processes) * cfg.train_seq_len
        yield told + f", or --preset {cfg.preset} --batch_tokens {fitting}" * (not gpus)


def build(cfg: Hyperparameters, processes: int) -> tuple[GPT, list]:
    """Build model and optimizers on no device, and run a block of tokens through. Raise UserError if that fails."""
    cfg = dataclasses.replace(cfg, device="cpu", lm_head_fp8=False, mlp_fp8=False)
    try:
        with torch.device("meta"):
            gpt = train_gpt.GPT(cfg)
            optimizers = train_gpt.build_optimizers(gpt, Ranks(0, processes, 0, processes))
            tokens, windows = torch.zeros(cfg.block_size, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            gpt(tokens, tokens[:, None].long(), windows, torch.zeros(1)).backward()
    except (AssertionError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"rows of layers and groups, or sizes, do not fit each other: {reason(error)}") from None
    if unused := [name for name, p in gpt.named_parameters() if p.grad is None]:
        raise UserError(f"rows of layers: nothing uses {unused[0]}")
    return gpt, optimizers


def check_memory_and_time(cfg: Hyperparameters, gpus: list[Gpu], processes: int, report: Report) -> None:
    """Estimate both, from the model itself and gpt2's buffers and speed. Compare free memory."""
    gpt, optimizers = build(cfg, processes)
    tensors = [t for o in optimizers for t in (*o.params, o.grad_buffer, o.grad_shard, *o.state.values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}  # some share one
    fixed = sum(storages.values()) + sum(p.nbytes for p in gpt.parameters())  # and their gradients
    weights = sum(p.numel() for name, p in gpt.named_parameters() if p.ndim > 1 and "embed" not in name)
    tokens = train_gpt.num_tokens(cfg.num_iterations, cfg)
    if gpus:
        free, where = min(gpu.free for gpu in gpus[:processes]), f"{processes} x {gpus[0].name}"
        rate = 1e12 * processes * min(next((n for part, n in TFLOPS.items() if part in gpu.name), 0) for gpu in gpus)
        seconds = 6 * weights * tokens / rate if rate else 0
    else:  # by nano: 9.2 s in float32 (n = 8), 4.8 in bf16; by wider and deeper models, on one thread
        lines = Path("/proc/meminfo").read_text() if os.path.exists("/proc/meminfo") else "MemAvailable: 9999999999"
        free, where = 1024 * int(re.findall(r"MemAvailable: *(\d+)", lines)[0]) // processes, "2 CPU cores"
        rate = 9.1e10 if cfg.dtype == "bfloat16" else 4.5e10
        seconds = 6 * weights * tokens / rate + 5e-6 * tokens * (1 + len(cfg.layers))

    def need(name: str, length: int) -> float:
        """Return the bytes of the longest step, or of validation, with sequences of this length."""
        (slice_mib, length_mib), is_train, gpt2 = BUFFER_MIB[name], name == "train_seq_len", PRESETS["gpt2"]
        growth, known = (max(stage.batch for stage in c.stages) if is_train else 1 for c in (cfg, gpt2))
        size = len(cfg.layers) * cfg.model_dim / (len(gpt2.layers) * gpt2.model_dim)
        logits = cfg.lm_head_slice * cfg.vocab_size / (gpt2.lm_head_slice * gpt2.vocab_size)
        mib = logits * slice_mib + size * length_mib * growth * length / (known * getattr(gpt2, name))
        if gpus:
            return fixed + (SPARE_MIB + mib) * 2**20
        # A CPU fuses nothing: 3 times the buffers, and 0.4 GB for torch (0.5 GB for nano; measured: 0.46). It holds
        # numbers for every query and each key that its block sees: of the mask, or scores, keys and values.
        # Measured: 18 to 69 bytes in four runs of 17 to 268 million pairs (1 or 2 layers, 2 or 4 heads); here 20 to 64
        window = max(cfg.final_window, *(stage.window for stage in cfg.stages))
        seen = min(growth * length, cfg.block_size * (1 - -window // cfg.block_size))
        kept = sum(layer.attention != "none" for layer in cfg.layers) if is_train else 1
        numbers = cfg.num_heads * (2 + kept * (1 + 2 * cfg.head_dim / cfg.block_size))
        per_pair = max(18, numbers * gpt.embed.weight.itemsize)
        return fixed + 4e8 + 3 * mib * 2**20 + growth * length * seen * per_pair

    for name in BUFFER_MIB:
        length = getattr(cfg, name)
        mem = need(name, length)
        line = f"--{name} {length} takes {mem / 2**30:.1f} GiB a process (estimated), {free / 2**30:.1f} are free"
        report.fact(f"memory: {line}")
        if mem > free:
            shorter = (n for n in (length >> i for i in range(1, 9)) if n % cfg.block_size == 0 < n)
            fix = next((f"--{name} {n}" for n in shorter if need(name, n) <= free), "a smaller model")
            report.problems.append(f"{line}: free some, or train otherwise, with {fix}")
    size, unit = (3600, "hours") if seconds > 7200 else (60, "minutes") if seconds > 120 else (1, "seconds")
    text = f"about {max(seconds / size, 1):.0f} {unit}" if seconds else "unknown"
    report.fact(f"time: {text} of training on {where} (estimated)", note=seconds > 300 and not report.problems)


def wrong_shard(path: str, cfg: Hyperparameters) -> str | None:
    highest = 0
    if (problem := shard_problem(Path(path))) is None:  # the first million tokens tell bytes from GPT-2's
        highest = np.fromfile(path, "<u2", 2**20, offset=1024).max(initial=0)
    if highest >= cfg.vocab_size or 0 < highest <= 256 < cfg.vocab_size - 1:
        problem = f"has tokens up to {highest}, not of {cfg.vocab_size} (--vocab_size)"
    return problem and f"{path}: {problem}"


def check_data(cfg: Hyperparameters, report: Report) -> dict[str, str]:
    """Return the commands that get what the shards lack, and why; report what none mends."""
    gpt2, nano = ((PRESETS[name].train_files, PRESETS[name].val_files) for name in ("gpt2", "nano"))
    tokens = train_gpt.num_tokens(cfg.num_iterations, cfg) if cfg.train_files in gpt2 else 0
    if (shards := math.ceil(PACKING * tokens / SHARD_TOKENS)) > FINEWEB_SHARDS:
        raise UserError(f"--num_iterations {cfg.num_iterations} needs {shards} shards of FineWeb's {FINEWEB_SHARDS}")
    commands = dict.fromkeys(gpt2, f"data/cached_fineweb10B.py {shards}") | dict.fromkeys(nano, "data/pack_nano.py")
    found = {}  # what is wrong with the files of a pattern
    for files in cfg.train_files, cfg.val_files:
        paths = sorted(glob.glob(files, recursive=True))
        report.fact(f"data: {len(paths)} shards match {files}")
        problems = [problem for path in paths if (problem := wrong_shard(path, cfg))]
        if problems or not paths:
            command = commands.get(files, "data/pack_text.py --help")
            found[files] = (
                f"{[*problems, f'no shards match {files} in {os.getcwd()}'][0]}; get it: {needs.PYTHON} {command}"
            )
    try:
        if not found:
            train_gpt.plan_data(cfg)
    except UserError as error:
        is_train = (problem := reason(error)).startswith(cfg.train_files)
        if is_train and len(glob.glob(cfg.train_files)) < shards:
            found[cfg.train_files] = f"{problem}; get it: {needs.PYTHON} {commands[cfg.train_files]}"
        else:
            fix = f"; lower --{'num_iterations' if is_train else 'val_tokens'}" * ("the run needs" in problem)
            report.problems.append(problem + fix)
    report.problems += [problem for files, problem in found.items() if files not in commands]
    return {commands[files]: problem for files, problem in found.items() if files in commands}


def find_gpus(cfg: Hyperparameters, is_for_cpu: bool, report: Report) -> list[Gpu]:
    """Return the GPUs that work, and report those that do not. Raise UserError if there should be one."""
    gpus: list[Gpu] = []
    if not torch.cuda.is_available():
        why, is_problem = why_no_gpu()
        if cfg.device == "cuda" or (is_problem and not is_for_cpu):
            raise UserError(f"{why}; {needs.NANO}")
        report.fact(f"hardware: {os.cpu_count()} CPU cores, {why}", note="NVIDIA" not in why)
    elif cfg.device != "cpu":
        for index in range(torch.cuda.device_count()):
            try:
                gpus.append(try_gpu(index))
            except RuntimeError as error:
                fix = "free or reset it, or leave it out with CUDA_VISIBLE_DEVICES"
                report.problems.append(f"GPU {index} does not work: {reason(error)}: {fix}")
    return gpus


def check_compiler(is_for_cpu: bool, report: Report) -> None:
    """Look for what torch.compile needs: Triton builds a Python module in C, and a CPU's kernels are C++."""
    variable, usual = ("CXX", "clang++" if sys.platform == "darwin" else "g++") if is_for_cpu else ("CC", "gcc clang")
    names = [os.environ[variable]] if variable in os.environ else usual.split()
    if not any(map(shutil.which, names)):
        missing = f"torch.compile finds no C compiler, {' or '.join(names)} ({variable})"
        report.problems.append(f"{missing}: install one (Debian, Ubuntu: apt install g++)")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Debian has its headers
    if not (header := Path(sysconfig.get_path("include", scheme), "Python.h")).exists():
        report.problems.append(f"torch.compile needs {header}: apt install python3.{sys.version_info.minor}-dev")


def check_machine(argv: list[str], report: Report) -> tuple[Hyperparameters, int]:
    """Check all but the data. Return configuration and processes. Raise UserError where more checks are pointless."""
    report.fact(f"versions: Python {sys.version.split()[0]}, {', '.join(map(' '.join, versions.items()))}")
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
    for gpu in sorted(gpus, key=lambda gpu: gpu.capability)[:1]:
        this = f"{gpu.name} (compute capability {'.'.join(map(str, gpu.capability))})"
        fp8 = " and ".join(["head"] * cfg.lm_head_fp8 + ["MLPs"] * cfg.mlp_fp8) or "nothing"
        report.fact(f"hardware: {len(gpus)} x {this}: {cfg.dtype}, {fp8} in FP8", note=True)
        if gpu.capability < (8, 0):
            is_one_of = any(other.capability >= (8, 0) for other in gpus)
            fix = "leave it out with CUDA_VISIBLE_DEVICES" if is_one_of else needs.NANO
            report.problems.append(f"{this} is too old: {needs.CAPABILITY}; {fix}")
    if is_root:
        report.problems += (found := [*contradictions(cfg, gpus, processes)])
        if not found:
            train_gpt.parse_args(argv, processes)  # refuses to choose a preset for several without a GPU
            check_memory_and_time(cfg, gpus, processes, report)
    return cfg, processes


def examine(argv: list[str], report: Report) -> int:
    """Check everything, get the data, and return the number of processes."""
    cfg, processes = check_machine(argv, report)
    for command in check_data(cfg, report) if processes else ():
        report.fact(f"data: run.sh gets them: {needs.PYTHON} {command}")
        if not report.problems and not report.is_full:
            print(f"getting the data: {needs.PYTHON} {command}", file=sys.stderr, flush=True)
            if subprocess.run([sys.executable, *command.split()], stdout=sys.stderr).returncode:
                raise UserError("the data could not be fetched: see above, then run this again")
            report.problems += [problem for left, problem in check_data(cfg, report).items() if left == command]
    return processes


def main(argv: list[str] | None = None) -> int:
    argv, processes = sys.argv[1:] if argv is None else list(argv), 0
    report = Report("--check" in argv)
    warnings.simplefilter("ignore")  # torch's, about drivers: check.py says it in one line
    try:
        processes = examine([flag for flag in argv if flag != "--check"], report)
    except (UserError, OSError) as error:  # the latter: a shard that cannot be read
        report.problems.append(str(error))
    except KeyboardInterrupt:  # while data are fetched
        return 130
    for problem in report.problems:
        print("check.py: " + "".join(c if c.isprintable() else "?" for c in problem), file=sys.stderr)
    if not report.problems:
        print(f"processes: {processes}" if report.is_full else processes)
    return 2 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
