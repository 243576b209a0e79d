"""Numbers of published runs: records/gpt2/golden.npz has them, golden.json explains them."""

import json

import numpy as np
import torch

import train_gpt as m
from speedrun import ROOT


class Golden:
    def __init__(self, record: str):
        self.facts = json.loads((ROOT / "records/gpt2/golden.json").read_text())[record]
        arrays = np.load(ROOT / "records/gpt2/golden.npz")
        self.arrays = {n.removeprefix(f"{record}/"): arrays[n] for n in arrays.files if n.startswith(f"{record}/")}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def tensor(self, name: str) -> torch.Tensor:
        t = torch.from_numpy(self[name])
        return t.double() if t.is_floating_point() else t

    def compare(self, name: str, ours, index=...) -> None:
        """Compare an array, or its part at `index`, to 1e-8 of the array's largest entry."""
        theirs = self[name][index]
        ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
        assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        if theirs.dtype.kind != "f":
            assert np.array_equal(ours, theirs), name
            return
        worst = np.abs(ours - theirs).max(initial=0) / (np.abs(self[name]).max() or 1)
        assert worst <= 1e-8, (name, index, worst)

    def compare_schedule(self, cfg) -> None:
        """Compare every number of every step and of the last validation."""
        ours = {f"schedule/{name}": numbers for name, numbers in planned(cfg).items()}
        assert set(ours) == {n for n in self.arrays if n.startswith("schedule/") and not n.startswith("schedule/tick/")}
        for name, numbers in ours.items():
            self.compare(name, numbers)
        self.compare_ticks("schedule/tick", cfg)

    def compare_ticks(self, folder: str, cfg) -> None:
        """Compare the rates of the averages. The first row does in one what the original does in two, at odd steps."""
        N, found = cfg.num_iterations, {}
        for i, row in enumerate(cfg.emas):
            rates = np.array([row.rate_at(s, N) for s in range(N)])
            assert rates[rates > 0][0] == 1  # the first copies
            found[i] = np.where(rates > 0, row.rate, -1)
        first, rate = np.flatnonzero(found[0] > 0)[0], cfg.emas[0].rate
        for s in range(first + 1, N):
            found[0][s] = rate if s == N - 1 else (1 - (1 - rate) ** 2 if s % 2 else -1)
        assert np.array_equal(found[3], found[4])
        for label, i in dict(tail_ema=0, tail_avg=1, value_embed_avg=2, bank_blend=3).items():
            self.compare(f"{folder}/{label}", found[i])


def planned(cfg) -> dict:
    """Return what is planned, under the files' names: for all steps, for those and the last validation, for updates."""
    steps, ends = cfg.plans, m.stage_ends(cfg)
    plans = [*steps, m.plan_validation(cfg.num_iterations, cfg)]
    names = "lm_head", "ngrams", "blocks.0.attn.qk_w", "value_embeds.1.weight"
    head, tables, muon, values = (m.group_of(name, cfg) for name in names)
    momenta = [plan.updates[muon.names].beta1 for plan in steps]
    of_values, of_tables = ([p.updates[row.names] for p in steps if row.names in p.updates] for row in (values, tables))
    lrs = [values.lr * plan.lr_factor for plan in steps if values.names in plan.updates]
    found = {
        "lr": [plan.updates[muon.names].rate / cfg.muon_lr for plan in steps],
        "batch_tokens": [plan.seq_len * 8 for plan in steps],
        "adam_updates": [head.names in plan.updates for plan in steps],
        "table_updates": [tables.names in plan.updates for plan in steps],
        "tied": [m.is_tied(plan.step, head, cfg) for plan in steps],
        "last_tied": max(plan.step for plan in steps if plan.ties),
        "max_doc_len": [plan.max_doc_len for plan in steps],
        "momentum": momenta,
        "fast_momentum": [0.85 if p.has_slow_momentum else beta for p, beta in zip(steps, momenta, strict=True)],
        "fast_weight": [0.4385 if plan.has_slow_momentum else 1.0 for plan in steps],
        "stages": [*zip([0, *ends], ends, strict=False)],
        "stage": [plan.stage for plan in plans],
        "candidates": [plan.candidates for plan in plans],
        "prefix_weight": [plan.prefix_weight for plan in plans],
        "next_weights": [plan.next_weights + [0.0] * (3 - len(plan.next_weights)) for plan in plans],
        "num_next": [len(plan.next_weights) for plan in plans],
        "value_embeds_betas": [(update.beta1, update.beta2) for update in of_values],
        "value_embeds_decay": [update.decay / lr**2 / 0.005 for update, lr in zip(of_values, lrs, strict=True)],
        "ngrams_beta2": [update.beta2 for update in of_tables],
    }
    for kind in "long", "short":
        found[f"window_{kind}"] = [plan.windows[kind].reach for plan in plans]
        found[f"attn_scale_{kind}"] = [plan.windows[kind].attn_scale for plan in plans]
        found[f"frequencies_{kind}"] = np.stack([windows[kind].frequencies for windows in m.plan_windows(cfg)])
    if cfg.pointer_dim:
        found["pointer_block"] = [cfg.pointer_block] * len(steps) + [cfg.val_pointer_block]
    return found
