"""docs/train.slurm with a stand-in for Slurm, as two nodes of one machine."""

import json
import os
import random
import re
import subprocess
import sys

import pytest

import train_gpt
from conftest import TINY_FLAGS
from world_worker import ENVIRONMENT, ROOT

SHORT = [*TINY_FLAGS, "--dtype=float64", "--num_iterations=48", "--val_loss_every=0", "--seed=1"]
# Start the command once per node, in NODES/0 and NODES/1. Kill the last one when a file matches LOSE
SRUN = r"""#!/bin/bash
for option in 1 2; do [[ $1 =~ ^--(kill-on-bad-exit=1|cpus-per-task=[0-9]+)$ ]] && shift || exit 9; done
for node in 0 1; do (cd "$NODES/$node" && exec setsid "$@") & nodes[node]=$!; done
if [ -n "$LOSE" ]; then
    until compgen -G "$LOSE" >/dev/null || ! kill -0 "${nodes[1]}"; do sleep 0.005; done
    kill -KILL -- "-${nodes[1]}"
fi
for node in 0 1; do wait -n || { code=$?; kill -TERM -- "-${nodes[0]}" "-${nodes[1]}" 2>/dev/null; }; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf '127.0.0.%s\\n' 1 2
"""


@pytest.fixture
def sbatch(tmp_path):
    """Run the batch script as Slurm does: a copy of it, with the variables that its #SBATCH lines ask for.

    A node's working directory holds only the script, so that its logs and checkpoints are on a disk of its own.
    """
    script = (ROOT / "docs" / "train.slurm").read_text()
    (tmp_path / "slurm_script").write_text(script)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.M))
    for node in "01":
        (tmp_path / "nodes" / node).mkdir(parents=True)
        (tmp_path / "nodes" / node / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
    (tmp_path / "bin").mkdir()
    for name, text in ("srun", SRUN), ("scontrol", SCONTROL):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*flags: str, **env: str) -> subprocess.CompletedProcess:
        slurm = dict(SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_NUM_NODES=options["nodes"])
        slurm |= dict(SLURM_CPUS_PER_TASK=options["cpus-per-task"], SLURM_GPUS_ON_NODE=options["gpus-per-node"])
        own = dict(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", NODES=f"{tmp_path}/nodes", PYTHON=sys.executable)
        command, env = ["bash", tmp_path / "slurm_script", *flags], ENVIRONMENT | slurm | own | env
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=80)

    return run


@pytest.mark.slow
def test_batch_script_goes_on_after_a_node_is_lost(sbatch, script_flags, tmp_path):
    """The same job starts again from the checkpoint on the first node's own disk, and ends as one process does."""
    first, second = (tmp_path / "nodes" / node / "logs" for node in "01")
    given = dict(NPROC="1", SLURM_JOB_ID=str(random.SystemRandom().randrange(10_000)))  # the port is 20,000 above it
    flags = [*SHORT, *script_flags, "--checkpoint_every", "4"]
    assert sbatch(*flags, **given, LOSE=f"{first}/*.checkpoint").returncode != 0
    run = first / f"slurm-{given['SLURM_JOB_ID']}"
    assert not run.with_suffix(".json").exists()
    done = sbatch(*flags, **given, SLURM_RESTART_COUNT="1")
    assert (done.returncode, "resumed at step " in done.stdout) == (0, True), done.stdout + done.stderr
    assert "\n2 processes, " in run.with_suffix(".txt").read_text()
    alone = train_gpt.main([*flags, "--log_dir", str(tmp_path / "alone")])
    assert json.loads(run.with_suffix(".json").read_text())["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-7)
    assert run.with_suffix(".checkpoint").exists()
    assert not second.exists()


def test_batch_script_asks_for_the_gpus_that_slurm_gives(sbatch, tmp_path):
    """It asks for gpt2 on GPUs, whatever the node has; flags come last and win."""
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for flags, own in {"--seed 7": "", "--checkpoint_every=10": "--run_id slurm-123456 --resume latest "}.items():
        words = sbatch(*flags.split(), SLURM_JOB_ID="123456").stdout.split()
        assert words[words.index("train_gpt.py") + 1 :] == f"{own}--preset gpt2 --device cuda {flags}".split()
        assert {"--nnodes=2", "--nproc_per_node=4", "--cpus-per-task=16", "--kill-on-bad-exit=1"} <= set(words)
        assert "--rdzv_endpoint=127.0.0.1:23456" in words
