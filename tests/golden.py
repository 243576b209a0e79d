"""Numbers of published runs: golden.npz has them, golden.json explains them."""

import json
from pathlib import Path

import numpy as np
import torch

import train_gpt as m

FOLDER = Path(__file__).parent


class Golden:
    def __init__(self, record: str):
        self.facts = json.loads((FOLDER / "golden.json").read_text())[record]
        arrays = np.load(FOLDER / "golden.npz")
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
        ours = {f"schedule/{name}": numbers for name, numbers in scheduled(cfg).items()}
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


def scheduled(cfg) -> dict:
    """Return what is scheduled, by the files' names: for all steps, for these and the last validation, for updates."""
    steps, ends = cfg.step_schedules, m.stage_ends(cfg)
    schedules = [*steps, m.schedule_validation(cfg.num_iterations, cfg)]
    names = "lm_head.weight", "ngrams", "blocks.0.attn.qk_w", "value_embeds.1.weight"
    head, tables, muon, values = (m.find_group(name, cfg) for name in names)
    muon_steps = [schedule.updates[muon.name] for schedule in steps]
    value_steps, table_steps = (
        [schedule.updates[row.name] for schedule in steps if row.name in schedule.updates] for row in (values, tables)
    )
    lrs = [values.lr * schedule.lr_factor for schedule in steps if values.name in schedule.updates]
    found = {
        "lr": [update.lr / cfg.muon_lr for update in muon_steps],
        "batch_tokens": [schedule.seq_len * 8 for schedule in steps],
        "adam_updates": [head.name in schedule.updates for schedule in steps],
        "table_updates": [tables.name in schedule.updates for schedule in steps],
        "tied": [m.is_tied_step(schedule.step, head, cfg) for schedule in steps],
        "last_tied": max(schedule.step for schedule in steps if schedule.tied),
        "max_doc_len": [schedule.max_doc_len for schedule in steps],
        "momentum": [update.momentum for update in muon_steps],
        "fast_momentum": [update.fast_beta for update in muon_steps],
        "fast_weight": [update.fast_share for update in muon_steps],
        "stages": [*zip([0, *ends], ends, strict=False)],
        "stage": [schedule.stage for schedule in schedules],
        "candidates": [schedule.sampled_classes for schedule in schedules],
        "prefix_weight": [schedule.prefix_weight for schedule in schedules],
        "next_weights": [schedule.mtp_weights + [0.0] * (3 - len(schedule.mtp_weights)) for schedule in schedules],
        "num_next": [len(schedule.mtp_weights) for schedule in schedules],
        "value_embeds_betas": [(update.beta1, update.beta2) for update in value_steps],
        "value_embeds_decay": [update.decay / lr**2 / 0.005 for update, lr in zip(value_steps, lrs, strict=True)],
        "ngrams_beta2": [update.beta2 for update in table_steps],
    }
    for kind in "long", "short":
        found[f"window_{kind}"] = [schedule.windows[kind].size for schedule in schedules]
        found[f"attn_scale_{kind}"] = [schedule.windows[kind].attn_scale for schedule in schedules]
        found[f"frequencies_{kind}"] = np.stack([windows[kind].frequencies for windows in m.schedule_windows(cfg)])
    if cfg.pointer_dim:
        found["pointer_block"] = [cfg.pointer_block] * len(steps) + [cfg.val_pointer_block]
    return found
