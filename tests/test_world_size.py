"""The same training on any number of processes: started for real, compared with what one process does."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
import world_worker
from shards import write_shard
from train_gpt import World

ROOT, TESTS = Path(train_gpt.__file__).parent, Path(__file__).parent
SIZES = (2, 3, 4)
# Numbers that 2, 3 and 4 do not divide, wherever a rank gets a share: see test_shares_are_uneven
SMALL = dict(
    preset="nano",
    device="cpu",
    dtype="float64",
    seed=0,
    vocab_size=61,
    eot_token=60,
    num_iterations=8,
    val_loss_every=3,
    val_sha256="",
    momentum_warmup_steps=3,
    train_seq_len=64,
    batch_tokens=12 * 64,
    val_seq_len=96,
    val_tokens=7 * 96,
    model_dim=25,
    num_heads=2,
    head_dim=12,
    attention_layout="LS-S",
    bigram_rows=66,
    value_embed_layout="0..0",
    block_size=16,
    window_tokens=64,
)


def free_ports(count: int) -> list[str]:
    """Below the ports that systems hand out by themselves: else a connection of one world might take another's."""
    ports: list[str] = []
    for port in random.SystemRandom().sample(range(12_000, 32_000), 20_000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            ports.append(str(port))
        if len(ports) == count:
            break
    return ports


def start(command: Sequence[str], cwd: Path = ROOT) -> subprocess.Popen:
    """A Python process in a group of its own, without what a torchrun around us sets, and with one thread."""
    inherited = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(processes: Sequence[subprocess.Popen], timeout: float) -> None:
    """Waits for all of them, which all have to succeed, and leaves none behind."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its own
                process.wait(timeout=40)
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-8000:]


def torchrun(*flags: str) -> list[str]:
    return ["-m", "torch.distributed.run", *flags]


def small_flags(**fields) -> list[str]:
    return [text for field, value in (SMALL | fields).items() for text in (f"--{field}", str(value))]


def write_tokens(path: Path, length: int, vocab_size: int, seed: int) -> None:
    """Documents of some 30 tokens, with something to learn: a token says a lot about the next."""
    rng = np.random.default_rng(seed)
    tokens = np.cumsum(rng.integers(1, 4, size=length)) % (vocab_size - 1)
    tokens[rng.random(length) < 1 / 30] = vocab_size - 1
    write_shard(path, tokens)


# Four steps in double precision, from random values in every parameter


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the small runs leave their results: rank{r}of{W}.pt of the four steps, main{W}.json of the whole runs.

    Those of one process are this process's; two for the four steps torchrun starts.
    """
    folder = tmp_path_factory.mktemp("worlds")
    # Two shards, the first with a rest too short for a batch: the batches are not simply in a row
    write_tokens(folder / "train_0.bin", 4 * SMALL["batch_tokens"] + 100, SMALL["vocab_size"], seed=0)
    write_tokens(folder / "train_1.bin", 4 * SMALL["batch_tokens"] + 1, SMALL["vocab_size"], seed=1)
    write_tokens(folder / "val_0.bin", SMALL["val_tokens"] + 1, SMALL["vocab_size"], seed=2)
    flags = small_flags(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", log_dir=folder)
    worlds = [("steps", 3), ("steps", 4), ("main", 2), ("main", 3)]
    worlds = [(*world, port) for world, port in zip(worlds, free_ports(len(worlds)), strict=True)]
    script, job = str(TESTS / "world_worker.py"), dict(argv=flags)
    processes = [
        start([*torchrun("--standalone", "--nproc_per_node=2"), script, json.dumps(job)]),
        start([script, json.dumps(job | dict(worlds=worlds))]),
    ]
    try:
        torch.save(world_worker.four_steps(flags, World()), folder / "rank0of1.pt")
        train_gpt.main([*flags, "--run_id", "main1"])
    finally:
        finish(processes, timeout=120)
    return folder


@pytest.fixture(scope="module")
def runs(folder) -> dict[int, list[dict]]:
    """By number of processes, what each of them came to in four steps."""
    return {size: [torch.load(folder / f"rank{rank}of{size}.pt") for rank in range(size)] for size in (1, *SIZES)}


def full_state(ranks: Sequence[dict]) -> dict[str, torch.Tensor]:
    """The optimizers' state, from the ranks' shares of it, without padding. Padding has to be zero."""
    state = {}
    for name, pieces in ranks[0]["layout"].items():
        flat = torch.cat([rank["shares"][name] for rank in ranks])
        spans = pieces if isinstance(pieces, list) else [(0, pieces)]
        is_padding = torch.ones(len(flat), dtype=torch.bool)
        for i, (first, count) in enumerate(spans):
            state[f"{name}[{i}]"] = flat[first : first + count]
            is_padding[first : first + count] = False
        assert not flat[is_padding].any(), f"padding of {name} is not zero"
    return state


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest one, relative to the largest number."""
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_one_process(runs, size):
    [alone] = runs[1]
    for rank, result in enumerate(runs[size]):
        assert result["params"].keys() == alone["params"].keys()
        for name, expected in alone["params"].items():
            assert expected.dtype == torch.float64
            assert difference(result["params"][name], expected) < 1e-8, f"{name} on rank {rank}"
            assert torch.equal(result["params"][name], runs[size][0]["params"][name]), f"{name} on rank {rank}"


@pytest.mark.parametrize("size", SIZES)
def test_state_of_the_optimizers_is_that_of_one_process_in_shares(runs, size):
    expected, got = full_state(runs[1]), full_state(runs[size])
    assert got.keys() == expected.keys()
    for name in expected:
        assert difference(got[name], expected[name]) < 1e-8, name
    for name, whole in runs[1][0]["shares"].items():
        lengths = [len(rank["shares"][name]) if whole.ndim else None for rank in runs[size]]
        if whole.ndim:
            assert lengths == [-(-len(whole) // size)] * size, f"{name}: {lengths}"
        else:
            assert name.endswith(".step")
            assert [rank["shares"][name].item() for rank in runs[size]] == [4] * size


@pytest.mark.parametrize("size", SIZES)
def test_losses_are_those_of_one_process(runs, size):
    [alone] = runs[1]
    for result in runs[size]:
        np.testing.assert_allclose(result["val_losses"], alone["val_losses"], rtol=1e-8)
        # The training loss only tells whether a run is sound: it is summed up in fp32
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-6)


def test_training_has_moved_everything_and_the_loss_is_that_of_a_step(runs):
    """Else the comparisons would compare nothing."""
    [alone] = runs[1]
    start_values = dict(world_worker.build(train_gpt.parse_args(small_flags())).named_parameters())
    for name, p in alone["params"].items():
        assert difference(p, start_values[name].detach()) > 1e-3, name
    assert all(t.any() for t in full_state(runs[1]).values())
    assert 12 * 0.5 < alone["losses"][-1] < alone["losses"][0] < 12 * 10
    full, three = alone["val_losses"]
    assert 0.5 < full < 10
    assert abs(full - three) > 1e-4


def test_shares_are_uneven(runs):
    """No number of processes divides the matrices of a shape, the elements of the embeddings, the validation."""
    layout = runs[1][0]["layout"]
    counts = [pieces for pieces in layout.values() if isinstance(pieces, int)]
    assert len(counts) == 2
    spans = next(pieces for name, pieces in layout.items() if "embed" in name and isinstance(pieces, list))
    for size in SIZES:
        numbers = [*counts, sum(count for _, count in spans), SMALL["val_tokens"] // SMALL["val_seq_len"]]
        assert all(number % size for number in numbers), f"{size} divides one of {numbers}"
        share = len(runs[size][0]["shares"][next(name for name in layout if "embed" in name)])
        assert any(first // share < (first + count - 1) // share for first, count in spans), "no parameter is cut"
    # Flat buffers are padded to 16 elements, so that 3 is what can fail to divide them
    ends = [pieces[-1][0] + -(-pieces[-1][1] // 16) * 16 for pieces in layout.values() if isinstance(pieces, list)]
    assert all(end % 3 for end in ends)


@pytest.mark.parametrize("size", [2, 3])
def test_whole_run_validates_as_that_of_one_process(folder, size):
    """With the script's own initialization, warm-up and share of the data."""
    expected, got = (json.loads((folder / f"main{n}.json").read_text()) for n in (1, size))
    assert f"; {size} processes, " in (folder / f"main{size}.txt").read_text()
    steps, losses, _ = zip(*expected["val_curve"], strict=True)
    assert steps == (0, 3, 6, 8)
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose([loss for _, loss, _ in got["val_curve"]], losses, rtol=1e-8)


# Whole runs of the nano preset in its own precision, on real text


@pytest.fixture(scope="module")
def text_flags(tmp_path_factory) -> list[str]:
    """Flags for some of torch's sources as bytes, and for logs beside them.

    One thread even for one process: threads that meet other programs on their cores took six times as long.
    """
    folder = tmp_path_factory.mktemp("text")
    files = sorted((Path(torch.__file__).parent / "nn").rglob("*.py"))
    tokens = np.concatenate([np.array([256, *file.read_bytes()], dtype=np.uint16) for file in files])
    write_shard(folder / "val_0.bin", tokens[:41_000])
    write_shard(folder / "train_0.bin", tokens[41_000:])
    data = f"--train_files {folder}/train_*.bin --val_files {folder}/val_*.bin --val_tokens {5 * 8192}"
    return f"--preset nano --device cpu --cpu_threads 1 --seed 1 --val_loss_every 0 --log_dir {folder} {data}".split()


def final_loss(flags: Sequence[str], run_id: str, size: int) -> float:
    """The validation loss of a run that is over. It has to have been one run of `size` processes."""
    path = Path(flags[flags.index("--log_dir") + 1]) / run_id
    assert f"; {size} processes, " in path.with_suffix(".txt").read_text()
    return json.loads(path.with_suffix(".json").read_text())["val_loss"]


@pytest.fixture(scope="module")
def twenty_steps(text_flags) -> list[str]:
    return [*text_flags, "--num_iterations", "20", "--batch_tokens", str(12 * 1024)]


@pytest.fixture(scope="module")
def loss_alone(twenty_steps) -> float:
    finish([start(["train_gpt.py", *twenty_steps, "--run_id", "alone"])], timeout=300)
    return final_loss(twenty_steps, "alone", 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_nano_loss_after_twenty_steps_is_that_of_one_process(twenty_steps, loss_alone, size):
    """To 0.01: rounding alone moves it by some thousandths."""
    assert 1.5 < loss_alone < 4
    flags = [*twenty_steps, "--run_id", f"torchrun{size}"]
    finish([start([*torchrun("--standalone", f"--nproc_per_node={size}"), "train_gpt.py", *flags])], timeout=300)
    assert abs(final_loss(twenty_steps, f"torchrun{size}", size) - loss_alone) < 0.01


@pytest.mark.slow
def test_two_nodes_train_as_one_process(text_flags):
    flags = [*text_flags, "--num_iterations", "6", "--batch_tokens", str(2 * 1024)]
    [port] = free_ports(1)
    nodes = []
    for rank in range(2):
        node = torchrun("--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1")
        rendezvous = ["--master_addr=127.0.0.1", f"--master_port={port}"]
        nodes.append(start([*node, *rendezvous, "train_gpt.py", *flags, "--run_id", "nodes"]))
    finish(nodes, timeout=200)
    alone = torchrun("--standalone", "--nproc_per_node=1")
    finish([start([*alone, "train_gpt.py", *flags, "--run_id", "node"])], timeout=200)
    assert abs(final_loss(flags, "nodes", 2) - final_loss(flags, "node", 1)) < 0.01
