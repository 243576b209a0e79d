"""Run train_gpt.py in processes forked from one that has imported torch, which saves seconds for each."""

import functools
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed

from speedrun import ROOT

os.environ.pop("PYTHONUNBUFFERED", None)  # buffers are part of what is tested
# Without the variables of a launcher around us
ENVIRONMENT = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.nn.attention.flex_attention", "torch.distributed", "tqdm"])


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def import_as_train_gpt(script: Path | str) -> None:
    """Import a script so that all tests are of it."""
    spec = importlib.util.spec_from_file_location("train_gpt", script)
    sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["train_gpt"])


class Run:
    """Start one process for each list of flags in `ranks`. Their output goes to OUT.RANK.out and .err.

    `nodes`: each rank is a machine of its own. `kill`: a moment (see `kill_at`) and a rank.
    """

    def __init__(self, ranks, out="", nodes=False, kill=None, scripts=()):
        size, self.out, self.processes = len(ranks), out, []
        # Serve the store that the ranks meet at, as torchrun does: a port looked for and let go can be taken
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = dict(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=self.store.port)
        shared |= dict(TORCHELASTIC_USE_AGENT_STORE=True)
        for rank, flags in enumerate(ranks):
            local = dict(RANK=rank, LOCAL_RANK=0 if nodes else rank, LOCAL_WORLD_SIZE=1 if nodes else size)
            variables = {name: str(value) for name, value in (shared | local).items() if size > 1}
            paths = [f"{out}.{rank}.{name}" for name in ("out", "err")]
            moment = kill[0] if kill and kill[1] == rank else ""
            script = scripts[rank] if scripts else sys.modules["train_gpt"].__file__
            args = (str(script), [str(flag) for flag in flags], variables, paths, moment)
            self.processes.append(FORKS.Process(target=run_rank, args=args))
            self.processes[-1].start()

    def wait(self, timeout: float = 60, kill_others: bool = False) -> list[int]:
        """Return the exit codes. Kill what still runs after `timeout` seconds, or as soon as one has ended."""
        deadline = time.monotonic() + timeout
        if kill_others:
            multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout)
        for process in self.processes:
            process.join(0 if kill_others else max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]

    def text(self, name: str, rank: int = 0) -> str:
        return Path(f"{self.out}.{rank}.{name}").read_text()


def run_rank(script: str, flags: list[str], variables: dict, paths: list[str], moment: str) -> None:
    """Run the script as this process."""
    for name in [name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name]:
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(ROOT)
    for fd, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644), fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if moment:
        kill_at(*moment.split())
    sys.argv = [script, *flags]
    init = torch.distributed.init_process_group  # to which records name no backend; a CUDA build would take NCCL
    torch.distributed.init_process_group = lambda *backend, **options: init(*(backend or ["gloo"]), **options)
    if "--preset=mini" in flags:  # which is no preset of the script's own
        import_as_train_gpt(script)
        import mini  # noqa: F401
        import train_gpt

        if variables:
            train_gpt.start_collective = start_strictly
        sys.exit(train_gpt.cli(flags))
    runpy.run_path(script, run_name="__main__")


def start_strictly(collective, out, *args):
    """Read what is sent at once, and write `out` not before it is waited for: whoever reads early has old values."""
    arrived, sent = out.clone(), [(t, t.clone()) for t in args if isinstance(t, torch.Tensor)]
    collective(arrived, *args)

    @functools.cache
    def wait():
        assert all(torch.equal(now, before) for now, before in sent), "was written to while it travelled"
        out.copy_(arrived)

    return wait


def kill_at(event: str, suffix: str, count: str) -> None:
    """Kill this process before the `count`-th event of Python's audit that concerns a file with this suffix.

    At "open" it begins to be written: leave some of it.
    """
    left = int(count)

    def hook(name: str, args: tuple) -> None:
        nonlocal left
        if name == event and suffix in str(args[0]) and args[1] != "r":
            left -= 1
            if left == 0:
                if event == "open":
                    Path(args[0]).write_bytes(b"PK" * 1000)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
