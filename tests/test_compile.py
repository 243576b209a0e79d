"""torch.compile sees a training graph for each length and number of targets, a validation graph, and no more."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

import train_gpt
from data.shards import write_shard
from train_gpt import Layer, Ranks, Stage, Trainer

# In 14 steps they begin at 0, 6 and 12; the last two have equal lengths, and the second has two numbers of classes
STAGES = (
    Stage(1 / 2, 1, 28, dict(short=8, long=24), mtp=((1, 1), (0.5, 0.5), (0.25, 0)), sampled_classes=(64,)),
    Stage(1 / 2, 2, 64, dict(short=24, long=56), lr=1.5, sampled_classes=(88, 96)),
    Stage(0, 2, 64, dict(short=48, long=104), extra_steps=2, lr=1.7, sampled_classes=(96,)),
)
# Fewer layers, as flex without code takes long: two nets, all that they make, MUDD, heads in pairs and halves, nano's
LAYERS = (
    Layer("paired", half_qk=True, gate_net=True, x0=True, ngram_input=True),
    Layer("long", half_v=True, value_embed=True, xsa=True),
    Layer(None, shift=(0, 2, 1), gate_net=True, skip=1, mlps=0),
    Layer("nope", value_embed=True, attn_input=1, head_gate=True, ngram=True, mlps=2, mudd=1, head_mix=(1, 0)),
)
LONG = dict(num_iterations=14, val_seq_len=256, val_tokens=512, head_dim=16, model_dim=32, tied_frac=0.5)
LONG |= dict(vocab_size=128, eot_token=127, final_window=120, mix_groups=8, dtype="float64", compile=True)
LONG |= dict(stages=STAGES, layers=LAYERS)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Capture the graphs of torch.compile, and run them without generating code: it takes neither GPU nor compiler.

    FlexAttention, which refuses to train on a CPU, then heeds the mask of elements and ignores the lists of blocks.
    """
    train_gpt.compiled.cache_clear()
    torch._dynamo.reset()  # else the graphs of one test count towards the limit on recompilations in the next
    captured, run_eagerly = [], torch._dynamo.lookup_backend("aot_eager")  # with autograd's, forward and backward

    def backend(graph: torch.fx.GraphModule, inputs: list):
        captured.append(graph)
        return run_eagerly(graph, inputs)

    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return captured


@pytest.mark.slow
def test_all_graphs_are_there_after_the_warm_up(gpt2, graphs, tmp_path: Path):
    """Warm up, take every step, validate, and compare with a run that is not compiled, in bands."""
    files = dict(train_files=f"{tmp_path}/train.bin", val_files=f"{tmp_path}/val.bin")
    for seed, path in enumerate(files.values()):
        write_shard(Path(path), np.random.default_rng(seed).integers(128, size=20_000))
    cfg = dataclasses.replace(gpt2, **LONG | files)
    trainer, plain = Trainer(cfg, Ranks()), Trainer(dataclasses.replace(cfg, compile=False), Ranks())
    for module in trainer.gpt, trainer.gpt.pointer:
        module.cfg = dataclasses.replace(cfg, device="cuda")  # what the masks go by
    trainer.warm_up()
    models = [graph for graph in graphs if "flex_attention" in graph.code]
    assert len(models) == 4, "two lengths, the second with two numbers of classes, and a validation"
    counters = torch._dynamo.utils.counters["stats"]
    before = len(graphs), counters["unique_graphs"]
    for t in (trainer, plain):
        t.batches = t.loader.steps(train_gpt.train_cycles(train_gpt.train_batches(cfg), cfg))
    for schedule in cfg.step_schedules:
        ours, expected = (t.train_step(schedule, *next(t.batches))[0].item() for t in (trainer, plain))
        assert ours == pytest.approx(expected, rel=1e-9)
    ours, expected = (t.evaluate(len(cfg.step_schedules)) for t in (trainer, plain))
    assert ours == pytest.approx(expected, rel=1e-9)
    assert (schedule.stage, schedule.windows["long"].size) == (2, 104)
    assert not torch.equal(trainer.gpt.embed.weight, trainer.gpt.lm_head.weight), "two tables in the end"
    assert (len(graphs), counters["unique_graphs"]) == before
