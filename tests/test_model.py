"""What is true of any model here: which tokens an output depends on, derivatives, precision, schedules, Newton-Schulz.

Formulas of gpt2 are held by numbers of the public record that it equals (test_public_records.py).
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from dense import dense_mask
from gpu_proof.randomize import randomize
from train_gpt import PRESETS, Layer, Ranks, Rotary, Trainer
from train_gpt import zeropower_via_newtonschulz5 as zeropower


def text(cfg) -> Tensor:
    """Return a training sequence of four documents."""
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len,), dtype=torch.int32)
    tokens[[0, 5, 6, 11]] = cfg.eot_token
    return tokens


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
    trainer = Trainer(cfg, Ranks())
    gpt = trainer.gpt
    randomize(gpt)
    assert gpt.lm_head.dtype == (torch.bfloat16 if cfg.tied_frac else torch.float32), "of its own"
    with Products() as products:
        features = gpt.features(text(cfg), trainer.windows)
        features.backward(torch.ones_like(features))
    assert features.dtype == torch.bfloat16
    assert {*products.dtypes} == {torch.bfloat16}
    assert len(products.dtypes) > 10 * len(cfg.layers)


@pytest.mark.parametrize("is_strict", [False, True])
@torch.no_grad()
def test_no_output_depends_on_later_tokens_or_other_documents(gpt2, is_strict: bool):
    """Change one token after the other, and see which outputs change.

    Long keys, bigrams and the smear look at the token before, which may end another document: strict without.
    """
    stages = tuple(stage._replace(window=120) for stage in gpt2.stages)  # half of it reaches over a document, too
    cfg, tokens = dataclasses.replace(gpt2, dtype="float64", stages=stages), text(gpt2)
    if is_strict:
        layers = (layer._replace(attention=layer.attention.replace("long", "short")) for layer in cfg.layers)
        cfg = dataclasses.replace(cfg, layers=tuple(layers), smear_gate_inputs=0)
    trainer = Trainer(cfg, Ranks())
    gpt = trainer.gpt
    randomize(gpt)
    if is_strict:
        gpt.bigram_embed.weight.zero_()
    before, columns = gpt.features(tokens, trainer.windows), []
    places = [*range(13), 20, 31, 32, 40, 55, 63]
    for place in places:
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % cfg.eot_token
        columns.append((gpt.features(changed, trainer.windows) - before).abs().amax(1) > 1e-11)
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


def test_the_gradient_of_a_table_is_the_sum_over_the_tokens_of_a_row():
    """As autograd's own, also where a row is read several times, in bf16 with one rounding."""
    ids, grad = torch.randint(5, (40,)), torch.randn(40, 8)
    table = torch.randn(9, 8, dtype=torch.float64)
    for dtype, limit in (torch.float64, 1e-15), (torch.bfloat16, torch.finfo(torch.bfloat16).eps):
        rows, exact = (table.to(kind, copy=True).requires_grad_() for kind in (dtype, torch.float64))
        train_gpt.LookUp.apply(rows, ids).backward(grad.to(dtype))
        F.embedding(ids, exact).backward(grad.to(dtype).double())
        assert rows.grad.dtype == dtype
        assert (rows.grad - exact.grad).norm() <= limit * exact.grad.norm()


def test_signs_of_bigrams_are_the_same_in_all_runs(gpt2):
    signs = train_gpt.GPT(gpt2).signs
    assert torch.equal(train_gpt.GPT(gpt2).signs, signs)
    assert signs.unique().tolist() == [-1, 1]
    assert signs.double().mean().abs() < 0.2


def test_rotary_tables_are_precise(tiny):
    """The angles are right to 2^-20 of themselves, for 128K positions."""
    long = dict(layers=(Layer("paired"),), dtype="bfloat16", head_dim=64, val_seq_len=2**16, val_tokens=2**16)
    cfg = dataclasses.replace(tiny, **long)
    rotary, freqs = Rotary(cfg), train_gpt.rotary_frequencies(0, cfg, torch.float64)[0]
    angles = torch.outer(torch.arange(0, 128 * 1024, 511, dtype=torch.float64), freqs)
    for table, exact in (rotary.cos, angles.cos()), (rotary.sin, angles.sin()):
        assert (table.dtype, len(table)) == (torch.float32, 128 * 1024), "pairs have two positions a token"
        assert torch.all((table[::511] - exact).abs() <= 1e-7 + angles * 2**-20)
    q, k = torch.randn(2, 400, 2, 64).bfloat16()
    for got, want in zip(rotary(q, k, 2), rotary(q.float(), k.float(), 2), strict=True):
        assert torch.equal(got, want.bfloat16()), "it computes in fp32"


@pytest.mark.parametrize("preset", PRESETS)
def test_schedules_are_what_the_rows_say(preset: str):
    """At every step. Rates may fall in any way, but from what the stages say to `min_lr_frac`."""
    cfg = dataclasses.replace(PRESETS[preset], prefix_file="prefixes")
    n, starts, highest = cfg.num_iterations, train_gpt.stage_starts(cfg), max(stage.lr for stage in cfg.stages)
    ends = [cfg.scheduled_steps * sum(stage.share for stage in cfg.stages[: i + 1]) for i in range(len(cfg.stages))]
    assert starts == [0, *map(round, ends[:-1]), n]
    for i, stage in enumerate(cfg.stages):
        steps = range(starts[i], starts[i + 1])
        for step in steps:
            assert train_gpt.stage_of(step, cfg) == stage
            assert train_gpt.train_seq_len(step, cfg) == stage.batch * cfg.train_seq_len
            assert train_gpt.attention_windows(step, cfg)["long"] == stage.window
            assert min(cfg.min_lr_frac, stage.lr) <= train_gpt.lr_multiplier(step, cfg) <= highest
            pairs = [*stage.mtp, *[stage.prefix] * any(stage.prefix)]
            done = (step - starts[i]) / len(steps)
            expected = [first + done * (last - first) for first, last in pairs]
            assert train_gpt.loss_weights(step, cfg) == pytest.approx(expected)
    assert train_gpt.lr_multiplier(0, cfg) == cfg.stages[0].lr
    assert train_gpt.lr_multiplier(cfg.scheduled_steps, cfg) == pytest.approx(cfg.min_lr_frac)
    last = train_gpt.attention_windows(n, cfg)
    assert last["long"] == (cfg.final_window or cfg.stages[-1].window), "in the last validation"
    assert all(window >= 0 for window in last.values())
    momentum = [train_gpt.muon_momentum(step, cfg) for step in range(n)]
    assert max(momentum) == cfg.muon_momentum
    assert (momentum[0] == cfg.muon_momentum) == (cfg.momentum_warmup_steps == 0)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_tables_part_right_after_a_step_of_adam(every: int):
    """The last tied step is one in which Adam steps, for any number of steps."""
    for steps in range(20, 400):
        changes = dict(num_iterations=steps, extension_steps=0, adam_every=every, checkpoint_every=0, tied_frac=0.6)
        cfg = dataclasses.replace(PRESETS["gpt2"], **changes)
        last = next(step for step in range(round(0.6 * steps), steps) if (step + 1) % every == 0)
        assert [train_gpt.is_tied(step, cfg) for step in (0, last, last + 1)] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1e15])
@pytest.mark.parametrize("size", [(64, 64), (48, 160)], ids=str)
def test_singular_values_end_near_1_and_vectors_stay(size: tuple, scale: float, dtype: torch.dtype):
    """Each matrix of a stack has its own norm; a zero one stays zero, and nothing overflows."""
    norms = scale * torch.tensor([1, 10, 1000, 0])
    g = F.normalize(torch.randn(4, *size, dtype=torch.float64), dim=(1, 2)) * norms[:, None, None]
    x = zeropower(g.float(), dtype)
    assert (x.dtype, x[3].any()) == (dtype, False)
    u, _, vh = torch.linalg.svd(g[:3], full_matrices=False)
    turned = u.mT @ x[:3].double() @ vh.mT
    values, margin = turned.diagonal(dim1=1, dim2=2), 0.1 if dtype == torch.bfloat16 else 0.02
    assert values.max() <= 1.2
    assert values[:, : size[0] - 2].min() >= 0.65, "but for the smallest"
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=margin)
