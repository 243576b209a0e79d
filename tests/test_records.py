"""The root beside the newest record, and a short training of nano by each record's script."""

import json
import re
import sys
from pathlib import Path

import pytest

import train_gpt
from conftest import GPT2_FLAGS
from speedrun import records
from speedrun.logs import load_script

SCRIPTS = [folder / records.SCRIPT for folder in records.lineage(records.RECORDS)]
SHORT = "--preset nano --device cpu --dtype float64 --cpu_threads 1 --seed 1 --num_iterations 8 --model_dim 32 "
SHORT += "--num_heads 2 --head_dim 16 --block_size 16 --train_seq_len 128 --batch_tokens 768 --val_seq_len 256 "
SHORT += "--val_tokens 1280"


def train(script, flags: list[str], tmp_path) -> float:
    """Return the last validation loss."""
    script.main([*flags, f"--log_dir={tmp_path}", "--run_id=r"])
    return json.loads((tmp_path / "r.json").read_text())["val_loss"]


def test_scripts_import_nothing_of_this_repository():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    imported = re.findall(r"^ *(?:import|from) ([\w.]+)", sources, re.M)
    theirs = {module.split(".")[0] for module in imported} - sys.stdlib_module_names
    assert theirs == {"torch", "numpy", "tqdm", "triton"}  # the last comes with torch for GPUs


@pytest.mark.published
@pytest.mark.parametrize(("preset", "loss"), [("nano", 3.486589), ("mini", 3.755396)])
def test_presets_still_train_what_they_did(preset: str, loss: float, script_flags, corpus, tmp_path):
    """Whoever changes their mathematics in the root, or what parameters begin with, changes a loss, of torch 2.13.0."""
    mini = [*GPT2_FLAGS, f"--prefix_file={corpus}/prefixes", *"--dtype=float64 --seed=1 --num_heads=6".split()]
    mini += ["--head_dim=8", "--model_dim=48", "--val_loss_every=0"]  # the heads of gpt2
    flags = mini if preset == "mini" else SHORT.split()
    assert train(train_gpt, [*flags, *script_flags], tmp_path) == pytest.approx(loss, abs=1e-6)


IN_THE_GATE = [path for track in ("nano", "gpt2") for path in [it for it in SCRIPTS if it.parts[-3] == track][-2:]]
PATHS = [(path, pytest.mark.slow if path in IN_THE_GATE else pytest.mark.frozen) for path in SCRIPTS]


@pytest.mark.parametrize("path", [pytest.param(path, marks=mark, id=path.parent.name) for path, mark in PATHS])
def test_a_record_still_trains(path: Path, script_flags, tmp_path):
    script = load_script(path)
    nano, flags = script.PRESETS["nano"], [*SHORT.split(), *script_flags]
    if not hasattr(nano, "block_size"):  # it was called so once
        flags = [flag.replace("--block_size", "--mask_block") for flag in flags]
    if hasattr(nano, "window_tokens"):
        flags += ["--window_tokens=64"]
    assert train(script, flags, tmp_path) < 5.2, "ln 257 = 5.55 is the loss of no training"
