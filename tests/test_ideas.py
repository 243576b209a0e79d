"""The script takes the ideas of the pages."""

import re
import subprocess
from pathlib import Path

import pytest

import mini
from conftest import GPT2_FLAGS, SMALL
from speedrun import ROOT
from speedrun.logs import load_script

SOURCE = (ROOT / "train_gpt.py").read_text()
CHANGES = (ROOT / "docs" / "change.md").read_text()
DIFFS = sorted(ROOT.glob("docs/changes/*.diff"))
pytestmark = [pytest.mark.published, pytest.mark.slow]


def losses_of(path: Path, corpus: Path, folder: Path) -> tuple[list[float], list[float]]:
    """Train nano, and gpt2's layers in small, with a script."""
    module = load_script(path)
    data = [f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin", "--run_id=r", f"--log_dir={folder}"]
    nano = module.main([*SMALL, *data])
    module.PRESETS["mini"] = module.Hyperparameters(**mini.MINI | dict(layers=module.GPT2_LAYERS))
    # Six heads, of which 1, 2, 3 or 6 are a matrix; three steps have an update of every group
    flags = "--batch_tokens=16 --num_heads=6 --head_dim=8 --model_dim=48 --seed=0 --val_loss_every=0".split()
    small = module.main([*GPT2_FLAGS, *flags, *data, f"--prefix_file={corpus}/prefixes", f"--log_dir={folder}/gpt2"])
    return tuple([loss for _, loss, _ in it["train_curve"] + it["val_curve"]] for it in (nano, small))


def test_changes_of_the_pages_apply_and_train_something_else(tmp_path, corpus):
    for text in re.findall(r"\| `([^`]+)` → ", CHANGES):
        assert SOURCE.count(text) == 1, f"train_gpt.py lacks `{text}`: update docs/change.md"
    before = losses_of(ROOT / "train_gpt.py", corpus, tmp_path / "before")
    assert {path.stem for path in DIFFS} == {*re.findall(r"\(changes/(\w+).diff\)", CHANGES)}
    for path in DIFFS:
        (script := tmp_path / "train_gpt.py").write_text(SOURCE)
        applied = subprocess.run(["git", "apply", path], cwd=tmp_path)
        assert applied.returncode == 0, f"train_gpt.py has changed where {path} changes it: update that"
        nano, small = losses_of(script, corpus, tmp_path / path.stem)
        assert small != before[1]
        assert (nano != before[0]) == (path.stem != "layer"), "the layer is gpt2's"
        assert all(0 < loss < 20 for loss in nano + small)  # and so not NaN
