"""What each figure is. Times are in ms unless a name says otherwise; nothing here writes or prints."""

import contextlib
import dataclasses
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from train_gpt import GPT, Batch, Hyperparameters, World


def figure(values: Sequence[float]) -> dict:
    """The median of n measurements and their 10th and 90th percentile."""
    low, median, high = np.percentile(values, [10, 50, 90]).tolist()
    return dict(median=median, p10=low, p90=high, n=len(values))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Spans:
    """Spans of time by name: on CUDA between two events of the stream, which wait for nothing; else by the clock.

    `only` these are taken, or all. Read them when the device is done.
    """

    def __init__(self, device: torch.device, only: Sequence[str] = ()):
        self.is_cuda, self.only, self.edges = device.type == "cuda", only, defaultdict(list)

    def mark(self):
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self.only and name not in self.only:
            yield
            return
        start = self.mark()
        yield
        self.edges[name].append((start, self.mark()))

    def ms(self, name: str) -> float:
        return sum(a.elapsed_time(b) if self.is_cuda else 1000 * (b - a) for a, b in self.edges[name])


@dataclass(frozen=True)
class TimedWorld(World):
    """A World whose collectives, while there is a last one in `spans`, are waited for at once and timed.

    So nothing overlaps them: that is what communication costs, not what it adds to a step.
    """

    spans: list[Spans] = field(default_factory=list, compare=False)

    def timed(self, collective: Callable, *args, **kwargs):
        if not self.spans or self.size == 1:
            return collective(*args, **kwargs)
        with self.spans[-1].span("communication"):
            pending = collective(*args, **kwargs)
            pending.wait()
        return pending

    def reduce_scatter(self, *args, **kwargs):
        return self.timed(super().reduce_scatter, *args, **kwargs)

    def all_gather(self, *args, **kwargs):
        return self.timed(super().all_gather, *args, **kwargs)

    def all_reduce(self, *args, **kwargs):
        return self.timed(super().all_reduce, *args, **kwargs)


def agree(world: World, device: torch.device, value: float) -> float:
    """The mean over the ranks, the same on all of them."""
    return World.all_reduce(world, torch.tensor([value], device=device)).wait().item() / world.size


@dataclass
class Trainer:
    """What train_gpt.train builds before its clock starts."""

    cfg: Hyperparameters
    world: TimedWorld
    device: torch.device
    gpt: GPT
    model: Callable
    orthogonalize: Callable
    optimizers: Sequence
    window: Tensor

    @classmethod
    def build(cls, cfg: Hyperparameters, world: World, device: torch.device) -> "Trainer":
        """Without the warm-up."""
        world = TimedWorld(**dataclasses.asdict(world))
        torch.manual_seed(cfg.seed)
        gpt = GPT(cfg).to(device)
        if world.size > 1:
            for p in gpt.parameters():
                dist.broadcast(p.detach(), src=0)
        model, orthogonalize = gpt, train_gpt.zeropower_via_newtonschulz5
        if cfg.compile:
            model, orthogonalize = (torch.compile(f, fullgraph=True, dynamic=False) for f in (model, orthogonalize))
        optimizers = train_gpt.build_optimizers(gpt, cfg, world, orthogonalize)
        window = torch.ones((), dtype=torch.int32, device=device)
        return cls(cfg, world, device, gpt, model, orthogonalize, optimizers, window)

    def warm_up(self) -> None:
        train_gpt.warm_up(self.gpt, self.model, self.optimizers, self.cfg, self.world)

    def batches(self, plan: Sequence[Batch]) -> Iterator:
        """This rank's sequences of each batch."""
        own = range(self.world.rank, self.cfg.batch_sequences, self.world.size)
        return train_gpt.read_batches(plan, self.cfg.train_seq_len, own, self.cfg.vocab_size, self.device)

    def step(self, batches: Iterator, spans: Spans) -> Sequence[tuple[Tensor, Tensor]]:
        """A step of the loop in train_gpt.train, but for its log and schedules. Returns the step's sequences."""

        def model(*inputs: Tensor) -> Tensor:
            with spans.span("forward"):
                return self.model(*inputs)

        with spans.span("step"):
            with spans.span("data"):
                sequences = next(batches)
            with spans.span("train_step"):
                loss = train_gpt.train_step(model, sequences, self.window)
            with spans.span("loss"):
                loss = self.world.all_reduce(loss)
            with spans.span("optimizers"):
                train_gpt.step_optimizers(self.optimizers)
                self.gpt.zero_grad(set_to_none=True)
            loss.wait()
        return sequences


PARTS = ("data", "forward", "backward", "optimizers", "communication")


def parts_of(spans: Spans) -> dict[str, float]:
    """The parts of an instrumented step, none of which holds another."""
    found = {name: spans.ms(name) for name in ("data", "forward", "communication")}
    found["backward"] = spans.ms("train_step") - found["forward"]
    found["optimizers"] = spans.ms("loss") + spans.ms("optimizers") - found["communication"]
    return {name: found[name] for name in PARTS}


def step_times(trainer: Trainer, batches: Iterator, window: int, n: int, parts: bool) -> dict:
    """n steps, and with `parts` as many instrumented ones between them; and the FLOPs of a step of this rank."""
    trainer.window.fill_(window)
    whole, instrumented, seen = [], [], []
    for _ in range(n):
        whole.append(Spans(trainer.device, only=["step"]))
        sequences = trainer.step(batches, whole[-1])
        seen = seen or [tokens for tokens, _ in sequences]
        if parts:
            instrumented.append(Spans(trainer.device))
            trainer.world.spans.append(instrumented[-1])
            trainer.step(batches, instrumented[-1])
            trainer.world.spans.clear()
    synchronize(trainer.device)
    found = dict(window_blocks=window, whole=figure([spans.ms("step") for spans in whole]))
    found["flops"] = sum(training_flops(trainer.gpt, tokens, window) for tokens in seen)
    if parts:
        each = [parts_of(spans) for spans in instrumented]
        found["parts"] = {name: figure([step[name] for step in each]) for name in PARTS}
        found["sum_of_parts"] = sum(part["median"] for part in found["parts"].values())
        found["sum_over_whole"] = found["sum_of_parts"] / found["whole"]["median"]
    return found


def seen_pairs(docs: Tensor, window: int, block_size: int) -> Tensor:
    """How many (token, token it sees) there are: causal, in its document (docs (T,) never falls), in its window."""
    position = torch.arange(len(docs), device=docs.device)
    opens = torch.ones_like(docs, dtype=torch.bool)
    opens[1:] = docs[1:] != docs[:-1]
    document = torch.where(opens, position, 0).cummax(0).values
    windowed = (position // block_size - (max(window, 1) - 1)).clamp(min=0) * block_size
    return (position - torch.maximum(document, windowed) + 1).sum()


def matmul_parameters(gpt: GPT) -> int:
    """Those that every token is multiplied with: the blocks' matrices and the head, its padding included."""
    return sum(p.numel() for name, p in gpt.named_parameters() if p.ndim >= 2 and "embed" not in name)


def flops_of(gpt: GPT, tokens: int, pairs: dict[str, int]) -> int:
    """Of forward and backward: 6 per matmul parameter and token, 12 per pair, head and dimension in each layer.

    pairs: how many tokens see how many, by the layer's letter. The backward pass counts twice the forward pass;
    recomputation does not count.
    """
    cfg = gpt.cfg
    attention = sum(pairs[letter] for letter in cfg.attention_layout if letter != "-")
    return 6 * matmul_parameters(gpt) * tokens + 12 * cfg.num_heads * cfg.head_dim * attention


def training_flops(gpt: GPT, tokens: Tensor, window: int) -> int:
    """Of a sequence, with the pairs that its documents and the windows leave."""
    docs = (tokens == gpt.cfg.eot_token).cumsum(0)
    windows = {"L": window, "S": window // 2}
    pairs = {letter: int(seen_pairs(docs, blocks, gpt.cfg.block_size)) for letter, blocks in windows.items()}
    return flops_of(gpt, len(tokens), pairs)


def repeat(function: Callable[[], object], device: torch.device, n: int, inner: int = 1) -> list[float]:
    """Times of a call, n of them, each the mean of `inner`; two calls before do not count."""
    taken = []
    for i in range(n + 2):
        spans = Spans(device)
        with spans.span("call"):
            for _ in range(inner):
                function()
        if i > 1:
            taken.append(spans)
    synchronize(device)
    return [spans.ms("call") / inner for spans in taken]


def matmul_tflops(device: torch.device, dtype: torch.dtype, n: int) -> list[float]:
    """What a large square matmul attains on this device: what utilization is measured against."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return [2 * size**3 / ms / 1e9 for ms in repeat(lambda: a @ b, device, n, inner=10 if size > 2048 else 1)]


def newton_schulz(trainer: Trainer, n: int) -> list[dict]:
    """For each shape of hidden matrices, a rank's share of them in one batch, as Muon orthogonalizes them."""
    shapes: Counter = Counter()
    for name, p in trainer.gpt.named_parameters():
        if name.startswith("blocks.") and p.ndim >= 2:
            shapes[tuple(sorted(p.shape[-2:]))] += p.shape[:-2].numel()
    found, dtype = [], train_gpt.activation_dtype(trainer.cfg)
    for (rows, cols), count in shapes.items():
        share = -(-count // trainer.world.size)
        stack = torch.randn(share, rows, cols, device=trainer.device)
        with torch.no_grad():
            taken = repeat(lambda stack=stack: trainer.orthogonalize(stack, dtype), trainer.device, n)
        flops = share * 5 * (4 * rows * rows * cols + 2 * rows**3)  # five times X X', A A and B X
        ms = figure(taken)
        found.append(dict(shape=[share, rows, cols], ms=ms, flops=flops, tflops=flops / ms["median"] / 1e9))
    return found


def block_mask(trainer: Trainer, tokens: Tensor, window: int, n: int) -> dict:
    """document_block_mask alone and not compiled, for one training sequence."""
    cfg = trainer.cfg
    docs = (tokens == cfg.eot_token).cumsum(0, dtype=torch.int32)
    limit = torch.tensor(window, dtype=torch.int32, device=trainer.device)
    taken = repeat(lambda: train_gpt.document_block_mask(docs, limit, cfg.block_size), trainer.device, n)
    return dict(tokens=len(tokens), ms=figure(taken))


def drop_from_cache(paths: Sequence[str]) -> bool:
    """Asks the kernel to forget what it holds of these files; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return True


def loader(trainer: Trainer, plan: Sequence[Batch], n: int) -> dict:
    """Tokens per second of one rank while all of them read and nothing else, from files out of the cache and in it."""
    tokens = len(plan) * trainer.cfg.batch_tokens // trainer.world.size
    paths = sorted({batch.shard.path for batch in plan})
    found: dict = dict(tokens=tokens)
    for state in ("cold", "warm"):
        rates = []
        for _ in range(n):
            if state == "cold" and not drop_from_cache(paths):
                break
            agree(trainer.world, trainer.device, 0.0)  # all ranks have dropped, none has begun
            start = time.perf_counter()
            for _ in trainer.batches(plan):
                pass
            synchronize(trainer.device)
            rates.append(tokens / (time.perf_counter() - start))
        found[f"{state}_tokens_per_s"] = figure(rates) if rates else None
    return found


def validation(trainer: Trainer, plan: Sequence[Batch], n: int) -> dict:
    """All ranks together, reading included."""
    cfg, world, taken = trainer.cfg, trainer.world, []
    while len(taken) < n:
        synchronize(trainer.device)
        start = time.perf_counter()
        own = plan[world.rank :: world.size]
        batches = train_gpt.read_batches(own, cfg.val_seq_len, [0], cfg.vocab_size, trainer.device)
        loss = train_gpt.evaluate(trainer.model, batches, trainer.window, world)
        taken.append(time.perf_counter() - start)
        if agree(world, trainer.device, taken[0]) > 5:
            break
    return dict(tokens=len(plan) * cfg.val_seq_len, seconds=figure(taken), loss=loss)


def synchronizations(trainer: Trainer, batches: Iterator) -> dict:
    """Operations of one step that wait for the device, by the line that asks for them. None is the aim."""
    synchronize(trainer.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step(batches, Spans(trainer.device, only=["nothing"]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{warning.filename}:{warning.lineno}" for warning in caught if "synchronizing" in str(warning.message)
    )
    return dict(count=lines.total(), lines=dict(lines))


def profile(trainer: Trainer, batches: Iterator, steps: int = 3) -> str:
    """The 20 operations that took longest themselves, of some steps: kernels where there is CUDA."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if trainer.device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            trainer.step(batches, Spans(trainer.device, only=["nothing"]))
        synchronize(trainer.device)
    order = "self_device_time_total" if trainer.device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20)
