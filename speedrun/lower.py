"""Lower train_gpt.py's graphs for GPUs that are not here, compile every kernel to machine code, predict a step.

    python -m speedrun lower [--arch 90 89 80] [--one_of 8] [--script FILE] [--kernels PATTERN] [--update]
        [flags of train_gpt.py]

docs/gpu.md says what the figures mean. --kernels '^$' compiles no kernel. --update does the same, and writes launches,
memory and predicted times to h100.json, beside those of other cards and numbers of processes.
Exit codes: 0 done, 1 a graph or a kernel failed, 2 something is missing, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import re
import sys
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

from speedrun import cards, pretend_gpu, roofline
from speedrun.pretend_gpu import GPUS
from speedrun.process import own_process
from speedrun.roofline import DOCUMENT

# The process of one architecture: pretend, then import torch
CHILD = "import sys; from speedrun import pretend_gpu; pretend_gpu.install(int(sys.argv[1])); "
CHILD += "from speedrun import lower; lower.child(*sys.argv[1:])"
SPARE = 1500  # MiB that CUDA, its libraries and the allocator need beside the tensors
WRITES_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_", "index_copy_")  # do not read what they overwrite
LOOKUPS = ("index", "index_add_", "index_copy_", "index_select", "index_put_", "embedding")
NO_WORK = ("empty", "detach", "set_", "resize_")


# ---- Bytes and FLOPs of a launch -------------------------------------------------------------------------------------
def elements(t: Tensor) -> int:
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)


def kernel_costs(source: str, arguments: dict[str, Any]) -> dict:
    """Return the kind, bytes and FLOPs of a launch, and of a product that the script's own kernel makes a name.

    Bytes are an element by access and index, none twice: every argument is read at most once and written at most once,
    as a whole. FlexAttention's and the script's own kernels, which have no numbered ranges of indices, do both so. What
    a kernel reads back of its own output is in a cache, and masks are ignored.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    ranges = {name: n for name, n in arguments.items() if name.endswith("numel")}
    ranges |= dict(re.findall(r"^    (\w+?numel) = (\d+)$", source, re.M))
    if not ranges:
        costs: dict = dict(kind="kernel", bytes=sum(elements(t) * t.itemsize for t in tensors.values()))
        if "tl.dot" in source and "flex" not in source:  # which takes three matrices
            a, b, *_ = tensors.values()
            (rows, inner), columns = a.shape, b.numel() // a.shape[1]
            kind = f"{a.dtype} in Triton".removeprefix("torch.")
            name = f"{'_scaled_' * (a.dtype.itemsize == 1)}mm {rows}x{inner}x{columns}"  # as PyTorch calls those in FP8
            costs |= dict(kind=kind, name=name, flops=2 * rows * inner * columns)
        return costs
    touched: Counter = Counter()
    for kind, pointer, _ in {*re.findall(r"tl\.(load|store|atomic_add)\((\w+) \+ ([^,]*)", source)}:
        if kind != "load" or not pointer.startswith("out_ptr"):
            for way in ("load", "store") if kind == "atomic_add" else (kind,):
                touched[way, pointer] += math.prod(map(int, ranges.values()))
    moved = (min(elements(tensors[name]), n) * tensors[name].itemsize for (_, name), n in touched.items())
    return dict(kind="kernel", bytes=sum(moved))


def operation_costs(func, args: tuple, reads: list[Tensor], writes: list[Tensor], result) -> dict:
    """Return the same of a call of ATen; of a table only the bytes of as many rows as it looks up."""
    packet, table = func._overloadpacket, args[0] if func._overloadpacket.__name__ in LOOKUPS else None
    sizes = [(t, elements(t) * t.itemsize) for t in (*reads, *writes)]
    rows = max((size for t, size in sizes if t is not table), default=0)
    costs = dict(kind="copy", bytes=sum(min(size, rows) if t is table else size for t, size in sizes))
    if packet in flop_registry:
        wide = [t for t in reads if t.ndim > 1]
        a, b = wide[:2] if packet.__name__ == "_scaled_mm" else wide[-2:]  # scales come last, and what is added first
        costs["name"] = f"{packet.__name__} {'x'.join(map(str, (*a.shape, b.shape[-1])))}"
        costs |= dict(kind=str(a.dtype).removeprefix("torch."), flops=flop_registry[packet](*args, out_val=result))
    return costs


# ---- What runs -------------------------------------------------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """Note what a program on fake CUDA tensors would launch, which kernels it compiles, and the peaks of its memory."""

    def __init__(self, names: str = ""):
        super().__init__()
        self.names, self.phase, self.graph = names, "", ""  # names: a pattern for kernels to compile
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

    def part(self, name: str):
        """Return a context for a part of a phase, as `Trainer.part` does."""
        return self.during(f"{name} {self.phase}")

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
        self.kernels[self.graph][kernel] = self.compiled[kernel]
        args = tuple(getattr(a, "base", a) for a in args)  # a TensorDescriptor stands for its tensor
        shapes = tuple((tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a for a in args)
        arguments = dict(zip(kernel.fn.arg_names, args, strict=False))
        self.note(kernel.fn.__name__, shapes, lambda: kernel_costs(kernel.fn.src, arguments))

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
        """Note a call of ATen."""
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
        if reads or writes:
            shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in (*reads, *writes))
            result = result if writes else None
            self.note(name, shapes, lambda: operation_costs(func, args, reads, writes, result))

    def note(self, name: str, shapes: tuple, costs: Callable[[], dict]) -> None:
        key = self.phase, self.graph, name, shapes
        if key not in self.calls:
            place = dict(zip(("phase", "graph", "name"), key, strict=False))
            self.calls[key] = place | dict(count=0, flops=0) | costs()
        self.calls[key]["count"] += 1


def compile_config(kernel, config) -> dict:
    """Compile with Triton, and return what its ptxas says that a thread and a block need."""
    import triton
    from torch._inductor.runtime.triton_compat import ASTSource
    from triton.backends.compiler import GPUTarget

    meta = kernel._create_compile_meta(config)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(config, meta)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        binary = triton.compile(source, target=GPUTarget("cuda", meta["cc"], 32), options=options)
    patterns = dict(registers=r"Used (\d+) registers", spills=r"(\d+) bytes spill stores")
    needs = {name: max(map(int, re.findall(pattern, told.getvalue()))) for name, pattern in patterns.items()}
    return needs | dict(shared=binary.metadata.shared)


# ---- The process of one architecture ---------------------------------------------------------------------------------
def find_stages(cfg) -> list[dict]:
    """Return the parts of a run whose steps have equal graphs and windows."""
    found: list[dict] = []
    for plan in cfg.plans:
        targets = len(plan.next_weights) + (plan.prefix_weight > 0)
        phase = f"train {plan.seq_len} x {targets} of {plan.candidates or 'all'}"
        # Of the pointer, the mean: a token sees the part of its block before it, and the block before
        windows = {kind: window.reach for kind, window in plan.windows.items()} | dict(pointer=1.5 * cfg.pointer_block)
        if not found or (phase, windows) != (found[-1]["phase"], found[-1]["windows"]):
            found.append(dict(first=plan.step, steps=0, tokens=plan.seq_len, windows=windows, phase=phase))
        found[-1]["steps"] += 1
    return found


def run_steps(script, cfg, stages: list[dict], world: int, recorder: Recorder) -> dict:
    """Take a cycle of steps of every stage as one of `world` processes, and score a sequence.

    Return graphs, peaks of memory, and what a step communicates in bytes. Tokens are random, as frequent as
    Zipf's law says: they have more n-grams than text has.
    """
    rng, frequencies = np.random.default_rng(0), (np.arange(cfg.vocab_size) + 3.0) ** -1.1
    sent_bytes: list[int] = []

    class Table(roofline.rows_apart(script.NgramTable, recorder.part)):  # type: ignore[misc]
        def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Callable]:
            sent_bytes.append(sum(sent) * rows[0].nbytes)
            return rows.new_empty(sum(received), rows.size(1)), lambda: None

    class Trainer(script.Trainer):
        table_class, part = Table, recorder.part

    def read(plans: list, length: int, count: int) -> tuple[list, Any]:
        size = len(plans), count, length + 1
        tokens = rng.choice(cfg.vocab_size, size, p=frequencies / frequencies.sum()).astype(np.uint16)
        tokens[rng.random(size) < 1 / DOCUMENT] = cfg.eot_token
        with unset_fake_temporarily():
            made = trainer.reader.make(plans, tokens)
        with recorder.during("setup"):
            return trainer.reader.on_device(made)

    with recorder.during("setup"), torch.device("cuda"):
        trainer = Trainer(cfg, script.Ranks(0, world, 0, world))
    trainer.reader.on_host = lambda array: torch.from_numpy(array.copy())
    communication = {}
    for phase, stage in {stage["phase"]: stage for stage in reversed(stages)}.items():
        first = (stage["first"] + stage["steps"] // 2) // cfg.all_step * cfg.all_step
        sent_bytes.clear()
        cycle: list = []
        nbytes = 0.0
        for last in cfg.plans[first : first + cfg.all_step]:
            cycle.append(last)
            sent = [o for o in trainer.optimizers if o.is_due(last) and not (last.ties and "lm_head" in o.names)]
            nbytes += sum(o.param_buffer.nbytes * 2 for o in sent)
            if trainer.table.group.names in last.updates:
                steps, requests = read(cycle, last.seq_len, cfg.batch_sequences)
                for plan, sequences in zip(cycle, steps, strict=True):
                    with recorder.during(phase):  # the second sequence finds the gradients of the first
                        trainer.train_step(plan, sequences[:2], requests)
                cycle = []
        communication[phase] = round((nbytes + sum(sent_bytes)) / cfg.all_step)
    plan = script.plan_validation(cfg.num_iterations, cfg)
    (sequences,), requests = read([plan], cfg.val_seq_len, world)
    V = cfg.padded_vocab
    with recorder.during("validation"), torch.no_grad():
        canon = torch.empty(V, V // 8, dtype=torch.uint8, device="cuda") if cfg.canon_file else None
        trainer.score(plan, sequences, requests, canon)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    memory = {name: peak for name, peak in recorder.peaks.items() if name != "setup"}
    return dict(graphs=graphs, memory=memory, communication=communication)


def child(arch: str, world: str, path: str, names: str, *flags: str) -> None:
    """Print what was found out about one architecture, as a line of JSON."""
    recorder, breaks = Recorder(names), torch._dynamo.utils.counters["graph_break"]
    spec: Any = importlib.util.spec_from_file_location("train_gpt", path)
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = script
    spec.loader.exec_module(script)
    given = script.parse_args(["--preset", "gpt2", "--device", "cuda", "--seed", "1", *flags])
    # A mask costs without a file, too; what CUDA graphs would replay is recorded launch by launch
    cfg = dataclasses.replace(script.resolve(given), canon_file=given.canon_file, cuda_graphs=False)
    stages = find_stages(cfg)  # before tensors are fake: plans have some
    attention = [
        dict(script.ATTENTION[row.attention]._asdict(), heads=cfg.num_heads, qk_dim=layer.qk_dim, v_dim=layer.v_dim)
        for layer in cfg.resolved_layers
        if (row := layer.row) and layer.window
    ]
    if cfg.pointer_dim:
        attention.append(dict(window="pointer", heads_per_pair=1, heads=2, qk_dim=cfg.pointer_dim, v_dim=16))
    found = dict(configuration=dataclasses.asdict(cfg), cycle=cfg.all_step, one_of=int(world), failed="")
    found |= dict(attention=attention, stages=stages)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            found |= run_steps(script, cfg, stages, int(world), recorder)
    except Exception as error:  # what was found before is worth having
        found["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
    kernels = {
        graph: [dict(name=kernel.fn.__name__, configurations=configs) for kernel, configs in own.items()]
        for graph, own in recorder.kernels.items()
    }
    calls = [call for call in recorder.calls.values() if call["phase"] != "setup"]
    print(json.dumps(found | dict(graph_breaks=dict(breaks), kernels=kernels, calls=calls)))


# ---- The report ------------------------------------------------------------------------------------------------------
def measure(arch: int, script: Path, flags: Sequence[str] = (), names: str = "", one_of: int = 8) -> dict:
    """Return what `child` found out, in a process of its own. Raise RuntimeError if it could not begin.

    `names` is a pattern: compile the kernels that have it in their names; "^$" is none, "" all.
    """
    if why := pretend_gpu.missing():
        raise RuntimeError(why)
    told = own_process(["-c", CHILD, str(arch), str(one_of), str(script.resolve()), names, *flags])
    return json.loads(told.splitlines()[-1])


def failures(arch: int, found: dict) -> list[str]:
    """Return what keeps the graphs from running on this GPU: a line each."""
    lines = [found["failed"]] if found["failed"] else []
    lines += [f"graph break: {reason}" for reason in found["graph_breaks"]]
    for kernel in (kernel for graph in found["kernels"].values() for kernel in graph):
        for entry in kernel["configurations"]:
            if "error" in entry:
                lines.append(f"{kernel['name']} ({entry['config']}) does not compile: {entry['error']}")
            elif entry["shared"] > GPUS[arch].shared_limit:
                lines.append(f"{kernel['name']} ({entry['config']}) needs {entry['shared']:,} bytes of shared memory")
    return list(dict.fromkeys(lines))


def table(arch: int, found: dict) -> str:
    gpu = GPUS[arch]
    lines = [f"## sm_{arch}: {gpu.name}, {gpu.shared_limit:,} bytes of shared memory per block", ""]
    for graph, kernels in found["kernels"].items():
        entries = [entry for kernel in kernels for entry in kernel["configurations"] if "error" not in entry]
        registers, shared = (max((e[key] for e in entries), default=0) for key in ("registers", "shared"))
        told = f"- {graph}: {len(kernels)} kernels, {registers} registers, {shared:,} bytes of shared memory"
        for kernel in kernels:  # of several configurations the compiler drops those that spill much
            if spills := min((e["spills"] for e in kernel["configurations"] if "spills" in e), default=0):
                told += f"; {kernel['name']} spills {spills} bytes"
        lines.append(told)
    lines += ["", roofline.table(found, {}), ""]
    if "memory" in found:
        peaks = {name: n / 2**20 for name, n in found["memory"].items()}
        most = max(peaks, key=peaks.__getitem__)
        fits = "fits" if peaks[most] + SPARE < gpu.memory_mib else "DOES NOT FIT"
        told = f"Peak in MiB: {most} {peaks[most]:,.0f}, validation {peaks['validation']:,.0f}"
        lines += [f"Graphs: {found['graphs']}. {told}. This {fits} into {gpu.memory_mib:,} with {SPARE:,} to spare"]
    return "\n".join([*lines, *(f"FAILED: {line}" for line in failures(arch, found))])


def update(arch: int, found: dict) -> None:
    """Write what bench and cards read of an architecture as one of 8, and of an H100 memory by processes."""
    document = json.loads(cards.PREDICTED.read_text()) | dict(torch=torch.__version__)
    if found["one_of"] == 8:
        told = json.dumps({name: found[name] for name in ("one_of", "stages", "memory", "predicted")})
        document["gpus"][str(arch)] = json.loads(told, parse_float=lambda text: round(float(text), 3))
    if arch == cards.H100.arch:
        mib = {name: round(n / 2**20) for name, n in found["memory"].items()}
        own = dict(train=max(n for name, n in mib.items() if "train" in name), validation=mib["validation"])
        own |= dict(ngram_rows=found["configuration"]["ngram_rows"])
        document["processes"][str(found["one_of"])] = own
    cards.PREDICTED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options: dict[str, Any] = dict(usage=argparse.SUPPRESS, allow_abbrev=False)
    options |= dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m speedrun lower", description=__doc__, **options)
    parser.add_argument("--arch", type=int, nargs="+", choices=GPUS, default=[*GPUS], help="(default: %(default)s)")
    parser.add_argument("--one_of", type=int, default=8, metavar="N", help="as one process of N (default: 8)")
    told = "a changed train_gpt.py; a record has another interface: lower it with the tools of its day"
    parser.add_argument("--script", type=Path, default=Path("train_gpt.py"), metavar="FILE", help=told)
    parser.add_argument("--kernels", default="", metavar="PATTERN", help="compile those with it in their names")
    parser.add_argument("--update", action="store_true", help="compile no kernel, and write times to h100.json")
    args, flags = parser.parse_known_args(argv)
    code = 0
    try:
        for arch in args.arch:
            found = measure(arch, args.script, flags, "^$" if args.update else args.kernels, args.one_of)
            found["predicted"] = roofline.predict(found) if "memory" in found else []
            print(f"{table(arch, found)}\n", flush=True)
            code |= bool(failures(arch, found))
            if args.update and not failures(arch, found):
                update(arch, found)
    except (RuntimeError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m speedrun lower: interrupted\n")
    return code
