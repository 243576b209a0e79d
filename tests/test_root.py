"""The root is equal in mathematics to public record 89: its schedules, losses, gradients and steps, to 1e-8 or better.

These numbers notice what no other test does: a factor, a window, a rate or an order that changes in the middle of gpt2.
Whoever adds an idea of gpt2 to the root sets SCRIPT to the newest record's script that is without it: that record is
held from then on, in the slow tier, and the idea's own tests hold the root.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import test_record89
from public_records import PublicRecord, load
from test_record83 import FIRST, MEMBERS, SHARDS, STD
from test_record83 import reorder as reorder_queries
from train_gpt import GPT2_LAYERS, GPT2_STAGES

SCRIPT = "train_gpt.py"  # or records/NAME/train_gpt.py
pytestmark = [] if SCRIPT == "train_gpt.py" else pytest.mark.slow


def with_stages(settings: dict) -> dict:
    """Return a milestone's settings, with rows for stages."""
    settings = settings | dict(block_size=settings["mask_block"], final_window=settings["final_window_tokens"])
    stages = zip(GPT2_STAGES, settings["window_tokens"], settings["max_doc_len"], strict=True)
    settings["stages"] = tuple(stage._replace(window=window, max_doc_len=cut) for stage, window, cut in stages)
    gone = "mask_block final_window_tokens window_tokens max_doc_len".split()
    return {name: value for name, value in settings.items() if name not in gone}


SMALL, RUN = with_stages(test_record89.SMALL), with_stages(test_record89.RUN)
STEPS = SMALL | dict(vocab_size=16, eot_token=15, head_dim=4, model_dim=24, bigram_rows=20, prefix_file="")
STEPS |= dict(layers=(*GPT2_LAYERS[:10], *GPT2_LAYERS[1::9]))  # with a row more, as many factors as the public arrays
PARTS = {name: kind for name, kind in test_record89.MEMBERS.items() if not name.startswith(("gate.", "mudd."))}
PARTS |= {f"gate.{kind}": rf"gate_nets\.\d\.{kind}" for kind in ("w1", "w2", "b2")}
PARTS |= {f"mudd.{kind}": rf".*(mudd|head)_net\.{kind}" for kind in ("w1", "w2", "b2")}
PARTS["scalars"] = MEMBERS["scalars"].replace("skip_weights", r".*\.skip_lambda")
# The public name of each net, and its rows in our order, which is by block. There xsa of all blocks comes first, then
# their head gates, embeds, skip and dc; in the last block attention's factors come before those of the embeddings
NETS = {
    "gate_nets.0": ("gates.early", np.r_[18:22, 0:6, 22:26, 6:18]),
    "gate_nets.4": ("gates.mid", np.r_[18:20, 0:6, 20:22, 28, 22:24, 6:12, 24:28, 12:18, 29:41]),
    "blocks.10.mudd_net": ("mudd.last", np.r_[0:9, 12, 9, 13, 10:12]),
    "head_net": ("mudd.out", np.r_[0:5]),
}
VALUE_EMBEDS = [i for i, layer in enumerate(GPT2_LAYERS) if layer.value_embed]


def place(name: str) -> tuple[str, int]:
    net, _, kind = name.rpartition(".")
    if net in NETS:
        return f"{NETS[net][0]}.{kind}", 0
    name = re.sub(r"value_embeds\.(\d+)", lambda found: f"value_embeds.{VALUE_EMBEDS.index(int(found[1]))}", name)
    return test_record89.place(name.replace("blocks.6.skip_lambda", "skip_lambda"))


def reorder(name: str, values: np.ndarray, public: bool) -> np.ndarray:
    net, _, kind = name.rpartition(".")
    if net not in NETS or kind == "w1":
        return reorder_queries(name, values, public)
    rows = NETS[net][1]
    return values.reshape(len(rows), -1)[np.argsort(rows) if public else rows]


RECORD = PublicRecord("2026-07-17_FP8DownProjection", place, SHARDS, reorder, load(SCRIPT))
RECORD.rtol = 1e-8


def test_schedules(tmp_path: Path):
    RECORD.compare_schedules(tmp_path, schedule=dict(device="cpu", seed=0))


@pytest.mark.parametrize("first", [0, 844])
def test_optimizers(first: int, tmp_path: Path):
    """Take six steps from the first one on, and six across the untying."""
    cfg = RECORD.config(tmp_path, **STEPS)
    cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
    RECORD.compare_steps(RECORD.script.Trainer(cfg, RECORD.script.Ranks()), first, PARTS)


@pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_states(count: int, tmp_path: Path):
    """Later stages have other numbers alone, which the schedules show."""
    states = dict([*test_record89.STATES.items()][:count])
    RECORD.compare_states(RECORD.trainer(tmp_path, **SMALL), states, 847, "net_sample")


def test_packing(tmp_path: Path):
    cfg = RECORD.config(tmp_path, **SMALL | dict(vocab_size=200, eot_token=199, bigram_rows=1280))
    RECORD.compare_packing(tmp_path, cfg, dict(bigram_rows=377280, sign_rows=8192), [128, 256, 384])


def test_first_values(tmp_path: Path):
    first = FIRST | {"blocks.6.skip_lambda": -1.5, "gate_scale": 0.1}
    for name, (public, rows) in NETS.items():
        first[f"{name}.b2"] = np.array(test_record89.FIRST_B2[public])[rows]
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), first, STD)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)
