"""What a change of the script may break without an error: ./test.sh --idea holds these of any model."""

import dataclasses

import pytest
import torch

import mini
import train_gpt
from conftest import CPU, TINY, small
from dense import randomize
from train_gpt import Ranks, Trainer, make_attention_settings, step_optimizers

# gpt2's own layers with sizes that FP8's products take
SIZES = dict(model_dim=96, num_heads=6, head_dim=16, mlp_dim=64)
GPT2 = mini.MINI | CPU | SIZES | dict(layers=train_gpt.GPT2_LAYERS, batch_tokens=16)
MODELS = pytest.mark.parametrize("sizes", [TINY, GPT2], ids=["nano", "gpt2"])


def make_trainer(cfg, parameters: dict | None = None) -> tuple[Trainer, tuple]:
    """Return a trainer with random or these parameters, and what its model reads."""
    trainer = Trainer(cfg, Ranks())
    randomize(trainer.gpt)
    if parameters:
        trainer.gpt.load_state_dict(parameters)
    for optimizer in trainer.optimizers:
        optimizer.master.copy_(optimizer.param_buffer)
    schedule = cfg.step_schedules[0]
    (inputs, *_), exchange = trainer.dummy_batch(schedule)
    trainer.table.rows.normal_()
    trainer.table.fetch(exchange)
    trainer.table.wait_for_rows()
    return trainer, (inputs, make_attention_settings(schedule, cfg, trainer.device))


@MODELS
def test_every_parameter_has_a_gradient_and_follows_it(sizes):
    """Also in the precision that activations have: an optimizer that has a master copies it to where layers read."""
    cfg = small(sizes)
    trainer, batch = make_trainer(cfg)
    trainer.add_gradients(*batch)
    still = [name for name, p in trainer.params.items() if not trainer.grad_view_of[p].any()]
    assert still == [], "no gradient reaches these parameters: is a factor of theirs detached, or backward None?"
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    schedule = next(it for it in cfg.step_schedules if it.updates.keys() == {group.name for group in cfg.groups})
    step_optimizers(trainer.optimizers, schedule)
    assert [name for name, p in trainer.params.items() if torch.equal(p, before[name])] == [], "no step moves these"
    for optimizer in trainer.optimizers:
        assert torch.equal(optimizer.param_shard, optimizer.master.type_as(optimizer.param_shard)), optimizer.names


def outputs_and_gradients(part: torch.nn.Module, args: tuple) -> list[torch.Tensor]:
    """Return the output of a part of a layer, and a product's gradients with respect to input and parameters."""
    x, *others = args
    y = part(x := x.detach().requires_grad_(), *others)
    torch.manual_seed(0)
    return [y, *torch.autograd.grad(y, [x, *part.parameters()], torch.randn_like(y), allow_unused=True)]


@MODELS
def test_layers_compute_the_same_in_fp8_and_in_validation(sizes):
    """Whichever branch a GPU takes: in training, with and without FP8, and without gradients."""
    cfg = dataclasses.replace(small(sizes | SIZES), dtype="bfloat16")
    plain, batch = make_trainer(cfg)
    fp8, _ = make_trainer(dataclasses.replace(cfg, layers_fp8=True), plain.gpt.state_dict())
    taken = {}
    parts, fp8_parts = (
        [it for block in of.gpt.blocks for it in (block.attn, *block.mlps) if it] for of in (plain, fp8)
    )
    for part in parts:
        part.register_forward_pre_hook(lambda part, args: taken.setdefault(part, args) and None)  # or it replaces args
    plain.gpt(*batch, plain.table.fetched)
    for part, fp8_part in zip(parts, fp8_parts, strict=True):
        with torch.no_grad():
            validated = part(*taken[part])
        want = outputs_and_gradients(part, taken[part])
        assert (validated - want[0]).norm() < 0.01 * want[0].norm(), "not what trains"
        for a, b in zip(outputs_and_gradients(fp8_part, taken[part]), want, strict=True):
            assert (a is None) == (b is None), "a gradient that one branch lacks"
            # The gradient of a few factors is a sum over all tokens, which cancels
            assert a is None or a.ndim < 2 or (a - b).norm() < 0.2 * b.norm(), f"{type(part).__name__} in FP8"
