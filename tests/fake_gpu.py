"""Pretend that an NVIDIA GPU is here, and say kernel by kernel what a step of train_gpt.py would launch on it.

    python tests/fake_gpu.py [--arch 90] [--stage 3] [--one_of 8] [--script FILE] [--kernels PATTERN] [its flags]

Nothing runs: tensors are fake, shapes without data. torch.compile lowers graphs for the GPU (120: an RTX 5090, 100: a
B200, 90: an H100, 89: an RTX 4090, 80: an A100), and the ptxas of triton's wheel compiles their kernels. Of each it
tells launches in a step, MB that a launch reads and writes, GFLOP of products and attention, registers, spilled bytes,
and operands of 1 MB or more: r read, w written, layout (rows: the last dimension is contiguous, columns: the one
before). It predicts no time.

An operand is read and written at most once by a launch, as a whole or as often as the kernel has indices. FLOPs of
FlexAttention are those for one visible key of each query: how many there are is data. Phase `loss`: what has logits.
Totals: products (own kernels with one, too), attention, fused (other kernels of the compiler), other (ATen's, own).
A kernel's configurations are compiled until one fits and spills nothing. --kernels: those with it in their names.

A test of its own imports this before torch, in a new process, calls install(90), and uses device="cuda" within
`FakeTensorMode(allow_non_fake_inputs=True), (recorder := Recorder())`. All is written for torch 2.13 and triton 3.7.
"""

# ruff: noqa: E402  (torch has to find the guard when it is imported)
import argparse
import contextlib
import ctypes
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

assert "torch" not in sys.modules, "torch has been imported: pretend in a process of its own"
with tempfile.TemporaryDirectory() as folder:
    root = Path(importlib.util.find_spec("torch").origin).parent
    options = f"-std=c++20 -shared -fPIC -I{root}/include -L{root}/lib -Wl,-rpath,{root}/lib -lc10 -ltorch_cpu".split()
    subprocess.run(["g++", Path(__file__).with_suffix(".cpp"), "-o", f"{folder}/guard.so", *options], check=True)
    GUARD = ctypes.CDLL(f"{folder}/guard.so")
# Compile here and now: workers and caches would hide kernels. And do not time whether to pad the gates' products of 12
# inputs: an H100's rates pad none (torch._inductor.fx_passes.pad_mm, is_mm_compute_bound)
os.environ |= dict(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
os.environ |= dict(TORCHINDUCTOR_SHAPE_PADDING="0", TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1")
import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, DebugAutotuner
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget

GPUS = json.loads(Path(__file__).with_suffix(".json").read_text())["gpus"]


# ---- The device: each pretence says what asks for it -----------------------------------------------------------------
class OnCPU(TorchDispatchMode, contextlib.ContextDecorator):
    """The CPU for the folding of constants: the compiler computes one element of them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
        return func(*args, **kwargs)


def install(arch: int) -> None:
    """Make this process believe in a GPU of compute capability `arch`, such as 90."""
    GUARD.take_over()  # a CUDA build has put its own there
    properties = argparse.Namespace(major=arch // 10, minor=arch % 10, **GPUS["all"], **GPUS[str(arch)])

    class device(contextlib.nullcontext):
        idx, prev_idx = 0, -1

    # The script asks for some, Dynamo and Inductor for the others. Dynamo tells functions apart by identity
    answers = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
        get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8),  # Dynamo saves and restores it
        set_rng_state=lambda state, device="cuda": None,
        set_device=lambda device: None,
        Stream=contextlib.nullcontext,
        _lazy_init=lambda: None,
        device=device,
        _DeviceGuard=type("guard", (device,), {}),  # what generated code enters
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("current_device", "get_rng_state", "set_rng_state"):  # has imported them by name
        setattr(torch.cuda.random, name, answers[name])
    for name in ("current_device", "device_count", "get_device_properties", "set_device"):
        setattr(CudaInterface, name, staticmethod(answers[name]))
    CudaInterface.device = device
    CudaInterface.get_raw_stream = staticmethod(lambda index: 0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0

    def to(module: torch.nn.Module, *args) -> torch.nn.Module:
        # It cannot move fake parameters: modules are built on the GPU. But some buffers are built on the CPU
        for owner in module.modules():
            owner._buffers |= {name: torch.empty_like(t, device="cuda:0") for name, t in owner._buffers.items()}
        return module

    torch.nn.Module.to = to
    # torch.tensor(..., device="cuda") begins as a real tensor: on the CPU
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda device: None  # a CUDA build makes a tensor there
    for name in ("_deduce_value", "_add_peephole_patterns"):
        setattr(UniformValueConstantFolder, name, OnCPU()(getattr(UniformValueConstantFolder, name)))
    methods = dict.fromkeys(("get_benchmarker", "map_python_to_cpp_type"))  # abstract
    methods |= dict(
        __init__=lambda self: None,
        is_active=staticmethod(lambda: True),
        get_current_target=lambda self: GPUTarget("cuda", arch, 32),
        get_active_torch_device=lambda self: torch.device("cuda", 0),
        get_current_device=lambda self: 0,
    )
    triton.runtime.driver.set_active(type("Driver", (triton.backends.driver.DriverBase,), methods)())
    triton_helpers.set_driver_to_gpu = lambda: None  # every kernel's source calls it: it would look for a real driver


def compile_kernel(kernel: CachingAutotuner) -> dict:
    """Compile until a configuration fits and spills nothing. Return what ptxas says of it, or of the best."""
    limit, found = torch.cuda.get_device_properties().shared_memory_per_block_optin, []
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        source = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        with contextlib.redirect_stdout(io.StringIO()) as told:
            options = kernel._create_compile_options(config, meta)
            binary = triton.compile(source, target=GPUTarget("cuda", meta["cc"], 32), options=options)
        patterns = dict(registers=r"Used (\d+) registers", spills=r"(\d+) bytes spill stores")
        needs = {name: max(map(int, re.findall(pattern, told.getvalue()))) for name, pattern in patterns.items()}
        found.append(needs | dict(excess=max(0, binary.metadata.shared - limit)))
        if not found[-1]["spills"] + found[-1]["excess"]:
            break
    return min(found, key=lambda needs: (needs["excess"], needs["spills"]))


# ---- Bytes of a launch: its operands, with those that are read and those that are written ----------------------------
Moves = list[tuple[Tensor, int, int]]


def nbytes(t: Tensor) -> int:
    """Return the bytes of a tensor; of what is expanded once."""
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.itemsize


def kernel_moves(source: str, arguments: dict[str, Any], mutated: list[str]) -> Moves:
    """Return what a kernel of Triton moves. The compiler's have ranges of indices; FlexAttention's and ours do not."""
    ranges = {name: n for name, n in arguments.items() if name.endswith("numel")}
    ranges |= dict(re.findall(r"^    (\w+?numel) = (\d+)$", source, re.M))
    indices, body, moves = math.prod(map(int, ranges.values())), source.partition("):")[2], []
    for name, t in arguments.items():
        if not isinstance(t, Tensor):
            continue
        if ranges:
            accesses = {*re.findall(rf"tl\.(load|store|atomic_add)\({name} \+ ([^,]*)", source)}
            count = Counter(kind for kind, _ in accesses)  # by kind, those whose index differs
            loads, stores = ((count[kind] + count["atomic_add"]) * indices for kind in ("load", "store"))
            loads *= not name.startswith("out_ptr")  # what a kernel reads back of its own output is in a cache
        else:
            same = (other for other, *_ in moves if other.storage_offset() == t.storage_offset())
            if any(torch._C._is_alias_of(t, other) for other in same):
                continue  # a kernel gets it under several names if it reads one of them
            stores = nbytes(t) * bool(name in mutated or re.search(rf"store\({name}\b|\b{name}\.store\(", body))
            if "width" in arguments:  # of N columns it stores so many
                stores = stores * arguments["width"] // arguments["N"]
            reads = rf"load\({name}\b|\b{name}\.load\(|[(,] {name}[,)]"
            loads = nbytes(t) * bool(not stores or re.search(reads, body))
        moves.append((t, *(min(nbytes(t), n * t.itemsize) for n in (loads, stores))))
    return moves


def operation_moves(name: str, arguments: tuple, result) -> Moves:
    """Return what a call of ATen moves; of a table that it looks up only as many rows as it does."""
    given = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    written = [t for t in tree_leaves(arguments[0][0] if result is None else result) if isinstance(t, Tensor)]
    reads = not re.match("new_|.*_like$", name)  # these only look at the shape
    updates = name.endswith("_") and not re.search("copy|fill|zero", name)
    moves = [(t, nbytes(t) * reads, 0) for t in given if all(t is not own for own in written)]
    moves += [(t, nbytes(t) * updates, nbytes(t)) for t in written]
    if re.match("index|embedding", name):
        most = max(read + wrote for t, read, wrote in moves if t is not arguments[0][0])
        moves = [(t, min(read, most), min(wrote, most)) for t, read, wrote in moves]
    return moves


def describe(t: Tensor, read: int, written: int) -> str:
    """Describe an operand in four words."""
    strides = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    layout = "rows" if strides[-1:] == [1] else "columns" if strides[-2:-1] == [1] else "strided"
    way, dtype, shape = "r" * bool(read) + "w" * bool(written), str(t.dtype), "x".join(map(str, t.shape))
    return f"{way} {dtype.removeprefix('torch.')} {shape} {layout}"


# ---- What runs -------------------------------------------------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """The launches of what runs within it on fake CUDA tensors. Equal ones of a phase are counted together."""

    def __init__(self, names: str = ""):
        super().__init__()
        self.names = names  # a pattern of the kernels to compile
        self.phase, self.classes = "outside", 0  # of graphs; columns of the logits
        self.calls: dict[tuple, dict] = {}
        self.needs: dict[str, dict] = {}  # of kernels, by their sources

        def called(graph: CompiledFxGraph, inputs):
            kind = graph.fx_kwargs  # of those outside of a part; sums of n-grams' gradients have none of their own
            phase = "backward" if kind["is_backward"] else "rows" if kind["is_inference"] else "forward"
            with self.part(phase if self.phase == "outside" else self.phase):
                return call(graph, inputs)

        call, CompiledFxGraph.__call__ = CompiledFxGraph.__call__, called
        CachingAutotuner.precompile = lambda kernel, *args, **options: None
        CachingAutotuner.run = DebugAutotuner.run = lambda kernel, *args, **options: self.launched(kernel, args)
        # C++ functions that look into tensors: generated code takes them from here. With `out` _scaled_mm does, too
        extern_kernels._scaled_mm = lambda *args, out, **options: torch.ops.aten._scaled_mm(*args, **options)
        guards = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2], device="cuda:0")
        guards._reinterpret_tensor = lambda t, *layout: t.as_strided(*layout[:2], t.storage_offset() + sum(layout[2:]))
        guards.assert_size_stride = lambda *args: None

    is_infra_mode = classmethod(lambda cls: True)  # else Dynamo compiles nothing

    @contextlib.contextmanager
    def part(self, phase: str) -> Iterator[None]:
        """Count what is launched within as a part of a step."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def launched(self, kernel: CachingAutotuner, args: tuple) -> None:
        """Note a launch of a kernel of Triton, and compile it once."""
        args = tuple(getattr(a, "base", a) for a in args)  # a TensorDescriptor stands for its tensor
        name, source, arguments = kernel.fn.__name__, kernel.fn.src, dict(zip(kernel.fn.arg_names, args, strict=False))
        if source not in self.needs:
            self.needs[source] = compile_kernel(kernel) if re.search(self.names, name) else {}
        moves = kernel_moves(source, arguments, kernel.mutated_arg_names)
        kind, flops = "fused" if name.startswith("triton_") else "other", 0
        if name.startswith("triton_tem"):  # FlexAttention's are the only templates
            qk, v = (int(re.search(rf"\b{kind}_HEAD_DIM : tl.constexpr = (\d+)", source)[1]) for kind in ("QK", "V"))
            of_pair = 6 * qk + 4 * v if "arg_DO" in arguments else 2 * qk + 2 * v  # backward, forward
            kind, flops = "attention", of_pair * arguments["arg_LSE"].numel()  # one for a head and query
        elif "tl.dot" in source:  # the script's own
            (a, *_), (b, *_), *_ = moves
            kind, flops = "product", 2 * a.numel() * b.numel() // a.shape[1]
        self.note(name, moves, kind, flops, **self.needs[source])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, returns = func._overloadpacket, func._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        is_free = is_view or re.match("(new_)?empty|detach|set_|resize_", packet.__name__)
        if func.namespace == "aten" and not is_free and torch._guards.TracingContext.try_get() is None:
            flops = flop_registry[packet](*args, out_val=result) if packet in flop_registry else 0
            moves = operation_moves(packet.__name__, (args, kwargs), result)
            self.note(packet.__name__, moves, "product" if flops else "other", flops)
        return result

    def note(self, name: str, moves: Moves, kind: str, flops: int, **needs) -> None:
        operands = [describe(*move) for move in moves]
        key = self.phase, name, *operands
        if key not in self.calls and any(t.is_cuda for t, *_ in moves):
            logits = [t for t, *_ in moves if t.ndim == 2 and self.classes in t.shape and min(t.shape) > 1024]
            phase = "loss" if logits and self.phase in ("forward", "backward") else self.phase
            read, written = (sum(move[i] for move in moves) for i in (1, 2))
            told = dict(phase=phase, name=name, kind=kind, count=0, read=read, written=written, flops=flops)
            big = [operand for operand, move in zip(operands, moves, strict=True) if sum(move[1:]) >= 1e6]
            self.calls[key] = told | dict(operands=big) | needs
        if key in self.calls:
            self.calls[key]["count"] += 1


def take_steps(script: Any, cfg, stage: int, one_of: int, recorder: Recorder) -> int:
    """Take a cycle of steps of a stage as one of several processes, and score a sequence. Return recompiles.

    A step of the warm-up comes before, which compiles all. Tokens are random, as frequent as Zipf's law says: they have
    more n-grams than text has.
    """
    rng, frequencies = np.random.default_rng(0), (np.arange(cfg.vocab_size) + 3.0) ** -1.1

    class Table(script.NgramTable):
        fetch = recorder.part("rows")(script.NgramTable.fetch)
        update = recorder.part("rows")(script.NgramTable.update)

        def all_to_all(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Any:
            return lambda: None

    script.NgramTable = Table
    script.step_optimizers = recorder.part("optimizers")(script.step_optimizers)

    def read(step_schedules: list, sequences: int) -> tuple[list, Any]:
        size = len(step_schedules), sequences, step_schedules[0].seq_len + 1
        tokens = rng.choice(cfg.vocab_size, size, p=frequencies / frequencies.sum()).astype(np.uint16)
        tokens[rng.random(size) < 1 / 690] = cfg.eot_token  # documents of FineWeb have 690 tokens on average
        with fake_tensor.unset_fake_temporarily():
            made = trainer.loader.load_cycle(step_schedules, tokens)
        with recorder.part("input"):
            return trainer.loader.to_device(made)

    with torch.device("cuda"):
        trainer = script.Trainer(cfg, script.Ranks(0, one_of, 0, one_of))
    trainer.loader.pin = Tensor.clone
    trainer.loader.to_device = lambda made: tree_map_only(Tensor, lambda t: t.to("cuda"), made)
    steps = [schedule.step for schedule in cfg.step_schedules if schedule.stage == stage - 1]
    first = steps[len(steps) // 3] // cfg.common_interval * cfg.common_interval
    all_updates = {name: update for schedule in cfg.step_schedules for name, update in schedule.updates.items()}
    warm_up = cfg.step_schedules[first]._replace(updates=all_updates)
    recorder.classes = warm_up.sampled_classes or cfg.padded_vocab
    (sequences,), exchange = read([warm_up], cfg.batch_sequences)
    trainer.train_step(warm_up, sequences, exchange)
    recorder.calls.clear()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for step_schedules, _ in script.train_cycles(iter(cfg.step_schedules), cfg):
        if first <= step_schedules[0].step < first + cfg.common_interval:
            cycle, exchange = read(step_schedules, cfg.batch_sequences)
            for schedule, sequences in zip(step_schedules, cycle, strict=True):
                trainer.train_step(schedule, sequences, exchange)
    recompiles = stats["unique_graphs"] - before
    (sequences,), exchange = read([validation := script.schedule_validation(cfg.num_iterations, cfg)], one_of)
    with recorder.part("validation"), torch.no_grad():
        mask = torch.empty(cfg.padded_vocab, cfg.padded_vocab // 8, dtype=torch.uint8, device="cuda")
        trainer.eval_step(validation, sequences, exchange, mask)
    return recompiles


# ---- The report ------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace, flags: list[str]) -> dict:
    """Return the kinds of launches, with how many of each a step or a validation's sequence has, and what failed."""
    install(args.arch)
    recorder, breaks = Recorder(args.kernels), torch._dynamo.utils.counters["graph_break"]
    sys.path.insert(0, str(args.script.parent))
    script: Any = importlib.import_module(args.script.stem)
    given = "--preset gpt2 --device cuda --seed 1 --no-cuda_graphs".split()  # what they replay is noted one by one
    cfg = script.resolve(script.parse_args([*given, *flags]))
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), recorder:
        recompiles = take_steps(script, cfg, args.stage, args.one_of, recorder)
    calls = [call for call in recorder.calls.values() if call["phase"] != "input"]
    for call in calls:
        call["count"] /= 1 if call["phase"] == "validation" else cfg.common_interval
    failed = [f"graph break: {reason}" for reason in breaks] + [f"{recompiles} recompiles"] * (recompiles > 0)
    failed += {f"too much shared memory: {call['name']}" for call in calls if call.get("excess")}
    return dict(failed=failed, totals=totals(calls), calls=calls)


def totals(calls: list[dict]) -> dict[str, Counter]:
    """Return by phase the launches, GB by kind, and TFLOP of products; a step is all but validation."""
    found: dict[str, Counter] = {}
    for call in calls:
        for phase in (call["phase"], *["step"] * (call["phase"] != "validation")):
            own, n = found.setdefault(phase, Counter()), call["count"]
            own["launches"] += n
            own[call["kind"]] += n * (call["read"] + call["written"]) / 1e9
            own["TFLOP"] += n * call["flops"] / 1e12 * (call["kind"] == "product")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arch", type=int, choices=(120, 100, 90, 89, 80), default=90)
    parser.add_argument("--stage", type=int, default=3, metavar="N", help="row of the stages, from 1 (default: 3)")
    parser.add_argument("--one_of", type=int, default=8, metavar="N", help="as one process of N (default: 8)")
    parser.add_argument("--script", type=Path, default=Path(__file__).parents[1] / "train_gpt.py", metavar="FILE")
    parser.add_argument("--kernels", default="", metavar="PATTERN", help="compile those with it in their names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = measure(*parser.parse_known_args())
    if "--json" in sys.argv:
        print(json.dumps(found))
        return bool(found["failed"])
    print("phase     launches  MB read  written    GFLOP registers spilled  kernel, operands")
    for call in sorted(found["calls"], key=lambda c: (c["phase"], -c["count"] * (c["read"] + c["written"]))):
        numbers = f"{call['count']:8g}{call['read'] / 1e6:9.1f}{call['written'] / 1e6:9.1f}{call['flops'] / 1e9:9.1f}"
        told = f"{call['phase']:10}{numbers}{call.get('registers', 0):10}{call.get('spills', 0):8}  {call['name']}"
        print("\n      ".join([told, *call["operands"]]))
    print("\nin all    launches GB: product attention fused  other   TFLOP of products")
    for phase, own in found["totals"].items():
        kinds = ("launches", "product", "attention", "fused", "other", "TFLOP")
        print(f"{phase:10}" + "".join(f"{own[kind]:9.2f}" for kind in kinds))
    print(*(f"FAILED: {line}" for line in found["failed"]), sep="\n")
    return bool(found["failed"])


if __name__ == "__main__":
    sys.exit(main())
