"""Lower train_gpt.py's graphs for GPUs that are not here, and compile every kernel to machine code."""

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpu_proof import pretend_gpu
from speedrun.process import ROOT, own_process

INTRODUCTION = """Lower the graphs of gpt2 (training, validation, optimizers) for GPUs that are not here, and compile
every configuration of every Triton kernel to machine code. Print a table, write it to a JSON file.

    python -m gpu_proof gpu_graphs [--arch 90,89,86,80] [--script FILE] [--out FILE] [flags of train_gpt.py]

On Linux, with torch's CPU build and gpu_proof/requirements.txt. README.md says what the columns mean.
Exit codes: 0 done, 1 a graph or a kernel failed, 2 something is missing, 130 interrupted."""
# The process of one architecture: pretend, then import torch
CHILD = "import sys; from gpu_proof import pretend_gpu; pretend_gpu.install(int(sys.argv[1])); "
CHILD += "from gpu_proof import gpu_graphs; gpu_graphs.child(sys.argv[1:])"
WORLDS = (8, 4, 2, 1)  # numbers of processes
SPARE = 1500  # MiB that CUDA, its libraries and the allocator need beside the tensors
SAMPLE = 2**15  # indices of a launch to look at
SECTOR = 32  # bytes that memory moves at least
# Operations of the special function units in Triton's functions; a logarithm has none, but 32 others: 8 to one
SPECIAL = {"/": 1, "exp": 1, "exp2": 1, "erf": 1, "rsqrt": 1, "log": 4, "sqrt_rn": 2, "sigmoid": 2, "tanh": 2}
SPECIAL |= dict(online_softmax_combine=2)
WRITES_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_")  # do not read what they overwrite
LOOKUPS = ("index", "index_add_", "index_select", "index_put_", "embedding")
NO_WORK = ("empty", "detach", "set_", "resize_")


# ---- Bytes -----------------------------------------------------------------------------------------------------------
def elements(t: Tensor) -> int:
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)


def accesses(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (load, store or atomic_add, pointer, index) for each of a kernel's accesses to memory."""
    for found in re.finditer(r"tl\.(load|store|atomic_add)\((\w+) \+ \(", source):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        yield found[1], found[2], source[found.end() : end - 1]


def find_ranges(source: str, arguments: dict[str, object]) -> dict[str, int]:
    """Return the numbered ranges of a launch: x, y, z, and r0, r1 of a reduction. FlexAttention's kernels have none."""
    ranges = {name[: -len("numel")]: n for name, n in arguments.items() if name.endswith("numel")}
    ranges |= dict(re.findall(r"^    (\w+?)_?numel = (\d+)$", source, re.M))
    return {name.rstrip("_"): int(n) for name, n in ranges.items()}


def evaluate_indices(source: str, sizes: dict[str, int]) -> dict[str, object]:
    """Return the values of a kernel's index variables at the first positions of each range, an axis for each."""
    known: dict[str, object] = {}
    for axis, (name, size) in enumerate(sizes.items()):
        index = np.arange(size).reshape([-1 if other == axis else 1 for other in range(len(sizes))])
        known[f"{name}_index" if name[0] == "r" else f"{name}index"] = index
    for name, value in re.findall(r"^\s+([xyzr]\w*) = (\(?[\w %/*+()-]+\)?)$", source, re.M):
        with contextlib.suppress(NameError, SyntaxError):
            known.setdefault(name, eval(value, {}, known))
    return known


def find_addresses(text: str, known: dict[str, object]) -> np.ndarray | None:
    """Return the elements that an access touches, or None if they depend on what was loaded."""
    try:
        return np.ravel(eval(re.sub(r"tl\.broadcast_to\((\w+), \[.*?\]\)", r"\1", text), {}, known))
    except (NameError, SyntaxError):
        return None


def kernel_bytes(source: str, arguments: dict[str, object]) -> int:
    """Count the bytes that a launch moves: of each argument every element that it touches, read once, written once.

    The elements are counted in a sample of the launch's indices, and never more than the argument has. Masks are
    ignored, and what a kernel reads back of its own output is in a cache. FlexAttention's kernels move each argument
    once, whole.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if not (ranges := find_ranges(source, arguments)):
        return sum(elements(t) * t.itemsize for t in tensors.values())
    sizes, scale, room = {}, 1.0, SAMPLE
    for axis, name in enumerate(sorted(ranges)):  # reductions, r0 and r1, come first and whole
        most = max(1, room if name[0] == "r" else round(room ** (1 / (len(ranges) - axis))))
        sizes[name] = min(ranges[name], most)
        scale, room = scale * ranges[name] / sizes[name], room // sizes[name]
    known = evaluate_indices(source, sizes)
    touched: dict[tuple[str, str], list] = {}
    for kind, pointer, text in accesses(source):
        if kind == "load" and pointer.startswith("out_ptr"):
            continue
        for way in ("load", "store") if kind == "atomic_add" else (kind,):
            touched.setdefault((way, pointer), []).append(text)
    total = 0
    for (_, pointer), texts in touched.items():
        found = [find_addresses(text, known) for text in set(texts)]
        count = len(np.unique(np.concatenate([a for a in found if a is not None] or [np.empty(0)])))
        if any(a is None for a in found):  # every access may be to another element
            count = max(count, math.prod(sizes.values()))
        t = tensors[pointer]
        total += min(elements(t), round(count * scale)) * t.itemsize
    return total


def scattered_bytes(source: str, arguments: dict[str, object], tiles: Sequence[dict[str, int]]) -> int:
    """Count what a launch moves beyond `kernel_bytes`, in the best of several tiles, such as XBLOCK=64, R0_BLOCK=64.

    A tile's store fills whole sectors, as if no cache joined those of several tiles: a byte with a stride costs 32.
    What a second loop reads again is moved again where the rows of one tile per multiprocessor exceed the L2 cache.
    """
    device, ranges = torch.cuda.get_device_properties(), find_ranges(source, arguments)
    loops = re.split(r"^    for ", source, flags=re.M)[1:]
    loads = [{pointer for kind, pointer, _ in accesses(loop) if kind == "load"} for loop in loops]
    again = [t for name, t in arguments.items() if sum(name in pointers for pointers in loads) > 1]
    costs = [] if ranges else [0.0]
    for tile in tiles if ranges else ():
        blocks = {name.removesuffix("BLOCK").strip("_").lower(): size for name, size in tile.items()}
        sizes = {name: min(n, blocks.get(name, n)) for name, n in ranges.items()}
        known, cost = evaluate_indices(source, sizes), 0.0
        for kind, pointer, text in accesses(source):
            if kind == "store" and (found := find_addresses(text, known)) is not None:
                t = arguments[pointer]
                full = SECTOR * len(np.unique(found * t.itemsize // SECTOR)) / (len(np.unique(found)) * t.itemsize)
                cost += max(0, full - 1) * min(elements(t), math.prod(ranges.values())) * t.itemsize
        for t in again:
            rows = sizes["x"] * math.prod(n for name, n in ranges.items() if name[0] == "r") * t.itemsize
            if device.multi_processor_count * rows > device.L2_cache_size:
                cost += elements(t) * t.itemsize
        costs.append(cost)
    return round(min(costs))


def special_functions(source: str, arguments: dict[str, object]) -> int:
    """Count the operations of the special function units in a launch: SPECIAL for each value computed.

    A value has the axes of what it is computed from; a sum or maximum over r ends with [:, None] and has lost r.
    Constants have none, and a division by one is a product.
    """
    ranges = find_ranges(source, arguments)
    axes = {f"{name}_index" if name[0] == "r" else f"{name}index": {name} for name in ranges}
    total = 0
    for name, value in re.findall(r"^\s+(\w+) = (.*)$", source, re.M):
        if name not in axes:
            own = set().union(*(axes.get(word, ()) for word in re.findall(r"\w+", value)))
            axes[name] = {axis for axis in own if axis[0] != "r"} if "[:, None]" in value else own
        words = re.findall(r"\.(\w+)\(", value) + ["/" for by in re.findall(r" / (\w+)", value) if axes.get(by)]
        total += sum(SPECIAL.get(word, 0) for word in words) * math.prod(ranges[axis] for axis in axes[name])
    return total


def product(arguments: dict[str, object], source: str) -> tuple[str, str, int] | None:
    """Return the precision of a product that the script's own kernel makes of its first two arguments, name and FLOPs.

    Inductor's kernels have numbered ranges, and FlexAttention's take three matrices.
    """
    if "tl.dot" not in source or find_ranges(source, arguments) or "flex" in source:
        return None
    a, b, *_ = arguments.values()
    (rows, inner), columns = a.shape, b.shape[1]
    return f"{a.dtype} in Triton".removeprefix("torch."), f"mm {rows}x{inner}x{columns}", 2 * rows * inner * columns


def operation_bytes(tensors: Sequence[Tensor], table: Tensor | None) -> int:
    """Count the bytes of an operation's arguments and results; of a table only as many as the rows that it looks up."""
    rows = max((elements(t) * t.itemsize for t in tensors if t is not table), default=0)
    return sum(min(elements(t) * t.itemsize, rows if t is table else math.inf) for t in tensors)


# ---- What runs -------------------------------------------------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """Note what a program on fake CUDA tensors would launch, which kernels it compiles, and the peaks of its memory."""

    def __init__(self, names: str = ""):
        super().__init__()
        self.names, self.world, self.phase, self.graph = names, 1, "", ""  # names: a pattern for kernels to compile
        self.calls: dict[tuple, dict] = {}  # every launch, equal ones together
        self.kernels: dict[str, dict[str, list]] = {}  # by graph and name: its configurations
        self.compiled: dict[object, list] = {}
        self.costs: dict[tuple, dict] = {}  # of a kernel with arguments of these shapes
        self.live: list[tuple[StorageWeakRef, int, bool]] = []
        self.peaks: dict[str, dict] = {}  # by phase
        pretend_gpu.pretend_launches(self.precompile, self.launched, self.called)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo compiles nothing

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def called(self, is_backward: bool, function: Callable):
        kind, _, shape = self.phase.partition(" ")
        names = dict(train=f"{'backward' if is_backward else 'forward'} {shape}", optimizers="optimizers")
        self.graph = names.get(kind, self.phase)
        self.kernels.setdefault(self.graph, {})
        try:
            return function()
        finally:
            self.graph = ""

    def precompile(self, kernel) -> None:
        """Compile a kernel's every configuration; keep what it needs, or the error."""
        found = self.compiled[kernel] = []
        for config in kernel.configs if re.search(self.names, kernel.fn.__name__) else ():
            entry = dict(config=str(config))
            found.append(entry)
            try:
                entry |= compile_config(kernel, config)
            except Exception as error:  # whatever it is, it is reported
                entry["error"] = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]

    def launched(self, kernel, args: tuple) -> None:
        name = kernel.fn.__name__
        label, kernels = name, self.kernels[self.graph]  # graphs of one phase may have kernels of one name
        while kernels.setdefault(label, self.compiled[kernel]) is not self.compiled[kernel]:
            label += "'"
        args = tuple(getattr(a, "base", a) for a in args)  # a TensorDescriptor stands for its tensor
        arguments = dict(zip(kernel.fn.arg_names, args, strict=False))
        shapes = tuple((tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a for a in args)
        if not self.again(key := (self.world, self.phase, self.graph, name, shapes)):
            if (kernel, shapes) not in self.costs:
                launch, tiles = (kernel.fn.src, arguments), [config.kwargs for config in kernel.configs]
                costs = dict(scattered=scattered_bytes(*launch, tiles), specials=special_functions(*launch))
                self.costs[kernel, shapes] = costs | dict(bytes=kernel_bytes(*launch))
            kind, called, flops = product(arguments, kernel.fn.src) or ("kernel", "", 0)
            self.note(key, kind, called, **self.costs[kernel, shapes], flops=flops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if TracingContext.try_get() is None:
            if func is not torch.ops.aten._scaled_mm.default:  # for which pretend_gpu throws a result away
                self.hold(result)
            self.operation(func, args, kwargs, result)
        return result

    def hold(self, result) -> None:
        """Note new storages, and what of all memory is in use now, before anything is freed."""
        known = {ref.cdata for ref, *_ in self.live if not ref.expired()}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.device.type == "cuda":
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in known:
                    known.add(ref.cdata)
                    self.live.append((ref, t.untyped_storage().nbytes(), bool(self.graph)))
        self.live = [entry for entry in self.live if not entry[0].expired()]
        peak = self.peaks.setdefault(self.phase, dict(buffers=0, total=0))
        peak["buffers"] = max(peak["buffers"], sum(n for _, n, in_graph in self.live if in_graph))
        peak["total"] = max(peak["total"], sum(n for _, n, _ in self.live))

    def operation(self, func, args: tuple, kwargs: dict, result) -> None:
        """Note a call of ATen: its bytes, and the FLOPs of a matmul."""
        schema, name = func._schema, func._overloadpacket.__name__
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if func.namespace != "aten" or is_view or any(name.removeprefix("new_").startswith(word) for word in NO_WORK):
            return
        reads, writes = [], [] if any(r.alias_info for r in schema.returns) else tree_leaves(result)
        for i, argument in enumerate(schema.arguments):
            given = tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            writes += given if is_written else []
            reads += [] if is_written and (name in WRITES_ONLY or argument.is_out) else given
        reads, writes = ([t for t in ts if isinstance(t, Tensor)] for ts in (reads, writes))
        if name not in LOOKUPS:  # pretending leaves the table of signs on the CPU
            reads, writes = ([t for t in ts if t.is_cuda] for ts in (reads, writes))
        if not reads and not writes:
            return
        if name.startswith("_foreach") and len({len(tree_leaves(arg)) for arg in args[:2]}) == 1:
            pairs = list(zip(*(arg for arg in args[:2] if isinstance(arg, (list, tuple))), strict=True))
            if any(not same_layout(pair) for pair in pairs):  # then it is a loop
                for pair in pairs:
                    single = getattr(torch.ops.aten, name.removeprefix("_foreach_")).default
                    self.operation(single, pair, {}, pair[0])
                return
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in (*reads, *writes))
        if self.again(key := (self.world, self.phase, self.graph, name, shapes)):
            return
        num_bytes = operation_bytes((*reads, *writes), table=args[0] if name in LOOKUPS else None)
        if func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, out_val=result if writes else None)
            wide = [t for t in reads if t.ndim > 1]
            a, b = wide[:2] if name == "_scaled_mm" else wide[-2:]  # scales come last, and what is added first
            size = "x".join(map(str, (*a.shape, b.shape[-1])))
            kind = str(a.dtype).removeprefix("torch.")
            self.note(key, kind, f"{name} {size}", bytes=num_bytes, flops=flops)
        else:
            layout = "copy" if same_layout([*reads, *writes]) else "strided"
            self.note(key, layout, bytes=num_bytes)

    def again(self, key: tuple) -> bool:
        if key in self.calls:
            self.calls[key]["count"] += 1
        return key in self.calls

    def note(self, key: tuple, kind: str, name: str = "", **costs: int) -> None:
        place = dict(zip(("world", "phase", "graph", "name"), key, strict=False))
        place["name"] = name or place["name"]
        self.calls[key] = dict(**place, kind=kind, count=1, flops=0, scattered=0, specials=0) | costs


def same_layout(tensors: Sequence[Tensor]) -> bool:
    """Say whether all tensors with several elements lie in memory in one order."""
    orders = [sorted(range(t.ndim), key=lambda i, t=t: -t.stride(i)) for t in tensors if t.numel() > 1]
    most = max((len(order) for order in orders), default=0)
    return len({tuple(order) for order in orders if len(order) == most}) < 2


def compile_config(kernel, config) -> dict:
    import triton
    import triton.backends.nvidia
    from torch._inductor.runtime.triton_compat import ASTSource
    from triton.backends.compiler import GPUTarget

    meta = kernel._create_compile_meta(config)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target, options = GPUTarget("cuda", meta["cc"], 32), kernel._create_compile_options(config, meta)
    binary = triton.compile(source, target=target, options=options)
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", told).groups())
    spills = spilled(binary.asm["ptx"], meta["cc"], options) if stack else 0
    # Numbers that a thread reads at once, at most
    vector = max(map(int, re.findall(r"ld\.global\S*\.v(\d)", binary.asm["ptx"])), default=1)
    return dict(registers=registers, stack=stack, spills=spills, shared=binary.metadata.shared, vector=vector)


def spilled(ptx: str, capability: int, options: dict) -> int:
    """Return the bytes that a thread stores for want of registers, as ptxas says: a stack may hold other things."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", "--regAllocOptLevel=2", file.name, "-o", "/dev/null"]  # as Triton
        command += [f"--gpu-name={sm_arch_from_capability(capability)}"]
        command += [] if options.get("enable_fp_fusion", True) else ["--fmad=false"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max(map(int, re.findall(r"(\d+) bytes spill stores", told)))


# ---- The process of one architecture ---------------------------------------------------------------------------------
def load_script(path: Path):
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_stages(script, trainer) -> list[dict]:
    """Return the stages of a run: steps, tokens and windows. Equal phases have the same graphs."""
    cfg, found = trainer.cfg, []
    for first, end in pairwise(sorted({*script.stage_starts(cfg), cfg.num_iterations})):
        trainer.set_schedules(first)
        length, losses = script.train_seq_len(first, cfg), len(trainer.weights)
        stage = dict(first=first, steps=end - first, tokens=length, windows=script.attention_windows(first, cfg))
        found.append(stage | dict(phase=f"train {length} x {losses}"))
    return found


def describe_attention(cfg) -> dict:
    """Return the kind of attention of each layer, and the tokens of a block of the mask."""
    if hasattr(cfg, "layers"):
        return dict(kinds=[layer.attention for layer in cfg.layers], block=cfg.block_size)
    names = dict(L="long", S="short", P="paired")  # of scripts before the tables of rows
    return dict(kinds=[names.get(letter, "none") for letter in cfg.attention_layout], block=cfg.mask_block)


def run_steps(script, cfg, recorder: Recorder) -> tuple[list[dict], dict[int, dict]]:
    """Take steps of every stage as one of WORLDS processes, and score a sequence. Return stages and peaks of memory.

    Of a stage as many steps as Adam makes one of.
    """

    def batch(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(cfg.vocab_size, (length + 1,), device="cuda", dtype=torch.int32)
        return tokens[:-1], tokens[1:].long()

    step_optimizers, memory = script.step_optimizers, {}

    def optimize(*args) -> None:
        with recorder.during(f"optimizers {recorder.phase}"):
            step_optimizers(*args)

    script.step_optimizers = optimize
    with recorder.during("setup"):
        with pretend_gpu.building():
            trainer = script.Trainer(cfg, script.Ranks())
        stages = find_stages(script, trainer)
    phases = {stage["phase"]: stage for stage in reversed(stages)}
    for world in [world for world in WORLDS if cfg.batch_sequences % world == 0]:
        recorder.world, recorder.peaks = world, {}
        with recorder.during("setup"), pretend_gpu.building():
            # The model's graphs are the same for all; the optimizers' have other shapes, over 8 in all
            for name in {"zeropower_via_newtonschulz5", "adam_update", "muon_update"} & {*vars(script)}:
                torch._dynamo.reset_code(getattr(script, name).__code__)
            trainer.gpt.zero_grad(set_to_none=True)
            trainer.ranks, trainer.optimizers = script.Ranks(0, world, 0, world), []
            gc.collect()
            trainer.optimizers = script.build_optimizers(trainer.gpt, trainer.ranks)
        for phase, stage in phases.items():
            first = -(-stage["first"] // cfg.adam_every) * cfg.adam_every  # its gradients find none of Adam's waiting
            with recorder.during("setup"):
                trainer.set_schedules(first)
            for step in range(first, first + cfg.adam_every):
                with recorder.during(phase):  # the second sequence finds the gradients of the first
                    trainer.train_step(step, [batch(stage["tokens"])] * min(2, cfg.batch_sequences // world))
        with recorder.during("validation"), torch.no_grad():
            trainer.model(*batch(cfg.val_seq_len), trainer.windows, torch.ones_like(trainer.weights[:1]))
        memory[world] = {name: peak for name, peak in recorder.peaks.items() if name != "setup"}
        nbytes = sum((o.grad_buffer.nbytes + o.param_buffer.nbytes) / o.every for o in trainer.optimizers)
        memory[world] |= dict(communication=round(nbytes))
    return stages, memory


def child(argv: Sequence[str]) -> None:
    """Print what was found out about one architecture, as a line of JSON."""
    arch, path, names, changes, *flags = argv
    stages, memory, failed = [], {}, ""
    recorder, script = Recorder(names), load_script(Path(path))
    cfg = script.parse_args(["--preset", "gpt2", "--device", "cuda", "--seed", "1", *flags])
    cfg = script.resolve(dataclasses.replace(cfg, **json.loads(changes)))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            stages, memory = run_steps(script, cfg, recorder)
    except Exception as error:  # what was found before is worth having
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
    device, counters = pretend_gpu.DEVICES[int(arch)], torch._dynamo.utils.counters
    found = dict(device=device.name, shared_limit=device.shared_limit, memory_mib=device.memory, failed=failed)
    found |= dict(graph_breaks=dict(counters["graph_break"]), memory=memory, stages=stages)
    found |= dict(configuration=dataclasses.asdict(cfg), attention=describe_attention(cfg))
    calls = [call for call in recorder.calls.values() if call["phase"] != "setup"]
    print(json.dumps(found | dict(kernels=recorder.kernels, calls=calls)))


# ---- The report ------------------------------------------------------------------------------------------------------
def measure(arch: int, script: Path, flags: Sequence[str] = (), names: str = "", **changes) -> dict:
    """Return what `child` found out, in a process of its own. Raise RuntimeError if it could not begin.

    `names` is a pattern: compile the kernels that have it in their names; "^$" is none, "" all. `changes` are fields of
    the configuration that are no flags, such as `layers`.
    """
    if why := pretend_gpu.missing():
        raise RuntimeError(why)
    told = own_process(["-c", CHILD, str(arch), str(script.resolve()), names, json.dumps(changes), *flags])
    found = json.loads(told.splitlines()[-1])
    return found if flags or changes else found | dict(spill_limit=pretend_gpu.DEVICES[arch].spills)


def least_spills(configurations: Sequence[dict]) -> int:
    """Return what a kernel spills at least: of several configurations the compiler drops those that spill much."""
    return min((entry["spills"] for entry in configurations if "spills" in entry), default=0)


def failures(found: dict) -> list[str]:
    """Return what keeps the graphs from running on this GPU: a line each."""
    lines = [found["failed"]] if found["failed"] else []
    lines += [f"graph break: {reason}" for reason in found["graph_breaks"]]
    for name, configurations in (kernel for graph in found["kernels"].values() for kernel in graph.items()):
        for entry in configurations:
            if "error" in entry:
                lines.append(f"{name} ({entry['config']}) does not compile: {entry['error']}")
            elif entry["shared"] > found["shared_limit"]:
                lines.append(f"{name} ({entry['config']}) needs {entry['shared']:,} bytes of shared memory")
        if (spills := least_spills(configurations)) > found.get("spill_limit", math.inf):
            lines.append(f"{name} spills at least {spills} bytes: more than any kernel before")
    return list(dict.fromkeys(lines))


def memory_lines(found: dict) -> list[str]:
    lines = []
    for world, memory in found["memory"].items():
        peaks = {name: peak for name, peak in memory.items() if name != "communication"}
        total = max(peak["total"] for peak in peaks.values()) / 2**20
        parts = [
            f"{name} {peak['buffers'] / 2**20:,.0f}, with all else {peak['total'] / 2**20:,.0f}"
            for name, peak in peaks.items()
        ]
        fits = total + SPARE < found["memory_mib"]
        verdict = f"This {'fits' if fits else 'DOES NOT FIT'} into {found['memory_mib']:,} with {SPARE:,} to spare"
        lines.append(f"Processes: {world}. Peak of buffers in MiB: {'; '.join(parts)}. {verdict}")
    return lines


def table(arch: int, found: dict) -> str:
    limit = found["shared_limit"]
    lines = [f"## sm_{arch}: {found['device']}, {limit:,} bytes of shared memory per block", ""]
    lines += ["| graph | launches | kernels | configurations | registers | stack | spills | shared memory | ATen |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    world, every = max(map(int, found["memory"]), default=0), found["configuration"]["adam_every"]
    for graph, kernels in found["kernels"].items():
        calls = [call for call in found["calls"] if call["graph"] == graph and call["world"] == world]
        entries = [entry for configurations in kernels.values() for entry in configurations if "error" not in entry]
        most = {key: max((e[key] for e in entries), default=0) for key in ("registers", "stack", "shared")}
        times = len({call["phase"] for call in calls}) * (1 if graph == "validation" else every)  # that it ran
        aten = Counter()
        for call in calls:
            if call["kind"] != "kernel":
                aten[call["name"].split()[0]] += call["count"]
        launches = sum(call["count"] for call in calls) // max(1, times)
        cells = [graph, launches, len(kernels), len(entries), most["registers"]]
        cells += [most["stack"], max(map(least_spills, kernels.values()), default=0), f"{most['shared']:,}"]
        cells += [", ".join(f"{n // times} {name}" for name, n in aten.items())]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *memory_lines(found)]
    return "\n".join([*lines, "", *(f"FAILED: {line}" for line in failures(found))]).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m gpu_proof gpu_graphs", description=INTRODUCTION, **options)
    archs = ",".join(map(str, pretend_gpu.DEVICES))
    parser.add_argument("--arch", default=archs, help="compute capabilities (default: %(default)s)")
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", metavar="FILE")
    out = Path("logs") / time.strftime("gpu-graphs-%Y%m%d-%H%M%S.json")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="default: logs/gpu-graphs-TIME.json")
    args, flags = parser.parse_known_args(argv)
    if unknown := set(args.arch.split(",")) - set(archs.split(",")):
        parser.error(f"--arch {args.arch}: {min(unknown)!r} is none of {archs}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict = dict(script=str(args.script), flags=flags, architectures={})
    for arch in map(int, args.arch.split(",")):
        found = document["architectures"][arch] = measure(arch, args.script, flags)  # says so if Triton is missing
        document |= {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        print(f"{table(arch, found)}\n", flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return int(any(failures(found) for found in document["architectures"].values()))
