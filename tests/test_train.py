"""Whole runs on a small corpus: result, log, warm-up, clock, flags, exit codes, and what goes wrong around them."""

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from conftest import losses, refusal, train
from data.shards import write_shard
from speedrun import ROOT
from train_gpt import Ranks, Trainer, UserError
from world_worker import ENVIRONMENT, Run, wait_for


def test_log_and_result_have_their_form(flags, corpus):
    result = train([*flags, "--run_id", "form", "--target_loss", "5.5", "--loss_scale=0.5"])
    log = Path(result["log"])
    source, environment, steps = log.read_text().split("=" * 100 + "\n")
    assert source == Path(train_gpt.__file__).read_text() + "\n"
    trained = train_gpt.num_tokens(4, train_gpt.parse_args(flags))
    scored = hashlib.sha256(np.fromfile(corpus / "val_000000.bin", dtype="<u2", offset=1024)[:288]).hexdigest()
    wanted = [f", PyTorch {torch.__version__}, ", f"train shard: {corpus}/train_000000.bin, ", '"--run_id", "form"']
    wanted += [f"training tokens: {trained}, ", f"validation tokens: 288, sha256 {scored}\n", '"num_iterations": 4']
    wanted += [f"val shard: {corpus}/val_000000.bin, ", "environment: {", "parameters: ngrams 1,952, "]
    assert [text for text in wanted if text not in environment] == []
    wanted = ["seed: 5", "clock started: 0"]
    assert [text for text in wanted if text not in steps] == []
    lines = re.findall(r"^(step:.*) train_time:\d+ms step_avg:\d+\.\d\dms$", steps, re.M)
    curves = {name: {step: loss for step, loss, _ in result[f"{name}_curve"]} for name in ("train", "val")}
    order = [("val", 0), ("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4), ("val", 4)]
    assert abs(curves["train"][1] - curves["val"][0]) < 1, "both before the first update"
    assert lines == [f"step:{i}/4 {name}_loss:{curves[name][i]:.4f}" for name, i in order]
    assert json.loads(log.with_suffix(".json").read_text()) == json.loads(json.dumps(result))
    assert {path.name for path in log.parent.iterdir()} == {"form.txt", "form.json", "form.pt", "form.ngrams0"}


def test_a_step_is_in_the_log_at_once(flags, tmp_path, monkeypatch):
    """Who kills a run still has its steps."""
    evaluate = Trainer.evaluate

    def look(trainer, step, *args):
        assert step == 0 or f"\nstep:{step}/4 train_loss:" in (tmp_path / "logs" / "now.txt").read_text()
        return evaluate(trainer, step, *args)

    monkeypatch.setattr(Trainer, "evaluate", look)
    train([*flags, "--run_id=now"])


def test_warm_up_and_checkpoints_change_nothing_and_are_off_the_clock(gpt2_flags, monkeypatch):
    """Leave out the warm-up and write checkpoints. Hosts that wait for each other, too, take 1,000 seconds."""
    usual = train([*gpt2_flags, "--seed=5", "--run_id=usual"])
    clock, skipped = time.perf_counter, list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000 * len(skipped))
    monkeypatch.setattr(Trainer, "warm_up", lambda *_: skipped.append("warm_up"))
    for owner, name in (Trainer, "evaluate"), (train_gpt, "save_checkpoint"), (train_gpt, "all_gather_objects"):
        function = getattr(owner, name)

        def take_long(*args, name=name, function=function):
            skipped.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, take_long)
    other = train([*gpt2_flags, "--seed=5", "--run_id=other", "--checkpoint_every=8"])
    assert losses(usual) == losses(other)
    assert other["train_time_ms"] < 1e6
    assert skipped.count("warm_up") == 1
    assert skipped.count("save_checkpoint") == skipped.count("evaluate") - 2 > 1, "none at first and last"


def test_exit_codes_and_messages(flags, long_flags, tmp_path):
    """A run that fails says why once, in a line on stderr and in its log. A loss that is not finite stops all ranks."""
    endings = dict(
        unknown=(2, 1, [*flags, "--num_iteration", "5"], "--num_iteration 5; see --help"),
        diverged=(3, 2, [*long_flags, "--softcap_range=1e9"], "train_loss -inf at step 1"),
        stopped=(130, 1, long_flags, r"SIGINT$|^stopped: SIGINT; to go on"),
    )
    runs = {name: Run([[*argv, "--run_id", name]] * n, tmp_path / name) for name, (_, n, argv, _) in endings.items()}
    log = tmp_path / "logs" / "stopped.txt"
    wait_for(lambda: log.exists() and "step:20/" in log.read_text())
    os.kill(runs["stopped"].processes[0].pid, signal.SIGINT)
    for name, (code, size, _, message) in endings.items():
        assert runs[name].wait() == [code] * size, name
        told = "".join(runs[name].text("err", rank) for rank in range(size))
        assert re.search(message, told)
        assert told.count("\n") == 1, told
        if code > 2:
            log = (tmp_path / "logs" / f"{name}.txt").read_text()
            assert re.search(message, log.splitlines()[-1])
            assert not (tmp_path / "logs" / f"{name}.json").exists()
    assert runs["diverged"].text("out", 1) == ""


BAD = """preset gpt3;device tpu;num_iterations five;num_iteration 5;layers 1;num_iterations 0;
batch_tokens -1;batch_tokens 100;val_tokens 100;batch_tokens 2147483648;block_size 0;block_size 17;
ngram_rows 3 --ngram_order 3;ngram_rows 1;ngram_order 5;ngram_order 1;max_attn_len 0;final_window -1;cooldown_frac nan;
cooldown_frac 1.5;min_lr_frac 2;tied_frac 1.01;muon_momentum 1.1;
eot_token 257;train_files nowhere/*.bin;train_files {fifo};num_iterations 1000;prefix_file LICENSE;canon_file {fifo};
log_dir LICENSE;run_id ../x;resume nowhere"""
BAD += ";device cuda" * (not torch.cuda.is_available())


@pytest.mark.parametrize("flag", BAD.replace("\n", "").split(";"))
def test_bad_input_is_refused_by_name(flags, tmp_path, monkeypatch, flag):
    monkeypatch.chdir(ROOT)
    os.mkfifo(fifo := tmp_path / "fifo")  # which never ends
    text = refusal([*flags, *f"--{flag.format(fifo=fifo)}".split(" ")])
    assert flag.split()[0] in text or flag.format(fifo=fifo).split()[-1] in text
    assert not [*tmp_path.glob("logs/*.*")]


def test_rows_that_do_not_fit_together_are_refused(gpt2):
    two_stages = enumerate(row._replace(duration=0.5) for row in gpt2.stages[:2])
    for name, changes in {
        "stages": dict(stages=[stage._replace(duration=0.9 * stage.duration) for stage in gpt2.stages]),
        "emas": dict(emas=[train_gpt.EMA("x", window=2, rate=0.5, blend=1)]),
        "checkpoint_every": dict(checkpoint_every=gpt2.common_interval + 1),
        "stages.*max_doc_len": dict(stages=[gpt2.stages[0]._replace(max_doc_len=0), *gpt2.stages[1:]]),
        "groups.*beta1": dict(groups=[group._replace(beta1=0.9) for group in gpt2.groups]),
        "groups.*lr_mul instead": dict(groups=[gpt2.groups[0]._replace(lr=1.0), *gpt2.groups[1:]]),
        "groups.*an lr for lm_head": dict(groups=[group._replace(lr=0.0) for group in gpt2.groups]),
        "stages.*long": dict(stages=[stage._replace(windows=dict(short=8)) for stage in gpt2.stages]),
        "stages.*same windows": dict(stages=[row._replace(windows=row.windows | {str(i): 8}) for i, row in two_stages]),
        "stages.*something in mtp": dict(stages=[stage._replace(mtp=()) for stage in gpt2.stages]),
        "layers.*layer 0 to name earlier": dict(layers=[row._replace(skip=-1) for row in gpt2.layers]),
        "layers.*attention of long": dict(layers=[layer._replace(attention="wide") for layer in gpt2.layers]),
        "groups.*RowAdam for ngrams": dict(groups=[group._replace(optimizer="Adam") for group in gpt2.groups[6:7]]),
        "groups.*a name of its own": dict(groups=gpt2.groups * 2),
        "groups.*intervals": dict(groups=[group._replace(update_interval=(0, 1)) for group in gpt2.groups]),
        "layers.*xsa.*layer 3": dict(layers=[layer._replace(xsa=True, head_gate=True) for layer in gpt2.layers]),
        "layers.*value_embed.*layer 3": dict(
            layers=[row._replace(value_embed=True, head_mix=()) for row in gpt2.layers]
        ),
        "layers.*head_mix.*layer 0": dict(layers=[layer._replace(head_mix=(0,)) for layer in gpt2.layers]),
        "layers.*ngram.*layer 0": dict(layers=[layer._replace(ngram=True, ngram_input=True) for layer in gpt2.layers]),
    }.items():
        with pytest.raises(UserError, match=rf"^(--|`){name}[^\n]*$"):
            dataclasses.replace(gpt2, **changes)


def test_number_of_processes_has_to_divide_the_sequences(flags):
    flags += ["--batch_tokens", "768", "--num_iterations", "1"]
    train_gpt.plan_run(train_gpt.parse_args(flags), Ranks(5, 6, 5, 6))
    with pytest.raises(UserError, match=r"^24 processes: expected a divisor of 12 "):
        train_gpt.plan_run(train_gpt.parse_args(flags), Ranks(0, 24, 0, 24))


def test_gpus_are_for_gpt2_and_leave_nano_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for flags, expected in {"": "gpt2 cuda", "--preset nano": "nano cpu", "--device cpu": "nano cpu"}.items():
        cfg = train_gpt.resolve(train_gpt.parse_args(flags.split()))
        assert f"{cfg.preset} {cfg.device}" == expected
    for dtype in ("bfloat16", "float32", "float64"):  # of FP8 products with scales of rows
        cfg = train_gpt.resolve(train_gpt.parse_args(["--dtype", dtype]))
        assert (cfg.lm_head_fp8, cfg.layers_fp8) == (dtype == "bfloat16",) * 2


@pytest.mark.parametrize("suffix", [".txt", ".json", ".pt", ".checkpoint", ".ngrams1"])
def test_files_of_another_run_are_not_overwritten(flags, tmp_path, suffix):
    path = (tmp_path / "logs" / "other").with_suffix(suffix)
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(UserError, match=r"other\.txt: choose another --run_id or --log_dir: FileExistsError\("):
        train([*flags, "--run_id", "other"])
    assert path.read_text() == "mine"


def test_a_log_in_which_a_run_is_under_way_is_refused(flags, tmp_path):
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "mine.txt").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="BlockingIOError"):
            train([*flags, "--run_id", "mine", "--resume", "latest"])


def test_text_that_would_spoil_the_run_is_refused_before_it_starts(flags, corpus, tmp_path):
    """Another tokenizer's token as the last target of the run or of its validation; one file for both."""
    for name, count in dict(train=train_gpt.num_tokens(4, train_gpt.parse_args(flags)) + 1, val=288 + 1).items():
        tokens = np.fromfile(corpus / "long.bin", "<u2", 1000, offset=1024).astype(int)
        tokens[count - 1] = 257
        write_shard(tmp_path / f"{name}.bin", tokens)
        assert f"{name}.bin: has token 257" in refusal([*flags, f"--{name}_files={tmp_path}/{name}.bin"])
    assert "val_000000.bin: trains and validates" in refusal([*flags, f"--train_files={corpus}/val_*.bin"])
    assert not [*tmp_path.glob("logs/*.*")]


@pytest.mark.parametrize("count", [100, 321])
def test_sampled_classes_that_a_sequence_does_not_fit_are_known_before_the_first_step(gpt2, corpus, count):
    """Too few for the targets of a sequence of random tokens, or more than the head has rows, in a later stage."""
    write_shard(corpus / "random.bin", np.random.default_rng(0).integers(257, size=20_000))
    stages = [*gpt2.stages[:2], gpt2.stages[2]._replace(sampled_classes=(192, count)), *gpt2.stages[3:]]
    files = dict(train_files=f"{corpus}/random.bin", val_files=f"{corpus}/val_*.bin")
    wanted = rf"^stage 3: `sampled_classes` {count}: expected 1\d\d, [^\n]* to 320, the rows of the head$"
    with pytest.raises(UserError, match=wanted):
        train_gpt.plan_run(dataclasses.replace(gpt2, stages=stages, **files), Ranks())


def test_a_full_disk_ends_neither_the_training_nor_the_checkpoint_before(flags, tmp_path, monkeypatch, capsys):
    before, replace = tmp_path / "logs" / "full.checkpoint", os.replace

    def fill_up(*paths) -> None:
        if before.exists() and "checkpoint" not in str(paths):
            raise OSError(28, "No space left on device")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fill_up)
    train([*flags, "--checkpoint_every=1", "--run_id=full"])
    assert "not saved: OSError(28, 'No space left on device')" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("logs/*")} == {"full.txt", "full.step000001.rank0", "full.checkpoint"}
    assert torch.load(before, weights_only=True)["step"] == 1


@pytest.mark.slow
def test_nano_preset_reaches_the_target(tmp_path):
    """A seed nobody chose, on the track's own text."""
    train = [train_gpt.__file__, "--preset", "nano", "--log_dir", tmp_path, "--run_id", "nano"]
    env = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    for command in ["data/pack_nano.py"], train:  # packed before: left alone
        subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, timeout=600, check=True)
    result, cfg = json.loads((tmp_path / "nano.json").read_text()), train_gpt.PRESETS["nano"]
    assert len(result["train_curve"]) == cfg.num_iterations
    assert result["val_loss"] <= cfg.target_loss
    assert "not the track's validation tokens" not in (tmp_path / "nano.txt").read_text().split("=" * 100 + "\n")[1]
