"""Checkpoints: a run that is killed and resumed ends as the run that was not, to the last bit."""

import dataclasses
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

import numpy as np
import pytest
import torch

import train_gpt
from conftest import gpt2_run, losses, refusal
from train_gpt import RunLog, UserError
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
def whole_run(corpus, tmp_path_factory) -> Path:
    """Return the folder of the log of a run that has ended."""
    logs = tmp_path_factory.mktemp("whole")
    train_gpt.main([*gpt2_run(corpus, logs), *MORE, "--run_id", "whole"])
    return logs


@pytest.fixture
def saved(whole_run, tmp_path) -> Path:
    """Return a copy of its last checkpoint, after step 16, with all that lies beside it."""
    shutil.copytree(whole_run, tmp_path / "logs")
    return tmp_path / "logs" / "whole.checkpoint"


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
        kinds = {path.suffix for path in log.parent.glob(f"{log.stem}.*")}
        kinds -= {".torn"} | {
            f".{kind}{rank}" for kind in ("rank", "ngrams") for rank in range(size)
        }  # a log of no checkpoint moves aside
        assert kinds == {".txt", ".json", ".pt", ".checkpoint"}
        assert step_of(log.with_suffix(".checkpoint")) == 16


def test_a_resumed_run_goes_on_in_its_log_with_its_seed_and_on_its_clock(run_flags, saved):
    log = saved.with_suffix(".txt")
    before, whole = log.read_text(), json.loads(saved.with_suffix(".json").read_text())
    torch.save(torch.load(saved) | dict(ms=1e6), saved)
    saved.with_suffix(".json").unlink()  # as if the run had been killed at the end
    saved.with_name("older.checkpoint").touch()
    os.utime(saved.with_name("older.checkpoint"), (1, 1))
    result = train_gpt.main([*run_flags, "--resume", "latest"])
    assert (result["seed"], losses(result)) == (whole["seed"], losses(whole))
    assert 1e6 < result["train_time_ms"] < 1e6 + 60_000
    assert log.read_text().startswith(before)
    assert re.match(r"resumed at step 16.*\nstep:16/20 val.*\nstep:17/20 train", log.read_text().removeprefix(before))


def test_a_run_that_has_ended_is_left_alone(run_flags, saved, tmp_path):
    before = {path: path.read_bytes() for path in saved.parent.iterdir()}
    run = Run([[*run_flags, "--resume", "latest"]] * 2, tmp_path / "again")
    assert run.wait() == [0, 0]
    assert "whole.json: this run is already complete" in run.text("err")
    assert {path: path.read_bytes() for path in saved.parent.iterdir()} == before


def test_a_damaged_or_incomplete_checkpoint_is_refused(run_flags, saved):
    resume = [*run_flags, "--resume", "latest"]
    saved.with_suffix(".json").unlink()  # as if the run had not ended
    state = torch.load(saved, weights_only=True)
    share, older = (saved.with_suffix(f".{turn}.rank0") for turn in (state["turn"], 1 - state["turn"]))
    tensors = torch.load(share, weights_only=True)
    data = max((t for t in tensors.values() if isinstance(t, torch.Tensor)), key=torch.numel).numpy().tobytes()
    flipped = share.read_bytes().replace(data, data[:-1] + bytes([data[-1] ^ 1]), 1)
    assert flipped != share.read_bytes()
    for path, more in (saved, []), (share, [flipped, older.read_bytes()]):
        whole = path.read_bytes()
        for content in (whole[:-1000], whole[1000:], *more, b""):
            path.write_bytes(content)
            assert path.name in refusal(resume)
        path.write_bytes(whole)
    head = next(name for name in tensors if name.startswith("lm_head "))
    wrong = [tensors | {head: value} for value in (tensors[head][1:], tensors[head].to(torch.int32))]
    for changed in {name: t for name, t in tensors.items() if name != head}, *wrong:
        torch.save(changed, share)
        assert f"the checkpoint does not fit the model at {head}" in refusal(resume)
    without_step = {key: value for key, value in state.items() if key != "step"}
    for content in without_step, state | dict(step=Path()):  # a Path is code that a pickle calls
        torch.save(content, saved)
        assert "whole.checkpoint" in refusal(resume)
    saved.unlink()
    assert "whole.checkpoint" in refusal([*run_flags, "--resume", str(saved)])


@pytest.mark.slow
def test_a_share_that_could_not_be_written_leaves_the_checkpoint_before(run_flags, tmp_path, monkeypatch):
    """The disk is full at the second checkpoint's share, and then has room again."""
    write, flags = torch.save, [*run_flags, "--seed=5", "--run_id=full"]

    def fail(state: dict, file) -> None:
        if state.get("step") == 8 and "ids" in state:
            raise OSError(28, "No space left on device")
        write(state, file)

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(RunLog, "log_loss", stop_at(9))
    with pytest.raises(KeyboardInterrupt):
        train_gpt.main(flags)
    monkeypatch.undo()
    assert step_of(tmp_path / "logs" / "full.checkpoint") == 4
    resumed = train_gpt.main([*flags, "--resume=latest"])
    assert losses(resumed) == losses(train_gpt.main([*flags, "--run_id=whole"]))


def test_another_configuration_script_text_or_number_of_processes_is_refused(run_flags, saved, tmp_path):
    script, resume = tmp_path / "train_gpt.py", [*run_flags, "--resume", str(saved)]
    script.write_text((ROOT / "train_gpt.py").read_text() + "# changed\n")
    log = saved.with_suffix(".txt").read_bytes()
    changes = "seed 6", "num_iterations 21", "muon_lr 0.5", "cpu_threads 2", "dtype float64"
    for change in changes:
        assert f"has --{change.partition(' ')[0]} " in refusal([*resume, *f"--{change}".split()])
    assert f"--run_id b: {saved} is of run whole" in refusal([*resume, "--run_id", "b"])
    plans = train_gpt.plan_data(train_gpt.resolve(train_gpt.parse_args(run_flags)))
    for name, text, last in ("train", "training", 1), ("val", "validation", 2):  # which has no last target
        (path, pieces), changed = plans[name][-1][-1], tmp_path / f"{name}.bin"
        tokens = np.fromfile(path, "<u2")
        at = 512 + pieces[-1, 1] - last  # the very last that is used
        tokens[at] = (tokens[at] + 1) % 200
        tokens.tofile(changed)
        assert f"the checkpoint has {text} tokens " in refusal([*resume, f"--{name}_files={changed}"])
    run = Run([resume], tmp_path / "run", scripts=[script])
    assert (run.wait(), run.text("err").count("\n")) == ([2], 1)
    assert "script" in run.text("err")
    run = Run([resume] * 2, tmp_path / "two")
    assert (run.wait(), run.text("err", 1)) == ([2, 2], ""), "one line"
    assert re.fullmatch(r".* the checkpoint has processes 1 instead of 2.*\n", run.text("err"))
    assert saved.with_suffix(".txt").read_bytes() == log


def test_a_run_begins_with_the_weights_of_a_model(run_flags, whole_run, tmp_path):
    """And with its rows of n-grams, of which each rank takes its own; a model of other sizes is refused."""
    model = whole_run / "whole.pt"
    argv = [*map(str, run_flags), "--init_from", str(model), "--seed=6"]
    cfg = train_gpt.resolve(train_gpt.parse_args(argv))
    trainer = train_gpt.Trainer(cfg, train_gpt.Ranks())
    trainer.warm_up()
    saved = torch.load(model)["model"]
    saved["embed.weight"] = saved["lm_head"]  # as they step as one table at first
    assert all(torch.equal(t, saved[name]) for name, t in trainer.gpt.state_dict().items())
    rows = torch.load(model.with_suffix(".ngrams0"))
    assert all(torch.equal(t, rows[name]) for name, t in trainer.table.state().items())
    assert len(rows["ids"])
    for rank in range(2):
        table = train_gpt.NgramTable(cfg, train_gpt.Ranks(rank, 2), torch.device("cpu"))
        table.begin_with(model)
        own = (rows["ids"] < table.first + len(table.rows)) & (rows["ids"] >= table.first)
        assert torch.equal(table.state()["rows"], rows["rows"][own])
        assert own.any()
    with pytest.raises(UserError, match=f"^--init_from {model}: a model of other sizes: .*size mismatch"):
        train_gpt.Trainer(dataclasses.replace(cfg, mlp_dim=cfg.mlp_dim + 8), train_gpt.Ranks())
    other = dataclasses.replace(cfg, ngram_rows=cfg.ngram_rows + 2)
    with pytest.raises(UserError, match=f"it has --ngram_rows {cfg.ngram_rows}: give the same"):
        train_gpt.Trainer(other, train_gpt.Ranks())
    wide = train_gpt.NgramTable(dataclasses.replace(cfg, dtype="float32"), train_gpt.Ranks(), torch.device("cpu"))
    wide.begin_with(model)
    assert wide.rows.any()
    shutil.copy(model.with_suffix(".ngrams0"), tmp_path / "copy.ngrams1")  # of two files, one is missing
    with pytest.raises(UserError, match=r"copy\.ngrams0: there is no such file"):
        table.begin_with(tmp_path / "copy.pt")
    with pytest.raises(UserError, match="not a sound checkpoint"):
        train_gpt.Trainer(dataclasses.replace(cfg, init_from=str(model.with_suffix(".txt"))), train_gpt.Ranks())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_sigterm_saves_and_stops_all_ranks(run_flags, tmp_path, size):
    """Only one of them is told. The resumed run ends as if nothing had been."""
    argv = [*run_flags, "--seed=5", "--checkpoint_every=0", "--log_dir", tmp_path]
    script, send = tmp_path / "slow.py", "            log.send_loss("
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(send) == 1
    script.write_text(source.replace(send, f"            time.sleep(0.1)\n{send}"))

    def start(name: str, *more: str) -> Run:
        return Run([[*argv, "--run_id", name, *more]] * size, tmp_path / f"{name}{len(more)}", scripts=[script] * size)

    run, whole = start("told"), start("whole")
    log = tmp_path / "told.txt"
    wait_for(lambda: log.exists() and "\nstep:5/" in log.read_text())
    os.kill(run.processes[-1].pid, signal.SIGTERM)
    assert run.wait() == [130] * size, run.text("err")
    resume = f"; to go on, add --resume {log.with_suffix('.checkpoint')}"
    assert log.read_text().splitlines()[-1] == f"stopped: SIGTERM{resume}"
    assert step_of(log.with_suffix(".checkpoint")) in (8, 12)
    assert start("told", "--resume=latest").wait() == whole.wait() == [0] * size
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
