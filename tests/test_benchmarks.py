"""The benchmark's figures, and the CPU starting point."""

import copy
import dataclasses
import json
import math
import time

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from benchmarks import anchor_cpu, command, measure, race_anchor
from records.race import Run
from shards import write_shard

FIGURES = "step step_first_window step_last_window matmul_tflops throughput validation newton_schulz block_mask loader"


def flags_of(cfg: train_gpt.Hyperparameters) -> list[str]:
    """The flags that make the nano preset `cfg`."""
    nano = dataclasses.asdict(train_gpt.PRESETS["nano"])
    differing = {name: value for name, value in dataclasses.asdict(cfg).items() if value != nano[name]}
    flags = [f"--{name}={value}" for name, value in differing.items() if name != "compile"]
    return ["--preset=nano", *flags]


def numbers(found) -> list[float]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for part in found for number in numbers(part)]
    return [found] if isinstance(found, (int, float)) else []


def test_every_figure_is_there_finite_and_positive(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where there is no data: it is made up
    assert command.main([*flags_of(tiny), "--quick", "--out", "out"]) == 0
    found = json.loads((tmp_path / "out/benchmark.json").read_text())
    assert (tmp_path / "out/benchmark.md").read_text().strip() in capsys.readouterr().out
    assert "aten::" in (tmp_path / "out/profile.txt").read_text()
    assert found["data"].startswith("SYNTHETIC")
    assert found["settings"]["configuration"]["model_dim"] == tiny.model_dim
    assert found["compile"] == "not run: not compiled"
    assert list(found["startup"])[-1] == "total"
    step = found["step"]
    assert step["parts"].pop("communication")["median"] == 0  # of one process
    assert list(step["parts"]) == ["data", "forward", "backward", "optimizers"]
    for name in [*FIGURES.split(), "startup", "warm_up_s", "peak_memory_mib", "seconds"]:
        values = numbers(found[name])
        assert values, name
        assert all(math.isfinite(value) and value > 0 for value in values), (name, found[name])
    # A part counted twice would add at least the backward's share; the slack is for a busy machine
    assert step["sum_of_parts"] == pytest.approx(sum(part["median"] for part in step["parts"].values()))
    assert [shape["shape"] for shape in found["newton_schulz"]] == [[16, 32, 32], [8, 32, 128]]
    assert found["validation"]["tokens"] == tiny.val_tokens


def test_parts_of_a_step_add_up_to_the_step(tiny):
    """Of one and the same step, so that a busy machine does not matter."""
    trainer = measure.Trainer.build(tiny, train_gpt.World(), torch.device("cpu"))
    tokens = torch.randint(tiny.vocab_size, (65,))
    sequences = [(tokens[:-1].int(), tokens[1:])] * tiny.batch_sequences
    ratios = []
    for _ in range(9):
        spans = measure.Spans(trainer.device)
        trainer.step(iter([sequences]), spans)
        parts = measure.parts_of(spans)
        assert min(parts.values()) >= 0
        ratios.append(sum(parts.values()) / spans.ms("step"))
    assert max(ratios) <= 1 + 1e-9
    assert np.median(ratios) > 0.9


def test_collectives_are_timed_and_taken_from_the_optimizers(monkeypatch):
    """The clock stands in for time: every reading of it is 1 ms later."""
    readings = iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(readings) / 1000)
    monkeypatch.setattr(train_gpt.World, "all_reduce", lambda self, tensor: train_gpt.Pending(tensor))
    world = measure.TimedWorld(size=2)
    world.all_reduce(torch.zeros(1))
    assert next(readings) == 0  # not timed
    spans = measure.Spans(torch.device("cpu"))
    world.spans.append(spans)
    with spans.span("train_step"), spans.span("forward"):
        pass
    with spans.span("loss"):
        world.all_reduce(torch.zeros(1))
    with spans.span("optimizers"):
        world.all_reduce(torch.zeros(1))
    parts = measure.parts_of(spans)
    assert parts == pytest.approx(dict(data=0, forward=1, backward=2, optimizers=4, communication=2))


@pytest.mark.parametrize("layout", ["LSSL", "L-SL"])
def test_flops_equal_those_that_torch_counts(tiny64, random_gpt, layout):
    cfg = dataclasses.replace(tiny64, attention_layout=layout)
    gpt = random_gpt(cfg)
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len + 1,))
    window = torch.tensor(4, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        train_gpt.train_step(gpt, [(tokens[:-1].int(), tokens[1:])], window)
    # The plain path multiplies every block that may be in the window, seen or not
    pairs = {letter: cfg.train_seq_len * blocks * cfg.block_size for letter, blocks in (("L", 4), ("S", 2))}
    assert measure.flops_of(gpt, cfg.train_seq_len, pairs) == counter.get_total_flops()


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_seen_pairs_are_those_of_the_dense_mask(window):
    docs = (torch.rand(64) < 0.1).cumsum(0)
    i = torch.arange(64)
    visible = (i[:, None] >= i) & (docs[:, None] == docs) & (i[:, None] // 8 - i // 8 < max(window, 1))
    assert measure.seen_pairs(docs, window, 8) == visible.sum()


def test_flops_of_a_sequence_count_its_documents_and_windows(tiny, random_gpt):
    gpt, T, block = random_gpt(tiny), 64, tiny.block_size
    tokens = torch.zeros(T, dtype=torch.int32)
    tokens[32] = tiny.eot_token  # two documents of four blocks
    own = block * (block + 1) // 2  # pairs of a block with itself
    pairs = dict(L=8 * own + 6 * block**2, S=8 * own)  # windows of two blocks and of one
    assert measure.training_flops(gpt, tokens, window=2) == measure.flops_of(gpt, T, pairs)


def test_figure_is_the_median_with_its_spread():
    assert measure.figure([3, 1, 2]) == pytest.approx(dict(median=2, p10=1.2, p90=2.8, n=3))


def test_a_stage_that_fails_says_so_and_the_others_are_measured(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "startup", lambda *_: {"total": 1.0})
    monkeypatch.setattr(measure, "block_mask", lambda *_: 1 / 0)
    assert command.main([*flags_of(tiny), "--quick", "--out", "out"]) == 1
    assert "| block mask | FAILED: ZeroDivisionError: division by zero |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/benchmark.json").read_text())["loader"]["warm_tokens_per_s"]["median"] > 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--out"], "expected one argument"),
        (["--preset", "nano", "--resume", "latest"], "leave them out"),
        (["--preset", "nano", "--train_files", "none*"], "no shards match none*"),
    ],
)
def test_bad_input_gets_one_line(flags, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main([*flags, "--device", "cpu"] if flags != ["--out"] else flags) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_process_of_its_own_ends_at_its_limit_with_all_that_it_started(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with pytest.raises(RuntimeError, match="are spent"):
        command.own_process(["-c", ""], 9)
    monkeypatch.setattr(command, "MIN_SECONDS", 0)
    with pytest.raises(RuntimeError, match="not done in 1 s"):
        command.own_process(["-c", script], 1)
    with pytest.raises(RuntimeError, match="exit code 3: why"):
        command.own_process(["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], 60)
    time.sleep(3)
    assert not mark.exists()


# ----------------------------------------------------------------------------------------------------------------------
# The starting point


def test_anchor_has_the_parameters_that_its_sizes_make():
    width, layers = 128, 4
    block = 12 * width**2 + 2 * width
    expected = (257 + 64) * width + layers * block + width
    assert sum(p.numel() for p in anchor_cpu.PlainGPT().parameters()) == expected


def test_anchor_is_causal():
    model, tokens = anchor_cpu.PlainGPT(), torch.randint(257, (1, 64))
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p.data.normal_(std=0.2)
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 257
    targets = tokens.roll(-1, 1)[:, :40]  # the loss of the first 40 alone
    losses = [torch.nn.functional.cross_entropy(logits(model, x)[0, :40], targets[0]).item() for x in (tokens, changed)]
    assert losses[0] == losses[1]
    assert not torch.equal(logits(model, tokens)[0, 40:], logits(model, changed)[0, 40:])


@torch.no_grad()
def logits(model, tokens):
    return model.norm(model.blocks(model.embed(tokens) + model.positions.weight)) @ model.embed.weight.T


def test_a_few_steps_of_the_anchor_lower_the_loss():
    tokens = np.tile(np.arange(50, dtype=np.uint16), 40)
    _, losses, train_time = anchor_cpu.train(tokens, 15, seed=1, planned=30)
    assert losses[0] == pytest.approx(math.log(257), abs=0.2)
    assert losses[-1] < losses[0] - 0.5
    assert train_time > 0
    again = anchor_cpu.train(tokens, 3, seed=1, planned=30)[1]
    assert again == pytest.approx(losses[:3])


def test_anchor_validates_every_position_once():
    tokens = np.random.default_rng(0).integers(257, size=300 * 64 + 5).astype(np.uint16)
    seen = []

    class Counting(torch.nn.Module):
        def forward(self, x, y):
            assert torch.equal(x[:, 1:], y[:, :-1])
            assert x.shape[1] == 64
            seen.append((x.flatten(), y.flatten()))
            return y.double().mean()

    count = 300 * 64
    loss = anchor_cpu.validate(Counting(), tokens, count)
    inputs, targets = (torch.cat(part).numpy() for part in zip(*seen, strict=True))
    assert np.array_equal(inputs, tokens[:count])
    assert np.array_equal(targets, tokens[1 : count + 1])
    assert loss == pytest.approx(tokens[1 : count + 1].mean())


def test_anchor_learning_rate_warms_up_and_decays_to_the_least():
    rates = [anchor_cpu.learning_rate(step, 2000) for step in range(2001)]
    assert rates[100] == max(rates) == anchor_cpu.LR
    assert rates[:100] == pytest.approx([anchor_cpu.LR * (step + 1) / 101 for step in range(100)])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[1050] == pytest.approx((anchor_cpu.LR + anchor_cpu.MIN_LR) / 2)
    assert rates[2000] == pytest.approx(anchor_cpu.MIN_LR)


def test_anchor_refuses_what_is_no_whole_shard(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(10))
    write_shard(tmp_path / "b.bin", np.arange(10, 15))
    assert anchor_cpu.read_shards(str(tmp_path / "*.bin")).tolist() == list(range(15))
    (tmp_path / "b.bin").write_bytes((tmp_path / "b.bin").read_bytes()[:-2])
    with pytest.raises(SystemExit, match=r"b\.bin: no token shard, or cut short"):
        anchor_cpu.read_shards(str(tmp_path / "*.bin"))
    with pytest.raises(SystemExit, match="no shards match"):
        anchor_cpu.read_shards(str(tmp_path / "c*.bin"))


def pair(anchor: tuple[float, float], trainer: tuple[float, float]) -> dict:
    sides = {
        side: dict(val_loss=loss, train_time_ms=ms) for side, (loss, ms) in dict(anchor=anchor, trainer=trainer).items()
    }
    return dict(seed=1, at_or_below=trainer[0] <= anchor[0], **sides)


def test_race_against_the_anchor_claims_a_ratio_only_where_the_mean_loss_is_lower():
    pairs = [pair((1.6, 80.0), (1.5, 20.0)), pair((1.6, 90.0), (1.52, 30.0)), pair((1.6, 100.0), (1.5, 20.0))]
    found = race_anchor.summary(pairs)
    assert (found["median_ratio"], found["lowest_ratio"], found["highest_ratio"]) == (4, 3, 5)
    assert found["ratio_95"]["geometric_mean"] == pytest.approx(60 ** (1 / 3))
    assert "no ratio to claim" not in race_anchor.table(pairs, found, [])
    assert found["reached"]
    missed = copy.deepcopy(pairs)
    missed[1] = pair((1.6, 90.0), (1.61, 30.0))  # -0.1, +0.01, -0.1: lower on average, but not by more than chance
    found = race_anchor.summary(missed)
    told = race_anchor.table(missed, found, [])
    assert not found["reached"]
    assert "at or below the anchor of their pair: 2 of 3" in told
    assert "no ratio to claim" in told
    alone = race_anchor.summary(pairs[:1])
    assert "ratio_95" not in alone
    assert not alone["reached"]


def test_race_against_the_anchor_alternates_and_ends_with_1_where_one_misses(monkeypatch, tmp_path, capsys):
    order = []

    def run_anchor(seed, log, steps):
        order.append(("anchor", seed, steps))
        return dict(val_loss=1.6, train_time_ms=80.0)

    def run_script(script, seed, run_id, log_dir, flags):
        order.append(("trainer", seed, flags))
        return Run(seed, 1.5 if seed == 7 else 1.7, train_time=20.0, step_time=1.0, val_sha256=None)

    monkeypatch.setattr(race_anchor, "run_anchor", run_anchor)
    monkeypatch.setattr(race_anchor, "run_script", run_script)
    argv = ["--pairs", "2", "--seed", "7", "--anchor_steps", "9", "--out", str(tmp_path), "--", "--num_iterations", "3"]
    assert race_anchor.main(argv) == 1
    flags = ["--preset", "nano", "--num_iterations", "3"]
    assert order == [("anchor", 7, 9), ("trainer", 7, flags), ("trainer", 8, flags), ("anchor", 8, 9)]
    document = json.loads((tmp_path / "race_anchor.json").read_text())
    assert (document["reached"], document["pairs_at_or_below"], len(document["runs"])) == (False, 1, 2)
    assert race_anchor.main(["--", "--seed", "3"]) == 2
    assert race_anchor.main(["--pairs", "0"]) == 2
    capsys.readouterr()
