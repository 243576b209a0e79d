"""The two commands of Slurm that docs/train.slurm calls, for one machine: python slurm_stub.py srun|scontrol ...

Nodes are processes here, each in a working directory of its own (NODES/0, NODES/1, ...) and with the variables that
Slurm sets. `scontrol show hostnames` expands `node[1-2]` to addresses of this machine. Options that Slurm might have,
but these do not know, are refused. If LOSE names a file pattern, the last node is killed when a file matches.
"""

import argparse
import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import time


def scontrol(argv: list[str]) -> int:
    assert argv[:2] == ["show", "hostnames"], argv
    [(first, last)] = re.findall(r"^node\[(\d+)-(\d+)\]$", argv[2])
    print("\n".join(f"127.0.0.{node}" for node in range(int(first), int(last) + 1)))
    return 0


def kill(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def srun(argv: list[str]) -> int:
    """Starts the command once per node. Returns the highest exit code, 128 + number for a signal."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--cpus-per-task", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    nodes = []
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
        names = dict(SLURM_NODEID=node, SLURM_PROCID=node, SLURM_LOCALID=0, SLURM_STEP_ID=0)
        env = os.environ | {name: str(value) for name, value in names.items()} | {"SLURMD_NODENAME": f"node{node + 1}"}
        cwd = os.path.join(os.environ["NODES"], str(node))
        nodes.append(subprocess.Popen(args.command, cwd=cwd, env=env, start_new_session=True))
    lose, is_ending = os.environ.get("LOSE"), False
    while any(node.poll() is None for node in nodes):
        if lose and glob.glob(lose):
            kill(nodes[-1], signal.SIGKILL)
            lose = None
        if args.kill_on_bad_exit and any(node.returncode for node in nodes) and not is_ending:
            is_ending = True
            for node in nodes:
                kill(node, signal.SIGTERM)
        time.sleep(0.005)
    return max(128 - node.returncode if node.returncode < 0 else node.returncode for node in nodes)


if __name__ == "__main__":
    sys.exit(dict(srun=srun, scontrol=scontrol)[sys.argv[1]](sys.argv[2:]))
