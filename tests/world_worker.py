"""The processes that test_world_size.py compares. What they do: four steps from random values, or a whole run.

    torchrun --standalone --nproc_per_node=W tests/world_worker.py '{"argv": [flags of train_gpt.py]}'
    python tests/world_worker.py '{"argv": [flags of train_gpt.py], "worlds": [["steps", W, port], ["main", ...], ...]}'

The second form is all processes of several worlds at once, forked from one that has imported torch, to save time; in
worlds "main" they run train_gpt.main. In the others every rank writes what it came to in four steps to
rank{r}of{W}.pt in --log_dir: parameters, its shares of the optimizers' state, losses.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_gpt
from train_gpt import GPT, Adam, Hyperparameters, Muon, World


def build(cfg: Hyperparameters) -> GPT:
    """A model with random values in every parameter: at initialization only the head would have a gradient.

    Two of its matrices serve two layers each, so that the numbers of matrices of a shape are odd.
    """
    gpt = GPT(cfg)
    gpt.blocks[1].mlp.c_fc = gpt.blocks[0].mlp.c_fc
    gpt.blocks[3].attn.c_proj = gpt.blocks[0].attn.c_proj
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in gpt.parameters():
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(0.7 + 0.3 * values if p.ndim < 2 else values * p.size(-1) ** -0.5)
    return gpt


def four_steps(argv: Sequence[str], world: World) -> dict:
    """The loop of train_gpt.train, without clock and log."""
    cfg, cpu = train_gpt.parse_args([*argv, "--num_iterations", "4"]), torch.device("cpu")
    gpt = build(cfg)
    optimizers = train_gpt.build_optimizers(gpt, cfg, world, train_gpt.zeropower_via_newtonschulz5)
    train_plan, val_plan = train_gpt.plan_data(cfg)
    window = torch.ones((), dtype=torch.int32)
    sequences = range(world.rank, cfg.batch_sequences, world.size)
    batches = train_gpt.read_batches(train_plan, cfg.train_seq_len, sequences, cfg.vocab_size, cpu)
    losses = []
    for step in range(cfg.num_iterations):
        window.fill_(train_gpt.window_blocks(step, cfg))
        losses.append(world.all_reduce(train_gpt.train_step(gpt, next(batches), window)).wait().item())
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * train_gpt.lr_multiplier(step, cfg)
        for group in optimizers[0].param_groups:
            group["momentum"] = train_gpt.muon_momentum(step, cfg)
        train_gpt.step_optimizers(optimizers)
        gpt.zero_grad(set_to_none=True)
    val_losses = []
    for count in (len(val_plan), 3):  # of 3 sequences the fourth rank has none
        own = val_plan[:count][world.rank :: world.size]
        batches = train_gpt.read_batches(own, cfg.val_seq_len, [0], cfg.vocab_size, cpu)
        val_losses.append(train_gpt.evaluate(gpt, batches, window, world))
    return dict(
        losses=losses,
        val_losses=val_losses,
        params={name: p.detach().clone() for name, p in gpt.named_parameters()},
        shares={name: value.clone() for optimizer in optimizers for name, value in optimizer.state().items()},
        layout=layout(*optimizers),
    )


def layout(muon: Muon, adam: Adam) -> dict:
    """By name of a state, what its shares make when put in a row, without the padding.

    For Muon the number of matrices; for Adam where each parameter starts and how many elements it has.
    """
    pieces = {f"{'+'.join(g['names'])}.momentum_buffer": sum(g["counts"]) for g in muon.param_groups}
    for group in adam.param_groups:
        for kind in ("exp_avg", "exp_avg_sq"):
            spans = [(p.storage_offset(), p.numel()) for p in group["params"]]
            pieces[f"{'+'.join(group['names'])}.{kind}"] = spans
    return pieces


def run_rank(job: dict, kind: str = "steps", **variables: str) -> None:
    """What this process is to do in the world that `variables`, or else the environment, describes."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    world = World.from_env()
    if kind == "main":
        train_gpt.main([*job["argv"], "--run_id", f"main{world.size}"])
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = Path(train_gpt.parse_args(job["argv"]).log_dir)
    torch.save(four_steps(job["argv"], world), folder / f"rank{world.rank}of{world.size}.pt")
    dist.destroy_process_group()


def run_worlds(job: dict) -> int:
    """All ranks of all `worlds`. Returns the number of those that failed."""
    processes = []
    for kind, size, port in job["worlds"]:
        variables = dict(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in map(str, range(size)):
            kwargs = variables | dict(RANK=rank, LOCAL_RANK=rank)
            fork = multiprocessing.get_context("fork")
            processes.append(fork.Process(target=run_rank, args=[job, kind], kwargs=kwargs))
            processes[-1].start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.exit(run_worlds(job) if "worlds" in job else run_rank(job))
