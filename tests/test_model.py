"""What is true of any model here: which tokens an output depends on, derivatives, precision, schedules."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from dense import dense_mask, randomize
from train_gpt import PRESETS, Ranks, Trainer, make_attention_settings, schedule_lr, schedule_validation


def text(cfg) -> Tensor:
    """Return a training sequence of four documents."""
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len,), dtype=torch.int32)
    tokens[[0, 5, 6, 11]] = cfg.eot_token
    return tokens


def random_trainer(cfg) -> Trainer:
    """Return one with random values in every parameter and row of n-grams."""
    trainer = Trainer(cfg, Ranks())
    randomize(trainer.gpt)
    trainer.table.rows.normal_()
    return trainer


def features(trainer: Trainer, tokens: Tensor) -> Tensor:
    """Return the head's input, as in validation."""
    schedule = schedule_validation(0, trainer.cfg)
    [[inputs]], exchange = trainer.loader.load_cycle([schedule], [[np.append(tokens.numpy(), 0)]])
    trainer.table.fetch(exchange)
    return trainer.gpt.features(inputs, make_attention_settings(schedule, trainer.cfg, trainer.device))


class Products(TorchDispatchMode):
    """Note the precisions of all matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            self.dtypes += [t.dtype for t in args if isinstance(t, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_products_are_in_the_precision_of_the_activations(request, preset: str):
    """A factor of shape (1,) in fp32 once made fp32 of nano's stream, and bf16 brought nothing."""
    cfg = dataclasses.replace(request.getfixturevalue(preset), dtype="bfloat16")
    trainer = random_trainer(cfg)
    assert trainer.gpt.lm_head.weight.dtype == (torch.bfloat16 if cfg.tied_frac else torch.float32), "of its own"
    fresh = dict(train_gpt.GPT(cfg).named_parameters())
    for optimizer in trainer.optimizers:  # those of Muon become copies in the precision of the activations
        for name, p in zip(optimizer.names, optimizer.params, strict=True):
            assert p.dtype == (getattr(torch, cfg.dtype) if optimizer.has_master else fresh[name].dtype), name
    with Products() as products:
        x = features(trainer, text(cfg))
        x.backward(torch.ones_like(x))
    assert x.dtype == torch.bfloat16
    assert {*products.dtypes} == {torch.bfloat16}
    assert len(products.dtypes) > 10 * len(cfg.layers)


@pytest.mark.parametrize(("preset", "is_strict"), [("tiny", False), ("gpt2", False), ("gpt2", True)])
@torch.no_grad()
def test_no_output_depends_on_later_tokens_or_other_documents(request, preset: str, is_strict: bool):
    """Long keys, n-grams and the smear look at tokens before, which may end another document: strict without."""
    cfg = request.getfixturevalue(preset)
    # Half of it reaches over a document, too
    stages = tuple(stage._replace(windows=dict.fromkeys(stage.windows, 120)) for stage in cfg.stages)
    cfg, tokens = dataclasses.replace(cfg, dtype="float64", stages=stages), text(cfg)
    if is_strict:
        layers = (layer._replace(attention="short") if layer.attention == "long" else layer for layer in cfg.layers)
        cfg = dataclasses.replace(cfg, layers=tuple(layers), smear_gate_inputs=0)
    trainer = random_trainer(cfg)
    if is_strict:
        trainer.table.rows.zero_()
    before, columns = features(trainer, tokens), []
    places = [*range(13), 20, 31, 32, 40, 55, 63]
    for place in places:
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % cfg.eot_token  # an end of text becomes another token
        columns.append((features(trainer, changed) - before).abs().amax(1) > 1e-11)
    seen, docs = torch.stack(columns, dim=1), (tokens == cfg.eot_token).cumsum(0)
    in_document, causal = dense_mask(docs, len(docs))[:, places], torch.ones(len(docs), len(docs)).tril().bool()
    assert not (seen & ~(in_document if is_strict else causal[:, places])).any()
    assert torch.equal(seen & in_document, in_document), "a token sees its whole document"


def test_the_norm_and_its_derivative_are_right_to_rounding():
    x, grad = torch.randn(2, 300, 96, dtype=torch.float64)
    torch.autograd.gradcheck(train_gpt.norm, x[:4].clone().requires_grad_())
    assert not train_gpt.norm(torch.zeros(2, 96)).any(), "nor NaN"
    for dtype in torch.bfloat16, torch.float32:
        exact = x.to(dtype).double().requires_grad_()
        rounded = x.to(dtype).requires_grad_()
        ys = train_gpt.norm(rounded), F.rms_norm(exact, (96,), eps=torch.finfo(torch.float32).eps)
        pairs = zip(ys, (rounded, exact), strict=True)
        grads = [torch.autograd.grad(y, x, grad.to(dtype).type_as(y))[0] for y, x in pairs]
        for got, want in ys, grads:
            error = (got.double() - want).norm(dim=-1)
            assert (error < 2 * torch.finfo(dtype).eps * want.norm(dim=-1)).all()
            assert got.dtype == dtype


def test_rotated_heads_and_their_derivative_are_right_to_rounding():
    """Half heads have no quarters that stay."""
    for quarters in 2, 4:
        x, grad = torch.randn(2, 30, 3, 1, quarters // 2, 2, 5, dtype=torch.float64)
        angles = 9 * torch.rand(30, 1, 1, 1, 1, 5, dtype=torch.float64)
        cos, sin, scale = angles.cos(), angles.sin(), torch.tensor(0.1, dtype=torch.float64)
        args = x[:2].clone().requires_grad_(), cos[:2], sin[:2], scale
        torch.autograd.gradcheck(train_gpt.NormRotate.apply, args)
        rounded = x.bfloat16().requires_grad_()
        y = train_gpt.NormRotate.apply(rounded, cos.float(), sin.float(), scale.float())
        y.backward(grad.bfloat16())
        exact = x.bfloat16().double().requires_grad_()
        train_gpt.NormRotate.apply(exact, cos, sin, scale).backward(grad.bfloat16().double())
        for a, b in (y, train_gpt.NormRotate.apply(exact, cos, sin, scale)), (rounded.grad, exact.grad):
            assert a.dtype == torch.bfloat16
            assert (a - b).norm() < torch.finfo(torch.bfloat16).eps * b.norm()


@pytest.mark.parametrize("preset", PRESETS)
def test_schedules_are_what_the_rows_say(preset: str):
    """At every step, and in the last validation."""
    cfg = dataclasses.replace(PRESETS[preset], prefix_file="prefixes")
    schedules = cfg.step_schedules
    muon = next(group for group in cfg.groups if group.optimizer == "Muon")
    shares = [stage.share for stage in cfg.stages]
    extra = [stage.extra_steps for stage in cfg.stages]
    ends = [round((len(schedules) - sum(extra)) * sum(shares[:i])) + sum(extra[:i]) for i in range(1, len(shares) + 1)]
    assert train_gpt.stage_ends(cfg) == ends
    assert ends[-1] == len(schedules)
    for stage, start, end in zip(cfg.stages, [0, *ends], ends, strict=False):
        for schedule in schedules[start:end]:
            done = (schedule.step - start) / (end - start)
            assert cfg.stages[schedule.stage] == stage
            assert {kind: window.size for kind, window in schedule.windows.items()} == stage.windows
            assert (schedule.seq_len, schedule.max_doc_len) == (stage.batch * cfg.train_seq_len, stage.max_doc_len)
            assert schedule.prefix_weight == stage.prefix[int(len(stage.prefix) * done)]
            assert schedule.sampled_classes == stage.sampled_classes[int(len(stage.sampled_classes) * done)]
            assert schedule.mtp_weights == pytest.approx([first + done * (last - first) for first, last in stage.mtp])
            is_late = schedule.step >= cfg.long_interval_from
            due = [row.patterns for row in cfg.groups if (schedule.step + 1) % row.update_interval[is_late] == 0]
            assert [*schedule.updates] == due
    assert [schedule.step for schedule in schedules] == [*range(cfg.num_iterations)]
    rates = [schedule_lr(schedule.step, cfg.stages[schedule.stage], cfg) for schedule in schedules]
    assert rates[0] == cfg.stages[0].lr
    assert schedule_lr(cfg.scheduled_steps, cfg.stages[-1], cfg) == pytest.approx(cfg.min_lr_frac)
    assert [schedule.updates[muon.patterns].lr for schedule in schedules] == [cfg.muon_lr * rate for rate in rates]
    last = schedule_validation(len(schedules), cfg)
    assert last.windows["long"].size == (cfg.final_window or cfg.stages[-1].windows["long"]), "in the last validation"
    assert last.windows["long"].attn_scale == schedules[-1].windows["long"].attn_scale, "no step of YaRN"
    for schedule in (schedule_validation(step, cfg) for step in range(len(schedules) + 1)):
        assert (schedule.mtp_weights, schedule.updates) == ([1.0], {})
        assert (schedule.prefix_weight, schedule.sampled_classes) == (0, 0)
        assert (schedule.seq_len, schedule.max_doc_len, schedule.trains) == (cfg.val_seq_len, 0, False)


def test_a_warm_up_leaves_the_sweep_of_sampled_classes_where_it_was(gpt2):
    """With mini's few tokens a sweep always comes round to where it was."""
    stages = tuple(stage._replace(sampled_classes=(100,)) for stage in gpt2.stages)
    trainer = Trainer(dataclasses.replace(gpt2, vocab_size=2000, stages=stages), Ranks())
    before = [*trainer.loader.offsets]
    trainer.warm_up()
    assert trainer.loader.offsets == before
