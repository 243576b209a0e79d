"""Runs train_gpt.main with a SIGKILL for every process of the run at a moment: kill_worker.py MOMENT COUNT [flags]

MOMENT: when; COUNT: at its how manieth time. "step": before a training step; "write": in the middle of a checkpoint's
file; "rename": all is written, nothing renamed; "renamed": right after; "remove": while an older checkpoint is removed;
"validation": in the last batch of one.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt


def kill_at(count: int) -> None:
    """Kills this process, its launcher and its fellows at the `count`-th call."""
    global calls
    calls += 1
    if calls == count:
        victims = [os.getpid()]
        if "RANK" in os.environ:  # torchrun starts every rank in a session of its own
            launcher = os.getppid()
            fellows = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            victims = [launcher, *sorted(map(int, fellows), key=lambda pid: pid == os.getpid())]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)


def before(function, count: int):
    def patched(*args, **kwargs):
        kill_at(count)
        return function(*args, **kwargs)

    return patched


def after(function, count: int):
    def patched(*args, **kwargs):
        result = function(*args, **kwargs)
        kill_at(count)
        return result

    return patched


def half_written(state, path) -> None:
    whole(state, path)
    if calls + 1 == count:
        os.truncate(path, os.path.getsize(path) // 2)
    kill_at(count)


def half_removed(path, **options) -> None:
    if calls + 1 == count:
        next(Path(path).glob("*.pt")).unlink()
    kill_at(count)
    rmtree(path, **options)


calls, rmtree = 0, shutil.rmtree
moment, count, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
whole = torch.save
if moment == "step":
    train_gpt.train_step = before(train_gpt.train_step, count)
elif moment == "write":
    torch.save = half_written
elif moment == "rename":
    os.rename = before(os.rename, count)
elif moment == "renamed":
    os.rename = after(os.rename, count)
elif moment == "remove":
    shutil.rmtree = half_removed
elif moment == "validation":
    train_gpt.evaluate = after(train_gpt.evaluate, count)
train_gpt.main(flags)
