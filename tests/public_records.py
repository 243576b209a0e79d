"""Hold a script against numbers computed from the public record that it equals, in golden.npz beside the record.

Every number there is what the public script gave in float64, at its own size. Of large arrays the file keeps what
`digest` makes of them, samples, or their sums over rows and columns, in turn summed with the weights of `project`.
Public tables of embeddings have rows that no token reads. From VeFused on, parameters were drawn from a seed and
rounded: the file has the seed, and what a new draw misses. NumPy may one day draw other numbers: a checksum tells.
"""

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import types
import zlib
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
    """Import a record's script, once, or the root's."""
    if name == "train_gpt.py":
        return importlib.import_module("train_gpt")
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


def norm(x: np.ndarray) -> float:
    return np.sqrt(np.square(x).sum())  # not by BLAS, whose threads would fight over the cores


@functools.cache
def read(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a record's public numbers, and the public parameters."""
    numbers = dict(np.load(ROOT / "records" / name / "golden.npz"))
    numbers |= zip(numbers.pop("digest_names", ()), numbers.pop("digests", ()), strict=True)
    params = {key[6:]: x.astype(np.float64) for key, x in numbers.items() if key.startswith("param/")}
    if "seed" in numbers:
        rng, spreads = np.random.default_rng(int(numbers["seed"])), numbers["spreads"]
        bounds = numbers.get("bounds", [50] * len(spreads))
        for x, spread, bound in zip(params.values(), spreads, bounds, strict=True):
            is_uniform = numbers["seed"] == 8301  # BigramsSignTrick's
            drawn = rng.integers(-bound, bound + 1, x.shape) if is_uniform else rng.standard_normal(x.shape)
            x += np.rint(spread * drawn).clip(-127, 127)
        checksum = zlib.crc32(np.concatenate([*map(np.ravel, params.values())]).astype(np.int8))
        assert checksum == numbers["checksum"], "NumPy draws other numbers than it did"
        for x, unit in zip(params.values(), numbers["units"], strict=True):
            x *= unit
    return numbers, params


def loss_weights(m: types.ModuleType, step: int, cfg) -> tuple[list[float], list[float]]:
    """Return a script's weights of the losses of next tokens, and of the prefix."""
    if hasattr(m, "loss_weights"):
        weights, n = m.loss_weights(step, cfg), len(m.stage_of(step, cfg).mtp)
        return weights[:n], weights[n:]
    next_weights = getattr(m, "mtp_weights", getattr(m, "next_weights", lambda *_: []))
    return next_weights(step, cfg), getattr(m, "prefix_weights", lambda *_: [])(step, cfg)


class PublicRecord:
    """The tests of a script that has the mathematics of a public record. A subclass says which, and how."""

    record: str  # the folder with the numbers
    script: types.ModuleType  # of the record, or another with its mathematics
    rtol = 1e-10  # of what is compared with each number
    shards: dict[str, str]  # files, and names of the numbers in them
    small: dict  # settings of the public small model, and what differs in its run
    run: dict
    batches, loss = "run/{}/inputs", "loss_per_token"  # names of the run's inputs and losses
    one_table_until = -1  # step of the run up to which the public record keeps tied tables as its head alone
    first: dict  # first values of scalars, by kind or name; like deviations of matrices 0 by default
    std: dict

    numbers = property(lambda self: read(self.record)[0])
    params = property(lambda self: read(self.record)[1])

    def place(self, name: str) -> tuple[str, int]:
        """Return the public name of a parameter, and where it begins there.

        Where a public array has the scalars of all 11 layers, the second is the layer.
        """
        raise NotImplementedError

    def reorder(self, name: str, values: np.ndarray, public: bool) -> np.ndarray:
        """Return a parameter's values in the public order, or back in ours."""
        return values

    def config(self, folder: Path, **changes):
        """Return the preset gpt2 with changes, and with the shards of the run in small in `folder`."""
        for name, key in self.shards.items():
            if not (folder / f"{name}.bin").exists():
                write_shard(folder / f"{name}.bin", self.numbers[key])
        if "prefix_table" in self.numbers:
            self.numbers["prefix_table"][:VOCAB_SIZE].astype("<u2").tofile(folder / "prefixes")  # -1 is 65535
            changes = dict(prefix_file=f"{folder}/prefixes") | changes
        files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", log_dir=str(folder))
        return self.script.resolve(dataclasses.replace(self.script.PRESETS["gpt2"], **files, **changes))

    def trainer(self, folder: Path, **changes):
        return self.script.Trainer(self.config(folder, **changes), self.script.Ranks())

    def part(self, name: str, array: np.ndarray, size: int) -> np.ndarray:
        """Return a view of what ours is of a public array: a row of one for all layers, or the rows with tokens."""
        key, i = self.place(name)
        start = i * (array.size // 11) if key.endswith(("_lambdas", "_alphas")) else i
        return array.reshape(-1)[start : start + size]

    def public(self, gpt: nn.Module, unread: float, value: Callable = lambda p: p) -> dict[str, np.ndarray]:
        """Return `value` of our parameters by public names; what only those have is `unread` times its first value."""
        arrays = {key: np.array(unread * x) for key, x in self.params.items()}
        for name, p in gpt.named_parameters():
            values = self.reorder(name, value(p).detach().numpy(), public=True)
            self.part(name, arrays[self.place(name)[0]], values.size)[:] = values.flatten()
        return arrays

    def gradients(self, gpt: nn.Module, is_one_table: bool = False) -> dict[str, np.ndarray]:
        """Return all gradients. `is_one_table`: the public record keeps tied tables as its head alone."""
        found = self.public(gpt, 0.0, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        if is_one_table:
            found["lm_head.weight"] += found["embed.weight"]
            found["embed.weight"] *= 0
        return found

    def load_parameters(self, trainer, is_tied: bool = False) -> None:
        """Set all parameters, and the public signs of the small model, which are none."""
        gpt = trainer.gpt
        assert {self.place(name)[0] for name, _ in gpt.named_parameters()} == set(self.params)
        for name, p in gpt.named_parameters():
            values = self.part(name, self.params[self.place(name)[0]], p.numel())
            p.detach().copy_(torch.from_numpy(self.reorder(name, values, public=False)).reshape(p.shape))
        if is_tied:
            gpt.embed.weight.detach().copy_(gpt.lm_head)
        if "sign_table" in self.numbers:
            gpt.signs.copy_(torch.from_numpy(self.numbers["sign_table"]))

    def tokens(self, key: str) -> Tensor:
        return torch.from_numpy(self.numbers[key].astype(np.int64))

    def expect(self, key: str, found, row=..., scale: float | None = None) -> None:
        """Compare to 1e-8 of a scale, or each number to 1e-10 of itself, or what `rtol` says."""
        want = self.numbers[key][row]
        assert np.shape(found) == want.shape, key
        rtol, atol = (self.rtol, 0) if scale is None else (0, 1e-8 * scale)
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol, err_msg=f"{key} {row}")

    def compare(self, family: str, **found) -> None:
        for name, value in found.items():
            self.expect(f"{family}/{name}", value)

    def compare_digests(self, form: str, arrays: dict[str, np.ndarray]) -> set[str]:
        """Compare to 1e-8 of the norm, and return the names. A run's have no samples, and go over unread rows, too."""
        wants = {name: self.numbers[key] for name in arrays if (key := form.format(name)) in self.numbers}
        for name, want in wants.items():
            known = ~np.isnan(want)
            x = arrays[name][:VOCAB_SIZE] if "embed" in name and known.all() else arrays[name]
            np.testing.assert_allclose(digest(x)[known], want[known], rtol=0, atol=1e-8 * want[1], err_msg=name)
        return {*wants}

    def test_schedules(self, tmp_path: Path):
        self.compare_schedules(tmp_path, "schedule")

    def compare_schedules(self, folder: Path, family: str, **changes) -> None:
        """Compare all schedules of a family of numbers."""
        m, cfg = self.script, self.config(folder, device="cpu", seed=0, **changes)
        steps, stage_of = range(cfg.num_iterations), getattr(m, "stage_index", m.stage_of)
        stages = [stage_of(s, cfg) for s in range(cfg.num_iterations + 1)]
        freqs, scales = zip(*(m.rotary_frequencies(i, cfg, torch.float64) for i in range(4)), strict=True)
        long, short = zip(*(m.attention_windows(s, cfg) for s in range(len(stages))), strict=True)
        found = {name: [getattr(m, name)(s, cfg) for s in steps] for name in ("lr_multiplier", "muon_momentum")}
        found |= dict(stage=stages[:-1], batch_tokens=[8 * m.train_seq_len(s, cfg) for s in steps])
        cuts = [stage.max_doc_len for stage in cfg.stages] if hasattr(cfg, "stages") else cfg.max_doc_len
        cuts = cuts if isinstance(cuts, tuple | list) else [cuts] * 4
        found |= dict(max_doc_len=[cuts[i] for i in stages[:-1]], window_long=long, window_short=short)
        found |= dict(adam_steps=[s % cfg.adam_every == 1 for s in steps], rotary_frequencies=torch.stack(freqs))
        found |= dict(attention_scale=[scales[stage] for stage in stages])
        next_weights, prefix_weights = zip(*(loss_weights(m, s, cfg) for s in steps), strict=True)
        found |= dict(prefix_weight=[*map(sum, prefix_weights)], mtp_count=[*map(len, next_weights)])
        found |= dict(mtp_weights=[weights + [0] * (3 - len(weights)) for weights in next_weights])
        if hasattr(cfg, "tied_frac") and family != "schedule_logged":  # whose tables part two steps earlier
            found |= dict(tied=[s - 1 - s % 2 < cfg.tied_frac * cfg.scheduled_steps for s in steps])
        wants = {k.partition("/")[2]: want for k, want in self.numbers.items() if k.startswith(f"{family}/")}
        wants = {NAMES.get(name, name): want for name, want in wants.items() if NAMES.get(name, name) in found}
        assert len(wants) > 8
        for name, want in wants.items():
            n = len(stages) - (family == "sched")  # VeSkipGates' last windows lack those of the last validation
            n = min(n, len(want), len(found[name]))
            want = want[:n, : freqs[0].numel()] if name == "rotary_frequencies" else want[:n]  # then zeros
            np.testing.assert_allclose(found[name][:n], want, rtol=1e-12, atol=1e-15, err_msg=name)

    def test_first_values(self, tmp_path: Path):
        for name, p in self.script.GPT(self.config(tmp_path, **self.small)).named_parameters():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            if p.ndim < 2:
                kind = "attn" if name.endswith("attn.lambdas") else name if name in self.first else kind
                assert p.tolist() == pytest.approx(np.broadcast_to(self.first.get(kind, 0), p.shape).tolist()), name
            else:
                (rms,) = [v for k, v in self.std.items() if f".{k}." in f".{name}."] or [0]
                assert p.square().mean().sqrt().item() == pytest.approx(rms, rel=0.05), name

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [8])
    def test_any_number_of_processes_runs_the_same(self, tmp_path: Path, size: int):
        self.config(tmp_path)
        run = Run([[type(self).__module__, tmp_path]] * size, tmp_path / "run", target=join_run)
        assert run.wait(timeout=400) == [0] * size, run.text("err")

    def take_run(self, folder: Path, ranks) -> None:
        """Train from data to the last validation, as one of any number of processes.

        Compare tokens and loss of every step, by their public names, parameters after it, and the validations. A single
        process keeps gradients after an even step, as Adam waits: compare the norms. Eight do without the warm-up.
        """
        m, cfg, validations, losses, compared = self.script, self.config(folder, **self.small | self.run), [], [], 0
        if ranks.world_size > 1 and hasattr(m, "init_distributed"):  # else the Trainer does
            m.init_distributed()
        trainer, plans, own = m.Trainer(cfg, ranks), m.plan_data(cfg), range(ranks.rank, 8, ranks.world_size)
        if ranks.world_size < 8:
            trainer.warm_up()
        self.load_parameters(trainer, is_tied=hasattr(cfg, "tied_frac"))
        for step, batch in enumerate(m.read_batches(plans["train"], own, cfg, trainer.device)):
            validations += [trainer.evaluate(step, plans["val"])] if step in self.numbers["run/val_steps"] else []
            inputs = torch.stack([row for row, _ in batch])
            assert np.array_equal(inputs, self.numbers[self.batches.format(step)][own])
            losses.append(trainer.train_step(step, batch).item())
            if "run/grad_norm" in self.numbers and ranks.world_size == 1 and step % 2 == 0:
                grads = self.gradients(trainer.gpt, is_one_table=step <= self.one_table_until)
                found = {i: norm(g) / 8 for i, g in enumerate(grads.values()) if g.any()}
                self.expect("run/grad_norm", [*found.values()], (step, [*found]))
            arrays = self.public(trainer.gpt, 1.0)
            if step < self.one_table_until:
                del arrays["embed.weight"]
            compared += len(self.compare_digests(f"run/{step}/digest/{{}}", arrays))
            for key in [key for key in arrays if f"run/digest/{key}" in self.numbers]:
                x, want = arrays[key], self.numbers[f"run/digest/{key}"][step]
                found = [x.sum(), norm(x), *x.flat[self.numbers[f"run/indices/{key}"]]]
                self.expect(f"run/digest/{key}", found, step, want[1])
                compared += 1
        assert compared >= 3 * len(self.params)
        validations.append(trainer.evaluate(cfg.num_iterations, plans["val"]))
        self.compare("run", val_loss=validations, **{self.loss: losses})


class WholeRecord(PublicRecord):
    """Tests of all numbers that there are."""

    steps: dict  # what differs in the optimizers' steps
    across: int  # the first of six steps across the untying
    members: dict[str, str]  # patterns of the names of ours that stand, one after the other, for each public array
    states: dict[str, int]  # the step of each state
    last_tied: int
    nets: str  # name of the samples of the factors that nets make
    hashes: dict  # settings of hashes of a real size
    stored: dict[str, str]  # patterns of the names of parameters, by the precision that they are stored in

    def plan(self, pattern: str, lengths: list[int], cuts: tuple, cfg) -> list:
        return self.script.plan_batches(pattern, lengths, 8, cfg, cuts)

    def test_packing(self, tmp_path: Path):
        """Compare the batches of three steps of each stage with their bigrams, those of the run, real hashes."""
        m, changes = self.script, dict(vocab_size=200, eot_token=199, bigram_rows=1280)
        cfg = self.config(tmp_path, **self.small | changes)
        real = types.SimpleNamespace(cfg=dataclasses.replace(cfg, **self.hashes))
        tokens = self.tokens("hash/inputs").int()
        assert np.array_equal(m.GPT.bigram_hashes(real, tokens), self.numbers["hash/rows"])
        for key in {"hash/signs", "hash/sign_rows"} & {*self.numbers}:  # one of the two
            assert np.array_equal(m.GPT.sign_hashes(real, tokens), self.numbers[key])
        stages = [self.numbers[f"pack/stage{i}/inputs"] for i in (1, 2, 3)]
        lengths = [inputs.shape[-1] for inputs in stages for _ in range(3)]
        plan = self.plan(f"{tmp_path}/pack_*.bin", lengths, (28,) * 3 + (64,) * 6, cfg)
        for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
            for rank, (tokens, targets) in enumerate(batch):
                hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=cfg), tokens)
                for name, found in dict(inputs=tokens, targets=targets, bigram=hashes).items():
                    key = f"pack/stage{step // 3 + 1}/{name}"
                    assert np.array_equal(found, self.numbers[key][step % 3, rank]), key
        assert step == 8
        cfg = self.config(tmp_path, **self.small | self.run)
        plan = m.plan_data(cfg)["train"]
        for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
            inputs = torch.stack([inputs for inputs, _ in batch])
            assert np.array_equal(inputs, self.numbers[self.batches.format(step)])

    def compare_gradients(self, gpt: nn.Module, row: int) -> None:
        """Compare all norms, small gradients whole, and samples and sums of large ones, with those of a row."""
        for i, (key, g) in enumerate(self.gradients(gpt).items()):
            found = {f"grad/{key}": g}
            if f"grad/{key}" not in self.numbers:
                found = {f"grad/{key}:rows": project(g.sum(-1)), f"grad/{key}:cols": project(g.sum(-2))}
                found[f"grad/{key}:sample"] = g.flat[7919 * np.arange(16) % g.size]
            scale = self.numbers["grad_norm"][row, i]
            self.expect("grad_norm", norm(g), (row, i), scale)
            for name, value in found.items():
                self.expect(name, value, row, scale)

    def losses(self, trainer, states: dict[str, int]) -> Iterator[tuple]:
        """Yield the names of states and their losses: sums, in training, and else means."""
        for state, step in states.items():
            kind = "val" if state.startswith("val") else "train"
            kind += "1" * (f"{kind}1/inputs" in self.numbers and state == "s1")  # with shorter documents
            self.load_parameters(trainer, is_tied=step <= self.last_tied)
            trainer.set_schedules(step)
            tokens, targets = (self.tokens(f"{kind}/{name}") for name in ("inputs", "targets"))
            weights = torch.ones(1).double() if kind == "val" else trainer.weights
            if kind != "val" and hasattr(self.script, "next_targets"):
                next_weights, prefix_weights = loss_weights(self.script, step, trainer.cfg)
                prefixes = trainer.prefixes if prefix_weights else None
                targets = self.script.next_targets(targets, len(next_weights), prefixes)
            loss = trainer.gpt(tokens.int(), targets, trainer.windows, weights)
            yield state, loss / len(tokens) if kind == "val" else loss
            trainer.gpt.zero_grad()

    def test_states(self, tmp_path: Path):
        self.compare_states(self.trainer(tmp_path, **self.small), self.states)

    def compare_states(self, trainer, states: dict[str, int]) -> None:
        """Compare losses, also of each token, the stream between layers, what nets make, and every gradient."""
        outputs, made, losses, row, module = [], [], [], 0, self.script
        for name, part in trainer.gpt.named_modules():
            if type(part).__name__ == "Block":
                part.register_forward_hook(lambda *result: outputs.append(result[2].detach().numpy()))
            if "w2" in dict(part.named_parameters(recurse=False)):
                part.register_forward_hook(
                    lambda *call, name=name: made.append(self.reorder(f"{name}.b2", made_by(*call), public=True))
                )
        plain = module.softcapped_cross_entropy

        def with_losses(*inputs):
            losses.append((result := plain(*inputs))[0])
            return result

        with mock.patch.object(module, "softcapped_cross_entropy", with_losses):
            for case, (state, loss) in enumerate(self.losses(trainer, states)):
                self.expect("loss", loss.item(), case)
                self.expect(f"token_loss/{state}", torch.cat(losses), ..., 1)
                self.expect(self.nets, np.concatenate(made).T[[0, 384, 767]], case, 1)
                self.expect("block_rms", [np.sqrt(np.square(x).mean()) for x in outputs], (case, slice(11)))
                self.expect("block_sample", [x[[0, 384, 767], :8] for x in outputs], (case, slice(11)), 1)
                for kept in outputs, made, losses:
                    kept.clear()
                if not state.startswith("val"):
                    loss.backward()
                    self.compare_gradients(trainer.gpt, row)
                    row += 1

    def step(self, trainer, step: int, shown: int) -> None:
        """Step the optimizers with learning rate and momentum of step `shown`."""
        now = {name: getattr(self.script, name)(shown, trainer.cfg) for name in ("lr_multiplier", "muon_momentum")}
        with mock.patch.multiple(self.script, **{name: lambda *_, value=value: value for name, value in now.items()}):
            if hasattr(self.script, "TiedAdam"):
                self.script.step_optimizers(trainer.optimizers, step)
            else:  # the trainer ties: give it a loss with these gradients
                loss = sum((p * p.grad).sum() for p in trainer.gpt.parameters())
                trainer.gpt.zero_grad()
                trainer.model = lambda *_: loss
                trainer.train_step(step, [(torch.zeros(8), torch.zeros(8).long())])

    @pytest.mark.parametrize("begin", ["first", "across"])
    def test_optimizers(self, tmp_path: Path, begin: str):
        """Take six steps with given gradients, from the first one on or across the untying.

        Moments are zero before, and Adam counts from 1.
        """
        first = 0 if begin == "first" else self.across
        cfg = self.config(tmp_path, **self.small | self.steps)
        cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
        trainer = self.script.Trainer(cfg, self.script.Ranks())
        params = dict(trainer.gpt.named_parameters())
        members = {key: [p for n, p in params.items() if re.fullmatch(kind, n)] for key, kind in self.members.items()}
        public = {
            f"opt/{kind}/{key}": self.numbers[f"opt/{kind}/{key}"] for key in members for kind in ("init", "grad")
        }
        for key, ours in members.items():
            if ours[0].shape[::-1] == public[f"opt/init/{key}"].shape != ours[0].shape:  # ours is transposed
                public |= {name: x.swapaxes(-1, -2) for name, x in public.items() if name.endswith(f"/{key}")}
            set_values(ours, public[f"opt/init/{key}"])
        for t in range(6):
            grads = {p: torch.zeros_like(p) for p in params.values()}
            for key, ours in members.items():
                set_values([grads[p] for p in ours], public[f"opt/grad/{key}"][t])
            for p, grad in grads.items():
                p.grad = grad if p.grad is None else p.grad + grad
            self.step(trainer, t, first + t)
            for key, ours in members.items():
                init, values = public[f"opt/init/{key}"], np.concatenate([p.detach().numpy().ravel() for p in ours])
                values = values[: init.size].reshape(init.shape)
                values = values if init.flags.c_contiguous else values.T
                key = f"opt/from{first}/{key}"
                self.expect(key, digest(values), t, self.numbers[key][t, 1])

    def test_precision(self, tmp_path: Path):
        """Check how parameters and moments are stored in bf16, and which biases then can move.

        From 2.5 on, half a step of bf16 is larger than the update of a bias. nano's moments are stored as what they are
        of: its tables would step 5 times slower with moments in fp32.
        """
        for dtype in "bfloat16", "float32":
            trainer = self.trainer(tmp_path, **self.small | dict(dtype=dtype))
            params = dict(trainer.gpt.named_parameters())
            biases = {p: p.detach().clone() for name, p in params.items() if name.endswith("b2")}
            for name, p in params.items():
                (kind,) = (kind for kind, names in self.stored.items() if re.fullmatch(names, name))
                assert p.dtype == getattr(torch, kind if dtype == "bfloat16" else dtype), name
            assert {m.dtype for optimizer in trainer.optimizers for m in optimizer.state.values()} == {torch.float32}
            for step in range(8):
                for p in params.values():
                    p.grad = torch.ones_like(p)
                self.script.step_optimizers([opt for opt in trainer.optimizers if "exp_avg" in opt.state], step)
            for p, first in biases.items():
                large = first.abs() >= 2.5
                assert large.any()
                assert (p != first)[first == 0].all()
                assert (p != first)[large].all() if dtype == "float32" else (p == first)[large].all()
        nano = dataclasses.replace(self.script.PRESETS["nano"], dtype="bfloat16", device="cpu", cpu_threads=0)
        for optimizer in self.script.Trainer(self.script.resolve(nano), self.script.Ranks()).optimizers:
            if "exp_avg" in optimizer.state:
                assert {m.dtype for m in optimizer.state.values()} == {optimizer.param_buffer.dtype}


def made_by(net: nn.Module, inputs: tuple, output: dict | None) -> np.ndarray:
    """Return all factors that a net has made (n, T). Nets of records write them into their last argument."""
    factors = output.values() if output else [inputs[-1][i][kind] for kind, i in net.keys]
    return torch.cat([*factors])[..., 0].detach().numpy()


def set_values(tensors: list[Tensor], values: np.ndarray) -> None:
    """Write values, in order, to tensors that may have more at the end: those are zero."""
    values = torch.as_tensor(values.astype(np.float64)).flatten()
    for tensor in tensors:
        tensor.detach().zero_().view(-1)[: len(values)] = values[: tensor.numel()]
        values = values[tensor.numel() :]
    assert not len(values)


def join_run(ranks: list[int], test: str, folder: str) -> None:
    """Be one of the processes of a run."""
    record = importlib.import_module(test).TestRecord()
    record.take_run(Path(folder), record.script.Ranks(*ranks))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
