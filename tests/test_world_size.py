"""The same training on any number of processes: run for real, compared with what one process does."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from shards import write_shard
from test_train import SMALL_GPT2, corpus  # noqa: F401  (a fixture)
from world_worker import ROOT, Run, free_port, program

SIZES = (2, 3, 4)
# 4 does not divide 6 matrices of a shape, and neither size 7 sequences of validation
SMALL = (
    "--preset nano --device cpu --dtype float64 --cpu_threads 1 --seed 0 --num_iterations 6 --val_loss_every 3 "
    "--model_dim 25 --num_heads 2 --head_dim 12 --attention_layout LS- --value_embed_layout 0.0 --skip_layout ..0 "
    "--backout_layer . --block_size 16 --window_tokens 64 --stage_growth 1 --lr_factors 1 --extension_steps 0 "
    "--max_doc_len 0 --train_seq_len 64 --batch_tokens 768 --val_seq_len 96 --val_tokens 672 --bigram_rows 66 "
    "--momentum_warmup_steps 3 --val_sha256="
).split()


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory) -> list[str]:  # noqa: F811
    """Return flags for two shards with tails that are dropped, and for logs."""
    data = ["--train_files", f"{corpus}/train_*.bin", "--val_files", f"{corpus}/val_*.bin"]
    return [*SMALL, *data, "--log_dir", str(tmp_path_factory.mktemp("worlds"))]


@pytest.fixture(scope="module", params=["nano", "gpt2"])
def folder(flags, corpus, request) -> Path:  # noqa: F811
    """Run the script with one process and with each of SIZES; their logs are world1.txt, world2.txt, ..."""
    folder = Path(flags[-1]) / request.param
    if request.param == "gpt2":
        flags = [*SMALL_GPT2, *flags[len(SMALL) :], "--train_files", f"{corpus}/long.bin", "--dtype", "float64"]
    flags = [*flags, "--save_checkpoint", "--log_dir", str(folder)]
    folder.mkdir()
    runs = {size: Run([[*flags, "--run_id", f"world{size}"]] * size, folder / f"world{size}") for size in SIZES}
    train_gpt.main([*flags, "--run_id", "world1"])
    for size, run in runs.items():
        assert run.wait(timeout=120) == [0] * size, run.text("err")
        assert all(run.text("out", rank) == run.text("err", rank) == "" for rank in range(1, size)), (
            "rank 0 alone speaks"
        )
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_run_is_that_of_one_process(folder, size):
    """Compare curves and parameters in double precision."""
    expected, got = (json.loads((folder / f"world{n}.json").read_text()) for n in (1, size))
    assert f"{size} processes, " in (folder / f"world{size}.txt").read_text()
    for curve in "val_curve", "train_curve":
        steps, losses, _ = zip(*expected[curve], strict=True)
        assert losses[-1] < losses[0] - 0.1
        assert tuple(point[0] for point in got[curve]) == steps
        np.testing.assert_allclose([point[1] for point in got[curve]], losses, rtol=1e-8)
    alone, model = (torch.load(folder / f"world{n}.pt")["model"] for n in (1, size))
    assert not torch.equal(alone["lm_head"], alone["embed.weight"][: len(alone["lm_head"])]), "they part in gpt2"
    for name, p in alone.items():
        assert p.dtype == torch.float64
        assert (model[name] - p).abs().max() <= 1e-8 * p.abs().max(), name


def test_nodes_that_differ_or_fail_are_named_on_every_node(flags, tmp_path):
    for seed in (0, 9):  # of equal size
        write_shard(tmp_path / f"{seed}.bin", np.random.default_rng(seed).integers(256, size=6 * 768 + 1))
    changed = tmp_path / "train_gpt.py"
    changed.write_text((ROOT / "train_gpt.py").read_text() + "# changed\n")
    cases = {
        "script": ([], []),
        "head_adam": ([], ["--head_adam", "0.01", "0", "0.5", "0.9"]),
        "num_iterations": ([], ["--num_iterations", "5"]),
        "data": [["--train_files", f"{tmp_path}/{seed}.bin"] for seed in (0, 9)],
        "missing.bin": (["--val_files", "missing.bin"], []),
        "missing": (["--resume", f"{tmp_path}/missing"], []),
    }
    one_node = Run([[*flags, "--train_files", "missing.bin"]] * 2, tmp_path / "one")
    runs = {}
    for name, changes in cases.items():
        ranks = [[*flags, "--run_id", f"{name}{i}", *more] for i, more in enumerate(changes)]
        scripts = ["train_gpt.py", changed] if name == "script" else ()
        runs[name] = Run(ranks, tmp_path / name, nodes=True, scripts=scripts)
    for name, run in runs.items():
        assert run.wait() == [2, 2], name
        for rank in range(2):
            assert re.search(rf"\b{name}\b", run.text("err", rank)), run.text("err", rank)
            assert run.text("err", rank).count("\n") == 1
            assert "step:" not in run.text("out", rank)
    assert one_node.wait() == [2, 2]
    assert [one_node.text("err", rank).count("\n") for rank in range(2)] == [1, 0], "one process of a node speaks"


@pytest.fixture(scope="module")
def lonely(flags, tmp_path_factory) -> tuple[Run, float]:
    """Start two nodes of three, and let them wait while another test runs."""
    folder = tmp_path_factory.mktemp("lonely")
    return Run([[*flags, "--no-such-flag"], flags, flags], folder / "run", nodes=True), time.time()


@pytest.mark.slow
@pytest.mark.usefixtures("lonely")
def test_nano_loss_after_twenty_steps_depends_on_rounding_alone(corpus, tmp_path):  # noqa: F811
    """In the preset's own precision, with one process and three, and on two nodes."""
    flags = "--preset nano --device cpu --cpu_threads 1 --seed 1 --train_seq_len 256 --batch_tokens 3072 "
    flags += f"--val_seq_len 8192 --val_tokens {5 * 8192} --extension_steps 0 "
    flags += f"--train_files {corpus}/long.bin --val_files {corpus}/long.bin --num_iterations 20 --val_loss_every 0 "
    torchrun, nodes = "-m torch.distributed.run", f"--nnodes=2 --master_addr=127.0.0.1 --master_port={free_port()}"
    launchers = dict(one=[""], three=[f"{torchrun} --standalone --nproc_per_node=3"])
    launchers |= dict(nodes=[f"{torchrun} {nodes} --nproc_per_node=1 --node_rank={rank}" for rank in range(2)])
    losses = []
    for name, commands in launchers.items():
        command = f"train_gpt.py {flags} --log_dir {tmp_path} --run_id {name}"
        for process in [program(*f"{launcher} {command}".split()) for launcher in commands]:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output[-5000:]
        losses.append(json.loads((tmp_path / f"{name}.json").read_text())["val_loss"])
    assert 0.3 < losses[0] < 4
    assert losses == pytest.approx([losses[0]] * 3, abs=0.01)


@pytest.mark.slow
def test_node_that_does_not_come_is_waited_for_a_minute(lonely):
    run, start = lonely
    assert run.wait(timeout=100) == [2, 2, 2]
    assert Path(f"{run.out}.1.err").stat().st_mtime < start + 90
    assert "rank 1" in run.text("err", 1)
