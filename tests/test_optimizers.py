"""Muon and Adam of one process against plain references and torch.optim's own, and which parameter goes where."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, Adam, Muon, World, build_optimizers, step_optimizers, zeropower_via_newtonschulz5

# Batches of three, wide, tall and square; the first two and the last two share a stack with their transposes
MUON_SHAPES = {"qkv": (3, 24, 16), "c_proj": (16, 24), "square": (16, 16), "c_fc": (64, 16), "mlp_c_proj": (16, 64)}
# One element, less than, exactly and more than the alignment; 2-D; a batch
ADAM_GROUPS = (
    {"head": (128, 9)},
    {"embed": (37, 11), "value": (5, 3, 7)},
    {"a": (2,), "b": (1,), "c": (16,), "d": (17,)},
)


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


def set_gradients(params: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Gradients of changing size; the same for equal names and steps, whatever the precision."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params.values():
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10 ** (step % 3 - 1)
        p.grad = (grad * factor).to(p.dtype)


# Muon


def reference_zeropower(x: Tensor) -> Tensor:
    """Newton-Schulz of one matrix, term by term, without a transposition."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        xxx = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * xxx + 2.0315 * (xxx @ x.T @ x)
    return x


def test_muon_equals_a_reference_that_takes_one_matrix_at_a_time():
    divisor = 12
    params = parameters(MUON_SHAPES, torch.float64)
    expected = {name: p.detach().clone() for name, p in params.items()}
    momentum_buffers = {name: torch.zeros_like(p) for name, p in expected.items()}
    muon = Muon(params.items(), 0.05, divisor, World(), torch.float64)
    for step in range(6):
        lr, momentum = 0.05 * (1 - 0.15 * step), 0.85 + 0.02 * step
        for group in muon.param_groups:
            group["lr"], group["momentum"] = lr, momentum
        set_gradients(params, step, factor=divisor)
        for name, p in params.items():
            rows, cols = p.shape[-2:]
            m = momentum_buffers[name].mul_(momentum).add_((1 - momentum) * p.grad / divisor)
            nesterov = momentum * m + (1 - momentum) * p.grad / divisor
            updates = torch.stack([reference_zeropower(g) for g in nesterov.view(-1, rows, cols)])
            expected[name] -= lr * max(1, rows / cols) ** 0.5 * updates.view(p.shape)
        step_optimizers([muon])
        for name, p in params.items():
            torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-10, msg=f"{name}, step {step}")


def test_muon_in_bf16_agrees_with_torch():
    """To 5%: bf16 rounds differently when three matrices are one product, and torch normalizes in bf16."""
    lr, momentum = 0.02, 0.9
    params = parameters(
        {name: (*shape[:-2], 4 * shape[-2], 4 * shape[-1]) for name, shape in MUON_SHAPES.items()}, torch.float32
    )
    start = {name: p.detach().clone() for name, p in params.items()}
    # torch.optim.Muon is for 2-D parameters only. Its momentum is the lerp form, its lr adjustment sqrt(max(1, r / c))
    matrices = {
        name: [nn.Parameter(m.clone()) for m in p.detach().view(-1, *p.shape[-2:])] for name, p in params.items()
    }
    theirs = torch.optim.Muon(
        [m for ms in matrices.values() for m in ms],
        lr=lr,
        weight_decay=0.0,
        momentum=momentum,
        nesterov=True,
        ns_coefficients=(3.4445, -4.7750, 2.0315),
        ns_steps=5,
        adjust_lr_fn="original",
    )
    muon = Muon(params.items(), lr, 1, World(), torch.bfloat16)
    for group in muon.param_groups:
        group["momentum"] = momentum
    for step in range(6):
        set_gradients(params, step)
        for name, p in params.items():
            for m, grad in zip(matrices[name], p.grad.view(-1, *p.shape[-2:]), strict=True):
                m.grad = grad.clone()
        step_optimizers([muon])
        theirs.step()
    for name, p in params.items():
        change = p.detach() - start[name]
        expected = torch.stack([m.detach() for m in matrices[name]]).view_as(p) - start[name]
        error = (change - expected).norm() / expected.norm()
        assert error < 0.05, f"{name}: {error:.3f}"


def test_muon_leaves_the_gradients_alone_and_a_zero_gradient_moves_nothing():
    params = parameters(MUON_SHAPES, torch.float32)
    muon = Muon(params.items(), 0.05, 4, World(), torch.float32)
    before = {name: p.detach().clone() for name, p in params.items()}
    for p in params.values():
        p.grad = torch.zeros_like(p)
    step_optimizers([muon])
    for name, p in params.items():
        assert torch.equal(p.detach(), before[name])
    set_gradients(params, 0)
    grads = {name: p.grad.clone() for name, p in params.items()}
    step_optimizers([muon])
    for name, p in params.items():
        assert torch.equal(p.grad, grads[name])
        assert not torch.equal(p.detach(), before[name])


def test_muon_takes_the_learning_rate_it_is_given():
    params = parameters(MUON_SHAPES, torch.float64)
    before = {name: p.detach().clone() for name, p in params.items()}
    muon = Muon(params.items(), 0.03, 1, World(), torch.float64)
    assert {(group["lr"], group["initial_lr"]) for group in muon.param_groups} == {(0.03, 0.03)}
    set_gradients(params, 0)
    step_optimizers([muon])
    for name, p in params.items():
        rows, cols = p.shape[-2:]
        largest = torch.linalg.matrix_norm(p.detach() - before[name], ord=2) / max(1, rows / cols) ** 0.5
        assert (largest >= 0.65 * 0.03).all()
        assert (largest <= 1.25 * 0.03).all()


# Adam


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_adam_equals_torch(dtype):
    """Several groups, sizes that are no multiple of the alignment, and learning rates that change."""
    divisor, betas, eps = 4, (0.8, 0.95), 1e-10
    lrs = (0.008, 0.6, 0.04)
    groups = [parameters(shapes, dtype, seed) for seed, shapes in enumerate(ADAM_GROUPS)]
    theirs = [parameters(shapes, dtype, seed) for seed, shapes in enumerate(ADAM_GROUPS)]
    adam = Adam(
        [(list(params.items()), lr) for params, lr in zip(groups, lrs, strict=True)], betas, eps, divisor, World()
    )
    # fused: bf16 parameters with arithmetic in fp32 in between, as ours. The others: another implementation than ours
    reference = torch.optim.Adam(
        [dict(params=list(params.values()), lr=lr) for params, lr in zip(theirs, lrs, strict=True)],
        betas=betas,
        eps=eps,
        fused=dtype == torch.bfloat16,
        foreach=False,
    )
    rtol, atol = {torch.float64: (1e-13, 1e-13), torch.float32: (2e-6, 2e-6), torch.bfloat16: (0, 0)}[dtype]
    for step in range(6):
        for ours, other in zip(adam.param_groups, reference.param_groups, strict=True):
            ours["lr"] = other["lr"] = ours["initial_lr"] * (1 - 0.15 * step)
        for params, others in zip(groups, theirs, strict=True):
            set_gradients(params, step, factor=divisor)
            set_gradients(others, step)
        step_optimizers([adam])
        reference.step()
        for group, params, others in zip(adam.param_groups, groups, theirs, strict=True):
            for name, p in params.items():
                state = reference.state[others[name]]
                start = p.storage_offset()
                for kind in ("exp_avg", "exp_avg_sq"):
                    moment = group[kind][start : start + p.numel()].view_as(p)
                    torch.testing.assert_close(
                        moment, state[kind], rtol=rtol, atol=atol, msg=f"{kind} of {name}, step {step}"
                    )
                torch.testing.assert_close(p, others[name], rtol=rtol, atol=atol, msg=f"{name}, step {step}")
            assert group["step"] == step + 1


def test_adam_divides_the_gradients_once():
    a, b = parameters(ADAM_GROUPS[1], torch.float64), parameters(ADAM_GROUPS[1], torch.float64)
    one, twelve = (Adam([(list(p.items()), 0.1)], (0.8, 0.95), 1.0, n, World()) for p, n in ((a, 1), (b, 12)))
    for step in range(3):
        set_gradients(a, step)
        set_gradients(b, step, factor=12)
        step_optimizers([one, twelve])
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)


def test_adams_parameters_are_aligned_views_of_one_buffer_and_its_padding_stays_zero():
    groups = [parameters(shapes, torch.float32, seed) for seed, shapes in enumerate(ADAM_GROUPS)]
    before = [{name: p.detach().clone() for name, p in params.items()} for params in groups]
    adam = Adam([(list(params.items()), 0.1) for params in groups], (0.8, 0.95), 1e-10, 4, World())
    for params, values in zip(groups, before, strict=True):
        for name, p in params.items():
            assert torch.equal(p.detach(), values[name]), f"{name} changed before the first step"
    for step in range(3):
        for params in groups:
            set_gradients(params, step)
        step_optimizers([adam])
        for group, params in zip(adam.param_groups, groups, strict=True):
            is_padding = torch.ones(len(group["flat"]), dtype=torch.bool)
            for p in params.values():
                start = p.storage_offset()
                assert p.untyped_storage().data_ptr() == group["flat"].untyped_storage().data_ptr()
                assert start * p.element_size() % 16 == 0, "kernels want multiples of 16 bytes"
                assert is_padding[start : start + p.numel()].all(), "parameters overlap"
                is_padding[start : start + p.numel()] = False
            assert is_padding.sum() == sum(-p.numel() % Adam.ALIGNMENT for p in params.values())
            for name in ("flat", "grads", "exp_avg", "exp_avg_sq"):
                assert (group[name][is_padding] == 0).all(), f"{name}, step {step}"


def test_modules_parameters_stay_those_of_the_module():
    """Adam moves their storage: the module has to see every step, and a state_dict has to go out and in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    fresh = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    tokens = torch.arange(7)
    objects = list(model.parameters())
    before = model(tokens).detach()
    adam = Adam([(list(model.named_parameters()), 0.1)], (0.8, 0.95), 1e-10, 1, World())
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert torch.equal(model(tokens), before)
    model(tokens).square().sum().backward()
    step_optimizers([adam])
    after = model(tokens).detach()
    assert after.square().sum() < before.square().sum()

    state = {name: value.clone() for name, value in model.state_dict().items()}
    fresh.load_state_dict(state)
    assert torch.equal(fresh(tokens), after)
    with torch.no_grad():
        adam.param_groups[0]["flat"].zero_()
    assert (model(tokens) == 0).all()
    model.load_state_dict(state)
    assert torch.equal(model(tokens), after)
    assert adam.param_groups[0]["flat"].any()
    model(tokens).square().sum().backward()
    step_optimizers([adam])
    assert model(tokens).square().sum() < after.square().sum()


# Which parameter goes where


def small_gpt(**changes) -> GPT:
    defaults = dict(model_dim=16, num_heads=1, head_dim=8, attention_layout="L-SL", value_embed_layout="01.0")
    sizes = dict(vocab_size=40, eot_token=39, train_seq_len=64, val_seq_len=64, batch_tokens=192, val_tokens=64)
    options = defaults | sizes | dict(device="cpu", dtype="float32") | changes
    return GPT(dataclasses.replace(train_gpt.PRESETS["nano"], **options))


def built(gpt: GPT) -> tuple[Muon, Adam]:
    return build_optimizers(gpt, gpt.cfg, World(), zeropower_via_newtonschulz5)


def test_every_parameter_is_in_one_group_with_its_learning_rate():
    gpt = small_gpt(muon_lr=0.1, head_lr=0.2, embed_lr=0.3, scalar_lr=0.4)
    muon, adam = built(gpt)
    lrs: dict[str, list[float]] = {}
    for group in (*muon.param_groups, *adam.param_groups):
        assert group["lr"] == group["initial_lr"]
        for name, p in zip(group["names"], group["params"], strict=True):
            assert gpt.get_parameter(name) is p
            lrs.setdefault(name, []).append(group["lr"])
    expected = {"lm_head.weight": [0.2], "skip_weights": [0.4]}
    embeds = ("embed.weight", "bigram_embed.weight", "value_embeds.0.weight", "value_embeds.1.weight")
    expected |= {name: [0.3] for name in embeds}
    for i in range(4):
        expected |= {f"blocks.{i}.lambdas": [0.4], f"blocks.{i}.mlp.c_fc.weight": [0.1]}
        expected[f"blocks.{i}.mlp.c_proj.weight"] = [0.1]
        if i != 1:  # the layer without attention
            expected |= {f"blocks.{i}.attn.qkv_w": [0.1], f"blocks.{i}.attn.c_proj.weight": [0.1]}
            expected[f"blocks.{i}.attn.lambdas"] = [0.4]
    assert lrs == expected
    assert sorted(expected) == sorted(name for name, _ in gpt.named_parameters())


def test_optimizers_take_their_settings_from_the_configuration():
    gpt = small_gpt(adam_beta1=0.7, adam_beta2=0.9, adam_eps=1e-5, dtype="bfloat16")
    muon, adam = built(gpt)
    assert (adam.param_groups[0]["betas"], adam.eps) == ((0.7, 0.9), 1e-5)
    assert [muon.grad_divisor, *(group["divisor"] for group in adam.param_groups)] == [3] * 4
    assert muon.dtype == torch.bfloat16
    kinds = [{p.dtype for p in group["params"]} for group in adam.param_groups]
    assert kinds == [{torch.float32}, {torch.bfloat16}, {torch.float32}]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("extra", (3, 3)), ("blocks.0.mlp.embed", (3, 3)), ("embed_bias", (3,)), ("lm_head.bias", (3,))],
)
def test_parameter_that_fits_no_group_or_two_is_refused(name, shape):
    gpt = small_gpt()
    *path, last = name.split(".")
    gpt.get_submodule(".".join(path)).register_parameter(last, nn.Parameter(torch.zeros(shape)))
    with pytest.raises(AssertionError, match="exactly one group"):
        built(gpt)


def test_parameter_that_fits_one_group_is_welcome():
    gpt = small_gpt()
    gpt.blocks[1].gate = nn.Parameter(torch.zeros(3, 3))
    gpt.temperature = nn.Parameter(torch.zeros(()))
    muon, adam = built(gpt)
    assert "blocks.1.gate" in [name for group in muon.param_groups for name in group["names"]]
    assert "temperature" in adam.param_groups[2]["names"]
