"""Checkpoints: a run that is killed and resumed is the run that was not, to the last bit."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from shards import write_shard
from test_train import ROOT, corpus, flags, program  # noqa: F401  (fixtures)
from test_world_size import free_ports, start
from train_gpt import UserError, World

STEPS = "--num_iterations 12 --val_loss_every 5 --checkpoint_every 4".split()
# What is called how often: 2 training steps in the warm-up and one validation, then those of the run; 2 checkpoints
INJECTED = [("step", 5), ("write", 2), ("rename", 2), ("renamed", 1), ("remove", 3), ("validation", 3)]


def launch(size: int, *command) -> subprocess.Popen:
    """A process group with `size` processes of the program, under torchrun if more than one."""
    if size == 1:
        return start(command)
    rendezvous = f"--master_port={free_ports(1)[0]}"
    return start(["-m", "torch.distributed.run", f"--nproc_per_node={size}", rendezvous, *command])


def result_of(log_dir: Path, run_id: str) -> dict:
    return json.loads((log_dir / f"{run_id}.json").read_text())


@pytest.fixture
def run_flags(flags, tmp_path) -> list[str]:  # noqa: F811
    return [*flags, *STEPS]


def what_it_computed(result: dict) -> list:
    return [result["val_loss"], *[(step, loss) for step, loss, _ in result["val_curve"]]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the other processes in /proc")
@pytest.mark.parametrize("size", [1, 2])
def test_killed_and_resumed_is_undisturbed(run_flags, tmp_path, size):
    """SIGKILL for all processes at injected and at random moments; after each, --resume latest until the end."""
    logs = tmp_path / "logs"
    whole = launch(size, "train_gpt.py", *run_flags, "--run_id", "whole")
    assert whole.wait(timeout=120) == 0, whole.communicate()[0]
    expected = what_it_computed(result_of(logs, "whole"))
    assert [step for step, _ in expected[1:]] == [0, 5, 10, 12]
    moments = INJECTED + [("step", random.SystemRandom().randint(3, 14)) for _ in range(5)]
    for i, (moment, count) in enumerate(moments):
        named = ["--run_id", f"killed{i}"]
        killed = launch(size, "tests/kill_worker.py", moment, count, *run_flags, *named)
        killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, (moment, count)
        saved = sorted(path.name for path in (logs / f"killed{i}.checkpoints").glob("step-*") if path.suffix == "")
        resumed = launch(size, "train_gpt.py", *run_flags, *named, "--resume", "latest")
        output, _ = resumed.communicate(timeout=120)
        assert resumed.returncode == 0, (moment, count, output)
        assert what_it_computed(result_of(logs, f"killed{i}")) == expected, (moment, count, saved)
        text = (logs / f"killed{i}.txt").read_text()
        assert bool(re.search("^resumed at step", text, re.M)) == bool(saved), (moment, count)
        assert bool(re.search("^--resume latest: no checkpoint", text, re.M)) != bool(saved), (moment, count)
        if moment == "renamed":
            assert saved == ["step-000004"]
        if (moment, count) in (("write", 2), ("rename", 2)):
            assert saved == ["step-000004"], "the last whole checkpoint is not the one that was being written"


@pytest.fixture
def saved(run_flags, tmp_path) -> Path:
    """The last checkpoint of a whole run, after step 8."""
    train_gpt.main([*run_flags, "--run_id", "whole"])
    [folder] = (tmp_path / "logs" / "whole.checkpoints").iterdir()
    assert folder.name == "step-000008"
    return folder


def test_a_checkpoint_changes_nothing_and_is_off_the_clock(run_flags, saved, tmp_path, monkeypatch):
    without = train_gpt.main([*run_flags, "--checkpoint_every", "0", "--run_id", "without"])
    whole = result_of(tmp_path / "logs", "whole")
    assert what_it_computed(whole) == what_it_computed(json.loads(json.dumps(vars_of(without))))
    slow = train_gpt.write_checkpoint
    monkeypatch.setattr(train_gpt, "write_checkpoint", lambda *args: (time.sleep(1.5), slow(*args))[1])
    delayed = train_gpt.main([*run_flags, "--run_id", "delayed"])
    assert delayed.train_time_ms < 1500


def vars_of(result: train_gpt.Result) -> dict:
    return {name: getattr(result, name) for name in ("val_loss", "val_curve")}


def test_a_resumed_run_goes_on_in_its_log(run_flags, saved, tmp_path):
    log = tmp_path / "logs" / "whole.txt"
    before = log.read_text()
    result = train_gpt.main([*run_flags, "--resume", str(saved)])
    text = log.read_text()
    assert text.startswith(before)
    added = text.removeprefix(before).splitlines()
    assert added[0].startswith("resumed at step 8")
    assert added[1].startswith("step:9/12 ")
    assert what_it_computed(result_of(tmp_path / "logs", "whole")) == what_it_computed(
        json.loads(json.dumps(vars_of(result)))
    )
    assert result.train_time_ms > 0


def test_the_time_before_counts(run_flags, saved):
    state = torch.load(saved / "rank0.pt", weights_only=True)
    state["train_time_ms"], state["times"] = 1e6, [1e6 * i / 8 for i in range(9)]
    torch.save(state, saved / "rank0.pt")
    assert 1e6 < train_gpt.main([*run_flags, "--resume", str(saved)]).train_time_ms < 1e6 + 60_000


def test_nodes_that_share_a_disk_do_not_remove_each_others_checkpoint(tmp_path, monkeypatch):
    """The other node gives the folder its name as soon as all have written, before this one gets to it."""
    folder, all_reduce, calls = tmp_path / "step-000008", World.all_reduce, []
    (tmp_path / "step-000004").mkdir()

    def other_node_is_faster(world, tensor):
        calls.append(None)
        if len(calls) == 1:
            folder.with_suffix(".part").rename(folder)
        return all_reduce(world, tensor)

    monkeypatch.setattr(World, "all_reduce", other_node_is_faster)
    assert train_gpt.write_checkpoint(folder, {"step": 8}, World(), torch.device("cpu")) == ""
    assert torch.load(folder / "rank0.pt", weights_only=True) == {"step": 8}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"]


def damage(folder: Path, how: str) -> None:
    path = folder / "rank0.pt"
    if how == "cut short":
        path.write_bytes(path.read_bytes()[:-1000])
    elif how == "garbage":
        path.write_bytes(b"not a checkpoint")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["cut short", "garbage", "empty", "gone"])
def test_a_damaged_checkpoint_is_refused(run_flags, saved, how):
    damage(saved, how)
    with pytest.raises(UserError, match=r"^--resume .*step-000008: .*; name a folder") as error:
        train_gpt.main([*run_flags, "--resume", "latest"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--seed", "6"], "another seed, its run has 5, this one 6"),
        (["--num_iterations", "20"], "another num_iterations, its run has 12, this one 20"),
        (["--muon_lr", "0.5"], "another muon_lr, its run has 0.06, this one 0.5"),
        (["--cpu_threads", "2"], "another cpu_threads, its run has 1, this one 2"),
    ],
)
def test_another_configuration_is_refused(run_flags, saved, changes, message):
    with pytest.raises(UserError, match=message):
        train_gpt.main([*run_flags, *changes, "--resume", str(saved)])


def test_another_script_is_refused(run_flags, saved, tmp_path):
    copy = tmp_path / "train_gpt.py"
    copy.write_text(Path(train_gpt.__file__).read_text() + "# changed\n")
    done = program(*run_flags, "--resume", str(saved), script=str(copy))
    assert done.returncode == 2
    assert "another script" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_another_number_of_processes_is_refused(run_flags, saved):
    process = launch(2, "train_gpt.py", *run_flags, "--resume", str(saved))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "another processes, its run has 1, this one 2" in output


def test_the_seed_is_the_checkpoints(run_flags, tmp_path):
    without = [
        flag for pair in zip(run_flags[::2], run_flags[1::2], strict=True) for flag in pair if pair[0] != "--seed"
    ]
    whole = train_gpt.main([*without, "--run_id", "drawn"])
    resumed = train_gpt.main([*without, "--resume", "latest", "--run_id", "drawn"])
    assert (resumed.seed, resumed.val_loss) == (whole.seed, whole.val_loss)


def test_a_log_in_use_is_refused(run_flags, saved, tmp_path):
    import fcntl

    with open(tmp_path / "logs" / "whole.txt", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"whole\.txt is being written by another process"):
            train_gpt.main([*run_flags, "--resume", str(saved)])


def test_a_full_disk_ends_the_log_and_not_the_training(run_flags, tmp_path):
    """No file may grow beyond the log's size but for its last lines: a checkpoint is larger."""
    whole = program(*run_flags, "--run_id", "whole")
    size = (tmp_path / "logs" / "whole.txt").stat().st_size - 300
    command = [sys.executable, "train_gpt.py", *run_flags, "--run_id", "full"]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step:12/12 val_loss" in done.stdout
    final = re.compile(r"step:12/12 val_loss:\S+")
    assert final.findall(done.stdout) == final.findall(whole.stdout) != []
    assert "the log ends here, the training goes on" in done.stderr
    assert "checkpoint: not saved" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tell a process that its parent died")
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_no_process_outlives_the_others(run_flags, tmp_path, victim):
    """SIGKILL for torchrun, or for one rank: within 30 seconds none is left, and torchrun names the rank."""
    write_shard(tmp_path / "long.bin", np.random.default_rng(0).integers(256, size=4_000_000))
    long = ["--num_iterations", "30000", "--train_files", str(tmp_path / "long.bin")]
    process = launch(2, "train_gpt.py", *run_flags, *long)
    ranks: list[int] = []
    deadline = time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < deadline:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
        ranks = [int(pid) for pid in found.split()]
        time.sleep(0.2)
    assert len(ranks) == 2
    time.sleep(8)
    os.kill(process.pid if victim == "launcher" else ranks[1], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(is_alive(pid) for pid in ranks)
    output, _ = process.communicate(timeout=30)
    if victim == "rank":
        assert re.search(r"exitcode: -9\) local_rank: 1", output)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
