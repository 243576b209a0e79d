"""Checkpoints: a run that is killed and resumed ends as the run that was not, to the last bit."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import train_gpt
from test_train import corpus, flags, json_of, losses, skip_time, wait_for  # noqa: F401  (fixtures)
from train_gpt import UserError
from world_worker import ROOT, Run, program

# A line of the log, or an event of world_worker.kill_at, after which all are killed; its number; the rank that it hits;
# the steps of the checkpoints that are left, if known. Each checkpoint renames its file and its folder
FEW = [("step:7/", 0, 0, None), ("open", 2, -1, [4])]
ALL = [*FEW, ("step:3/", 0, 0, None), ("open", 1, 0, []), ("os.rename", 2, 0, []), ("os.rename", 4, 0, [4])]
ALL += [("os.rename", 5, 0, [4, 8]), ("os.remove", 1, 0, [8]), ("os.rmdir", 1, 0, [8]), ("step:10/12 val", 0, 0, None)]
ALL += 2 * [("at any time", 0, 0, None)]


@pytest.fixture
def run_flags(flags) -> list[str]:  # noqa: F811
    return [*flags, *"--num_iterations 12 --val_loss_every 5 --checkpoint_every 4".split()]


@pytest.fixture
def saved(run_flags, tmp_path) -> Path:
    """Return the last checkpoint of a whole run, after step 8."""
    train_gpt.main([*run_flags, "--run_id", "whole"])
    return tmp_path / "logs" / "whole.checkpoints" / "step-000008"


def steps_of(checkpoints: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*[0-9]"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("moments", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_killed_and_resumed_is_undisturbed(run_flags, tmp_path, size, moments):
    """The few are on two nodes that share a disk."""
    logs, resumed = tmp_path / "logs", []
    whole = Run([[*run_flags, "--run_id", "whole"]] * size, tmp_path / "whole")
    for i, (moment, count, rank, expected) in enumerate(moments):
        own, log = [[*run_flags, "--run_id", f"killed{i}"]] * size, logs / f"killed{i}.txt"
        run = Run(own, tmp_path / f"killed{i}", kill=(moment, count, rank % size), nodes=moments is FEW)
        if expected is None:
            wait_for(lambda: log.exists() and (moment[:5] != "step:" or f"\n{moment}" in log.read_text()))  # noqa: B023
            time.sleep(random.SystemRandom().random() if moment == "at any time" else 0)
        codes = run.wait(0 if expected is None else 60, kill_others=True)
        found = steps_of(logs / f"killed{i}.checkpoints")
        assert expected is None or (-signal.SIGKILL in codes and found == expected), moment
        again = [[*own[0], "--resume", "latest"]] * size
        resumed.append((moment, found, Run(again, tmp_path / f"resumed{i}", nodes=moments is FEW)))
    assert whole.wait() == [0] * size, whole.text("err")
    for i, (moment, found, run) in enumerate(resumed):
        assert run.wait() == [0] * size, (moment, run.text("err"))
        assert losses(json_of(run_flags, f"killed{i}")) == losses(json_of(run_flags, "whole")), (moment, found)
        assert re.findall(r"^resumed at step (\d+)", run.text("out")) == [str(step) for step in found[-1:]], moment
        assert steps_of(logs / f"killed{i}.checkpoints") == (found if 8 in found else [8])


def test_a_resumed_run_goes_on_in_its_log_and_on_its_clock(run_flags, saved):
    log = saved.parent.with_suffix(".txt")
    before, whole = log.read_text(), json_of(run_flags, "whole")
    torch.save(torch.load(saved / "rank0.pt") | dict(elapsed=1e6), saved / "rank0.pt")
    result = train_gpt.main([*run_flags, "--resume", str(saved)])
    assert losses(result) == losses(whole)
    assert 1e6 < result["train_time_ms"] < 1e6 + 60_000
    assert log.read_text().startswith(before)
    assert re.match(r"resumed at step 8.*\nstep:9/12 ", log.read_text().removeprefix(before))


def test_a_checkpoint_changes_nothing_and_is_off_the_clock(run_flags, monkeypatch, skip_time):  # noqa: F811
    write = train_gpt.write_checkpoint
    monkeypatch.setattr(train_gpt, "write_checkpoint", lambda *args: (skip_time(), write(*args))[1])
    delayed = train_gpt.main([*run_flags, "--run_id", "delayed"])
    times = [0, *(ms for _, _, ms in delayed["train_curve"]), 1e6]
    assert times == sorted(times)
    assert losses(train_gpt.main([*run_flags, "--checkpoint_every", "0"])) == losses(delayed)


def test_the_seed_of_a_resumed_run_is_the_checkpoints(run_flags):
    at = run_flags.index("--seed")
    drawn = run_flags[:at] + run_flags[at + 2 :]
    whole = train_gpt.main([*drawn, "--run_id", "drawn"])
    resumed = train_gpt.main([*drawn, "--resume", "latest"])
    assert (resumed["seed"], losses(resumed)) == (whole["seed"], losses(whole))


def test_only_checkpoints_are_removed(run_flags, tmp_path):
    """Keep what is beside them, also behind a link that stands for their folder."""
    elsewhere, logs = tmp_path / "elsewhere", tmp_path / "logs"
    logs.mkdir()
    for path in ("thesis/chapter.tex", "notes.txt", "step-1-mine/x", "step-000001.txt", "model.pt"):
        (elsewhere / path).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / path).write_text("mine")
    (logs / "run.checkpoints").symlink_to(elsewhere)
    mine = set(elsewhere.rglob("*"))
    train_gpt.main([*run_flags, "--run_id", "run"])
    assert set(elsewhere.rglob("*")) == mine | {elsewhere / "step-000008", elsewhere / "step-000008" / "rank0.pt"}


def refuse(argv: list[str], pattern: str = r"rank0\.pt") -> None:
    with pytest.raises(UserError, match=pattern) as error:
        train_gpt.main(argv)
    assert "\n" not in str(error.value)


def test_a_damaged_or_incomplete_checkpoint_is_refused(run_flags, saved):
    path, resume = saved / "rank0.pt", [*run_flags, "--resume", "latest"]
    whole, state = path.read_bytes(), torch.load(path, weights_only=True)
    for content in (whole[:-1000], whole[:1000], whole[1000:], b"not a checkpoint", b""):
        path.write_bytes(content)
        refuse(resume)
    for name in state:
        torch.save({key: value for key, value in state.items() if key != name}, path)
        refuse(resume)
    path.unlink()
    refuse(resume)


def test_flipped_bits_are_noticed_or_do_no_harm(saved):
    path, generator, refused = saved / "rank0.pt", random.Random(0), 0
    whole, expected = path.read_bytes(), train_gpt.load(path, "step", "tensors")
    for _ in range(100):
        content = bytearray(whole)
        content[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        try:
            state = train_gpt.load(path, "step", "tensors")
        except UserError:
            refused += 1
        else:  # the bit is in the padding between the tensors
            assert state["step"] == expected["step"]
            assert all(torch.equal(state["tensors"][name], t) for name, t in expected["tensors"].items())
    assert refused > 80


def test_another_configuration_script_or_text_is_refused(run_flags, saved, tmp_path, corpus):  # noqa: F811
    script, resume = tmp_path / "train_gpt.py", [*run_flags, "--resume", str(saved)]
    script.write_text((ROOT / "train_gpt.py").read_text() + "# changed\n")
    run = Run([resume], tmp_path / "run", scripts=[script])
    for name, value in dict(seed="6", num_iterations="20", muon_lr="0.5", cpu_threads="2", dtype="float64").items():
        refuse([*resume, f"--{name}", value], name)
    refuse([*resume, "--val_files", f"{corpus}/train_000001.bin"], "data")
    assert (run.wait(), run.text("err").count("\n")) == ([2], 1)
    assert "script" in run.text("err")


def test_what_fails_on_one_rank_is_named(run_flags, tmp_path):
    """A checkpoint of two processes is for neither one nor three. Then only the second's file is damaged."""
    run_flags += ["--batch_tokens", "384", "--num_iterations", "10"]
    assert Run([[*run_flags, "--run_id", "two"]] * 2, tmp_path / "two").wait() == [0, 0]
    path = tmp_path / "logs" / "two.checkpoints" / "step-000008" / "rank1.pt"
    resume = [*run_flags, "--resume", path.parent]
    for run in [Run([resume] * size, tmp_path / f"{size}") for size in (1, 3)]:
        assert set(run.wait()) == {2}
        assert "processes" in run.text("err")
    path.write_bytes(path.read_bytes()[:5000])
    damaged = Run([resume] * 2, tmp_path / "damaged")
    assert damaged.wait() == [2, 2]
    assert re.search(r"rank 1 .*rank1\.pt", damaged.text("err"))
    assert (damaged.text("err").count("\n"), damaged.text("err", 1)) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_no_process_outlives_the_others(run_flags, tmp_path, corpus, victim):  # noqa: F811
    """After a SIGKILL for torchrun, or for one rank, none is left: the log ends, and its lock is free."""
    long = ["--num_iterations", "1500", "--checkpoint_every", "0", "--train_files", corpus / "long.bin"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher = program(*torchrun, "train_gpt.py", *run_flags, *long, "--run_id", "long")
    log = tmp_path / "logs" / "long.txt"
    wait_for(lambda: log.exists() and "step:9/" in log.read_text())
    ranks = [
        Path(f"/proc/{pid}") for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ]
    assert len(ranks) == 2
    os.kill(launcher.pid if victim == "launcher" else int(ranks[1].name), signal.SIGKILL)
    launcher.communicate(timeout=40)  # which ends when none holds its pipe
    # One that ended may stay in /proc until its new parent asks; then it has no command line
    assert not any(rank.exists() and (rank / "cmdline").read_bytes() for rank in ranks)
    assert "step:1500/" not in log.read_text()
