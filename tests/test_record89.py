"""FP8DownProjection is equal in mathematics to public record 89: every number that we have of it, to 1e-8 or better.

None of them has FP8.
"""

import dataclasses
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

import test_record83
from public_records import PublicRecord
from test_record83 import SHARDS, reorder
from world_worker import ROOT

pytestmark = pytest.mark.slow
SMALL = {name: value for name, value in test_record83.SMALL.items() if name != "bigram_dim"}
SMALL |= dict(bigram_rows=640, sign_rows=64, dc_keys=14, max_doc_len=(112, 256, 256, 256))
RUN = {name: value for name, value in test_record83.RUN.items() if name != "bigram_dim"}
RUN |= dict(bigram_rows=640, sign_rows=64, dc_keys=5)
STEPS = SMALL | dict(vocab_size=16, eot_token=15, head_dim=4, model_dim=24, bigram_rows=20, prefix_file="")
# As many factors as the public arrays have, with those that no layer uses
STEPS |= dict(attention_layout="S" * 14, value_embed_layout=".01" + "." * 5 + "111" + "." * 3)
STEPS |= dict(source_layout="", xsa_layout="x" * 14, gate_layout="", dc_layout="", skip_layout="." * 13 + "3")
STATES = dict(s1=200, val_s1=250, s2=600, val_s2=750, s3_tied=847, s3=1100, val_s3=1250, ext=1275, val_final=1285)
MEMBERS = {
    key: kind for key, kind in test_record83.MEMBERS.items() if not key.startswith(("mudd", "x", "attn_", "skip"))
}
MEMBERS = {key: kind for key, kind in MEMBERS.items() if key != "bigram_lambdas"} | dict(gate_scale="gate_scale")
NETS = dict(gate="early|mid", mudd="last|out")
MEMBERS |= {f"{net}.{kind}": rf"nets\.({names})\.{kind}" for net, names in NETS.items() for kind in ("w1", "w2", "b2")}


def place(name: str) -> tuple[str, int]:
    return test_record83.place(re.sub(r"nets\.(early|mid)", r"gates.\1", name))


RECORD = PublicRecord("2026-07-17_FP8DownProjection", place, SHARDS, reorder)
RECORD.rtol = 1e-8  # in the run of 13 steps rounding grows to 7e-11
SCRIPT = RECORD.script


def test_schedules(tmp_path: Path):
    RECORD.compare_schedules(tmp_path, schedule=dict(device="cpu", seed=0))


@pytest.mark.parametrize("first", [0, 844])
def test_optimizers(first: int, tmp_path: Path):
    """Take six steps from the first one on, and six across the untying."""
    cfg = RECORD.config(tmp_path, **STEPS)
    cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
    RECORD.compare_steps(SCRIPT.Trainer(cfg, SCRIPT.Ranks()), first, MEMBERS)


def test_states(tmp_path: Path):
    RECORD.compare_states(RECORD.trainer(tmp_path, **SMALL), STATES, 847, "net_sample")


def test_packing(tmp_path: Path):
    cfg = RECORD.config(tmp_path, **SMALL | dict(vocab_size=200, eot_token=199, bigram_rows=1280))
    RECORD.compare_packing(tmp_path, cfg, dict(bigram_rows=377280, sign_rows=8192), [128, 256, 384])


def test_prefixes_of_gpt2_are_the_public_ones():
    """They have 47 tokens more, without a prefix."""
    cfg = SCRIPT.resolve(dataclasses.replace(SCRIPT.PRESETS["gpt2"], prefix_file=f"{ROOT}/data/gpt2_prefixes.bin"))
    table = np.pad(SCRIPT.read_prefixes(cfg), (0, 47), constant_values=-1).astype("<i4")
    public = "36281293860d09f2307c3d2cd503f2e595e24c165fbd49b11f89cfaed71b617c"
    assert hashlib.sha256(table).hexdigest() == public


FIRST_B2 = {"gates.early": [*[0] * 12, *[2.5] * 6, *[0, 0.5] * 4]}
FIRST_B2["gates.mid"] = [*[0] * 12, *[2.5] * 6, *[0, 0.5] * 5, 5, *[10] * 6, *[0] * 6]
FIRST_B2 |= {f"mudd.{net}": test_record83.B2[f"nets.{net}.b2"] for net in ("last", "out")}


def test_first_values(tmp_path: Path):
    gates = {f"nets.{net}.b2": FIRST_B2[f"gates.{net}"] for net in ("early", "mid")}
    first = test_record83.FIRST | gates | dict(gate_scale=0.1)
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), first, test_record83.STD)


def test_precision(tmp_path: Path):
    stored = dict(test_record83.STORED, float32=f"{test_record83.STORED['float32']}|gate_scale")
    RECORD.check_precision(tmp_path, stored, **SMALL)


@pytest.mark.parametrize("size", [1, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)
