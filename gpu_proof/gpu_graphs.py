"""Lower train_gpt.py's graphs for GPUs that are not here, and compile every kernel to machine code.

    python -m gpu_proof gpu_graphs [--arch 90,89,86,80] [--script FILE] [--kernels PATTERN] [--out FILE] [FLAG ...]

Training, validation and optimizers of gpt2, with the flags of train_gpt.py. README.md says what the columns mean; the
table goes to a JSON file, too. --kernels '^$' compiles no kernel and counts launches, bytes and memory alone.
Exit codes: 0 done, 1 a graph or a kernel failed, 2 something is missing, 130 interrupted.
"""

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpu_proof import pretend_gpu
from speedrun.process import own_process

# The process of one architecture: pretend, then import torch
CHILD = "import sys; from gpu_proof import pretend_gpu; pretend_gpu.install(int(sys.argv[1])); "
CHILD += "from gpu_proof import gpu_graphs; gpu_graphs.child(sys.argv[1:])"
WORLDS = (8, 4, 2, 1)  # numbers of processes
DOCUMENT = 690  # tokens of a document on average: FineWeb's sample of 10.2 billion in 14.9 million documents
SPARE = 1500  # MiB that CUDA, its libraries and the allocator need beside the tensors
WRITES_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_", "index_copy_")  # do not read what they overwrite
LOOKUPS = ("index", "index_add_", "index_copy_", "index_select", "index_put_", "embedding")
NO_WORK = ("empty", "detach", "set_", "resize_")


# ---- Bytes -----------------------------------------------------------------------------------------------------------
def elements(t: Tensor) -> int:
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)


def find_ranges(source: str, arguments: dict[str, Any]) -> list[int]:
    """Return the numbers of indices of a launch: x, y, z, and of a reduction. FlexAttention's kernels have none."""
    ranges = {name: n for name, n in arguments.items() if name.endswith("numel")}
    ranges |= dict(re.findall(r"^    (\w+?numel) = (\d+)$", source, re.M))
    return [int(n) for n in ranges.values()]


def kernel_bytes(source: str, arguments: dict[str, Any]) -> int:
    """Count the bytes that a launch moves: of each argument an element by access and index, and none twice.

    Every argument is read at most once and written at most once, as a whole; FlexAttention's and the script's own
    kernels do both so. What a kernel reads back of its own output is in a cache, and masks are ignored.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if not (ranges := find_ranges(source, arguments)):
        return sum(elements(t) * t.itemsize for t in tensors.values())
    touched: Counter = Counter()
    for kind, pointer, _ in {*re.findall(r"tl\.(load|store|atomic_add)\((\w+) \+ ([^,]*)", source)}:
        if kind != "load" or not pointer.startswith("out_ptr"):
            for way in ("load", "store") if kind == "atomic_add" else (kind,):
                touched[way, pointer] += math.prod(ranges)
    return sum(min(elements(tensors[name]), n) * tensors[name].itemsize for (_, name), n in touched.items())


def product(arguments: dict[str, Any], source: str) -> tuple[str, str, int] | None:
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
    return sum(min(elements(t) * t.itemsize, rows) if t is table else elements(t) * t.itemsize for t in tensors)


# ---- What runs -------------------------------------------------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """Note what a program on fake CUDA tensors would launch, which kernels it compiles, and the peaks of its memory."""

    def __init__(self, names: str = ""):
        super().__init__()
        self.names, self.world, self.phase, self.graph = names, 1, "", ""  # names: a pattern for kernels to compile
        self.calls: dict[tuple, dict] = {}  # every launch, equal ones together
        self.kernels: dict[str, dict[Any, list]] = {}  # by graph and kernel: its configurations
        self.compiled: dict[object, list] = {}
        self.live: list[tuple[StorageWeakRef, int]] = []
        self.peaks: dict[str, int] = {}  # bytes, by phase
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
        names = dict(rows="rows", train=f"{'backward' if is_backward else 'forward'} {shape}", optimizers="optimizers")
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
            found.append(dict(config=str(config)))
            try:
                found[-1] |= compile_config(kernel, config)
            except Exception as error:  # whatever it is, it is reported
                found[-1]["error"] = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]

    def launched(self, kernel, args: tuple) -> None:
        name = kernel.fn.__name__
        self.kernels[self.graph][kernel] = self.compiled[kernel]
        args = tuple(getattr(a, "base", a) for a in args)  # a TensorDescriptor stands for its tensor
        shapes = tuple((tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a for a in args)
        if not self.again(key := (self.world, self.phase, self.graph, name, shapes)):
            arguments = dict(zip(kernel.fn.arg_names, args, strict=False))
            kind, called, flops = product(arguments, kernel.fn.src) or ("kernel", "", 0)
            self.note(key, kind, called, bytes=kernel_bytes(kernel.fn.src, arguments), flops=flops)

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
        known = {ref.cdata for ref, _ in self.live if not ref.expired()}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.device.type == "cuda":
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in known:
                    known.add(ref.cdata)
                    self.live.append((ref, t.untyped_storage().nbytes()))
        self.live = [entry for entry in self.live if not entry[0].expired()]
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), sum(n for _, n in self.live))

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
            self.note(key, "copy", bytes=num_bytes)

    def again(self, key: tuple) -> bool:
        if key in self.calls:
            self.calls[key]["count"] += 1
        return key in self.calls

    def note(self, key: tuple, kind: str, name: str = "", **costs: int) -> None:
        place = dict(zip(("world", "phase", "graph", "name"), key, strict=False))
        place["name"] = name or place["name"]
        self.calls[key] = dict(**place, kind=kind, count=1, flops=0) | costs


def compile_config(kernel, config) -> dict:
    """Compile with Triton, and its PTX once more with ptxas, which says what a thread and a block need."""
    import triton
    from torch._inductor.runtime.triton_compat import ASTSource
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    meta = kernel._create_compile_meta(config)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(config, meta)
    binary = triton.compile(source, target=GPUTarget("cuda", meta["cc"], 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [get_ptxas(meta["cc"]).path, "-v", "--regAllocOptLevel=2", file.name, "-o", "/dev/null"]  # as Triton
        command += [f"--gpu-name={sm_arch_from_capability(meta['cc'])}"]
        command += [] if options.get("enable_fp_fusion", True) else ["--fmad=false"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = dict(registers=r"Used (\d+) registers", spills=r"(\d+) bytes spill stores")
    needs = {name: max(map(int, re.findall(pattern, told))) for name, pattern in patterns.items()}
    return needs | dict(shared=binary.metadata.shared)


# ---- The process of one architecture ---------------------------------------------------------------------------------
def load_script(path: Path):
    spec: Any = importlib.util.spec_from_file_location("train_gpt", path)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_stages(script, cfg) -> list[dict]:
    """Return the parts of a run whose steps have equal graphs and windows."""
    found: list[dict] = []
    for step in range(cfg.num_iterations):
        now = script.Plan(step, cfg)
        phase = f"train {now.seq_len} x {len(now.weights)} of {now.classes or 'all'}"
        if not found or (phase, now.windows) != (found[-1]["phase"], found[-1]["windows"]):
            found.append(dict(first=step, steps=0, tokens=now.seq_len, windows=now.windows, phase=phase))
        found[-1]["steps"] += 1
    return found


def describe_attention(cfg) -> dict:
    """Return the kind and the widths of heads of each layer that attends, and the tokens of a block of the mask."""
    layers = [layer for layer in cfg.layers if layer.attention != "none"]
    widths = [[cfg.head_dim // (1 + half) for half in (layer.half_qk, layer.half_v)] for layer in layers]
    return dict(kinds=[layer.attention for layer in layers], widths=widths, block=cfg.block_size)


def rows_that_fit(script, cfg, memory: int, world: int) -> int:
    """Return how many rows `world` GPUs of so many MiB have for n-grams: another number than gpt2's is a flag's."""
    part = {8: 1, 4: 2}.get(world, 4) if memory > 40_000 else {1: 64}.get(world, 32)
    return cfg.ngram_rows // part if cfg.ngram_rows == script.PRESETS["gpt2"].ngram_rows else cfg.ngram_rows


def run_steps(script, cfg, device_memory: int, recorder: Recorder) -> dict:
    """Take a cycle of steps of every stage as one of WORLDS processes, and score a sequence.

    Return stages, graphs, and by number of processes the n-grams' rows, peaks of memory, and what a step communicates
    in bytes. Tokens are random, as frequent as Zipf's law says: they have more n-grams than text has.
    """
    rng, table = np.random.default_rng(0), script.NgramTable
    frequencies = (np.arange(cfg.vocab_size) + 3.0) ** -1.1
    sent_bytes: list[int] = []

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        sent_bytes.append(sum(sent) * rows[0].nbytes)
        return rows.new_empty(sum(received), rows.size(1))

    def make(plans: list, length: int, count: int) -> tuple[list, Any]:
        size = len(plans), count, length + 1
        tokens = rng.choice(cfg.vocab_size, size, p=frequencies / frequencies.sum()).astype(np.uint16)
        tokens[rng.random(size) < 1 / DOCUMENT] = cfg.eot_token
        with unset_fake_temporarily():
            made = trainer.reader.make(plans, tokens)
        with recorder.during("setup"):
            return trainer.reader.on_device(made)

    def during(kind: str, function: Callable) -> Callable:
        def wrapped(*args):
            with recorder.during(f"{kind} {recorder.phase}"):
                return function(*args)

        return wrapped

    script.step_optimizers = during("optimizers", script.step_optimizers)
    table.fetch, table.update, table.exchange = during("rows", table.fetch), during("rows", table.update), exchange
    script.Reader.on_host = lambda self, array: torch.from_numpy(np.require(array, requirements="CW"))
    stages = find_stages(script, cfg)
    rows: dict[int, int] = {}
    memory: dict[int, dict] = {}
    communication: dict[int, dict] = {}
    phases = {stage["phase"]: stage for stage in reversed(stages)}
    with recorder.during("setup"), pretend_gpu.building():
        trainer = script.Trainer(cfg, script.Ranks())
    graphs = 0
    for world in [world for world in WORLDS if cfg.batch_sequences % world == 0]:
        recorder.world, recorder.peaks = world, {}
        with recorder.during("setup"), pretend_gpu.building():
            trainer.gpt.zero_grad(set_to_none=True)
            trainer.ranks = trainer.reader.ranks = ranks = script.Ranks(0, world, 0, world)
            trainer.optimizers = trainer.table = trainer.reads = trainer.rows = trainer.sums = None
            gc.collect()
            trainer.optimizers = script.build_optimizers(trainer.gpt, ranks)
            rows[world] = rows_that_fit(script, cfg, device_memory, world)
            trainer.reader.cfg = own = dataclasses.replace(cfg, ngram_rows=rows[world])
            trainer.table = table(own, ranks, trainer.device)
        communication[world] = {}
        for phase, stage in phases.items():
            if world in WORLDS[1:-1] and stage["tokens"] < max(stage["tokens"] for stage in stages):
                continue  # the longest sequences take the most memory
            first = (stage["first"] + stage["steps"] // 2) // cfg.all_step * cfg.all_step
            sent_bytes.clear()
            cycle: list = []
            nbytes = 0.0
            for step in range(first, first + cfg.all_step):
                cycle.append(now := script.Plan(step, cfg))
                nbytes += sum(o.grad_buffer.nbytes * 2 for o in trainer.optimizers if now.is_due(o.groups[0]))
                if now.is_due(trainer.table.group):
                    steps, reads = make(cycle, now.seq_len, cfg.batch_sequences)
                    for now, sequences in zip(cycle, steps, strict=True):
                        with recorder.during(phase):  # the second sequence finds the gradients of the first
                            trainer.train_step(now, sequences[:2], reads)
                    cycle = []
            communication[world][phase] = round((nbytes + sum(sent_bytes)) / cfg.all_step)
        now = script.Plan(cfg.num_iterations, cfg, trains=False)
        (sequences,), reads = make([now], cfg.val_seq_len, world)
        V = cfg.padded_vocab
        with recorder.during("validation"), torch.no_grad():
            canon = torch.empty(V, V // 8, dtype=torch.uint8, device="cuda") if cfg.canon_file else None
            trainer.score(now, sequences, reads, canon)
        memory[world] = {name: peak for name, peak in recorder.peaks.items() if name != "setup"}
        graphs = graphs or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return dict(stages=stages, graphs=graphs, rows=rows, memory=memory, communication=communication)


def child(argv: Sequence[str]) -> None:
    """Print what was found out about one architecture, as a line of JSON."""
    arch, path, names, changes, *flags = argv
    recorder, script = Recorder(names), load_script(Path(path))
    given = script.parse_args(["--preset", "gpt2", "--device", "cuda", "--seed", "1", *flags])
    given = dataclasses.replace(given, **json.loads(changes))
    # A mask costs without a file, too; what CUDA graphs would replay is recorded launch by launch
    cfg = dataclasses.replace(script.resolve(given), canon_file=given.canon_file, cuda_graphs=False)
    device, counters = pretend_gpu.DEVICES[int(arch)], torch._dynamo.utils.counters
    found = dict(device=device.name, shared_limit=device.shared_limit, memory_mib=device.memory, cycle=cfg.all_step)
    found |= dict(failed="", stages=[], memory={})
    torch._dynamo.config.recompile_limit = 64  # as four numbers of processes share this one
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            found |= run_steps(script, cfg, device.memory, recorder)
    except Exception as error:  # what was found before is worth having
        found["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
    found |= dict(graph_breaks=dict(counters["graph_break"]))
    found |= dict(configuration=dataclasses.asdict(cfg), attention=describe_attention(cfg))
    calls = [call for call in recorder.calls.values() if call["phase"] != "setup"]
    kernels = {
        graph: [
            dict(name=kernel.fn.__name__, configurations=configurations) for kernel, configurations in found.items()
        ]
        for graph, found in recorder.kernels.items()
    }
    print(json.dumps(found | dict(kernels=kernels, calls=calls)))


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


def least_spills(kernel: dict) -> int:
    """Return what a kernel spills at least: of several configurations the compiler drops those that spill much."""
    return min((entry["spills"] for entry in kernel["configurations"] if "spills" in entry), default=0)


def failures(found: dict) -> list[str]:
    """Return what keeps the graphs from running on this GPU: a line each."""
    lines = [found["failed"]] if found["failed"] else []
    lines += [f"graph break: {reason}" for reason in found["graph_breaks"]]
    for kernel in (kernel for graph in found["kernels"].values() for kernel in graph):
        for entry in kernel["configurations"]:
            if "error" in entry:
                lines.append(f"{kernel['name']} ({entry['config']}) does not compile: {entry['error']}")
            elif entry["shared"] > found["shared_limit"]:
                lines.append(f"{kernel['name']} ({entry['config']}) needs {entry['shared']:,} bytes of shared memory")
        if (spills := least_spills(kernel)) > found.get("spill_limit", math.inf):
            lines.append(f"{kernel['name']} spills at least {spills} bytes: more than any kernel before")
    return list(dict.fromkeys(lines))


def step_launches(found: dict) -> list[float]:
    """Return the launches of a step of each stage for 8 processes, the mean over a cycle of updates."""
    counts: Counter = Counter()
    for call in found["calls"]:
        if call["world"] == WORLDS[0]:
            counts[call["phase"][call["phase"].find("train") :]] += call["count"]
    return [counts[stage["phase"]] / found["cycle"] for stage in found["stages"]]


def memory_lines(found: dict) -> list[str]:
    """Return a line for each number of processes: MiB of the phase that needs most, and of validation."""
    lines = []
    for world, memory in found["memory"].items():
        peaks = {name: n / 2**20 for name, n in memory.items()}
        most = max(peaks, key=peaks.__getitem__)
        fits = "fits" if peaks[most] + SPARE < found["memory_mib"] else "DOES NOT FIT"
        told = (
            f"Processes: {world}. Rows of n-grams: {found['rows'][world]:,}. Peak in MiB: {most} {peaks[most]:,.0f}, "
        )
        told += f"validation {peaks['validation']:,.0f}"
        lines.append(f"{told}. This {fits} into {found['memory_mib']:,} with {SPARE:,} to spare")
    return lines


def table(arch: int, found: dict) -> str:
    limit = found["shared_limit"]
    lines = [f"## sm_{arch}: {found['device']}, {limit:,} bytes of shared memory per block", ""]
    lines += ["| graph | kernels | configurations | registers | spills | shared memory |"]
    lines += ["|---|---|---|---|---|---|"]
    for graph, kernels in found["kernels"].items():
        entries = [entry for kernel in kernels for entry in kernel["configurations"] if "error" not in entry]
        registers, shared = (max((e[key] for e in entries), default=0) for key in ("registers", "shared"))
        cells = [graph, len(kernels), len(entries), registers, max(map(least_spills, kernels), default=0)]
        lines.append(f"| {' | '.join(map(str, cells))} | {shared:,} |")
    launches = ", ".join(f"{n:g}" for n in step_launches(found))
    lines += ["", f"Graphs: {found.get('graphs', 0)}. Launches of a step, by stage, on one of 8 processes: {launches}"]
    lines += memory_lines(found)
    return "\n".join([*lines, "", *(f"FAILED: {line}" for line in failures(found))]).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options: dict[str, Any] = dict(usage=argparse.SUPPRESS, allow_abbrev=False)
    options |= dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m gpu_proof gpu_graphs", description=__doc__, **options)
    archs = ",".join(map(str, pretend_gpu.DEVICES))
    parser.add_argument("--arch", default=archs, help="compute capabilities (default: %(default)s)")
    parser.add_argument("--script", type=Path, default=Path("train_gpt.py"), metavar="FILE")
    parser.add_argument("--kernels", default="", metavar="PATTERN", help="compile those with it in their names")
    out = Path("logs") / time.strftime("gpu-graphs-%Y%m%d-%H%M%S.json")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="default: logs/gpu-graphs-TIME.json")
    args, flags = parser.parse_known_args(argv)
    if unknown := set(args.arch.split(",")) - set(archs.split(",")):
        parser.error(f"--arch {args.arch}: {min(unknown)!r} is none of {archs}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict = dict(script=str(args.script), flags=flags, architectures={})
    for arch in map(int, args.arch.split(",")):
        found = measure(arch, args.script, flags, args.kernels)  # says so if Triton is missing
        document["architectures"][arch] = found
        document |= {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        print(f"{table(arch, found)}\n", flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return int(any(failures(found) for found in document["architectures"].values()))
