"""Hold a record's script against numbers computed from the public record that it equals, in golden.npz beside it.

`python tests/public_records.py FOLDER SOURCE [TEST]` cuts it from SOURCE, which the public script gave and whose .json
describes it: parameters after optimizer steps become what `digest` makes of them, and so do gradients that lack such
figures. Sums over the rows and columns of a gradient are added up again, with the weights of `project`. The .json's
indices of entries are added, and names get a slash. With a test's module, `shrink` follows.
"""

import dataclasses
import functools
import importlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from shards import write_shard
from world_worker import ROOT, Run

VOCAB_SIZE = 120  # rows of the public tables of embeddings that ours have, too


def digest(x: np.ndarray) -> np.ndarray:
    """Return sum, norm, sum of entry i times cos(i), and 13 of the entries."""
    samples = x.flat[np.linspace(0, x.size - 1, 13).astype(int)]
    return np.array([x.sum(), np.linalg.norm(x), x.ravel() @ np.cos(np.arange(x.size)), *samples])


def project(sums: np.ndarray, states: int) -> np.ndarray:
    """Return for each of some states sums of a gradient's sums, times cos(i)."""
    return sums.reshape(states, -1) @ np.cos(np.arange(sums.size // states))


def like(p: Tensor, values: np.ndarray) -> Tensor:
    """Return what of a public tensor is in ours: scalars have a dimension there, tables of embeddings unread rows."""
    return torch.from_numpy(values).flatten()[: p.numel()].view_as(p)


def add_values(tensors: list[Tensor], values: np.ndarray) -> None:
    """Add values, in order, to tensors that may have more at the end, or to one that is transposed."""
    values = torch.from_numpy(values.astype(np.float64))
    values = (values.T if tensors[0].shape == values.shape[::-1] != values.shape else values).flatten()
    for tensor in tensors:
        tensor.detach().view(-1)[: len(values)] += values[: tensor.numel()]
        values = values[tensor.numel() :]


class PublicRecord:
    """The script of a record and the public numbers. `role` gives a parameter's name there; shards: files and names."""

    def __init__(self, name: str, role: Callable[[str], str], shards: dict[str, str]):
        self.folder, self.role, self.shards = ROOT / "records" / name, role, shards
        self.source = (self.folder / "train_gpt.py").read_text()
        self.numbers = dict(np.load(self.folder / "golden.npz"))
        self.numbers |= zip(self.numbers.pop("digest_names", ()), self.numbers.pop("digests", ()), strict=True)

    def load(self, source: str = "") -> types.ModuleType:
        """Execute the script, or a changed one, as a module."""
        module = types.ModuleType(f"public_{self.folder.name[11:]}_{hash(source)}")
        module.__file__ = str(self.folder / "train_gpt.py")
        sys.modules[module.__name__] = module  # dataclasses look it up
        exec(compile(source or self.source, module.__file__, "exec"), module.__dict__)
        return module

    def faulty(self, replacements: list[tuple[str, str]]) -> types.ModuleType:
        source = self.source
        for old, new in replacements:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        return self.load(source)

    def config(self, m: types.ModuleType, folder: Path, **changes):
        """Return the preset gpt2 with changes, and with the shards of the run in small in `folder`."""
        for name, key in self.shards.items():
            if not (folder / f"{name}.bin").exists():
                write_shard(folder / f"{name}.bin", self.numbers[key])
        files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", log_dir=str(folder))
        return m.resolve(dataclasses.replace(m.PRESETS["gpt2"], **files, **changes))

    def count_graphs(self, m: types.ModuleType, folder: Path, changes: dict) -> tuple[int, int]:
        """Return how many graphs a run on two sequences a step has compiled after its warm-up, and at its end."""
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters["stats"]
        counts.clear()
        with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
            cfg = self.config(m, folder, **changes | dict(compile=True))
            trainer, plans = m.Trainer(cfg, m.Ranks()), m.plan_data(cfg)
            trainer.warm_up()
            first = counts["unique_graphs"]
            for step, batch in enumerate(m.read_batches(plans["train"], range(2), cfg, trainer.device)):
                trainer.train_step(step, batch)
            trainer.evaluate(cfg.num_iterations, plans["val"][:1])
        return first, counts["unique_graphs"]

    def run_in_processes(self, test: str, folder: Path, size: int) -> None:
        """Let each of `size` processes do `check_run` of a test's module."""
        self.config(self.load(), folder)
        run = Run([[test, folder]] * size, folder / "run", target=join_run)
        assert run.wait(timeout=200) == [0] * size, run.text("err")

    def load_parameters(self, gpt: nn.Module) -> None:
        named = {f"param/{self.role(name)}": p for name, p in gpt.named_parameters()}
        assert named.keys() == {key for key in self.numbers if key.startswith("param/")}
        for key, p in named.items():
            p.detach().copy_(like(p, self.numbers[key]))

    def tokens(self, key: str) -> Tensor:
        return torch.from_numpy(self.numbers[key].astype(np.int64))

    def compare(self, family: str, **found) -> None:
        for name, value in found.items():
            want = self.numbers[f"{family}/{name}"]
            assert np.shape(value) == want.shape, f"{family}/{name}"
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=0, err_msg=f"{family}/{name}")

    def compare_digest(self, key: str, name: str, got: Tensor) -> None:
        """Compare to 1e-8 of the norm. The run's have no samples, and go over all rows of the public tables."""
        want, values = self.numbers[key], got.detach().numpy()
        if not (known := ~np.isnan(want)).all():
            values = np.append(values, self.numbers[f"param/{self.role(name)}"].flat[values.size :])
        np.testing.assert_allclose(digest(values)[known], want[known], rtol=0, atol=1e-8 * want[1], err_msg=key)

    def compare_documents(self, tokens: Tensor, key: str, *row: int, eot: int = VOCAB_SIZE - 1) -> None:
        """Check that the end-of-text tokens tell the documents of cu_seqlens, where an empty one may be the last."""
        document, starts = (tokens == eot).cumsum(0) - 1, self.numbers[key][row]
        assert np.array_equal(document, np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1), key


class StackedRecord(PublicRecord):
    """A public record that keeps scalars of all layers in one array, and one of whose parameters has another order.

    `place` gives the public name of a parameter and its layer; `reorder` the public order of its values, or back ours,
    which depends on how many `angles` the table of the model's rotary embeddings has.
    """

    def __init__(self, name: str, place: Callable, reorder: Callable, shards: dict[str, str]):
        super().__init__(name, lambda name: place(name)[0], shards)
        self.place, self.reorder = place, reorder
        self.order = [key[6:] for key in self.numbers if key.startswith("param/")]

    def part(self, name: str, array: np.ndarray, size: int) -> np.ndarray:
        """Return a view of what ours is of a public array: a row of one for all layers, or the rows with tokens."""
        key, i = self.place(name)
        return (array.reshape(11, -1)[i] if key.endswith("lambdas") else array.reshape(-1))[:size]

    def public(self, tensors: dict[str, Tensor], unread: float) -> dict[str, np.ndarray]:
        """Return our values by public names; what only the public record has is `unread` times its first value."""
        arrays = {key: np.array(unread * self.numbers[f"param/{key}"].astype(np.float64)) for key in self.order}
        for name, tensor in tensors.items():
            values = self.reorder(name, tensor.detach().numpy(), public=True, angles=self.angles)
            self.part(name, arrays[self.role(name)], values.size)[:] = values.flatten()
        return arrays

    def load_parameters(self, gpt: nn.Module, is_tied: bool = False) -> None:
        assert {self.role(name) for name, _ in gpt.named_parameters()} == set(self.order)
        self.angles = gpt.rotary.cos.size(1)
        for name, p in gpt.named_parameters():
            values = self.part(name, self.numbers[f"param/{self.role(name)}"].astype(np.float64), p.numel())
            p.detach().copy_(torch.from_numpy(self.reorder(name, values, public=False, angles=self.angles)).view_as(p))
        if is_tied:
            gpt.embed.weight.detach().copy_(gpt.lm_head)

    def expect(self, key: str, row, found, scale: float | None = None) -> None:
        """Compare to 1e-8 of a scale: by default, of the public numbers' largest."""
        want = self.numbers[key][row]
        assert np.shape(found) == want.shape, key
        scale = np.abs(want).max() if scale is None else scale
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * scale, err_msg=f"{key} {row}")


def join_run(ranks: tuple, test: str, folder: str) -> None:
    """Be one of the processes of a run."""
    module = importlib.import_module(test)
    module.check_run(module.SCRIPT, Path(folder), module.SCRIPT.Ranks(*ranks))
    torch.distributed.destroy_process_group()


def cut(folder: str, source: str) -> None:
    kept, digests, about = {}, {}, json.loads(Path(source).with_suffix(".json").read_text())
    scales = about.get("param_scale_log2", {})
    for key, array in np.load(source).items():
        key = re.sub(r"^(opt.?\.(?:grad|after)|\w+\.grad(?=\.)|pack\.\w+(?=\.)|\w+)\.", r"\1/", key)
        rows = slice(VOCAB_SIZE if "embed" in key and "opt/" not in key else None)
        if "/digest/" in key and array.ndim == 1:
            digests[key] = np.pad(array, (0, 13), constant_values=np.nan)
        elif re.match(r"stage./grad|optimizer/./param", key):
            digests[key] = digest(array[rows])
        elif key.startswith("token_loss"):
            continue  # the script gives sums
        elif key.startswith("grad/") and ":" in key:
            kept[key] = array[:, :16] if key.endswith("sample") else project(array, len(array))
        elif key.startswith("param/") and key[6:] in scales:
            kept[key] = (array * 2.0 ** -scales[key[6:]]).astype(np.float16)
        elif key.startswith(("optA.after", "optB.after", "opt/from")):
            digests |= {f"{key}/{t}": digest(after[rows] if after.ndim else after) for t, after in enumerate(array)}
        elif ".grad/" not in key or key.startswith("opt.grad"):
            kept[key] = array
    indices = about.get("run", {}).get("digest_indices", {})
    kept |= {f"run/indices/{name}": np.array(values) for name, values in indices.items()}
    save(folder, kept, digests)


def save(folder: str | Path, kept: dict[str, np.ndarray], digests: dict[str, np.ndarray]) -> None:
    np.savez_compressed(f"{folder}/golden.npz", **kept, digest_names=[*digests], digests=np.stack([*digests.values()]))


def shrink(test: str) -> None:
    """Do a test's checks, then compute the numbers anew whose parameters take too much, at a quarter of the width.

    These are the script's then, from when it gave the public ones: states and run. A check that fails leaves all as is.
    """
    module = importlib.import_module(test)
    record, numbers = module.RECORD, module.RECORD.numbers
    for check in module.CHECKS:
        check(module.SCRIPT, Path(tempfile.mkdtemp()))
    for name in record.order:  # hidden matrices are doubled, as their inputs are a quarter
        array = numbers[f"param/{name}"]
        kept = array[tuple(slice(n // (4 if n in (module.DIM, 4 * module.DIM) else 1)) for n in array.shape)]
        numbers[f"param/{name}"] = kept * np.float16(1 + ("blocks" in name and "gate" not in name))
    module.DIM //= 4
    for sizes in module.SMALL, module.RUN:
        sizes |= dict(model_dim=module.DIM, head_dim=module.DIM // 6)
    record.expect = lambda key, row, found, scale=None: numbers[key].__setitem__(row, found)
    for check in module.check_states, module.check_run:
        check(module.SCRIPT, Path(tempfile.mkdtemp()))
    save(record.folder, numbers, {key: numbers.pop(key) for key in [*numbers] if key.startswith("opt/from")})


if __name__ == "__main__":
    cut(*sys.argv[1:3])
    for test in sys.argv[3:]:
        shrink(test)
