"""Hold a record's script against numbers computed from the public record that it equals, in golden.npz beside it.

They are what the public script gave in float64. Of most gradients, and of parameters after optimizer steps, the file
keeps what `digest` makes of them, or sums over rows and columns with the weights of `project`. Public tables of
embeddings have rows that no token reads. The numbers of VeFused's states and run were then computed anew, by the script
itself, from when it gave the public ones: its parameters are the first quarter of the width of the public ones, hidden
matrices doubled, as their inputs are a quarter.
"""

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shards import write_shard
from world_worker import ROOT, Run

# Our names of the schedules, by those of the public numbers
NAMES = dict(lr="lr_multiplier", mtp="mtp_weights", attn_scale="attention_scale", adam_step="adam_steps")
NAMES |= dict(yarn_freq="rotary_frequencies", window_long_tokens="window_long", window_short_tokens="window_short")
VOCAB_SIZE = 120  # rows of the public tables of embeddings that ours have, too


def load(name: str) -> types.ModuleType:
    """Import a record's script, once."""
    module_name, path = f"record_{name[11:]}", ROOT / "records" / name / "train_gpt.py"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def digest(x: np.ndarray) -> np.ndarray:
    """Return sum, norm, sum of entry i times cos(i), and 13 of the entries."""
    samples = x.flat[np.linspace(0, x.size - 1, 13).astype(int)]
    return np.array([x.sum(), np.linalg.norm(x), x.ravel() @ np.cos(np.arange(x.size)), *samples])


def project(sums: np.ndarray) -> float:
    """Return the sum of a gradient's sums, times cos(i)."""
    return sums.ravel() @ np.cos(np.arange(sums.size))


class PublicRecord:
    """The script of a record and the public numbers.

    `place` gives the public name of a parameter, and its layer where a public array has the scalars of all 11; `shards`
    files and names. `reorder` gives the public order of a parameter's values, or back ours, which depends on how many
    `angles` the table of the model's rotary embeddings has.
    """

    def __init__(self, name: str, place: Callable, shards: dict[str, str], reorder: Callable = lambda _, x, **__: x):
        self.place, self.shards, self.reorder, self.script = place, shards, reorder, load(name)
        self.numbers = dict(np.load(ROOT / "records" / name / "golden.npz"))
        self.numbers |= zip(self.numbers.pop("digest_names"), self.numbers.pop("digests"), strict=True)
        self.order = [key[6:] for key in self.numbers if key.startswith("param/")]

    def config(self, m: types.ModuleType, folder: Path, **changes):
        """Return the preset gpt2 with changes, and with the shards of the run in small in `folder`."""
        for name, key in self.shards.items():
            if not (folder / f"{name}.bin").exists():
                write_shard(folder / f"{name}.bin", self.numbers[key])
        files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", log_dir=str(folder))
        return m.resolve(dataclasses.replace(m.PRESETS["gpt2"], **files, **changes))

    def run_in_processes(self, test: str, folder: Path, size: int) -> None:
        """Let each of `size` processes do `train` of a test's module."""
        self.config(self.script, folder)
        run = Run([[test, folder]] * size, folder / "run", target=join_run)
        assert run.wait(timeout=400) == [0] * size, run.text("err")

    def part(self, name: str, array: np.ndarray, size: int) -> np.ndarray:
        """Return a view of what ours is of a public array: a row of one for all layers, or the rows with tokens."""
        key, i = self.place(name)
        return (array.reshape(11, -1)[i] if key.endswith("_lambdas") else array.reshape(-1))[:size]

    def public(self, gpt: nn.Module, unread: float, value: Callable = lambda p: p) -> dict[str, np.ndarray]:
        """Return `value` of our parameters by public names; what only those have is `unread` times its first value."""
        arrays = {key: np.array(unread * self.numbers[f"param/{key}"].astype(np.float64)) for key in self.order}
        for name, p in gpt.named_parameters():
            values = self.reorder(name, value(p).detach().numpy(), public=True, angles=gpt.rotary.cos.size(1))
            self.part(name, arrays[self.place(name)[0]], values.size)[:] = values.flatten()
        return arrays

    def gradients(self, gpt: nn.Module) -> dict[str, np.ndarray]:
        return self.public(gpt, 0.0, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)

    def load_parameters(self, gpt: nn.Module, is_tied: bool = False) -> None:
        assert {self.place(name)[0] for name, _ in gpt.named_parameters()} == set(self.order)
        for name, p in gpt.named_parameters():
            values = self.part(name, self.numbers[f"param/{self.place(name)[0]}"].astype(np.float64), p.numel())
            values = self.reorder(name, values, public=False, angles=gpt.rotary.cos.size(1))
            p.detach().copy_(torch.from_numpy(values).view_as(p))
        if is_tied:
            gpt.embed.weight.detach().copy_(gpt.lm_head)

    def tokens(self, key: str) -> Tensor:
        return torch.from_numpy(self.numbers[key].astype(np.int64))

    def compare(self, family: str, **found) -> None:
        for name, value in found.items():
            want = self.numbers[f"{family}/{name}"]
            assert np.shape(value) == want.shape, f"{family}/{name}"
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=0, err_msg=f"{family}/{name}")

    def compare_schedules(self, m: types.ModuleType, folder: Path, **families: dict) -> None:
        """Compare all schedules of some families of numbers, each with its changes of the preset."""
        for family, changes in families.items():
            cfg = self.config(m, folder, **changes)
            steps, stages = range(cfg.num_iterations), [m.stage_of(s, cfg) for s in range(cfg.num_iterations + 1)]
            freqs, scales = zip(*(m.rotary_frequencies(i, cfg, torch.float64) for i in range(4)), strict=True)
            long, short = zip(*(m.attention_windows(s, cfg) for s in range(len(stages))), strict=True)
            found = {name: [getattr(m, name)(s, cfg) for s in steps] for name in ("lr_multiplier", "muon_momentum")}
            found |= dict(stage=stages[:-1], batch_tokens=[8 * m.train_seq_len(s, cfg) for s in steps])
            found |= dict(max_doc_len=[cfg.max_doc_len for _ in steps], window_long=long, window_short=short)
            found |= dict(adam_steps=[s % cfg.adam_every == 1 for s in steps], rotary_frequencies=torch.stack(freqs))
            found |= dict(attention_scale=[scales[stage] for stage in stages])
            if hasattr(m, "next_weights"):
                weights = [m.next_weights(s, cfg) for s in steps]
                found |= dict(mtp_count=[*map(len, weights)], mtp_weights=[w + [0] * (3 - len(w)) for w in weights])
                if family != "schedule_logged":  # whose tables part two steps earlier
                    found |= dict(tied=[s - 1 - s % 2 < cfg.tied_frac * cfg.scheduled_steps for s in steps])
            wants = {k.partition("/")[2]: want for k, want in self.numbers.items() if k.startswith(f"{family}/")}
            wants = {NAMES.get(name, name): want for name, want in wants.items() if NAMES.get(name, name) in found}
            assert len(wants) > 8
            for name, want in wants.items():
                n = len(stages) - (family == "sched")  # VeSkipGates' last windows lack those of the last validation
                n = min(n, len(want), len(found[name]))
                want = want[:n, : freqs[0].numel()] if name == "rotary_frequencies" else want[:n]  # then zeros
                np.testing.assert_allclose(found[name][:n], want, rtol=1e-12, atol=1e-15, err_msg=name)

    def compare_digests(self, form: str, arrays: dict[str, np.ndarray]) -> set[str]:
        """Compare to 1e-8 of the norm, and return the names. A run's have no samples, and go over unread rows, too."""
        wants = {name: self.numbers[key] for name in arrays if (key := form.format(name)) in self.numbers}
        for name, want in wants.items():
            known = ~np.isnan(want)
            x = arrays[name][:VOCAB_SIZE] if "embed" in name and known.all() else arrays[name]
            np.testing.assert_allclose(digest(x)[known], want[known], rtol=0, atol=1e-8 * want[1], err_msg=name)
        return {*wants}

    def expect(self, key: str, row, found, scale: float | None = None) -> None:
        """Compare to 1e-8 of a scale: by default, of the public numbers' largest."""
        want = self.numbers[key][row]
        assert np.shape(found) == want.shape, key
        scale = np.abs(want).max() if scale is None else scale
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * scale, err_msg=f"{key} {row}")

    def run(self, m, folder: Path, ranks, batches: str, loss: str, gradients_at=None, **changes) -> Iterator[tuple]:
        """Train from data to the last validation, after a warm-up, as one of any number of processes.

        Compare the tokens of every step and its loss, by their public names, and the validations. A single process
        keeps gradients after an even step, as Adam waits: compare the norms. Yield step and model.
        """
        cfg, validations, losses = self.config(m, folder, **changes), [], []
        trainer, plans, own = m.Trainer(cfg, ranks), m.plan_data(cfg), range(ranks.rank, 8, ranks.world_size)
        trainer.warm_up()
        self.load_parameters(trainer.gpt, is_tied=hasattr(cfg, "tied_frac"))
        for step, batch in enumerate(m.read_batches(plans["train"], own, cfg, trainer.device)):
            validations += [trainer.evaluate(step, plans["val"])] if step in self.numbers["run/val_steps"] else []
            assert np.array_equal(torch.stack([row for row, _ in batch]), self.numbers[batches.format(step)][own])
            losses.append(trainer.train_step(step, batch).item())
            if gradients_at and ranks.world_size == 1 and step % 2 == 0:
                found = np.array([np.linalg.norm(g) / 8 for g in gradients_at(trainer.gpt, step).values()])
                kept = found > 0
                assert kept.any()
                want = self.numbers["run/grad_norm"][step][kept]
                np.testing.assert_allclose(found[kept], want, rtol=1e-8, atol=1e-10)
            yield step, trainer.gpt
        validations.append(trainer.evaluate(cfg.num_iterations, plans["val"]))
        self.compare("run", val_loss=validations, **{loss: losses})


def step_as(m: types.ModuleType, trainer, step: int, shown: int) -> None:
    """Step the optimizers with learning rate and momentum of step `shown`."""
    now = {name: getattr(m, name)(shown, trainer.cfg) for name in ("lr_multiplier", "muon_momentum")}
    with mock.patch.multiple(m, **{name: lambda *_, value=value: value for name, value in now.items()}):
        m.step_optimizers(trainer.optimizers, step)


def check_first_values(m: types.ModuleType, cfg, first: dict, std: dict) -> None:
    """Check the first values of all parameters: those of scalars, the deviations of matrices. They are 0 by default."""
    for name, p in m.GPT(cfg).named_parameters():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if p.ndim < 2:
            assert p.tolist() == pytest.approx(first.get("attn" if "attn" in name else kind, 0)), name
        else:
            (rms,) = [v for k, v in std.items() if f".{k}." in f".{name}."] or [0]
            assert p.square().mean().sqrt().item() == pytest.approx(rms, rel=0.05), name


def join_run(ranks: tuple, test: str, folder: str) -> None:
    """Be one of the processes of a run."""
    module = importlib.import_module(test)
    module.train(module.SCRIPT, Path(folder), module.SCRIPT.Ranks(*ranks))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
