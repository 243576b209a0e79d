"""The script takes the ideas of the pages."""

import re
import subprocess
from pathlib import Path

import pytest

import mini
from conftest import GPT2_FLAGS
from speedrun import ROOT
from speedrun.logs import load_script

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
    module = load_script(path)
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
