"""torch.compile sees a training graph for each length and number of next weights, a validation graph, and no more."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

import train_gpt
from shards import write_shard
from train_gpt import Layer, Ranks, Stage, Trainer

# In 14 steps stages begin at 0, 4, 8 and 12; the tables part in the third
STAGES = (
    Stage(1 / 3, batch=1, max_doc_len=28, window=24, mtp=((1, 1), (0.5, 0.5), (0.25, 0))),
    Stage(1 / 3, batch=2, max_doc_len=64, window=56, lr=1.5, mtp=((1, 1), (0.5, 0))),
    Stage(1 / 3, batch=3, max_doc_len=64, window=88, lr=1.7),
    Stage(0, batch=3, max_doc_len=64, window=104, lr=1.7),
)
LONG = dict(num_iterations=14, extension_steps=2, val_seq_len=256, val_tokens=512, head_dim=16, model_dim=32)
LONG |= dict(vocab_size=128, eot_token=127, final_window=120, compile=True, stages=STAGES)
# Fewer layers, as flex without code takes long: two nets, MUDD, heads in pairs, and all that nets make factors of
LONG |= dict(
    layers=(
        Layer("paired", net=True),
        Layer("long", value_embed=True, xsa=True),
        Layer("none", net=True, skip=1),
        Layer("short", value_embed=True, reads=1, head_gate=True, dc=True, mudd=(1, 0)),
    )
)


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


def count_calls(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(node.op == "call_function" and name in str(node.target) for node in graph.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(dtype="float64"), dict(lm_head_fp8=True, mlp_fp8=True, dtype="bfloat16")])
def test_all_graphs_are_there_after_the_warm_up(gpt2, graphs, tmp_path: Path, changes: dict):
    """Run in small: warm up, then take every step, validate after it, and compare with attention that is gathered.

    Where that is not compiled. In float64 flex goes by its mask of elements: test_attention has the lists of blocks.
    """
    files = dict(train_files=f"{tmp_path}/train.bin", val_files=f"{tmp_path}/val.bin")
    for seed, path in enumerate(files.values()):
        write_shard(Path(path), np.random.default_rng(seed).integers(128, size=20_000))
    cfg = dataclasses.replace(gpt2, **LONG | changes | files)
    trainer, plain = Trainer(cfg, Ranks()), Trainer(dataclasses.replace(cfg, compile=False), Ranks())
    trainer.gpt.cfg = dataclasses.replace(cfg, device="cpu" if cfg.lm_head_fp8 else "cuda")  # what the masks go by
    trainer.warm_up()
    *trainings, validation = (graph for graph in graphs if count_calls(graph, "embedding"))
    assert len(trainings) == 3, "three lengths; the extension is as long as the stage before it"
    for graph in (*trainings, validation):
        attentions = sum(layer.attention != "none" for layer in cfg.layers)
        assert count_calls(graph, "flex_attention") == (not cfg.lm_head_fp8) * attentions
    assert count_calls(validation, "scaled_mm") == 0

    counters = torch._dynamo.utils.counters["stats"]
    compiled, plans = (len(graphs), counters["unique_graphs"]), train_gpt.plan_data(cfg)
    batches = train_gpt.read_batches(plans["train"], range(cfg.batch_sequences), cfg, trainer.device)
    for step, batch in enumerate(batches):
        losses = [(t.train_step(step, batch).item(), t.evaluate(step + 1, plans["val"])) for t in (trainer, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02 if cfg.lm_head_fp8 else 1e-10)
    assert (step, trainer.windows.max(), trainer.stage) == (13, 120, 3)
    assert not torch.equal(trainer.gpt.embed.weight, trainer.gpt.lm_head), "two tables in the end"
    assert (len(graphs), counters["unique_graphs"]) == compiled
