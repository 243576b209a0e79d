"""The scripts of records/: each still trains what it did, and equals its neighbours where it says so."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from public_records import load
from speedrun.logs import RECORDS, diff, lineage, read_script
from world_worker import ROOT, Run

NAMES = [folder.name for folder in lineage(RECORDS)]
V14, V15, V18, V20, V21, PAIRS, _, _, _, START, V83, V89, ROLES, LAYER, _, PASSES, *_ = NAMES
SHORT = "--preset nano --device cpu --dtype float64 --cpu_threads 1 --seed 1 --num_iterations 8 --model_dim 32 "
SHORT += "--num_heads 2 --head_dim 16 --block_size 16 --train_seq_len 128 --batch_tokens 768 --val_seq_len 256 "
SHORT += "--val_tokens 1280"


def script(name: str) -> str:
    return (RECORDS / name / "train_gpt.py").read_text(encoding="utf-8")


def short_flags(name: str) -> list[str]:
    """Return flags that make a record's nano small: two had another name, or are a row of a table now."""
    preset = load(name).PRESETS["nano"]
    short = SHORT if hasattr(preset, "block_size") else SHORT.replace("block_size", "mask_block")
    return f"{short}{' --window_tokens 64' * hasattr(preset, 'window_tokens')}".split()


@pytest.fixture(scope="module")
def loss_of(script_flags, tmp_path_factory):
    """Return a function that trains a record's nano preset, made small, and gives the last validation loss."""

    @functools.cache
    def train(name: str, flags: str) -> float:
        logs = tmp_path_factory.mktemp("logs")
        load(name).main([*short_flags(name), *flags.split(), *script_flags, f"--log_dir={logs}", "--run_id=r"])
        return json.loads((logs / "r.json").read_text())["val_loss"]

    return train


@pytest.mark.published
def test_the_root_is_the_newest_record_and_at_most_100_changed_lines():
    _, removed, added = diff(read_script(NAMES[-1], RECORDS), read_script(str(ROOT / "train_gpt.py"), RECORDS))
    assert removed + added <= 100


def test_scripts_import_nothing_of_this_repository():
    imported = re.findall(r"^ *(?:import|from) ([\w.]+)", "\n".join(map(script, NAMES)), re.M)
    theirs = {module.split(".")[0] for module in imported} - sys.stdlib_module_names
    assert theirs == {"torch", "numpy", "tqdm", "triton"}  # the last comes with torch for GPUs


# Losses of these scripts with torch 2.13.0, on the text of the first of them (`corpus`). All but the root are frozen
GOLDEN = {V14: 4.510611, V15: 4.512255, V18: 4.514202, V20: 4.455960, V21: 4.455960, PAIRS: 4.308473, START: 4.531433}
GOLDEN |= {ROLES: 4.534994, LAYER: 4.041625, PASSES: 4.041538, "train_gpt.py": 3.486589}
MARKED = [pytest.param(name, marks=pytest.mark.slow if name in NAMES else pytest.mark.published) for name in GOLDEN]


@pytest.mark.parametrize("name", MARKED)
def test_a_script_still_trains_what_it_did(name: str, loss_of):
    """Whoever changes nano's mathematics in the root changes its number here."""
    loss = loss_of(name, "")
    assert loss < 5.2, "ln 257 = 5.55 is the loss of no training"
    assert loss == pytest.approx(GOLDEN[name], abs=1e-6)


# Two records, flags for both that make their presets agree, and flags for the newer that turn its ideas off
PAIR_FLAGS = "--attention_layout LS --value_embed_layout 01 --muon_lr 0.025 --momentum_warmup_steps 100 --embed_lr 0.6"
EQUAL = [
    (V20, V21, "", ""),
    (V21, PAIRS, f"{PAIR_FLAGS} --adam_beta1 0.8", "--bigram_rows 0 --lm_head_slice 100"),
    (V83, V89, "", ""),  # nano has none of record 89's ideas
]


@pytest.mark.slow
@pytest.mark.parametrize(("older", "newer", "both", "more"), EQUAL)
def test_neighbours_are_one_training(older: str, newer: str, both: str, more: str, loss_of):
    """Ideas of speed change nothing but rounding; ideas with a flag change nothing when it is off."""
    before, after = loss_of(older, both), loss_of(newer, f"{both} {more}".strip())
    assert after == pytest.approx(before, abs=1e-9)
    assert before < 5.2


@pytest.mark.slow
@pytest.mark.parametrize("name", [V14, V21, START])
def test_three_processes_train_what_one_does(name: str, script_flags, loss_of, tmp_path: Path):
    """6 sequences a step, 5 of validation, and matrices whose number 3 does not divide."""
    flags = [*short_flags(name), *script_flags, "--log_dir", tmp_path, "--run_id", "r"]
    run = Run([flags] * 3, tmp_path / "run", scripts=[RECORDS / name / "train_gpt.py"] * 3)
    assert run.wait(timeout=400) == [0] * 3, run.text("err")
    three = json.loads((tmp_path / "r.json").read_text())["val_loss"]
    assert three == pytest.approx(loss_of(name, ""), abs=1e-9)
