"""Muon and Adam in one process against plain references and torch.optim's own, and which parameter goes where."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, Adam, Hyperparameters, Muon, Ranks, build_optimizers, lr_multiplier, step_optimizers

# Groups of one shape: a batch of three and a square matrix; tall and wide ones; a tall one alone
MUON_GROUPS = [[(3, 16, 16), (16, 16)], [(3, 24, 16), (16, 24)], [(64, 16)]]
# One element, less than, exactly and more than the alignment; 2-D; a batch
ADAM_GROUPS = [[(128, 9)], [(37, 11), (5, 3, 7)], [(2,), (1,), (16,), (17,)]]


def config(sequences: int, dtype: str) -> Hyperparameters:
    changes = dict(train_seq_len=64, batch_tokens=64 * sequences, adam_beta1=0.8, adam_beta2=0.95, adam_eps=0.01)
    return dataclasses.replace(train_gpt.PRESETS["nano"], **changes, dtype=dtype)


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    values = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return {str(i): nn.Parameter(value) for i, value in enumerate(values)}


def set_gradients(params: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Draw gradients of changing size, the same for equal shapes and steps, whatever the precision."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params.values():
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10 ** (step % 3 - 1)
        p.grad = (grad * factor).to(p.dtype)


def reference_update(grad: Tensor) -> Tensor:
    """Apply Newton-Schulz to each matrix, term by term, without a transposition."""
    updates = []
    for x in grad.view(-1, *grad.shape[-2:]):
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            xxx = x @ x.T @ x
            x = 3.4445 * x - 4.7750 * xxx + 2.0315 * (xxx @ x.T @ x)
        updates.append(max(1, x.size(0) / x.size(1)) ** 0.5 * x)
    return torch.stack(updates).view_as(grad)


@pytest.mark.parametrize("sequences", [1, 12])
@pytest.mark.parametrize("shapes", MUON_GROUPS, ids=str)
def test_muon_equals_a_reference_that_takes_one_matrix_at_a_time(shapes: list, sequences: int):
    params = parameters(shapes)
    expected = [p.detach().clone() for p in params.values()]
    momentum_buffers = [torch.zeros_like(p) for p in expected]
    muon = Muon(params, 0.05, config(sequences, "float64"), Ranks())
    for step in range(6):
        lr, momentum = 0.05 * lr_multiplier(step, muon.cfg), train_gpt.muon_momentum(step, muon.cfg)
        set_gradients(params, step, factor=sequences)
        grads = [p.grad.clone() for p in params.values()]
        step_optimizers([muon], step)
        for p, grad, m, want in zip(params.values(), grads, momentum_buffers, expected, strict=True):
            m.mul_(momentum).add_((1 - momentum) * grad / sequences)
            want -= lr * reference_update(momentum * m + (1 - momentum) * grad / sequences)
            torch.testing.assert_close(p.detach(), want, rtol=0, atol=1e-11)
            assert torch.equal(p.grad, grad), "the gradients are left alone"


def test_a_zero_gradient_moves_nothing():
    params = parameters(MUON_GROUPS[0], torch.float32)
    before = [p.detach().clone() for p in params.values()]
    set_gradients(params, 0, factor=0)
    step_optimizers([Muon(params, 0.05, config(4, "bfloat16"), Ranks())], 0)
    step_optimizers([Adam(params, 0.05, config(4, "bfloat16"), Ranks())], 0)
    assert all(map(torch.equal, params.values(), before))


@pytest.mark.parametrize("shapes", [[(64, 64)] * 4, [(64, 96), (96, 64)], [(256, 64)]], ids=str)
def test_muon_in_bf16_agrees_with_torch(shapes: list):
    """To 5%: bf16 rounds differently when matrices are one stack, and torch normalizes in bf16."""
    params, others = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    start = [p.detach().clone() for p in params.values()]
    options = dict(lr=0.02, weight_decay=0.0, momentum=0.9, nesterov=True, ns_steps=5, adjust_lr_fn="original")
    theirs = torch.optim.Muon(others.values(), **options)
    ours = Muon(params, 0.02, config(1, "bfloat16"), Ranks())
    for step in range(6):
        set_gradients(params, step)
        set_gradients(others, step)
        step_optimizers([ours], step)
        theirs.step()
    for p, other, before in zip(params.values(), others.values(), start, strict=True):
        assert (p - other).norm() < 0.05 * (other - before).norm()


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("shapes", ADAM_GROUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_adam_equals_torch(dtype: torch.dtype, shapes: list, sequences: int):
    """Sizes that are no multiple of the alignment, and learning rates that change."""
    params, others = parameters(shapes, dtype), parameters(shapes, dtype)
    ours = Adam(params, 0.1, config(sequences, "float32"), Ranks())
    # fused: bf16 parameters with arithmetic in fp32 in between, as ours. The others: another implementation than ours
    options = dict(lr=0.1, betas=(0.8, 0.95), eps=0.01, fused=dtype == torch.bfloat16, foreach=False)
    theirs = torch.optim.Adam(others.values(), **options)
    limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0}[dtype]
    for step in range(6):
        theirs.param_groups[0]["lr"] = 0.1 * lr_multiplier(step, ours.cfg)
        set_gradients(params, step, factor=sequences)
        set_gradients(others, step)
        step_optimizers([ours], step)
        theirs.step()
        moments = [ours.pieces(ours.state[kind]) for kind in ours.moments]
        for p, other, *pieces in zip(params.values(), others.values(), *moments, strict=True):
            torch.testing.assert_close(p, other, rtol=limit, atol=limit)
            for kind, piece in zip(ours.moments, pieces, strict=True):
                torch.testing.assert_close(piece.view_as(p), theirs.state[other][kind], rtol=limit, atol=limit)


def test_adams_parameters_are_aligned_views_that_follow_the_module():
    """Adam moves their storage: the module sees every step, and a state_dict goes out and in."""
    model, tokens = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)).double(), torch.arange(7)
    objects, before = list(model.parameters()), model(tokens).detach()
    adam = Adam(dict(model.named_parameters()), 0.1, config(1, "float64"), Ranks())
    assert [p.storage_offset() for p in objects] == [0, 48, 64], "multiples of 16 elements"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(2):
        assert torch.equal(model(tokens), before)
        model(tokens).square().sum().backward()
        step_optimizers([adam], step)
        assert model(tokens).square().sum() < before.square().sum()
        model.load_state_dict(state)


@pytest.fixture
def gpt(tiny) -> GPT:
    lrs = dict(muon_lr=0.1, head_lr=0.2, embed_lr=0.3, scalar_lr=0.4)
    return GPT(dataclasses.replace(tiny, **lrs, attention_layout="L-SL"))


def test_every_parameter_is_in_one_group_with_its_learning_rate(gpt: GPT):
    optimizers = build_optimizers(gpt, Ranks())
    found = [(name, type(o), o.lr, o.initial_lr) for o in optimizers for name in o.name.split("+")]
    assert [id(gpt.get_parameter(name)) for name, *_ in found] == [id(p) for o in optimizers for p in o.params]
    expected = []
    for name, _ in gpt.named_parameters():
        lr = (
            0.2 if name == "lm_head" else 0.3 if "embed" in name else 0.4 if "lambda" in name or "skip" in name else 0.1
        )
        expected.append((name, Muon if lr == 0.1 else Adam, lr, lr))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert optimizers == sorted(optimizers, key=lambda o: -o.grads.nbytes), (
        "the largest hides the others' communication"
    )
    assert [o.grads.shape[1:] for o in optimizers if isinstance(o, Muon)] == [(32, 128), (32, 32)], "one per shape"


@pytest.mark.parametrize("name", "extra blocks.0.gate blocks.1.attn_lambdas bigram_embed.c_proj embed.lambdas".split())
def test_a_parameter_without_exactly_one_group_is_refused_by_name(gpt: GPT, name: str):
    """No group claims the first three; two claim the others."""
    module, _, last = name.rpartition(".")
    gpt.get_submodule(module).register_parameter(last, nn.Parameter(torch.zeros(3, 3)))
    with pytest.raises(ValueError, match=rf"exactly one group in build_optimizers: {name}$"):
        build_optimizers(gpt, Ranks())
