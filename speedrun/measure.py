"""What each figure is: a median with its 10th and 90th percentiles, n and a unit. Nothing here prints or writes."""

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from train_gpt import Batch, Trainer

Figures = dict[str, dict]  # by name


def figure(values: Sequence[float], unit: str) -> dict:
    low, median, high = np.percentile(values, [10, 50, 90]).tolist()
    return dict(median=median, p10=low, p90=high, n=len(values), unit=unit)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def mean_over_ranks(trainer: Trainer, value: float) -> float:
    """Return the mean of the ranks' values. Every rank waits for the others."""
    total = torch.tensor([value], device=trainer.device)
    train_gpt.start_collective(dist.all_reduce, total)()
    return total.item() / trainer.ranks.world_size


class Spans:
    """Time nested spans by name, each without the spans inside it.

    On CUDA the edges are events in the stream, which wait for nothing: read the times when the device is idle.
    """

    def __init__(self, device: torch.device):
        self.on_cuda, self.open, self.closed = device.type == "cuda", [], []

    def edge(self):
        if not self.on_cuda:
            return time.perf_counter()
        (event := torch.cuda.Event(enable_timing=True)).record()
        return event

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        parent, start = self.open[-1] if self.open else None, self.edge()
        self.open.append(name)
        yield
        self.closed.append((self.open.pop(), parent, start, self.edge()))

    def ms(self) -> Counter:
        own: Counter = Counter()
        for name, parent, start, end in self.closed:
            ms = start.elapsed_time(end) if self.on_cuda else 1000 * (end - start)
            own[name] += ms
            own[parent] -= ms
        del own[None]
        return own


@contextlib.contextmanager
def instrumented(trainer: Trainer, spans: Spans) -> Iterator[None]:
    """Time forward pass, optimizers and collectives of the steps taken inside.

    Each collective is waited for at once, so that nothing overlaps it: this is what communication costs, not what it
    adds to a step.
    """

    def timed(name: str, function: Callable) -> Callable:
        def call(*args):
            with spans.span(name):
                return function(*args)

        return call

    start, patch = train_gpt.start_collective, mock.patch.object

    def collective(*args) -> Callable[[], None]:
        with spans.span("communication"):
            start(*args)()
        return lambda: None

    with (
        patch(trainer, "model", timed("forward", trainer.model)),
        patch(train_gpt, "step_optimizers", timed("optimizers", train_gpt.step_optimizers)),
        patch(train_gpt, "start_collective", collective),
    ):
        yield


def read(trainer: Trainer, plan: Iterable[Batch]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Read this rank's sequences of each batch."""
    cfg, ranks = trainer.cfg, trainer.ranks
    own = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    return train_gpt.read_batches(plan, own, cfg, trainer.device)


def take_step(trainer: Trainer, batches: Iterator, step: int, parts: bool = False) -> Spans:
    """Time a step of training number `step`; what the other spans leave of it is the backward pass."""
    spans = Spans(trainer.device)
    with instrumented(trainer, spans) if parts else contextlib.nullcontext(), spans.span("backward"):
        with spans.span("data"):
            sequences = next(batches)
        trainer.train_step(step, sequences)
    return spans


def title(step: int, cfg: train_gpt.Hyperparameters) -> str:
    windows = " and ".join(f"{window:,}" for window in train_gpt.attention_windows(step, cfg))
    return f"step: whole, stage {train_gpt.stage_index(step, cfg) + 1} (windows of {windows} tokens)"


def take_steps(trainer: Trainer, batches: Iterator, step: int, n: int, parts: Sequence[bool]) -> list[Counter]:
    """Return the ms of n steps for each of `parts`, in turn: means over a step that Adam takes and those it leaves out.

    A median of single steps would be that of one kind.
    """
    every = trainer.cfg.adam_every
    taken = [[take_step(trainer, batches, step + i, p) for i in range(every)] for _ in range(n) for p in parts]
    synchronize(trainer.device)
    sums = [sum((spans.ms() for spans in cycle), Counter()) for cycle in taken]
    return [Counter({name: ms / every for name, ms in total.items()}) for total in sums]


def whole_steps(trainer: Trainer, batches: Iterator, step: int, n: int) -> list[float]:
    """Return the ms of n steps as in training."""
    return [own.total() for own in take_steps(trainer, batches, step, n, [False])]


def steps(trainer: Trainer, batches: Iterator, step: int, n: int, matmul_tflops: float) -> Figures:
    """Take whole steps and instrumented ones in turn, and compute what the median whole one attains."""
    cfg = trainer.cfg
    times = take_steps(trainer, batches, step, n, [False, True])
    parts = ["data", "forward", "backward", "optimizers", *["communication"] * dist.is_initialized()]
    found = {f"step: {name}": figure([own[name] for own in times[1::2]], "ms") for name in parts}
    whole, total = figure([own.total() for own in times[::2]], "ms"), sum(part["median"] for part in found.values())
    found[title(step, cfg)] = whole
    found["sum of the parts / whole"] = figure([total / whole["median"]], "")
    seconds, tflop = whole["median"] / 1000, step_flops(trainer, next(batches), step) / 1e12
    tokens = cfg.batch_sequences * train_gpt.train_seq_len(step, cfg)
    found["throughput"] = figure([tokens / seconds], "tokens/s")
    found["model FLOPs per step and rank"] = figure([tflop * 1000], "GFLOP")
    found["attained per rank"] = figure([tflop / seconds], "TFLOP/s")
    return found | {"utilization, relative to the large matmul": figure([100 * tflop / seconds / matmul_tflops], "%")}


def attended_pairs(tokens: Tensor, window: int, eot_token: int, rows: int = 1) -> int:
    """Count the pairs of a token and one that it sees: in its document and the window; paired heads: of two rows."""
    at = torch.arange(len(tokens), device=tokens.device)
    first = torch.where(tokens == eot_token, at, 0).cummax(0).values  # of the token's document
    return sum(int((rows * (at - first) + row).clamp(max=window).sum()) + len(tokens) for row in range(rows))


def step_flops(trainer: Trainer, sequences: Sequence[tuple[Tensor, Tensor]], step: int) -> int:
    """Count the FLOPs of forward and backward pass: 6 per matmul parameter and token, 12 per pair, head and dimension.

    Matmul parameters are those of the blocks and the head, padding included; pairs those that the documents of these
    sequences and the windows leave. The backward pass counts twice the forward pass; recomputation does not count.
    """
    cfg, total = trainer.cfg, 0
    matmul = sum(p.numel() for name, p in trainer.gpt.named_parameters() if p.ndim >= 2 and "embed" not in name)
    long, short = train_gpt.attention_windows(step, cfg)
    for tokens, _ in sequences:
        pairs = dict(none=0, long=attended_pairs(tokens, long, cfg.eot_token))
        pairs["short"] = attended_pairs(tokens, short, cfg.eot_token)
        pairs["paired"] = attended_pairs(tokens, short, cfg.eot_token, rows=2) // 2  # of half as many heads
        attention = sum(pairs[layer.attention] for layer in cfg.layers)
        total += 6 * matmul * len(tokens) + 12 * cfg.num_heads * cfg.head_dim * attention
    return total


def together(trainer: Trainer, function: Callable[[], object], n: int) -> list[float]:
    """Return the ms of n calls that all ranks begin together, from idle device to idle device."""
    taken = []
    for _ in range(n):
        mean_over_ranks(trainer, 0.0)
        start = time.perf_counter()
        function()
        synchronize(trainer.device)
        taken.append(1000 * (time.perf_counter() - start))
    return taken


def matmul_tflops(trainer: Trainer, n: int) -> list[float]:
    """Return the TFLOP/s of a large square matmul: what utilization is measured against."""
    size = 16384 if trainer.device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=trainer.device).to(getattr(torch, trainer.cfg.dtype)) for _ in range(2))
    return [2 * size**3 / ms / 1e9 for ms in together(trainer, lambda: a @ b, n)]


def host_waits(trainer: Trainer, batches: Iterator, step: int) -> Figures:
    """Count the operations of a step that wait for the device, in all and by line. None is the aim."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train_step(step, next(batches))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    lines = Counter(f"host waits at {os.path.basename(warning.filename)}:{warning.lineno}" for warning in found)
    lines["host waits for the device in a step"] = len(found)
    return {name: figure([count], "") for name, count in lines.items()}


def profile(trainer: Trainer, batches: Iterator, step: int) -> str:
    """Return the 20 operations that take longest in three steps: kernels on CUDA."""
    on_cuda, kinds = trainer.device.type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_cuda else [])]) as profiler:
        for _ in range(3):
            trainer.train_step(step, next(batches))
        synchronize(trainer.device)
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20)
