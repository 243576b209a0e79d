"""Groups of parameters, and what travels in a step, when, and through which buffers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import train_gpt
from train_gpt import GPT, Muon, Ranks, UserError, build_optimizers

MUON = train_gpt.Group("all", "Muon", "*", beta2=0.95, update_interval=(1, 1))
EMA = train_gpt.EMA("w", window=30, rate=0.5, blend=1.0)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_parameter_without_exactly_one_row_is_refused_by_name(gpt2, rows: int):
    more = tuple(MUON._replace(name=name, patterns="mlp.*ext* *.extra") for name in "ab"[:rows])
    gpt = GPT(dataclasses.replace(gpt2, groups=gpt2.groups + more))
    gpt.blocks[1].register_parameter("extra", nn.Parameter(torch.zeros(3, 3)))
    with pytest.raises(UserError, match=rf"^blocks.1.extra: {rows} rows of `groups`"):
        build_optimizers(gpt, Ranks())


def test_a_parameter_in_the_row_of_the_ngrams_is_refused_by_name(gpt2):
    groups = [row._replace(patterns="ngrams *.lambdas") if row.name == "ngrams" else row for row in gpt2.groups]
    groups = [row._replace(patterns="*.skip_lambda smear_lambda") if row.name == "lambdas" else row for row in groups]
    with pytest.raises(UserError, match=r"^blocks\.\S*: group ngrams has optimizer RowAdam, expected one of"):
        build_optimizers(GPT(dataclasses.replace(gpt2, groups=groups)), Ranks())


def test_averages_of_no_parameter_are_refused(gpt2):
    cfg = dataclasses.replace(gpt2, emas=[*gpt2.emas, EMA._replace(patterns="*.nothing")])
    with pytest.raises(UserError, match=r"^emas: no parameter is named by \*\.nothing"):
        build_optimizers(GPT(cfg), Ranks())


def test_tied_tables_need_equal_rows(gpt2):
    """Or one of them would leave the other in silence."""
    groups = [row._replace(lr=row.lr / 2) if "lm_head.weight" in row.patterns else row for row in gpt2.groups]
    cfg = dataclasses.replace(gpt2, groups=groups, tied_frac=0.5)
    with pytest.raises(UserError, match=r"^embed\.weight has .*--tied_frac 0$"):
        build_optimizers(GPT(cfg), Ranks())
    build_optimizers(GPT(dataclasses.replace(cfg, tied_frac=0.0)), Ranks())


def test_gradients_of_rows_add_up_in_place_without_loss(gpt2):
    """A thousand tokens that are equal, in bf16, which counts no further than 256."""
    table = nn.Parameter(torch.randn(7, 16).bfloat16())
    index = torch.tensor([3] * 1000 + [5])
    sums = torch.ones(7, 16)
    rows = train_gpt.AccumulatingEmbedding.apply(table, index, sums)
    assert torch.equal(rows, table[index])
    for _ in range(2):
        assert torch.autograd.grad(rows.sum(), table, retain_graph=True, allow_unused=True) == (None,)
    assert sums.mean(1).tolist() == [1, 1, 1, 2001, 1, 3, 1]
    trainer = train_gpt.Trainer(dataclasses.replace(gpt2, dtype="bfloat16"), Ranks())
    gpt, tables = trainer.gpt, trainer.gpt.tables()
    assert {gpt.embed.grad_buffer.dtype, gpt.lm_head.grad_buffer.dtype} == {torch.float32}
    assert {table.grad_buffer.dtype for table in gpt.value_embeds.values()} == {torch.float16}
    large = {p for p in trainer.gpt.parameters() if p.ndim == 2 and len(p) >= 256}
    assert {table.weight for table in tables} == large


def test_muon_keeps_steps_that_bf16_would_lose():
    """As the second of two ranks, which has the second matrix and its factor."""
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype="bfloat16", device="cpu", muon_lr=1e-4, groups=(MUON,))
    first = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    params = {name: nn.Parameter(first.clone()) for name in ("other", "w")}
    muon = Muon(params, [MUON._replace(lr_mul=0.0), MUON], {0: EMA}, cfg, Ranks(1, 2, 1, 2))
    values = muon.state["master"][0]
    assert torch.equal(values, first)
    for step in range(30):
        before = values.clone()
        muon.grad_shard.copy_(torch.eye(16))
        train_gpt.step_optimizers([muon], cfg.step_schedules[step]._replace(ema_rates=[1.0]))
        assert torch.equal(params["w"], values.bfloat16())
        assert torch.equal(muon.state["ema 0"][0], values), "nor does an average"
        assert (values.diag() < before.diag()).all()
    moved = (first - values).diag()
    assert (moved > 1e-3).all(), "each step is about 1e-4: bf16 loses that from 0.05 on"


def test_moments_of_adam_are_wider_than_parameters(gpt2):
    for optimizer in build_optimizers(GPT(dataclasses.replace(gpt2, dtype="bfloat16")), Ranks()):
        if isinstance(optimizer, train_gpt.Adam):
            assert {t.dtype for t in optimizer.state.values()} == {torch.float32}


def test_communication_hides_behind_updates(monkeypatch, gpt2):
    """While one group computes, the next one's gradients and the last one's values travel."""
    events = []
    work = SimpleNamespace(wait=lambda: events.append("wait"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name, kind in dict(reduce_scatter="gradients", all_gather="values").items():
        monkeypatch.setattr(train_gpt, name, lambda *_, kind=kind, **more: (events.append(kind), work)[1])
    optimizers = build_optimizers(GPT(gpt2), Ranks(7, 8, 7, 8))
    sizes = [optimizer.param_buffer.nbytes for optimizer in optimizers]
    assert sizes == sorted(sizes, reverse=True), "the largest computes while others communicate"
    schedule = gpt2.step_schedules[gpt2.common_interval - 1]
    groups = len(optimizers) - schedule.tied  # then embedding and head are one table
    train_gpt.step_optimizers(optimizers, schedule, lambda: events.append("rows"))
    assert events == ["gradients"] * groups + ["rows"] + ["wait", "values"] * groups + ["wait"] * groups


def test_rows_of_ngrams_are_saved_and_restored_in_blocks(gpt2, monkeypatch):
    """As the second of two ranks has them: 33 rows, in blocks of four. A row's squares may have decayed to nothing."""
    cfg = dataclasses.replace(gpt2, dtype="bfloat16")  # v is in fp32
    monkeypatch.setattr(train_gpt, "ROWS_AT_ONCE", 4)
    tables = [train_gpt.NgramTable(cfg, Ranks(1, 2, 1, 2), torch.device("cpu")) for _ in range(2)]
    touched = torch.arange(len(tables[0].rows)) % 3 > 0
    tables[0].rows[touched] = torch.randn(int(touched.sum()), gpt2.model_dim).bfloat16()
    tables[0].v[touched] = torch.randn(int(touched.sum()), 1).relu()
    tables[0].rows[1], tables[0].v[1] = 0, 1
    tables[1].restore(**(saved := tables[0].state()))
    assert len(saved["ids"]) == touched.sum() > 16
    assert torch.equal(tables[1].rows, tables[0].rows)
    assert torch.equal(tables[1].v, tables[0].v)
