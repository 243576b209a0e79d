"""Checkpoints: a run that is killed and resumed ends as the run that was not, to the last bit."""

import gc
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from conftest import gpt2_run, losses, refusal
from train_gpt import RunLog, Trainer, UserError
from world_worker import ENVIRONMENT, ROOT, Run, wait_for

# A line of the log, or what world_worker.kill_at takes, after which all are killed; the step of the checkpoint that is
# left, if known. At "open" a file is written in part, at "os.rename" all but for its name
ALL = [("step:5/", None), ("at any time", None), ("open .rank 1", 0), ("open .checkpoint 1", 0)]
ALL += [("os.rename .checkpoint 1", 0), ("os.rename .checkpoint 2", 4)]
FEW = [("os.rename .rank 2", 4), ("open .checkpoint 2", 4)]

MORE = "--checkpoint_every 4 --save_checkpoint".split()


@pytest.fixture
def run_flags(gpt2_flags) -> list[str]:
    """Return flags without a seed for 20 steps, in which stages begin between checkpoints, and the last rows change."""
    return [*gpt2_flags, *MORE]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Path:
    """Return the folder of the logs of two runs that have ended, alike but for their seeds."""
    logs = tmp_path_factory.mktemp("runs")
    for name in "whole", "other":
        train_gpt.main([*gpt2_run(corpus, logs), *MORE, "--run_id", name])
    return logs


@pytest.fixture
def saved(runs, tmp_path) -> Path:
    """Return a copy of the last checkpoint of one, after step 16, as if it had been killed then."""
    shutil.copytree(runs, tmp_path / "logs")
    path = tmp_path / "logs" / "whole.checkpoint"
    shutil.move(path.with_suffix(".json"), tmp_path / "whole.json")
    return path


def stop_at(step: int):
    """Return a `RunLog.log_loss` that is interrupted at a step."""
    log_loss = RunLog.log_loss

    def stop(log, name: str, at: int, *args) -> None:
        if at == step:
            raise KeyboardInterrupt
        log_loss(log, name, at, *args)

    return stop


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["step"] if checkpoint.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "size"), [(ALL, 1), (FEW, 2)])
def test_killed_and_resumed_is_undisturbed(run_flags, tmp_path, size, moments):
    """The few are on nodes with disks of their own. The last rank is killed where it saves its share."""
    resumed, few = [], moments is not ALL

    def start(name: str, run_id: str, *more: str, **options) -> Run:
        folders = [tmp_path / ("node" if few and rank else "logs") for rank in range(size)]
        more = *more, *["--dtype=bfloat16"] * few  # so Muon's values are apart from the parameters
        argv = [[*run_flags, "--seed=5", "--run_id", run_id, "--log_dir", folder, *more] for folder in folders]
        return Run(argv, tmp_path / name, nodes=few, **options)

    whole = start("whole", "whole")
    for i, (moment, expected) in enumerate(moments):
        victim = size - 1 if ".rank" in moment else 0
        run = start(f"killed{i}", f"killed{i}", kill=(moment, victim) if expected is not None else None)
        log = tmp_path / "logs" / f"killed{i}.txt"
        if expected is None:
            wait_for(lambda: log.exists() and (moment[:5] != "step:" or f"\n{moment}" in log.read_text()))  # noqa: B023
            time.sleep(random.SystemRandom().random() if moment == "at any time" else 0)
        codes = run.wait(0 if expected is None else 60, kill_others=True)
        found = step_of(log.with_suffix(".checkpoint"))
        assert expected is None or (codes[victim] == -signal.SIGKILL and found == expected), (moment, run.text("err"))
        resumed.append((moment, log, found, start(f"resumed{i}", f"killed{i}", "--resume", "latest")))
    assert whole.wait() == [0] * size, whole.text("err")
    for moment, log, found, run in resumed:
        assert run.wait() == [0] * size, (moment, run.text("err"))
        ends = [losses(json.loads(log.with_name(f"{name}.json").read_text())) for name in (log.stem, "whole")]
        assert ends[0] == ends[1], (moment, found)
        assert re.findall(r"^resumed at step (\d+)", run.text("out"), re.M) == [str(found)] * bool(found), moment
        assert ("no checkpoint in" in run.text("out")) == (not found), moment
        kinds = {path.suffix.rstrip("01") for path in log.parent.glob(f"{log.stem}.*")} - {
            ".torn"
        }  # no checkpoint's log
        assert kinds == {".txt", ".json", ".pt", ".checkpoint", ".rank", ".ngrams"}
        assert step_of(log.with_suffix(".checkpoint")) == 16


def edit(checkpoint: Path, **changes) -> None:
    state = torch.load(checkpoint, weights_only=True) | changes
    state["seal"] = train_gpt.digest(train_gpt.Saved(**{name: state[name] for name in train_gpt.Saved._fields}))
    torch.save(state, checkpoint)


def test_a_resumed_run_goes_on_in_its_log_with_its_seed_and_on_its_clock(run_flags, saved, tmp_path):
    log = saved.with_suffix(".txt")
    before, whole = log.read_text(), json.loads((tmp_path / "whole.json").read_text())
    edit(saved, ms=1e6)
    saved.with_name("older.checkpoint").touch()
    for name in "older", "other":
        os.utime(saved.with_name(f"{name}.checkpoint"), (1, 1))
    result = train_gpt.main([*run_flags, "--resume", "latest"])
    assert (result["seed"], losses(result)) == (whole["seed"], losses(whole))
    assert 1e6 < result["train_time_ms"] < 1e6 + 60_000
    assert log.read_text().startswith(before)
    assert re.match(r"resumed at step 16.*\nstep:16/20 val.*\nstep:17/20 train", log.read_text().removeprefix(before))


def test_a_run_that_has_ended_is_left_alone(run_flags, saved):
    saved.with_suffix(".json").touch()
    before = {path: path.read_bytes() for path in saved.parent.iterdir()}
    with pytest.raises(UserError, match="this run is already complete") as error:
        train_gpt.main([*run_flags, "--resume=latest", "--run_id=whole"])
    assert error.value.code == 0
    assert {path: path.read_bytes() for path in saved.parent.iterdir()} == before


def test_what_is_no_checkpoint_of_this_run_is_refused(run_flags, saved):
    """Torn and flipped files, those of another step or run, one that is gone, what was edited, and another kind."""
    resume = [*run_flags, "--resume", str(saved)]
    state = torch.load(saved, weights_only=True)
    share, older = (saved.with_suffix(f".{turn}.rank0") for turn in (state["turn"], 1 - state["turn"]))
    whole, others = share.read_bytes(), share.with_stem(share.stem.replace("whole", "other")).read_bytes()
    largest = max((t for t in torch.load(share).values()), key=torch.numel).numpy().tobytes()
    flipped = whole.replace(largest, largest[:-1] + bytes([largest[-1] ^ 1]), 1)
    odd = [state | {name: value} for name, value in dict(step="16", run_id="../x", curves=[1], ms=float("nan")).items()]
    odd += [{name: value for name, value in state.items() if name != "step"}, state | dict(step=Path()), [1]]
    buffers = [io.BytesIO() for _ in odd]
    for value, buffer in zip(odd, buffers, strict=True):
        torch.save(value, buffer)
    edited = [buffer.getvalue() for buffer in buffers]
    model = saved.with_suffix(".pt").read_bytes()
    for path, more in (share, [flipped, older.read_bytes(), others]), (saved, [model, *edited]):
        good = path.read_bytes()
        for content in (good[:-1000], good[1000:], b"", *more):
            assert content != good
            path.write_bytes(content)
            assert f"{path}: not a sound " in refusal(resume)
        path.unlink()
        assert f"{path}: not a sound " in refusal(resume)
        path.write_bytes(good)


@pytest.mark.slow
def test_what_one_rank_finds_all_say(run_flags, tmp_path):
    """Shares that are exchanged between ranks, twice the same, gone."""
    argv = [*run_flags, "--run_id=two"]
    Run([argv] * 2, tmp_path / "two", kill=("os.rename .checkpoint 3", 0)).wait(kill_others=True)
    log = tmp_path / "logs" / "two.txt"
    turn = torch.load(log.with_suffix(".checkpoint"), weights_only=True)["turn"]
    shares = [log.with_suffix(f".{turn}.rank{rank}") for rank in range(2)]
    first, second = (share.read_bytes() for share in shares)
    for i, contents in enumerate([(second, first), (first, first), (first, None)]):
        for share, content in zip(shares, contents, strict=True):
            share.write_bytes(content) if content else share.unlink()
        run = Run([[*argv, "--resume=latest"]] * 2, tmp_path / f"again{i}")
        assert (run.wait(), run.text("err", 1)) == ([2, 2], "")
        assert re.fullmatch(r".*: rank [01]: .* not a sound part of the checkpoint .*\n", run.text("err"))


def test_a_share_that_could_not_be_written_leaves_the_checkpoint_before(run_flags, runs, tmp_path, monkeypatch):
    """The disk is full at the second checkpoint's share, and then has room again."""
    whole, write, shares = json.loads((runs / "whole.json").read_text()), torch.save, []

    def fail(state: dict, file) -> None:
        shares.extend(["share"] * ("ids" in state))
        if len(shares) == 2:
            raise OSError(28, "No space left on device")
        write(state, file)

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(RunLog, "log_loss", stop_at(9))
    flags = [*run_flags, f"--seed={whole['seed']}", "--run_id=full"]
    with pytest.raises(KeyboardInterrupt):
        train_gpt.main(flags)
    assert step_of(tmp_path / "logs" / "full.checkpoint") == 4
    monkeypatch.undo()
    assert losses(train_gpt.main([*flags, "--resume=latest"])) == losses(whole)


def test_another_configuration_script_text_or_number_of_processes_is_refused(run_flags, saved, tmp_path):
    resume, log = [*run_flags, "--resume", str(saved)], saved.with_suffix(".txt").read_bytes()
    for name, value in dict(seed=6, num_iterations=21, muon_lr=0.5, cpu_threads=2, dtype="float64").items():
        assert re.match(rf"has --{name} {value}, and the run began with ", refusal([*resume, f"--{name}={value}"]))
    assert f"--run_id b: {saved} is of run whole" in refusal([*resume, "--run_id", "b"])
    plans = train_gpt.plan_data(train_gpt.resolve(train_gpt.parse_args(run_flags)))
    for name, text, last in ("train", "training", 1), ("val", "validation", 2):  # which has no last target
        (path, pieces), changed = plans[name][-1][-1], tmp_path / f"{name}.bin"
        tokens = np.fromfile(path, "<u2")
        at = 512 + pieces[-1, 1] - last  # the very last that is used
        tokens[at] = (tokens[at] + 1) % 200
        tokens.tofile(changed)
        assert f"has {text} tokens " in refusal([*resume, f"--{name}_files={changed}"])
    script = tmp_path / "train_gpt.py"
    script.write_text((ROOT / "train_gpt.py").read_text() + "# changed\n")
    runs = Run([resume], tmp_path / "script", scripts=[script]), Run([resume] * 2, tmp_path / "processes")
    for run, words in zip(runs, ("has script ", "has processes 2, and the run began with 1: "), strict=True):
        assert set(run.wait()) == {2}
        assert re.fullmatch(rf".* {words}.*\n", run.text("err"))
    assert runs[1].text("err", 1) == "", "one line"
    assert saved.with_suffix(".txt").read_bytes() == log


def test_a_run_begins_with_the_weights_of_a_model(run_flags, runs, tmp_path):
    """And with its rows of n-grams, of which each rank takes its own, in the run's own precision."""
    model = runs / "whole.pt"
    cfg = train_gpt.resolve(train_gpt.parse_args([*run_flags, f"--init_from={model}", "--seed=6", "--dtype=float64"]))
    saved, rows = torch.load(model)["model"], torch.load(model.with_suffix(".ngrams0"))
    saved["embed.weight"] = saved["lm_head"]  # as they step as one table at first
    found = []
    for rank in range(2):
        trainer = train_gpt.Trainer(cfg, train_gpt.Ranks(rank, 2))
        assert all(torch.equal(t, saved[name].to(t.dtype)) for name, t in trainer.gpt.state_dict().items())
        for part in trainer.base:
            trainer.table.restore(**part)
        found.append(trainer.table.state())
    for name in "ids", "rows", "v":
        parts = [part[name] for part in found]
        assert all(map(len, parts))
        assert torch.equal(torch.cat(parts), rows[name].to(parts[0].dtype))


def test_what_is_no_model_to_begin_with_is_refused_before_there_is_a_log(run_flags, runs, tmp_path):
    """Rows of another run, one file too few, odd contents, other sizes, other n-grams, other kinds of files."""
    begin = [*run_flags, f"--init_from={tmp_path}/whole.pt"]
    saved = torch.load(runs / "whole.pt", weights_only=True)
    cfg = json.loads(saved["configuration"])
    odd = [dict(configuration="{"), dict(configuration="5"), dict(model=[1]), dict(model={}), dict(rows=[5])]
    odd += [dict(rows=saved["rows"] * 2), dict(configuration=json.dumps(cfg | dict(ngram_order=2)))]
    files = {}
    for i, changes in enumerate(odd):
        torch.save(saved | changes, tmp_path / "whole.pt")
        files[i] = (tmp_path / "whole.pt").read_bytes()
    files |= {suffix: (runs / f"whole{suffix}").read_bytes() for suffix in (".checkpoint", ".ngrams0", ".txt", ".json")}
    shutil.copy(runs / "whole.ngrams0", tmp_path)
    for content in files.values():
        (tmp_path / "whole.pt").write_bytes(content)
        assert re.search(
            r"whole\.(pt|ngrams[01]): (not a sound |it has --ngram_order 2: give the same)", refusal(begin)
        )
    shutil.copy(runs / "whole.pt", tmp_path)
    assert "whole.pt: not a sound model of this script: Error(s)" in refusal([*begin, "--mlp_dim=48"])
    rows = (tmp_path / "whole.ngrams0").read_bytes()
    at = rows.index(torch.load(tmp_path / "whole.ngrams0")["rows"].numpy().tobytes())
    (tmp_path / "whole.ngrams0").write_bytes(rows[:at] + bytes([rows[at] ^ 1]) + rows[at + 1 :])
    assert "whole.ngrams0: not a sound part of a model of this script: it is damaged" in refusal(begin)
    shutil.copy(runs / "other.ngrams0", tmp_path / "whole.ngrams0")
    assert "whole.ngrams0: not a sound part of a model of this script: it is of another run" in refusal(begin)
    assert not [*tmp_path.glob("logs/*")]


def test_a_run_goes_on_with_the_model_that_it_began_with(run_flags, runs, tmp_path, monkeypatch):
    """Rows that it has not trained yet come from there."""
    for path in runs.glob("*.[pn]*"):
        shutil.copy(path, tmp_path)
    argv = [*run_flags, "--seed=5", f"--init_from={tmp_path}/whole.pt", "--run_id"]
    whole = train_gpt.main([*argv, "whole"])
    monkeypatch.setattr(RunLog, "log_loss", stop_at(9))
    with pytest.raises(KeyboardInterrupt):
        train_gpt.main([*argv, "stopped"])
    monkeypatch.undo()
    for suffix in ".pt", ".ngrams0":
        (tmp_path / f"whole{suffix}").rename(tmp_path / f"moved{suffix}")
        (tmp_path / f"other{suffix}").rename(tmp_path / f"whole{suffix}")
    resume = [*argv, "stopped", "--resume=latest"]
    assert re.match("has --init_from .*, and the run began with ", refusal(resume))
    assert losses(train_gpt.main([*resume, f"--init_from={tmp_path}/moved.pt"])) == losses(whole)


SIGNALS = [(f"SIG{name}", "train_step", 1, 2) for name in "TERM INT HUP USR1 USR2 XCPU".split()]


@pytest.mark.parametrize(("name", "where", "at", "saved"), [*SIGNALS, *(("SIGTERM", "score", n, n) for n in (2, 4))])
def test_a_signal_saves_and_stops(flags, tmp_path, monkeypatch, name, where, at, saved):
    """Also one in a validation, even the last. Signals then do what they did before."""
    method, number, before = getattr(Trainer, where), getattr(signal, name), signal.getsignal(getattr(signal, name))

    def told(trainer, now, *args):
        if now.step == at and signal.getsignal(number) is not before:
            os.kill(os.getpid(), number)
        return method(trainer, now, *args)

    whole = train_gpt.main([*flags, "--run_id=whole"])
    monkeypatch.setattr(Trainer, where, told)
    with pytest.raises(KeyboardInterrupt, match=name):
        train_gpt.main([*flags, "--run_id=told"])
    assert (signal.getsignal(number), gc.get_freeze_count()) == (before, 0)
    log = tmp_path / "logs" / "told.txt"
    assert log.read_text().endswith(f"stopped: {name}; to go on, add --resume {log.with_suffix('.checkpoint')}\n")
    assert step_of(log.with_suffix(".checkpoint")) == saved
    monkeypatch.undo()
    assert losses(train_gpt.main([*flags, "--resume=latest"])) == losses(whole)


def test_ctrl_c_twice_stops_at_once(flags, tmp_path, monkeypatch):
    sent = []

    def told(*_):
        for number in signal.SIGINT, signal.SIGINT:
            sent.append(number)
            os.kill(os.getpid(), number)
        sent.append("too late")

    monkeypatch.setattr(RunLog, "send_loss", told)
    with pytest.raises(KeyboardInterrupt):
        train_gpt.main(flags)
    assert (len(sent), [*tmp_path.glob("logs/*.checkpoint")]) == (2, [])


def test_a_thread_may_train_and_an_ignored_signal_stays_ignored(flags, tmp_path, monkeypatch):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train_gpt.main, [*flags, "--run_id=thread"]).result()["val_loss"] < 6
    send_loss, before = RunLog.send_loss, signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(RunLog, "send_loss", lambda *args: (os.kill(os.getpid(), signal.SIGHUP), send_loss(*args)))
    assert train_gpt.main(flags)["val_loss"] < 6
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_one_step(run_flags, tmp_path):
    argv = [*run_flags, "--seed=5", "--checkpoint_every=0", "--log_dir", tmp_path]
    script, send = tmp_path / "slow.py", "                log.send_loss("
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(send) == 1
    script.write_text(source.replace(send, f"                time.sleep(0.1)\n{send}"))

    def start(name: str, *more: str) -> Run:
        return Run([[*argv, "--run_id", name, *more]] * 2, tmp_path / f"{name}{len(more)}", scripts=[script] * 2)

    run, whole = start("told"), start("whole")
    log = tmp_path / "told.txt"
    wait_for(lambda: log.exists() and "\nstep:5/" in log.read_text())
    os.kill(run.processes[-1].pid, signal.SIGTERM)
    assert run.wait() == [130] * 2, run.text("err")
    assert "\nstopped: SIGTERM; to go on, add --resume " in log.read_text()
    assert step_of(log.with_suffix(".checkpoint")) in (8, 12)
    assert start("told", "--resume=latest").wait() == whole.wait() == [0] * 2
    ends = [losses(json.loads((tmp_path / f"{name}.json").read_text())) for name in ("told", "whole")]
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_no_process_outlives_the_others(long_flags, tmp_path, victim):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT)
    launcher = subprocess.Popen([*torchrun, "train_gpt.py", *long_flags, "--run_id", "long"], **options)
    log = tmp_path / "logs" / "long.txt"
    wait_for(lambda: log.exists() and "step:9/" in log.read_text())
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ranks = [Path("/proc") / pid for pid in children]
    assert len(ranks) == 2
    os.kill(launcher.pid if victim == "launcher" else int(ranks[1].name), signal.SIGKILL)
    launcher.communicate(timeout=40)  # which ends when none holds its pipe
    # One that ended may stay in /proc until its new parent asks; then it has no command line
    assert not any(rank.exists() and (rank / "cmdline").read_bytes() for rank in ranks)
    assert "step:1500/" not in log.read_text()
