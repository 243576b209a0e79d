"""Whole runs of the script on a small corpus: result, log, warm-up, clock, exit codes, and what it refuses."""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from shards import write_shard
from train_gpt import NonFiniteLoss, UserError, World

ROOT = Path(train_gpt.__file__).parent
SMALL = (
    "--preset nano --device cpu --dtype float32 --cpu_threads 1 --seed 5 --num_iterations 4 --val_loss_every 2 "
    "--model_dim 32 --num_heads 2 --head_dim 16 --attention_layout LS --value_embed_layout 0. --block_size 16 "
    "--window_tokens 64 --train_seq_len 64 --batch_tokens 128 --val_seq_len 96 --val_tokens 288"
).split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Two training shards and a validation shard of words, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = [b"muon ", b"adam ", b"rotary ", b"window ", b"shard ", b"block\n"]
    for name in ("train_000000", "train_000001", "val_000000"):
        text = b"".join(words[i] for i in rng.integers(len(words), size=400))
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        tokens[rng.random(len(tokens)) < 0.01] = 256
        write_shard(folder / f"{name}.bin", tokens)
    return folder


@pytest.fixture
def flags(corpus, tmp_path) -> list[str]:
    data = ["--train_files", f"{corpus}/train_*.bin", "--val_files", f"{corpus}/val_*.bin", "--val_sha256", ""]
    return [*SMALL, *data, "--log_dir", str(tmp_path / "logs")]


def program(*argv: str, cwd: Path = ROOT, script: str = "train_gpt.py", **env: str) -> subprocess.CompletedProcess:
    """The script as a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | env
    command = [sys.executable, script, *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


# What a run leaves


def test_log_has_the_form_that_tools_for_the_community_read(flags, capsys):
    result = train_gpt.main([*flags, "--run_id", "form"])
    text = Path(result.log).read_text()
    source, environment, steps = text.split("=" * 100 + "\n")
    assert source == (ROOT / "train_gpt.py").read_text() + "\n"
    for wanted in (
        f"Running Python {sys.version}",
        f"Running PyTorch {torch.__version__}",
        "commit: ",
        "1 threads each",
        '"--run_id", "form"',
        '"num_iterations": 4',
        "train_000000.bin",
        "seed: 5",
    ):
        assert wanted in environment
    assert re.search(r"validation tokens: 288, sha256 [0-9a-f]{64}\n", environment)
    lines = [line for line in steps.splitlines() if not line.startswith(("effective", "step times vary"))]
    pattern = r"step:(\d+)/4 (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    read = [re.fullmatch(pattern, line) for line in lines[:7]]
    assert [(int(m[1]), m[2] is not None) for m in read] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    times = [int(m[3]) for m in read]
    assert times[0] < 50, "the clock has just started"
    assert times == sorted(times)
    assert lines[7].startswith("first batch: ")
    assert lines[7].endswith("train_000000.bin position 0")
    assert lines[8].endswith("train_000000.bin position 384")
    assert lines[9] == "recompiles after the clock started: 0"
    assert lines[10] == "garbage collections after the clock started: 0"
    assert re.fullmatch(r"step time: median \S+ms p99 \S+ms slowest \S+ms at step [0-3]", lines[11])
    assert re.fullmatch(r"peak memory: \d+ MiB", lines[12])
    assert len(lines) == 13

    stored = json.loads(Path(result.log).with_suffix(".json").read_text())
    assert stored == json.loads(json.dumps(dataclasses.asdict(result)))
    assert [point[0] for point in stored["val_curve"]] == [0, 2, 4]
    assert f"{stored['val_loss']:.4f}" == read[-1][2]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("step:")] == lines[:7]


def test_validation_loss_falls_from_that_of_a_guess(flags):
    result = train_gpt.main([*flags, "--num_iterations", "30"])
    assert result.val_curve[0][1] == pytest.approx(np.log(320), abs=1e-4)  # 257 tokens, padded to 320
    assert result.val_loss < 2.6


def test_same_seed_gives_the_same_losses_and_another_one_others(flags):
    first, again = (train_gpt.main([*flags, "--run_id", name]) for name in ("first", "again"))
    other = train_gpt.main([*flags, "--run_id", "other", "--seed", "6"])
    assert [point[:2] for point in first.val_curve] == [point[:2] for point in again.val_curve]
    assert first.val_loss != other.val_loss


def test_seed_is_fresh_unless_given(flags):
    flags = [flag for flag in flags if flag not in ("--seed", "5")]
    assert train_gpt.main(flags).seed != train_gpt.main(flags).seed


def test_validation_scores_exactly_the_tokens_it_says(flags, corpus):
    """The loss is the mean over the first val_tokens positions, whatever the length of the sequences; before training
    every position costs ln 320, and the tokens that are read are the shard's first."""
    cfg = train_gpt.parse_args(flags)
    _, plan = train_gpt.plan_data(cfg)
    assert [(batch.start, batch.num_tokens) for batch in plan] == [(0, 96), (96, 96), (192, 96)]


def test_warm_up_leaves_no_trace(flags):
    cfg = train_gpt.resolve(train_gpt.parse_args(flags))
    torch.manual_seed(1)
    gpt = train_gpt.GPT(cfg)
    optimizers = train_gpt.build_optimizers(gpt, cfg, World(), train_gpt.zeropower_via_newtonschulz5)
    with torch.no_grad():  # moments that are not zero, as they might be
        for tensor in (tensor for optimizer in optimizers for tensor in optimizer.state().values()):
            tensor.add_(0.5)

    def bits() -> list[bytes]:
        tensors = [*gpt.parameters(), *gpt.buffers(), *(t for o in optimizers for t in o.state().values())]
        return [t.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]

    ran = []
    before, rng, python_rng = bits(), torch.get_rng_state(), np.random.get_state()[1].copy()
    for optimizer in optimizers:
        finish = optimizer.finish
        optimizer.finish = lambda group, finish=finish: (finish(group), ran.append(bits()))
    train_gpt.warm_up(gpt, gpt, optimizers, cfg, World())
    assert ran[-1] != before, "warm-up did not train"
    assert bits() == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert np.array_equal(np.random.get_state()[1], python_rng)
    assert all(p.grad is None for p in gpt.parameters())
    assert gpt.training


def test_warm_up_does_not_change_the_run(flags, monkeypatch):
    with_warm_up = train_gpt.main([*flags, "--run_id", "with"])
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    without = train_gpt.main([*flags, "--run_id", "without"])
    assert [point[:2] for point in with_warm_up.val_curve] == [point[:2] for point in without.val_curve]


def test_copied_script_launched_from_the_root_gives_the_same(flags, tmp_path):
    folder = tmp_path / "records" / "2026-01-01_Copy"
    folder.mkdir(parents=True)
    copied = shutil.copy(ROOT / "train_gpt.py", folder)
    here, there = (program(*flags, "--run_id", Path(s).parent.name + "x", script=s) for s in ("train_gpt.py", copied))
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    losses = [re.findall(r"val_loss:(\S+)", done.stdout) for done in (here, there)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_clock_stands_still_during_validation(flags, monkeypatch):
    evaluate = train_gpt.evaluate

    def slow(*args):
        train_gpt.time.sleep(0.5)
        return evaluate(*args)

    monkeypatch.setattr(train_gpt, "evaluate", slow)
    assert train_gpt.main(flags).train_time_ms < 450  # four steps of some milliseconds, three validations


def test_what_the_steps_used_is_logged_at_the_first_middle_and_last(flags):
    """Learning rate, momentum, betas and window as they were used, not as they were meant."""
    log = Path(train_gpt.main([*flags, "--num_iterations", "8", "--momentum_warmup_steps", "8"]).log).read_text()
    lines = re.findall(r"^effective at step (\d+): window (\d+), ([^:]*): (.*)$", log, re.M)
    names = {name for _, _, group, _ in lines for name in group.split("+")}
    cfg = train_gpt.parse_args([*flags, "--num_iterations", "8", "--momentum_warmup_steps", "8"])
    assert names == {name for name, _ in train_gpt.GPT(cfg).named_parameters()}
    for step, window in (0, 1), (4, 2), (7, 4):
        used = {group: ast.literal_eval(used) for *at, group, used in lines if at == [str(step), str(window)]}
        factor = train_gpt.lr_multiplier(step, cfg)
        momentum = train_gpt.muon_momentum(step, cfg)
        muon = next(group for group in used if "c_fc" in group)
        assert used[muon] == pytest.approx({"lr": cfg.muon_lr * factor, "momentum": momentum})
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        assert used["lm_head.weight"] == {"lr": pytest.approx(cfg.head_lr * factor), "betas": betas}
    assert len(lines) == 3 * len(used)


def test_step_times_that_vary_are_said(flags, monkeypatch, capsys):
    step, calls = train_gpt.train_step, []

    def sometimes_slow(*args):
        calls.append(None)
        time.sleep(0.25 if len(calls) == 20 else 0)
        return step(*args)

    monkeypatch.setattr(train_gpt, "train_step", sometimes_slow)
    train_gpt.main([*flags, "--num_iterations", "25"])
    assert "step times vary, p99 is over 1.5 times the median" in capsys.readouterr().out


def test_collector_rests_while_training_and_works_again_afterwards(flags, monkeypatch):
    enabled = []
    step = train_gpt.train_step
    monkeypatch.setattr(train_gpt, "train_step", lambda *a: (enabled.append(train_gpt.gc.isenabled()), step(*a))[1])
    train_gpt.main(flags)
    assert enabled[-4:] == [False] * 4
    assert train_gpt.gc.isenabled()


# How runs end


def run_as_program(monkeypatch, capsys, *argv: str) -> tuple[int, str]:
    """Exit code and stderr of the script, without a process of its own."""
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *argv])
    code = train_gpt.run_as_program()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num_iteration 5", "unrecognized arguments: --num_iteration 5"),
        ("--num_iterations five", "argument --num_iterations: invalid int value: 'five'"),
        ("--num_iterations 0", "--num_iterations 0: expected a whole number of at least 1"),
        ("--preset gpt3", "argument --preset: invalid choice: 'gpt3' (choose from "),
        ("--muon_lr nan", "--muon_lr nan: expected a finite number of at least 0"),
        ("--muon_lr=-1", "--muon_lr -1.0: expected a finite number of at least 0"),
        ("--cooldown_frac 1.5", "--cooldown_frac 1.5: expected more than 0 and at most 1"),
        ("--muon_momentum 1", "--muon_momentum 1.0: expected less than 1"),
        ("--batch_tokens 100", "--batch_tokens 100: expected a multiple of --train_seq_len 64"),
        ("--val_tokens 100", "--val_tokens 100: expected a multiple of --val_seq_len 96"),
        ("--train_seq_len 72", "--train_seq_len 72: expected a multiple of --block_size 16"),
        ("--attention_layout LSX", "--attention_layout LSX: expected an even number of layers, for the U-Net skips"),
        ("--attention_layout LX", "--attention_layout LX: expected only the letters L, S and -"),
        ("--value_embed_layout 012", "--value_embed_layout 012: expected 2 characters"),
        ("--head_dim 18", "--head_dim 18: expected a multiple of 4"),
        ("--vocab_size 70000", "--vocab_size 70000: expected at most 65536"),
        ("--vocab_size 100", "--eot_token 256: expected a token below vocab_size 100"),
        ("--device tpu", "--device tpu: expected cuda, cpu or auto"),
        ("--dtype fp8", "--dtype fp8: expected bfloat16, float32, float64 or auto"),
        ("--run_id ../x", "--run_id ../x: expected a file name without folders"),
        ("--lm_head_softcap 0", "--lm_head_softcap 0.0: expected more than 0"),
        ("--train_files nowhere/*.bin", "no shards match nowhere/*.bin"),
        ("--val_files LICENSE", "LICENSE: not a token shard"),
        ("--num_iterations 1000", "batches of 128 tokens, the run needs 1000; get more: python data/pack_text.py"),
        ("--val_tokens 96000", "batches of 96 tokens, the run needs 1000; get more: python data/pack_text.py"),
        ("--vocab_size 100 --eot_token 99", "but --vocab_size is 100: another tokenizer's shard?"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(flags, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(ROOT)
    code, errors = run_as_program(monkeypatch, capsys, *flags, *argv.split())
    assert code == 2
    assert message in errors
    assert errors.startswith("train_gpt.py: ")
    assert errors.count("\n") == 1
    assert "step:" not in "".join(path.read_text()[-300:] for path in (tmp_path / "logs").glob("*.txt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(flags, monkeypatch, capsys):
    code, errors = run_as_program(monkeypatch, capsys, *flags, "--device", "cuda")
    assert code == 2
    assert "sees no GPU; use --device cpu" in errors


def test_number_of_processes_that_does_not_divide_names_the_nearest_that_do(tiny):
    cfg = dataclasses.replace(tiny, train_seq_len=64, batch_tokens=64 * 12)
    for size in (1, 2, 3, 4, 6, 12):
        train_gpt.check_world(cfg, World(size=size))
    with pytest.raises(UserError, match="5 processes do not divide the 12 sequences of a step: start 4 or 6,"):
        train_gpt.check_world(cfg, World(size=5))
    with pytest.raises(UserError, match="13 processes do not divide the 12 sequences of a step: start 12,"):
        train_gpt.check_world(cfg, World(size=13))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda")
    train_gpt.check_world(cfg, World(size=8, local_size=2))
    with pytest.raises(UserError, match=r"8 processes, but 3 GPUs on this machine: --nproc_per_node=2"):
        train_gpt.check_world(cfg, World(size=8, local_size=8))


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_WORLD_SIZE"])
def test_half_an_environment_of_torchrun_is_refused(monkeypatch, missing):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert World.from_env() == World(1, 1, 1, 1)
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match="launch with torchrun, or unset all four"):
        World.from_env()


def test_as_processes_exit_codes_and_messages(flags):
    """What the in-process tests above rely on, once for real: code, one line, no traceback; also under torchrun."""
    bad = program(*flags, "--num_iterations", "1000")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, "train_gpt.py", *flags, "--num_iterations", "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("train_gpt.py: the 2 shards") == 1


def test_log_of_another_run_is_not_overwritten(flags, monkeypatch, capsys):
    code, _ = run_as_program(monkeypatch, capsys, *flags, "--run_id", "mine")
    assert code == 0
    log = Path(flags[-1]) / "mine.txt"
    before = log.read_bytes()
    code, errors = run_as_program(monkeypatch, capsys, *flags, "--run_id", "mine")
    assert code == 2
    assert "choose another --run_id" in errors
    assert log.read_bytes() == before


def test_loss_that_is_not_finite_stops_within_ten_steps(flags, monkeypatch, capsys):
    """The head is blown up in step 3; the loss of step 4 is the first that is not finite."""
    step_optimizers, calls = train_gpt.step_optimizers, []

    def spoil(optimizers):
        step_optimizers(optimizers)
        calls.append(None)
        if len(calls) == 2 + 4:  # two steps of warm-up, then steps 0 to 3
            optimizers[1].param_groups[0]["params"][0].data.fill_(float("nan"))

    monkeypatch.setattr(train_gpt, "step_optimizers", spoil)
    code, errors = run_as_program(
        monkeypatch, capsys, *flags, "--run_id", "nan", "--num_iterations", "25", "--val_loss_every", "0"
    )
    assert code == 3
    assert re.search(r"loss nan at step 4, data \S+train_000000.bin position 512", errors)
    assert errors.count("\n") == 1
    log = (Path(flags[-1]) / "nan.txt").read_text()
    assert "stopped: loss nan at step 4" in log
    last = int(re.findall(r"\nstep:(\d+)/25 train", log)[-1])
    assert last <= 4 + 10


def test_interrupted_run_says_so(flags, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gpt, "evaluate", interrupt)
    code, _ = run_as_program(monkeypatch, capsys, *flags, "--run_id", "stop")
    assert code == 130
    assert "interrupted" in (Path(flags[-1]) / "stop.txt").read_text()
    assert train_gpt.gc.isenabled()


def test_other_validation_text_than_the_tracks_is_called_so(flags):
    flags = [flag for flag in flags if flag]
    flags.remove("--val_sha256")
    log = Path(train_gpt.main(flags).log).read_text()
    assert "(not the track's: do not compare losses)" in log


# Flags and presets


def test_every_field_has_a_flag_with_help(capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse_args(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(train_gpt.Hyperparameters):
        assert f"--{field.name}" in text


def test_flags_lie_over_the_preset():
    cfg = train_gpt.parse_args("--preset gpt2 --seed 3 --no-compile --muon_lr 0.1 --log_dir x".split())
    changed = {"seed": 3, "compile": False, "muon_lr": 0.1, "log_dir": "x"}
    assert cfg == dataclasses.replace(train_gpt.PRESETS["gpt2"], **changed)
    assert cfg.preset == "gpt2"
    assert train_gpt.parse_args([]).preset == ("gpt2" if torch.cuda.is_available() else "nano")


def test_fields_that_other_tools_rely_on():
    names = {field.name for field in dataclasses.fields(train_gpt.Hyperparameters)}
    assert names >= set(
        "preset train_files val_files val_tokens num_iterations cooldown_frac val_loss_every batch_tokens "
        "train_seq_len val_seq_len lm_head_softcap seed device compile log_dir run_id".split()
    )


@pytest.mark.slow
def test_nano_preset_reaches_the_target():
    """A seed nobody chose, from the command to the last line."""
    done = subprocess.run(["./run.sh"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"val_loss:(\S+)", done.stdout)[-1]) <= 1.45


def test_nonfiniteloss_is_no_user_error():
    assert not issubclass(NonFiniteLoss, UserError)
