"""What is true of any model here: which tokens an output depends on, and derivatives right to rounding."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from dense import dense_mask, randomize
from train_gpt import Ranks, Trainer, make_attention_settings, schedule_validation


def features(trainer: Trainer, tokens: Tensor) -> Tensor:
    """Return the head's input, as in validation."""
    schedule = schedule_validation(0, trainer.cfg)
    [[inputs]], exchange = trainer.loader.load_cycle([schedule], [[np.append(tokens.numpy(), 0)]])
    trainer.table.fetch(exchange)
    settings = make_attention_settings(schedule, trainer.cfg, trainer.device)
    return trainer.gpt.hidden_states(inputs, settings, trainer.table.fetched)


@pytest.mark.parametrize(("preset", "is_strict"), [("tiny", False), ("gpt2", False), ("gpt2", True)])
@torch.no_grad()
def test_no_output_depends_on_later_tokens_or_other_documents(request, preset: str, is_strict: bool):
    """Long keys, n-grams and the smear look at tokens before, which may end another document: strict without."""
    cfg = request.getfixturevalue(preset)
    # Half of it reaches over a document, too
    stages = tuple(stage._replace(windows=dict.fromkeys(stage.windows, 120)) for stage in cfg.stages)
    cfg, tokens = dataclasses.replace(cfg, dtype="float64", stages=stages), torch.randint(cfg.eot_token, (64,)).int()
    tokens[[0, 5, 6, 11]] = cfg.eot_token
    if is_strict:
        layers = (layer._replace(attention="short") if layer.attention == "long" else layer for layer in cfg.layers)
        cfg = dataclasses.replace(cfg, layers=tuple(layers), smear_gate_inputs=0)
    trainer = Trainer(cfg, Ranks())
    randomize(trainer.gpt)
    if not is_strict:
        trainer.table.rows.normal_()
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


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_the_stream_keeps_the_precision_of_the_activations(request, preset: str):
    """A factor of shape (1,) in fp32 once made fp32 of nano's, and bf16 brought nothing."""
    cfg = dataclasses.replace(request.getfixturevalue(preset), dtype="bfloat16")
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len,))
    assert features(Trainer(cfg, Ranks()), tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("quarters", [0, 2, 4])
def test_norms_rotations_and_their_derivatives_are_right_to_rounding(quarters: int):
    """Half heads have no quarters that stay. 0: the norm alone."""
    x, grad = torch.randn(2, 30, 3, 1, max(1, quarters // 2), 2, 5, dtype=torch.float64)
    angles = 9 * torch.rand(30, 1, 1, 1, 1, 5, dtype=torch.float64)
    fixed = (angles.cos(), angles.sin(), torch.tensor(0.1, dtype=torch.float64)) if quarters else ()
    function = train_gpt.NormRotate.apply if quarters else train_gpt.norm
    torch.autograd.gradcheck(function, (x[:2].clone().requires_grad_(), *(t[:2] if t.ndim else t for t in fixed)))
    rounded = x.bfloat16().requires_grad_()
    exact = x.bfloat16().double().requires_grad_()
    y, exact_y = function(rounded, *(t.float() for t in fixed)), function(exact, *fixed)
    y.backward(grad.bfloat16())
    exact_y.backward(grad.bfloat16().double())
    for a, b in (y, exact_y), (rounded.grad, exact.grad):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < torch.finfo(torch.bfloat16).eps * b.norm()


def test_a_warm_up_leaves_the_sweep_of_sampled_classes_where_it_was(gpt2):
    """With mini's few tokens a sweep always comes round to where it was."""
    stages = tuple(stage._replace(sampled_classes=(100,)) for stage in gpt2.stages)
    trainer = Trainer(dataclasses.replace(gpt2, vocab_size=2000, stages=stages), Ranks())
    before = [*trainer.loader.offsets]
    trainer.warm_up()
    assert trainer.loader.offsets == before
