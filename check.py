"""Checks a run in one plain process before it starts, and gets the data that it lacks.

    python check.py [the flags of train_gpt.py]

`run.sh` calls it: torchrun would turn every refusal into exit code 1 behind a report of its own. On success the last
line of stdout is how many processes to start: as many as there are GPUs and as divide a step's sequences, or NPROC.
On a CPU it is one: with both threads it took 0.90 to 0.95 of the time of two with one each (nano, 2 sequences a step,
3 interleaved pairs of 40 steps). Exit code 2 and one line say what to mend.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

import train_gpt
from train_gpt import Hyperparameters, UserError, World


def num_processes(cfg: Hyperparameters) -> int:
    """Processes to start on this machine: NPROC, or the most that fit."""
    wish = os.environ.get("NPROC")
    if wish is not None:
        if not wish.isdecimal() or int(wish) < 1:
            raise UserError(f"NPROC={wish}: expected a number of processes of at least 1")
        return int(wish)
    limit = torch.cuda.device_count() if cfg.device == "cuda" else 1
    return max(size for size in range(1, limit + 1) if cfg.batch_sequences % size == 0)


def get_data(cfg: Hyperparameters) -> None:
    """Runs the command that gets the preset's shards, unless they are there and last for the run."""
    try:
        train_gpt.plan_data(cfg)
    except UserError:
        preset = train_gpt.PRESETS[cfg.preset]
        if (cfg.train_files, cfg.val_files) != (preset.train_files, preset.val_files):
            raise  # somebody's own data
        command = [sys.executable, *shlex.split(train_gpt.data_command(cfg))[1:]]
        print(f"getting the data: {train_gpt.data_command(cfg)}", file=sys.stderr, flush=True)
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError("the data could not be fetched: see above; then run this again") from None
        train_gpt.plan_data(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """The number of processes to start for a run with the flags `argv`. Raises UserError."""
    cfg = train_gpt.resolve(train_gpt.parse_args(sys.argv[1:] if argv is None else argv))
    if cfg.device == "cpu" and shutil.which("nvidia-smi"):
        why = "is a CPU build" if torch.version.cuda is None else "cannot use the GPU: is its driver too old?"
        print(
            f"note: training on the CPU although there is nvidia-smi: torch {torch.__version__} {why}", file=sys.stderr
        )
    size = num_processes(cfg)
    train_gpt.check_world(cfg, World(size=size, local_size=size))
    get_data(cfg)
    return size


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        print(f"check.py: {error}", file=sys.stderr)
        sys.exit(2)
