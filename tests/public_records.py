"""Hold a record's script against numbers computed from the public record that it equals, in golden.npz beside it.

`python tests/public_records.py FOLDER SOURCE` cuts that file from SOURCE, which the public script gave and whose .json
describes it: parameters after optimizer steps become what `digest` makes of them, and so do gradients that lack such
figures. The .json's indices of entries are added, and names get a slash.
"""

import dataclasses
import functools
import importlib
import json
import re
import sys
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


def like(p: Tensor, values: np.ndarray) -> Tensor:
    """Return what of a public tensor is in ours: scalars have a dimension there, tables of embeddings unread rows."""
    return torch.from_numpy(values).flatten()[: p.numel()].view_as(p)


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

    def compare_documents(self, tokens: Tensor, key: str, *row: int) -> None:
        """Check that the end-of-text tokens tell the documents of cu_seqlens, where an empty one may be the last."""
        document, starts = (tokens == VOCAB_SIZE - 1).cumsum(0) - 1, self.numbers[key][row]
        assert np.array_equal(document, np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1), key


def join_run(ranks: tuple, test: str, folder: str) -> None:
    """Be one of the processes of a run."""
    module = importlib.import_module(test)
    module.check_run(module.SCRIPT, Path(folder), module.SCRIPT.Ranks(*ranks))
    torch.distributed.destroy_process_group()


def cut(folder: str, source: str) -> None:
    kept, digests = {}, {}
    for key, array in np.load(source).items():
        key = re.sub(r"^(opt.?\.(?:grad|after)|\w+\.grad(?=\.)|pack\.\w+(?=\.)|\w+)\.", r"\1/", key)
        rows = slice(VOCAB_SIZE if "embed" in key else None)
        if "/digest/" in key and array.ndim == 1:
            digests[key] = np.pad(array, (0, 13), constant_values=np.nan)
        elif re.match(r"stage./grad|optimizer/./param", key):
            digests[key] = digest(array[rows])
        elif key.startswith(("optA.after", "optB.after")):
            digests |= {f"{key}/{t}": digest(after[rows] if after.ndim else after) for t, after in enumerate(array)}
        elif ".grad/" not in key or key.startswith("opt.grad"):
            kept[key] = array
    indices = json.loads(Path(source).with_suffix(".json").read_text()).get("run", {}).get("digest_indices", {})
    kept |= {f"run/indices/{name}": np.array(values) for name, values in indices.items()}
    names, rows = zip(*digests.items(), strict=True)
    np.savez_compressed(f"{folder}/golden.npz", **kept, digest_names=names, digests=np.stack(rows))


if __name__ == "__main__":
    cut(*sys.argv[1:])
