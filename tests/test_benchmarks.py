"""The benchmarks: figures, report, the CPU starting point, the file of a first GPU run."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from conftest import TINY_FLAGS, pytest_configure
from dense import dense_mask
from speedrun import bench, plain_gpt
from speedrun.logs import Log
from speedrun.process import ROOT, own_process
from train_gpt import Ranks, Trainer


def test_figures_are_of_the_steps_that_train(tiny, script_flags, tmp_path, monkeypatch, capsys):
    seen = {}
    for name in ("step_flops", "profile"):
        real = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *args, name=name, real=real: seen.setdefault(name, real(*args)))
    assert bench.main(["--quick", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "out/benchmark.json").read_text())
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf or name == "sent in a step", name
        assert f"| {name} | {bench.shown(figure['median'])} {figure['unit']} |" in told
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    seconds, peak = median["stage 1: step"] / 1000, median["large matmul in float32"] * 1e12
    assert median["stage 1: throughput"] == pytest.approx(tiny.batch_tokens / seconds)
    assert median["stage 1: utilization"] == pytest.approx(100 * seen["step_flops"] / seconds / peak)
    parts, text = seen["profile"]
    assert parts.keys() == {"data", "forward", "backward", "optimizers"}
    assert text.rstrip() == (tmp_path / "out/profile.txt").read_text().rstrip()
    assert "Self CPU" in text


def test_measured_steps_are_steps_of_training(tiny64):
    """Timed and profiled steps, of a pair where Adam takes every other one, leave the same parameters."""
    cfg = dataclasses.replace(tiny64, adam_every=2)
    trainer, other = Trainer(cfg, Ranks()), Trainer(cfg, Ranks())
    tokens = torch.randint(cfg.vocab_size, (65,))
    sequences, calls = [(tokens[:-1].int(), tokens[1:])] * 2, (train_gpt.step_optimizers, trainer.gpt)
    bench.step_ms(trainer, iter([sequences] * 4), 0, 2)
    parts, _ = bench.profile(trainer, iter([sequences] * 2), 4)
    for step in (0, 1, 0, 1, 4, 5):
        other.train_step(step, sequences)
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert (train_gpt.step_optimizers, trainer.model) == calls
    assert all(ms > 0 for ms in parts.values())


def test_flops_are_those_that_torch_counts(tiny64, monkeypatch):
    layers = [train_gpt.Layer(kind) for kind in ("long", "short", "none", "paired")]
    trainer = Trainer(dataclasses.replace(tiny64, layers=layers), Ranks())
    tokens = torch.randint(tiny64.eot_token, (65,))
    sequences = [(tokens[:-1].int(), tokens[1:])] * 2
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda *args: None)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(4, sequences)
    one_document = torch.zeros(64, dtype=torch.int32)
    masks, long = trainer.gpt.attention_masks(one_document, trainer.windows), trainer.windows[0]

    def multiplied(tokens, window, eot_token, rows=1):  # the plain path takes every block that could be in the window
        return masks["paired" if rows == 2 else "long" if window == long else "short"].bias.numel()

    monkeypatch.setattr(bench, "attended_pairs", multiplied)
    # A new parameter of a few numbers is counted as if it were multiplied
    assert bench.step_flops(trainer, sequences, 4) == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize(("window", "rate", "rows"), [(0, 0.06, 1), (21, 0.06, 1), (32, 0.0, 1), (15, 0.1, 2)])
def test_attended_pairs_are_those_of_the_dense_mask(window, rate, rows):
    tokens = torch.where(torch.rand(64) < rate, 256, 1)
    ids = (tokens == 256).cumsum(0).repeat_interleave(rows)
    assert bench.attended_pairs(tokens, window, 256, rows) == dense_mask(ids, window).sum()


def test_plain_gpt_learns_causally_and_validates_every_position_once():
    tokens, seen = np.random.default_rng(0).integers(257, size=300 * 64 + 5), []
    loss = plain_gpt.validate(lambda x, y: seen.append((x, y)) or y.double().mean(), tokens, 300 * 64)
    pair = [torch.cat(part).flatten().numpy() for part in zip(*seen, strict=True)]
    assert np.array_equal(pair, [tokens[: 300 * 64], tokens[1 : 300 * 64 + 1]])
    assert loss == pytest.approx(pair[1].mean())
    model, losses, *_ = plain_gpt.train(np.tile(np.arange(50), 40), 9, 1)
    assert losses[0] == pytest.approx(math.log(plain_gpt.VOCAB_SIZE), abs=0.2)
    assert losses[-1] < losses[0] - 0.05
    x = torch.randn(1, 64, plain_gpt.WIDTH, requires_grad=True)
    model.blocks(x)[0, 40].sum().backward()
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == [True] * 41 + [False] * 23


def test_plain_gpt_writes_a_log_that_can_be_raced_on_any_text(corpus, tmp_path, monkeypatch, capsys):
    argv = f"plain --data {corpus}/ --val_tokens 128 --steps 3 --val_every 1 --log_dir {tmp_path} --run_id r".split()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(plain_gpt, "THREADS", 1)
    plain_gpt.main()
    log, told = Log(tmp_path / "r.txt"), json.loads(capsys.readouterr().out)
    assert log.source == Path(plain_gpt.__file__).read_text().rstrip("\n")
    assert log.curve == {step: pytest.approx((loss, ms), abs=1) for step, loss, ms in told["val_curve"]}
    assert (log.incomplete, log.val_loss) == (None, pytest.approx(told["val_loss"], abs=1e-4))
    assert log.train_time == pytest.approx(told["train_time_ms"], abs=1)
    monkeypatch.setattr(sys, "argv", [*argv, "--val_tokens=1"])
    with pytest.raises(SystemExit, match="2"):
        plain_gpt.main()


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.exit.Exception, match="no GPU that torch can use") as stopped:  # ./test.sh -m gpu
        pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr="gpu")))
    assert stopped.value.returncode == 2


@pytest.mark.slow
def test_a_first_gpu_run_on_a_cpu_packs_what_its_stages_show(tmp_path):
    env = os.environ | dict(OUT=f"{tmp_path}/out", PYTHON=sys.executable)
    command = [ROOT / "docs" / "first_gpu_run.sh", *TINY_FLAGS, "--num_iterations=4", "--dtype=float16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    outcomes = dict(line.split(": ") for line in (tmp_path / "out/stages.txt").read_text().splitlines())
    assert [name for name, outcome in outcomes.items() if outcome == "ok"] == ["versions", "self-test"]
    assert [outcomes[name] for name in ("check", "run", "bench")] == ["FAILED, exit code 2"] * 3
    done = subprocess.run(command[:-1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        texts = {name: archive.extractfile(name).read().decode() for name in archive.getnames() if "." in name}
    assert json.loads(texts["out/short.json"])["num_iterations"] == 4
    assert "| profiled step: forward |" in texts["out/bench/benchmark.md"]
    assert not [name for name, text in texts.items() if str(ROOT) in text]


@pytest.mark.slow
def test_two_processes_send_half_of_each_gradient_and_value(tmp_path):
    flags = ["--quick", *TINY_FLAGS, "--train_seq_len=512", "--batch_tokens=1024", f"--out={tmp_path}/out"]
    own_process(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "speedrun.bench", *flags])
    both = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    cfg = train_gpt.resolve(train_gpt.parse_args(flags[1:-1]))
    numbers = sum(p.nbytes for p in train_gpt.GPT(cfg).parameters()) / 2**20
    assert both["processes"] == 2
    assert both["figures"]["sent in a step"]["median"] == pytest.approx(numbers / cfg.adam_every, rel=0.2)
