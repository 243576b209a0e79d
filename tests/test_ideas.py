"""The script takes ideas: those of the pages, one by one, and many at once."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

import mini
from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import ROOT
from world_worker import Run

SOURCE = (ROOT / "train_gpt.py").read_text()
CHANGES = (ROOT / "docs" / "change.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", CHANGES, re.M | re.S)
pytestmark = [pytest.mark.published, pytest.mark.slow]


def apply(diff: str, folder: Path) -> Path:
    """Apply a diff of the pages to a copy of the script."""
    script = folder / "train_gpt.py"
    script.write_text(SOURCE)
    applied = subprocess.run(["git", "apply"], input=diff, text=True, cwd=folder)
    assert applied.returncode == 0, "train_gpt.py has changed where a diff in docs/ changes it: update that"
    return script


def losses_of(path: Path, corpus: Path, folder: Path) -> list[float]:
    """Train gpt2's layers in small with a script."""
    spec = importlib.util.spec_from_file_location("changed", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.PRESETS["mini"] = module.Hyperparameters(**mini.MINI | dict(layers=module.GPT2_LAYERS))
    # Six heads, of which 1, 2, 3 or 6 are a matrix; three steps have an update of every group
    flags = "--batch_tokens=16 --num_heads=6 --head_dim=8 --model_dim=48 --seed=0 --run_id=r --val_loss_every=0".split()
    flags += [f"--prefix_file={corpus}/prefixes", f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin"]
    result = module.main([*GPT2_FLAGS, *flags, f"--log_dir={folder}"])
    return [loss for _, loss, _ in result["train_curve"] + result["val_curve"]]


def test_changes_of_the_pages_apply_and_train_something_else(tmp_path, corpus):
    for text in re.findall(r"\| `([^`]+)` → ", CHANGES):
        assert SOURCE.count(text) == 1, f"train_gpt.py lacks `{text}`: update docs/change.md"
    before = losses_of(ROOT / "train_gpt.py", corpus, tmp_path / "before")
    assert len(DIFFS) == 3
    for i, diff in enumerate(DIFFS):
        losses = losses_of(apply(diff, tmp_path), corpus, tmp_path / str(i))
        assert losses != before
        assert all(0 < loss < 20 for loss in losses)  # and so not NaN


# In nano: two stages, of batches that grow; a layer more, with another kind of window; SwiGLU; Lion for tables
MANY = {
    "NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)": "NANO_STAGES = tuple("
    "Stage(0.5, batch=batch, max_doc_len=0, windows=dict(long=512, mid=24)) for batch in (1, 2))",
    '    "short": Attention("short"),': '    "short": Attention("short"),\n    "mid": Attention("mid"),',
    "NANO_LAYERS = (": 'NANO_LAYERS = (Layer("mid", x0=True), ',
    "        self.c_fc =": "        self.c_gate = uniform_weight(K, K, cfg.mlp_dim)\n        self.c_fc =",
    "F.linear(F.relu(F.linear(x, c_fc)).square(), c_proj)": "linear("
    "F.silu(linear(x, self.c_gate.mT)) * linear(x, c_fc), c_proj)",
    'Group("Muon", "*.c_fc", lr=2.0': 'Group("Muon", "*.c_fc *.c_gate", lr=2.0',
    'Group("Adam", "embed.weight value_embeds.*", lr=0.18': 'Group("Lion", "embed.weight value_embeds.*", lr=0.018',
}


def test_many_ideas_train_on_three_processes_what_they_do_on_one(script_flags, tmp_path):
    script = apply(next(diff for diff in DIFFS if "class Lion" in diff), tmp_path)
    source = script.read_text()
    for old, new in MANY.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    script.write_text(source)
    flags = [*TINY_FLAGS, *script_flags, "--seed=1", "--dtype=float64", "--batch_tokens=192", f"--log_dir={tmp_path}"]
    runs = [Run([[*flags, f"--run_id={n}"]] * n, tmp_path / f"out{n}", scripts=[script] * n) for n in (1, 3)]
    assert [run.wait() for run in runs] == [[0], [0] * 3], [run.text("err") for run in runs]
    alone, several = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 3))
    assert [loss for _, loss, _ in several["train_curve"]] == pytest.approx(
        [loss for _, loss, _ in alone["train_curve"]]
    )
    assert alone["val_loss"] < alone["train_curve"][0][1] - 0.1
