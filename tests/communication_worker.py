"""A network that takes its time and takes notes, and the processes in which test_communication.py measures a step.

    python tests/communication_worker.py W SECONDS [flags of train_gpt.py]

Every rank makes one optimizer step from random gradients twice, as it is and over the slow network, and writes what
came of it to rank{r}of{W}.pt in --log_dir.
"""

import functools
import multiprocessing
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_gpt
import world_worker
from train_gpt import GPT, Adam, Muon, World


def own_share(result: Tensor, tensor: Tensor, async_op: bool) -> None:
    """What the first rank gets of a reduce-scatter if all others hold zeros."""
    result.copy_(tensor[: len(result)])


def repeat(result: Tensor, tensor: Tensor, async_op: bool) -> None:
    """What an all-gather gives if all ranks hold the same."""
    result.unflatten(0, (-1, len(tensor))).copy_(tensor)


@dataclass(eq=False)
class Transfer:
    """A collective under way on a Network: what train_gpt.py gets instead of a dist.Work."""

    network: "Network"
    name: tuple[str, int]
    result: Tensor
    tensor: weakref.ref  # the network does not keep it alive: that is up to train_gpt.py
    sent: Tensor
    arrival: Future

    def wait(self) -> None:
        self.network.notes.append(("wait", *self.name))
        arrived = self.arrival.result()
        tensor = self.tensor()
        assert tensor is not None, f"nothing kept the input of {self.name} until it was done"
        assert torch.equal(tensor, self.sent), f"the input of {self.name} was written to while it was under way"
        assert self.result.isnan().all(), f"the result of {self.name} was written to before it arrived"
        self.result.copy_(arrived)
        self.network.under_way.remove(self)


class Network:
    """Carries out collectives one after the other, in the order of their launch, as NCCL's stream does.

    Each takes `seconds` and lasts until it is waited for; until then its result is NaN, and its input has to stay as it
    is. Updates, by the functions that `computing` wraps, take twice as long. `notes`: what the optimizers did, in
    order; `sizes`: bytes that a collective was given, and elements of a share, by collective; `busy` and `computed`:
    from when to when.
    """

    def __init__(self, reduce_scatter: Callable, all_gather: Callable, seconds: float = 0.0):
        self.seconds = seconds
        self.notes: list[tuple[str, str, int]] = []
        self.sizes: dict[tuple[str, int], tuple[int, int]] = {}
        self.busy: list[tuple[float, float]] = []
        self.computed: list[tuple[float, float]] = []
        self.under_way: list[Transfer] = []
        self.reduce_scatter = functools.partial(self.launch, "reduce_scatter", reduce_scatter)
        self.all_gather = functools.partial(self.launch, "all_gather", all_gather)
        self.link = ThreadPoolExecutor(max_workers=1)

    def launch(self, kind: str, collective: Callable, result: Tensor, tensor: Tensor, async_op: bool) -> Transfer:
        assert async_op
        name = kind, sum(kind == other for other, _ in self.sizes)
        self.notes.append(("launch", *name))
        whole, share = (tensor, result) if kind == "reduce_scatter" else (result, tensor)
        self.sizes[name] = whole.nbytes, share.numel()
        taken = [storage(t) for other in self.under_way for t in (other.result, other.tensor()) if t is not None]
        assert not {storage(result), storage(tensor)} & set(taken), f"{name} shares a buffer with one under way"
        sent = tensor.clone()
        result.fill_(torch.nan)
        arrival = self.link.submit(self.carry, collective, torch.empty_like(result), sent)
        self.under_way.append(Transfer(self, name, result, weakref.ref(tensor), sent, arrival))
        return self.under_way[-1]

    def carry(self, collective: Callable, result: Tensor, sent: Tensor) -> Tensor:
        start = time.perf_counter()
        collective(result, sent, async_op=False)
        time.sleep(self.seconds)
        self.busy.append((start, time.perf_counter()))
        return result

    def computing(self, function: Callable) -> Callable:
        def update(*args, **kwargs):
            self.notes.append(("update", "", len(self.computed)))
            start = time.perf_counter()
            result = function(*args, **kwargs)
            time.sleep(2 * self.seconds)
            self.computed.append((start, time.perf_counter()))
            return result

        return update

    def attach(self, muon: Muon, setattr: Callable) -> None:
        """From here on the optimizers communicate over this network, and their updates take time."""
        setattr(train_gpt, "reduce_scatter", self.reduce_scatter)
        setattr(train_gpt, "all_gather", self.all_gather)
        setattr(train_gpt, "adam", self.computing(train_gpt.adam))
        setattr(muon, "orthogonalize", self.computing(muon.orthogonalize))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def build(cfg: train_gpt.Hyperparameters, world: World) -> tuple[GPT, tuple[Muon, Adam]]:
    """A model with random values and gradients, other gradients on every rank, and its optimizers."""
    gpt = world_worker.build(cfg)
    set_gradients(gpt, world.rank)
    return gpt, train_gpt.build_optimizers(gpt, cfg, world, train_gpt.zeropower_via_newtonschulz5)


def set_gradients(gpt: GPT, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in gpt.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run_rank(world: World, seconds: float, argv: list[str]) -> None:
    torch.set_num_threads(1)
    cfg = train_gpt.parse_args(argv)
    store = dist.FileStore(f"{cfg.log_dir}/store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=60))
    expected, optimizers = build(cfg, world)
    train_gpt.step_optimizers(optimizers)
    network = Network(train_gpt.reduce_scatter, train_gpt.all_gather, seconds)
    gpt, optimizers = build(cfg, world)
    network.attach(optimizers[0], setattr)
    dist.barrier()
    start = time.perf_counter()
    train_gpt.step_optimizers(optimizers)
    end = time.perf_counter()
    network.link.shutdown()
    same = all(torch.equal(a, b) for a, b in zip(gpt.parameters(), expected.parameters(), strict=True))
    measured = dict(same=same, seconds=end - start, notes=network.notes, busy=network.busy, computed=network.computed)
    torch.save(measured, f"{cfg.log_dir}/rank{world.rank}of{world.size}.pt")
    dist.destroy_process_group()


def main(size: int, seconds: float, argv: list[str]) -> int:
    """All ranks, forked from one process that has imported torch, to save time. Returns how many failed."""
    fork = multiprocessing.get_context("fork")
    worlds = [World(rank, size, rank, size) for rank in range(size)]
    processes = [fork.Process(target=run_rank, args=[world, seconds, argv]) for world in worlds]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
