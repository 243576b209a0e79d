"""runs/train.slurm with a stand-in for Slurm, as two nodes of one machine."""

import json
import os
import random
import subprocess
import sys

import pytest

import train_gpt
from conftest import TINY_FLAGS, train
from speedrun import ROOT
from world_worker import ENVIRONMENT

SRUN = """#!/bin/bash
shift 2
for node in 0 1; do (cd "$NODES/$node" && exec "$@") & done
wait -n && wait -n
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf '127.0.0.%s\\n' 1 2
"""


@pytest.mark.slow
def test_batch_script_trains_on_two_nodes_what_one_process_does(script_flags, tmp_path):
    """Each node has a disk of its own."""
    job = str(random.SystemRandom().randrange(10_000))  # the port is 20,000 above it
    for node in "01":
        (tmp_path / node).mkdir()
        (tmp_path / node / "train_gpt.py").symlink_to(train_gpt.__file__)
    for name, text in ("srun", SRUN), ("scontrol", SCONTROL):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = dict(SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID=job, SLURM_CPUS_PER_TASK="16")
    own = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", NODES=str(tmp_path), PYTHON=sys.executable, NPROC="1")
    flags = [*TINY_FLAGS, "--dtype=float64", "--seed=1", *script_flags, "--checkpoint_every=4"]
    command = dict(cwd=ROOT, env=ENVIRONMENT | slurm | own, capture_output=True, text=True, timeout=80)
    done = subprocess.run(["bash", "runs/train.slurm", *flags], **command)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "0" / "logs" / f"slurm-{job}"
    assert "\n2 processes, " in run.with_suffix(".txt").read_text()
    alone = train([*flags, "--log_dir", str(tmp_path / "alone")])
    assert json.loads(run.with_suffix(".json").read_text())["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-7)
    assert {path.suffix for path in (tmp_path / "1" / "logs").iterdir()} == {".rank1", ".ngrams1"}, "its share alone"
