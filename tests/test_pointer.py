"""The pointer is equal to public proposal 379: loss, gradients, candidates and schedule, in float64 to 1e-8.

The record's `golden.json` says what the numbers are. They have the same mathematics at other sizes.
"""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as m
from test_record92 import compare_ticks, planned
from world_worker import ROOT

pytestmark = pytest.mark.published
FOLDER = ROOT / "records" / "gpt2" / "92e_Pointer"
GOLDEN = dict(np.load(FOLDER / "golden.npz"))
FACTS = json.loads((FOLDER / "golden.json").read_text())
CASES = {case["case"]: case for case in FACTS["cases"]}
SIZES = FACTS["config"]
V = SIZES["V"]


def compare(name: str, ours, index=...) -> None:
    """Compare with an array, or its part at `index`, relative to its largest entry."""
    theirs = GOLDEN[name][index].astype(float)
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
    assert ours.shape == theirs.shape, name
    worst = np.abs(ours - theirs).max() / (np.abs(theirs).max() or 1)
    assert worst <= 1e-8, (name, worst)


def numbers(name: str) -> torch.Tensor:
    t = torch.from_numpy(GOLDEN[name])
    return t if t.is_floating_point() else t.long()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients(gpt2, case: dict):
    """Of all tokens and of some, with one to three next tokens and prefixes, short documents, a validation's blocks."""
    trains = case["kind"] == "train"
    sizes = dict(model_dim="H", pointer_dim="d", vocab_size="vocab", eot_token="bos", pointer_block="band")
    sizes = {ours: SIZES[theirs] for ours, theirs in dict(sizes, val_pointer_block="val_band").items()}
    cfg = dataclasses.replace(gpt2, **sizes, dtype="float64", block_size=16)
    pointer = m.Pointer(cfg).double()
    with torch.no_grad():
        pointer.weight.copy_(torch.cat([numbers("param/w_q"), numbers("param/w_k")]))
        pointer.sink.copy_(numbers("param/k_sink"))
        pointer.gain.copy_(numbers("param/gain"))
    tokens, targets, cu_seqlens = (numbers(f"data/{case['data']}/{key}") for key in ("tokens", "targets", "cu_seqlens"))
    doc_ids = (cu_seqlens <= torch.arange(len(tokens))[:, None]).sum(1)
    weights = [*case.get("mtp", [1.0]), *[case.get("prefix_weight", 0)] * trains]
    columns = np.pad(targets, (0, len(weights)), constant_values=m.BEYOND)
    columns = [columns[k : k + len(tokens)] for k in range(len(case.get("mtp", [1])))]
    columns += [GOLDEN["prefix_table"][targets]] * trains
    wanted = np.column_stack([*columns, np.full(len(tokens), SIZES["copy_id"])]).astype(np.int64)
    candidates = None
    if case.get("candidates"):
        padded = SimpleNamespace(pointer_dim=cfg.pointer_dim, copy_row=SIZES["copy_id"], padded_vocab=V)  # to 16
        candidates, after = m.choose_candidates(targets.numpy(), case["candidates"], case["sweep_offset"], padded)
        assert after == case["offset_after"]
        compare(f"cand/{case['case']}", candidates)
        index = np.full(V, m.NONE)
        index[candidates] = np.arange(len(candidates))
        wanted = np.where(wanted < 0, wanted, index[wanted])
    assert (wanted[:, -2] >= 0).sum() == case["prefix_terms"] if trains else True
    chosen = None if candidates is None else torch.from_numpy(candidates)
    weights = torch.tensor([*weights, 0.0])
    inputs = m.Inputs(tokens, targets, doc_ids, torch.from_numpy(wanted), weights, chosen, *[None] * 2)
    never = None
    if case.get("mask"):
        table = np.unpackbits(GOLDEN["canon_table"], axis=1, bitorder="little")
        table[:, SIZES["copy_id"]] = 0  # which the real table never has
        never = torch.from_numpy(np.packbits(table, axis=1, bitorder="little"))[tokens]
    hidden, head = (numbers(name).requires_grad_() for name in ("hidden", "param/lm_head"))
    softcap = SIZES["softcap"][2] * 2, SIZES["softcap"][0], SIZES["softcap"][1]
    grads = {}
    with torch.set_grad_enabled(trains):
        y = m.norm(hidden)
        rows = head if chosen is None else head[chosen]
        weighed = pointer(y, inputs)
        compare(f"p_copy/{case['case']}", weighed[:, 0])
        compare(f"a_sink/{case['case']}", weighed[:, 1])
        loss = m.HeadLoss.apply(y, rows, weighed, inputs.targets, weights.double(), softcap, 50, None, trains, never)
        compare(f"loss/{case['case']}", loss if trains else loss / len(tokens))
    if trains:
        wanted = dict(hidden=hidden, y=y, k_sink=pointer.sink, gain=pointer.gain, lm_head=head, weight=pointer.weight)
        grads = dict(zip(wanted, torch.autograd.grad(loss, wanted.values()), strict=True))
        grads["w_q"], grads["w_k"] = grads.pop("weight").chunk(2)
        for name, grad in grads.items():
            compare(f"grad/{case['case']}/{name}", grad)


def test_candidates_have_the_row_of_a_copy(monkeypatch):
    """Of real size, rank after rank, step after step: the copy is one of those that the sweep leaves out."""
    monkeypatch.setattr(m, "read_prefixes", lambda cfg: None)
    cfg = m.resolve(dataclasses.replace(m.PRESETS["gpt2"], device="cpu", run_id="r", seed=0))
    reader = m.Reader(cfg, m.Ranks(), torch.device("cpu"))
    for case in FACTS["cand_real"]:
        states = [case["lcg_seed"]]
        for _ in range(case["tokens"]):
            states.append((1664525 * states[-1] + 1013904223) % 2**32)
        uniform = [(state >> 16) ** 4 >> 48 for state in states[1:]]
        following = np.array([((u * u >> 16) * 50257) >> 16 for u in uniform])
        sequence = np.append(0, following).astype(np.int32)
        plan = cfg.plans[0]._replace(candidates=case["candidates"], next_weights=[1.0], prefix_weight=0.0)
        inputs = reader.inputs(plan, case["rank"], sequence, None)
        targets, found = inputs.targets, inputs.candidates
        bits = np.packbits(np.isin(np.arange(50304), found), bitorder="little")
        assert np.array_equal(bits, GOLDEN[f"cand_real/rank{case['rank']}"][case["step"]])
        assert (found[targets] == np.column_stack([following, np.full_like(following, 50257)])).all()
        assert reader.offsets[case["rank"]] == case["offset_after"]


def test_schedules():
    """Of 1,050 steps and the last validation, with all that record 92 does after so many steps where it was."""
    cfg = dataclasses.replace(m.PRESETS["gpt2"], prefix_file="p")
    assert m.num_tokens(1050, cfg) == sum(plan.seq_len * 8 for plan in cfg.plans) == 289_472_512
    whole, chain, of_steps, sparse, due = planned(cfg)
    chain["pointer_band"] = [cfg.pointer_block] * 1050 + [cfg.val_pointer_block]
    del of_steps["lookahead"]  # that is the rail's
    left = {name for name in GOLDEN if name.startswith("schedule/") and not name.startswith("schedule/tick/")}
    for part, index in (whole, ...), (chain, ...), (of_steps, slice(1050)), (sparse, due):
        for name, ours in part.items():
            compare(f"schedule/{name}", ours, index)
            left.remove(f"schedule/{name}")
    assert not left
    compare_ticks(SimpleNamespace(compare=compare), "schedule/tick", cfg)


def test_updates_of_its_parameters():
    """Adam's of the proposal, in no average."""
    cfg = m.PRESETS["gpt2"]
    ours = {"pointer.weight": "W_q, W_k (2, 128, 768), bf16", "pointer.sink": "sink key (128), fp32"}
    for name, theirs in (ours | {"pointer.gain": "gain (1), fp32"}).items():
        row, public = m.group_of(name, cfg), FACTS["groups"][f"copy {theirs}"]
        assert (row.optimizer, [row.beta1, row.beta2], row.lr / 0.008) == ("Adam", public["betas"], public["lr"])
        assert (row.decay, row.every) == (0.005 * public["decay"], (2, 2))
        assert not any(m.matches(name, ema.names) for ema in cfg.emas)
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
        assert gpt.lm_head.shape[0] == rows
        assert torch.equal(gpt.embed.weight, gpt.lm_head), "tied at first"


def test_blocks_may_be_longer_than_any_sequence(gpt2):
    """As long as may be: the mask is that of one block."""
    tokens, shares = torch.randint(9, (65,), dtype=torch.int32), []
    inputs = m.Inputs(tokens[:-1], tokens[1:], torch.zeros(64, dtype=torch.int32), *[None] * 5)
    x, pointer = torch.randn(64, gpt2.model_dim), m.Pointer(gpt2)
    for block in 64, 2**31 - 1:
        pointer.cfg = dataclasses.replace(gpt2, pointer_block=block)
        shares.append(pointer(x, inputs))
    assert torch.equal(*shares)
