"""Checkpoints: a run that is killed and resumed ends as the run that was not, to the last bit."""

import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import gpt2_run, losses, refusal, train
from speedrun import ROOT
from speedrun.logs import Log
from train_gpt import DistributedDataLoader, Ranks, StepResults, Trainer, UserError
from world_worker import ENVIRONMENT, Run, wait_for

MORE = "--checkpoint_every 4 --save_checkpoint --ngram_rows 2000".split()  # of which a run trains some
# What world_worker.kill_at takes, the rank, and the step of the checkpoint that is left. At "open" a file is written in
# part, at "os.rename" all but for its name
MOMENTS = [("open .rank 1", 1, 0), ("open .checkpoint 1", 0, 0), ("os.rename .rank 2", 1, 4)]
MOMENTS += [("open .checkpoint 2", 0, 4), ("os.rename .checkpoint 2", 0, 4)]


@pytest.fixture
def run_flags(gpt2_flags) -> list[str]:
    """Return flags without a seed for 20 steps, in which stages begin between checkpoints, and the last rows change."""
    return [*gpt2_flags, *MORE]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Path:
    """Return the folder of the logs of two runs that have ended, alike but for their seeds."""
    logs = tmp_path_factory.mktemp("runs")
    for name in "whole", "other":
        train([*gpt2_run(corpus, logs), *MORE, "--run_id", name])
    return logs


@pytest.fixture
def saved(runs, tmp_path) -> Path:
    """Return a copy of the last checkpoint of one, after step 16, as if it had been killed then."""
    shutil.copytree(runs, tmp_path / "logs")
    path = tmp_path / "logs" / "whole.checkpoint"
    shutil.move(path.with_suffix(".json"), tmp_path / "whole.json")
    return path


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["step"] if checkpoint.exists() else 0


@pytest.mark.slow
def test_killed_and_resumed_is_undisturbed(run_flags, tmp_path):
    """On two nodes with disks of their own, in bf16, where Muon has a master copy. At last nobody chose the moment."""

    def start(name: str, *more: str, **options) -> Run:
        argv = [*run_flags, "--seed=5", "--dtype=bfloat16", "--run_id", name, *more, "--log_dir"]
        ranks = [[*argv, tmp_path / folder] for folder in ("logs", "node")]
        return Run(ranks, tmp_path / f"{name}{len(more)}", nodes=True, **options)

    whole = start("whole")
    assert whole.wait() == [0, 0], whole.text("err")
    expected = losses(json.loads((tmp_path / "logs" / "whole.json").read_text()))
    for i, (moment, victim, left) in enumerate([*MOMENTS, ("", 0, None)]):
        log = tmp_path / "logs" / f"killed{i}.txt"
        run = start(log.stem, kill=(moment, victim))
        if not moment:
            wait_for(log.exists)
            time.sleep(random.SystemRandom().random())
        codes = run.wait(60 if moment else 0, kill_others=True)
        found = step_of(log.with_suffix(".checkpoint"))
        assert not moment or (codes[victim], found) == (-signal.SIGKILL, left), (moment, run.text("err"))
        resumed = start(log.stem, "--resume=latest")
        assert resumed.wait() == [0, 0], (moment, resumed.text("err"))
        assert losses(json.loads(log.with_suffix(".json").read_text())) == expected, (moment, found)
        assert re.findall(r"^seed: 5, from step (\d+) on", resumed.text("out"), re.M) == [str(found)], moment
        assert not [*tmp_path.rglob("*.part")]


def test_a_resumed_run_goes_on_in_its_log_with_its_seed_and_on_its_clock(run_flags, runs, saved, tmp_path):
    log = saved.with_suffix(".txt")
    before, whole = log.read_text(), json.loads((tmp_path / "whole.json").read_text())
    shutil.copy(runs / "other.checkpoint", older := saved.with_name("z.checkpoint"))
    os.utime(older, (1, 1))
    saved.with_name("other.checkpoint").touch()  # newer, but of a run that is complete
    result = train([*run_flags, "--resume", "latest"])
    assert losses(result) == losses(whole)
    times = [ms for _, _, ms in result["train_curve"]]
    assert times == sorted(times)
    assert log.read_text().startswith(before)
    assert Log(log).problem.startswith("was started 2 times: not one whole run")
    added = log.read_text().removeprefix(before)
    seed = re.search(r"^seed: (\d+), from step 0 on", before, re.M)[1]
    assert re.search(rf"\nseed: {seed}, from step 16 on, .*\nstep:16/20 val.*\nstep:17/20 train", added)


def test_a_resumed_run_prepares_no_step_before_its_checkpoint(run_flags, saved, monkeypatch):
    load_cycle, loaded = DistributedDataLoader.load_cycle, []

    def note(loader, schedules, batches):
        loaded.extend(schedule.step for schedule in schedules)
        return load_cycle(loader, schedules, batches)

    monkeypatch.setattr(Trainer, "warm_up", lambda trainer, saved: trainer.load_state_dict(saved))
    monkeypatch.setattr(DistributedDataLoader, "load_cycle", note)
    train([*run_flags, "--resume=latest"])
    assert min(loaded) == 16


def test_a_run_that_has_ended_is_left_alone(run_flags, saved):
    saved.with_suffix(".json").touch()
    for _ in range(2):
        before = {path: path.read_bytes() for path in saved.parent.iterdir()}
        with pytest.raises(UserError, match="this run is already complete") as error:
            train([*run_flags, "--resume=latest", "--run_id=whole"])
        assert error.value.code == 0
        assert {path: path.read_bytes() for path in saved.parent.iterdir()} == before
        saved.unlink(missing_ok=True)  # a short run has none


def test_what_is_no_checkpoint_of_this_run_is_refused(run_flags, saved, tmp_path):
    """Torn and flipped files, one of another run, one that is gone, and another kind."""
    flags = [*run_flags, "--resume=latest", "--run_id=whole"]
    state = torch.load(saved, weights_only=True)
    [share] = saved.parent.glob("whole.step*")  # those of older steps are gone
    assert share == saved.with_suffix(".step000016.rank0")
    other = share.with_name(share.name.replace("whole", "other"))
    rows = torch.load(share)["rows"].numpy().tobytes()
    flipped = share.read_bytes().replace(rows, bytes([rows[0] ^ 1]) + rows[1:], 1)
    torch.save(state | dict(other=0), tmp_path / "odd")
    shares = [flipped, other.read_bytes()]
    others = [saved.with_suffix(".pt").read_bytes(), (tmp_path / "odd").read_bytes()]
    for path, more in (share, [*shares, None]), (saved, others):
        good = path.read_bytes()
        for content in (good[:-1000], *more):
            assert content != good
            path.write_bytes(content) if content else path.unlink()
            assert f"{path}: not a sound " in refusal(flags)
        path.write_bytes(good)
    assert "\nstopped: " not in saved.with_suffix(".txt").read_text(), "nor is it what a run goes on with"


def test_another_configuration_or_number_of_processes_is_refused(run_flags, saved, monkeypatch):
    """And whatever else ranks have to agree on, by the same comparison."""
    resume, log = [*run_flags, "--resume=latest"], saved.with_suffix(".txt").read_bytes()
    for name, value in dict(seed=6, num_iterations=21, muon_lr=0.5, dtype="float64").items():
        assert re.match(rf"run \S+ began with .*'--{name}': ", refusal([*resume, f"--{name}={value}"]))
    monkeypatch.setattr(train_gpt, "init_distributed", lambda: Ranks(0, 2, 0, 2))
    assert " began with {'processes': '1, of " in refusal(resume)
    assert saved.with_suffix(".txt").read_bytes() == log


SIGNALS = [(name, "train_step", 2, 3) for name in "SIGTERM SIGINT SIGHUP".split()]
SIGNALS += [("SIGTERM", "eval_step", 2, 3), ("SIGTERM", "eval_step", 4, 4), ("SIGTERM", "train_step", 17, 20)]


@pytest.mark.parametrize(("name", "where", "at", "saved"), SIGNALS)
def test_a_signal_saves_and_stops(flags, gpt2_flags, tmp_path, monkeypatch, request, name, where, at, saved):
    """One in a validation lets it end, and in the last one the run with it. Signals then do what they did before.

    Where gradients wait for an update it goes on, here to the end: the model saved has averages blended in, once.
    """
    flags = [*gpt2_flags, "--seed=5"] if saved == 20 else flags
    method, number = getattr(Trainer, where), getattr(signal, name)
    request.addfinalizer(functools.partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, before := signal.default_int_handler)  # under nohup it may be ignored

    def told(trainer, now, *args):
        if now.step == at and signal.getsignal(number) is not before:
            os.kill(os.getpid(), number)
        return method(trainer, now, *args)

    whole = train([*flags, "--run_id=whole"])
    monkeypatch.setattr(Trainer, where, told)
    if saved == 4:
        assert losses(train([*flags, "--run_id=told"])) == losses(whole)
        return
    with pytest.raises(KeyboardInterrupt, match=name):
        train([*flags, "--run_id=told"])
    assert (signal.getsignal(number), gc.isenabled()) == (before, True)
    log = tmp_path / "logs" / "told.txt"
    resume = "; to go on, give the same flags and --resume latest --run_id told\n"
    assert log.read_text().endswith(f"\nstopped: {name}{resume}")
    assert step_of(log.with_suffix(".checkpoint")) == saved
    monkeypatch.undo()
    assert losses(train([*flags, "--resume=latest"])) == losses(whole)


def test_ctrl_c_twice_stops_at_once(flags, tmp_path, monkeypatch):
    told = signal.raise_signal
    monkeypatch.setattr(StepResults, "send", lambda *_: (told(signal.SIGINT), told(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        train(flags)
    assert not [*tmp_path.glob("logs/*.checkpoint")]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_one_step(run_flags, tmp_path):
    """At one at which all optimizers have stepped."""
    more = "--num_iterations=300 --train_seq_len=32 --batch_tokens=64 --val_loss_every=0 --checkpoint_every=0".split()
    run = Run([[*run_flags, *more, "--run_id=told"]] * 2, tmp_path / "told")
    log = tmp_path / "logs" / "told.txt"
    wait_for(lambda: log.exists() and "\nstep:5/" in log.read_text())
    os.kill(run.processes[-1].pid, signal.SIGTERM)
    assert run.wait() == [130] * 2, run.text("err")
    assert "\nstopped: SIGTERM; to go on, give the same flags and --resume latest --run_id told\n" in log.read_text()
    assert step_of(log.with_suffix(".checkpoint")) in range(8, 300, 4)


@pytest.mark.slow
def test_no_rank_outlives_its_launcher(long_flags, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT)
    launcher = subprocess.Popen([*torchrun, train_gpt.__file__, *long_flags, "--run_id", "long"], **options)
    log = tmp_path / "logs" / "long.txt"
    wait_for(lambda: log.exists() and "step:9/" in log.read_text())
    launcher.kill()
    launcher.communicate(timeout=40)  # which ends when none holds its pipe
    assert "step:1500/" not in log.read_text()
