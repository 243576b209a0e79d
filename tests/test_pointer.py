"""The pointer is equal to public proposal 379: loss, gradients, sampled classes and schedule, in float64 to 1e-8."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch

import train_gpt as m
from dense import find_doc_starts
from golden import Golden

pytestmark = pytest.mark.published
GOLDEN = Golden("92e_Pointer")
CASES = {case["case"]: case for case in GOLDEN.facts["cases"]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients(gpt2, monkeypatch, case: dict):
    """Of all tokens and of some, with one to three next tokens and prefixes, short documents, a validation's blocks."""
    name, trains = case["case"], case["trains"]
    monkeypatch.setattr(m.Hyperparameters, "padded_vocab", GOLDEN.facts["padded_vocab"])
    sizes = GOLDEN.facts["config"] | dict(block_size=16, logits_chunk=50, val_logits_chunk=50)
    cfg = dataclasses.replace(gpt2, **sizes, dtype="float64", prefix_file="")
    assert [cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift] == GOLDEN.facts["softcap"]
    pointer = m.Pointer(cfg).double()
    pointer.load_state_dict({name: GOLDEN.tensor(name) for name in ("weight", "sink", "gain")})
    loader = m.DistributedDataLoader(cfg, m.Ranks(), torch.device("cpu"))
    loader.prefixes, loader.offsets = GOLDEN["prefixes"], [case.get("offset", 0)]
    schedule = cfg.step_schedules[0] if trains else m.schedule_validation(0, cfg)
    schedule = schedule._replace(**{key: case[key] for key in ("mtp_weights", "prefix_weight", "sampled_classes")})
    sequence = GOLDEN[f"sequence/{case['data']}"].astype(np.int32)
    classes = loader.next_classes(schedule, 0, sequence[1:])
    inputs = loader.model_inputs(schedule, sequence, classes, np.zeros((1, 1)))
    if case["sampled_classes"]:
        assert loader.offsets == [case["offset_after"]]
        GOLDEN.compare(f"candidates/{name}", inputs.sampled_classes)
    if case["prefix_weight"]:
        assert (inputs.targets[:, -2] >= 0).sum() == case["prefix_terms"]
    docs = GOLDEN.tensor(f"doc_ids/{case['data']}")  # parts of documents begin sequences
    inputs = inputs._replace(doc_starts=find_doc_starts(docs))
    invalid = torch.from_numpy(GOLDEN["canon"])[inputs.tokens] if case.get("mask") else None
    hidden, head = (GOLDEN.tensor(name).requires_grad_() for name in ("hidden", "lm_head"))
    with torch.set_grad_enabled(trains):
        y = m.norm(hidden)
        rows = head if inputs.sampled_classes is None else head[inputs.sampled_classes]
        pointer_mass = pointer(y, inputs)
        GOLDEN.compare(f"shares/{name}", pointer_mass)
        if not trains:
            loss = m.validation_loss(y, rows, pointer_mass, inputs, cfg, invalid)
            GOLDEN.compare(f"loss/{name}", loss / len(inputs.tokens))
            return
        loss = m.TrainingLoss.apply(y, rows, pointer_mass, inputs.targets, inputs.loss_weights, cfg)
        GOLDEN.compare(f"loss/{name}", loss)
        wanted = dict(hidden=hidden, lm_head=head, **dict(pointer.named_parameters()))
        for key, grad in zip(wanted, torch.autograd.grad(loss, wanted.values()), strict=True):
            GOLDEN.compare(f"grad/{name}/{key}", grad)


def test_sampled_classes_have_the_row_of_a_copy(monkeypatch):
    """Of real size, rank after rank, step after step: the copy is one of those that the sweep leaves out."""
    monkeypatch.setattr(m, "read_prefixes", lambda cfg: None)
    cfg = m.resolve(dataclasses.replace(m.PRESETS["gpt2"], device="cpu", run_id="r", seed=0))
    loader = m.DistributedDataLoader(cfg, m.Ranks(), torch.device("cpu"))
    for case in GOLDEN.facts["real_candidates"]:
        states = [case["lcg_seed"]]
        for _ in range(case["tokens"]):
            states.append((1664525 * states[-1] + 1013904223) % 2**32)
        uniform = [(state >> 16) ** 4 >> 48 for state in states[1:]]
        next_tokens = np.array([((u * u >> 16) * 50257) >> 16 for u in uniform])
        sequence = np.append(0, next_tokens).astype(np.int32)
        changes = dict(sampled_classes=case["sampled_classes"], mtp_weights=[1.0], prefix_weight=0.0)
        schedule = cfg.step_schedules[0]._replace(**changes)
        classes = loader.next_classes(schedule, case["rank"], sequence[1:])
        inputs = loader.model_inputs(schedule, sequence, classes, np.zeros((1, 1)))
        targets, found = inputs.targets.numpy(), inputs.sampled_classes.numpy()
        assert hashlib.sha256(found.astype("<i4")).hexdigest() == case["sha256_int32_le"]
        assert (found[targets] == np.column_stack([next_tokens, np.full_like(next_tokens, 50257)])).all()
        assert loader.offsets[case["rank"]] == case["offset_after"]


def test_schedules():
    """Of 1,050 steps and the last validation, with all that record 92 does after so many steps where it was."""
    cfg = dataclasses.replace(m.PRESETS["gpt2"], prefix_file="p")
    assert m.num_tokens(1050, cfg) == sum(schedule.seq_len * 8 for schedule in cfg.step_schedules) == 289_472_512
    GOLDEN.compare_schedule(cfg)


def test_updates_of_its_parameters():
    """Adam's of the proposal, in no average."""
    cfg = m.PRESETS["gpt2"]
    for name, public in GOLDEN.facts["groups"].items():
        row = m.find_group(name, cfg)
        assert (row.optimizer, [row.beta1, row.beta2], row.lr / 0.008) == ("Adam", public["betas"], public["lr"])
        assert (row.decay, row.update_interval) == (0.005 * public["decay"], (2, 2))
        assert not any(m.matches(name, ema.patterns) for ema in cfg.emas)
    torch.manual_seed(0)
    pointer = m.Pointer(dataclasses.replace(cfg, dtype="bfloat16"))
    stds = pointer.weight.float().std().item(), pointer.sink.std().item() * 128**0.5
    assert stds == (pytest.approx(768**-0.5, rel=0.01), pytest.approx(1, rel=0.2))
    assert pointer.weight.abs().max() <= 0.0625
    kinds = [p.dtype for p in (pointer.weight, pointer.sink, pointer.gain)]
    assert (kinds, pointer.gain.item()) == ([torch.bfloat16, torch.float32, torch.float32], 1)


def test_a_copy_has_a_row_of_head_and_embedding(gpt2):
    for size, rows in (256, 320), (255, 256):
        gpt = m.GPT(dataclasses.replace(gpt2, vocab_size=size, eot_token=1))
        assert len(gpt.lm_head.weight) == rows
        assert torch.equal(gpt.embed.weight, gpt.lm_head.weight), "tied at first"
