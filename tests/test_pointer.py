"""The pointer is equal to public proposal 379: loss, gradients, candidates and schedule, in float64 to 1e-8.

The record's `golden.json` says what the numbers are. They have the same mathematics at other sizes.
"""

import dataclasses
import hashlib
import json
import math
import re
from itertools import accumulate

import numpy as np
import pytest
import torch

import train_gpt as m
from world_worker import ROOT

pytestmark = pytest.mark.published
FOLDER = ROOT / "records" / "gpt2" / "92e_Pointer"
GOLDEN = dict(np.load(FOLDER / "golden.npz"))
FACTS = json.loads((FOLDER / "golden.json").read_text())
CASES = {case["case"]: case for case in FACTS["cases"]}
SIZES = FACTS["config"]
V = SIZES["V"]


def compare(name: str, ours, limit: float = 1e-8) -> None:
    """Compare with an array, relative to its largest entry."""
    theirs = GOLDEN[name]
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
    assert ours.shape == theirs.shape, name
    worst = np.abs(ours.astype(float) - theirs.astype(float)).max() / (np.abs(theirs).max() or 1)
    assert worst <= limit, (name, worst)


def numbers(name: str) -> torch.Tensor:
    t = torch.from_numpy(GOLDEN[name])
    return t if t.is_floating_point() else t.long()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients(gpt2, case: dict):
    """Of all classes and of some, with one to three next tokens and prefixes, short documents, the validation's band."""
    trains = case["kind"] == "train"
    cfg = dataclasses.replace(
        gpt2, dtype="float64", model_dim=SIZES["H"], pointer_dim=SIZES["d"], block_size=16, vocab_size=SIZES["vocab"], eot_token=SIZES["bos"],
        pointer_block=SIZES["band"], val_pointer_block=SIZES["val_band"],
    )  # fmt: skip
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
        candidates, after = m.choose_candidates(
            np.append(targets, SIZES["copy_id"]), case["candidates"], case["sweep_offset"], V
        )
        assert after == case["offset_after"]
        compare(f"cand/{case['case']}", candidates)
        index = np.full(V, m.NONE)
        index[candidates] = np.arange(len(candidates))
        wanted = np.where(wanted < 0, wanted, index[wanted])
    assert (wanted[:, -2] >= 0).sum() == case["prefix_terms"] if trains else True
    chosen = None if candidates is None else torch.from_numpy(candidates)
    inputs = m.Inputs(tokens, doc_ids, torch.from_numpy(wanted), chosen, *[None] * 2)
    weights = torch.tensor([*weights, 0.0])
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
        grads = dict(zip(wanted, torch.autograd.grad(loss, wanted.values())))
        grads["w_q"], grads["w_k"] = grads.pop("weight").chunk(2)
        for name, grad in grads.items():
            compare(f"grad/{case['case']}/{name}", grad)
