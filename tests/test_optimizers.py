"""Groups of parameters, and what travels in a step, when, and through which buffers."""

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, Muon, Ranks, UserError, build_optimizers, step_optimizers

MUON = train_gpt.Group("Muon", "*", lr=1.0, beta2=0.95, update_interval=(1, 1))
EMA = train_gpt.EMA("w", window=30, rate=0.5, blend=1.0)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_parameter_without_exactly_one_row_is_refused_by_name(gpt2, rows: int):
    gpt = GPT(dataclasses.replace(gpt2, groups=gpt2.groups + (MUON._replace(patterns="mlp.*ext* *.extra"),) * rows))
    gpt.blocks[1].register_parameter("extra", nn.Parameter(torch.zeros(3, 3)))
    with pytest.raises(UserError, match=rf"^blocks.1.extra: {rows} rows of `groups`"):
        build_optimizers(gpt, Ranks())


@pytest.mark.parametrize("changes", [dict(lr=0.5), dict(optimizer="Other"), dict(beta2=0.5), None], ids=str)
def test_tied_tables_need_equal_rows(gpt2, monkeypatch, changes: dict | None):
    """Or one of them would leave the other in silence. None: one row for both."""
    monkeypatch.setitem(train_gpt.OPTIMIZERS, "Other", type("Other", (train_gpt.Adam,), {}))
    row = train_gpt.Group("Adam", "lm_head.weight", lr=0.01, decay=0.1, beta1=0.5, beta2=0.95)
    others = (row._replace(patterns=re.sub("lm_head.weight|embed.weight", "", row.patterns)) for row in gpt2.groups)
    both = (row._replace(patterns="lm_head.weight embed.weight"),)
    groups = (*others, *(both if changes is None else (row, row._replace(patterns="embed.weight", **changes))))
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
    tables = trainer.gpt.tables()
    assert all(table.grad_buffer.dtype == torch.float32 for table in tables)
    large = {p for p in trainer.gpt.parameters() if p.ndim == 2 and len(p) >= 256}
    assert {table.weight for table in tables} == large


def test_muon_keeps_steps_that_bf16_would_lose():
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype="bfloat16", device="cpu", muon_lr=1e-4, groups=(MUON,))
    first = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    params = dict(w=nn.Parameter(first.clone()))
    muon = Muon(params, [MUON], {0: EMA}, cfg, Ranks())
    values = muon.state["master"][0]
    assert torch.equal(values, first)
    for step in range(30):
        before = values.clone()
        muon.add([torch.eye(16).bfloat16()])
        muon.reduce()
        muon.update(cfg.step_schedules[step])
        assert torch.equal(params["w"], values.bfloat16())
        muon.update_emas(cfg.step_schedules[step]._replace(ema_rates=[1.0]))
        assert torch.equal(muon.state["ema 0"][0], values), "nor does an average"
        assert (values.diag() < before.diag()).all()
    moved = (first - values).diag()
    assert (moved > 1e-3).all(), "each step is about 1e-4: bf16 loses that from 0.05 on"


def test_moments_of_adam_are_wider_than_parameters(gpt2):
    for optimizer in build_optimizers(GPT(dataclasses.replace(gpt2, dtype="bfloat16")), Ranks()):
        if isinstance(optimizer, train_gpt.Adam):
            assert {t.dtype for t in optimizer.state.values()} == {torch.float32}


def shared(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors without gaps have bytes in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class Network:
    """Carry out collectives one by one, in a unit of time each; an update takes two. Results are NaN until then."""

    def __init__(self, monkeypatch, ranks: Ranks):
        self.ranks, self.under_way, self.events, self.now, self.free = ranks, [], [], 0, 0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        for kind in ("reduce_scatter", "all_gather"):
            monkeypatch.setattr(train_gpt, kind, lambda *args, kind=kind, **_: self.launch(kind, *args))

    def launch(self, kind: str, result: Tensor, tensor: Tensor) -> SimpleNamespace:
        self.events.append(kind)
        assert result.dtype == tensor.dtype
        self.free = arrival = max(self.now, self.free) + 1
        sent, buffers, (rank, size, *_) = tensor.clone(), (result, tensor), self.ranks
        for others in self.under_way:
            for (written, _), pair in (buffers, others), (others, buffers):
                assert not any(shared(written, t) for t in pair), f"{kind} shares a buffer with one under way"
        self.under_way.append(buffers)
        result.fill_(math.nan)
        if kind == "all_gather":  # may be in place
            tensor.copy_(sent)

        def wait() -> None:
            missing = result.isnan().sum() + (tensor.numel() if shared(result, tensor) else 0)
            assert torch.equal(tensor, sent), f"the input of {kind} was written to while it was under way"
            assert missing == result.numel(), f"the result of {kind} was written to before it arrived"
            if kind == "reduce_scatter":  # the others have no gradients
                result.copy_(sent.unflatten(0, (size, -1))[rank])
            else:  # the others update theirs as we do
                result.unflatten(0, (size, -1)).copy_(sent)
            self.now = max(self.now, arrival)
            self.under_way[:] = [pair for pair in self.under_way if pair is not buffers]

        return SimpleNamespace(wait=wait)

    def compute(self, update, *args) -> None:
        self.events.append("update")
        self.now += 2
        update(*args)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 3), (7, 8)])
def test_buffers_are_safe_and_communication_hides_behind_compute(monkeypatch, gpt2, rank, size):
    """With n groups a step has 4 n units of time, of which 2 n - 2 are hidden: half of these if only gradients, or only
    updates, travel beside compute. The second step finds the buffers of the first."""
    network = Network(monkeypatch, Ranks(rank, size))
    optimizers = build_optimizers(gpt := GPT(dataclasses.replace(gpt2, dtype="bfloat16")), network.ranks)
    sizes = [optimizer.param_buffer.nbytes for optimizer in optimizers]
    assert sizes == sorted(sizes, reverse=True), "the largest computes while others communicate"
    for optimizer in optimizers:
        optimizer.update_shard = lambda *args, update=optimizer.update_shard: network.compute(update, *args)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.add([torch.randn_like(p) for p in optimizer.params])
        schedule = gpt2.step_schedules[gpt2.common_interval - 1]
        step_optimizers(optimizers, schedule, lambda: network.events.append("rows"))
        assert not network.under_way
        assert all(p.isfinite().all() for p in gpt.parameters()), "a result was used before it was there"
        groups = len(optimizers) - schedule.tied  # then embedding and head are one table
        assert network.events == ["reduce_scatter"] * groups + ["rows"] + ["update", "all_gather"] * groups
        assert network.now <= (2 * groups + 2) * (step + 1)
        network.events.clear()


def test_rows_of_ngrams_wait_for_what_other_ranks_send(gpt2):
    """Both ways. The other of two ranks sends what this one does."""

    class Table(train_gpt.NgramTable):
        def all_to_all(self, out, rows, received, sent):
            assert rows.isfinite().all()
            out.fill_(math.nan)
            return lambda: out.copy_(rows[torch.arange(len(out)) % len(rows)])

    schedule = gpt2.step_schedules[gpt2.common_interval - 1]
    table = Table(gpt2, Ranks(0, 2, 0, 2), torch.device("cpu"))
    loader = train_gpt.DistributedDataLoader(gpt2, table.ranks, torch.device("cpu"))
    tokens = np.arange(schedule.seq_len + 1) % 7
    _, exchange = loader.load_cycle([schedule], [[tokens] * gpt2.batch_sequences])
    for _ in range(2):
        table.fetch(exchange)
        assert table.fetched.isfinite().all()
        table.grads[: len(exchange.recv_ids)] += 1
        table.send(exchange)
        table.update(exchange, schedule)
        assert not table.grads.any()
        assert table.rows.isfinite().all()
        assert table.rows.any(1).sum() == len(exchange.unique_rows)


def test_rows_of_ngrams_are_saved_and_restored_in_blocks(gpt2, monkeypatch):
    """As the second of two ranks has them: 33 rows, those that had a gradient in blocks of four."""
    monkeypatch.setattr(train_gpt, "ROWS_AT_ONCE", 4)
    tables = [train_gpt.NgramTable(gpt2, Ranks(1, 2, 1, 2), torch.device("cpu")) for _ in range(2)]
    touched = torch.arange(len(tables[0].rows)) % 3 > 0
    tables[0].rows[touched] = torch.randn(int(touched.sum()), gpt2.model_dim)
    tables[0].v[touched] = torch.rand(int(touched.sum()), 1) + 0.1
    tables[1].restore(**(saved := tables[0].state()))
    assert len(saved["ids"]) == touched.sum() > 16
    assert torch.equal(tables[1].rows, tables[0].rows)
    assert torch.equal(tables[1].v, tables[0].v)
