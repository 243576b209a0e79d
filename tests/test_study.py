"""mini in the tools, and the study that takes gpt2's ideas out of it."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

import check
import evaluate
import sample
import train_gpt
from benchmarks import study
from conftest import GPT2
from records import race
from records.logs import Log, ToolError
from records.process import ROOT
from records.rules import track_of

MINI = train_gpt.PRESETS["mini"]
TINY = GPT2 | dict(num_iterations=3, extension_steps=1, val_loss_every=0, val_tokens=96, final_window=48)


@pytest.fixture
def flags(corpus) -> list[str]:
    sizes = {name: value for name, value in TINY.items() if name not in ("preset", "cpu_threads")}
    files = [f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin"]
    return [*(f"--{name}={value}" for name, value in sizes.items()), *files]


@pytest.fixture
def command(tmp_path, flags):
    """Return the words that start a command of the study, of two ideas and two seeds, on a file of its own."""

    def words(name: str, *more: str) -> list[str]:
        own = ["--seeds=2", "--threads=1", "--ideas", "bigrams", "losses of further tokens"] if name == "run" else []
        return [name, f"--results={tmp_path}/study.jsonl", *own, *more, "--", *flags]

    return words


def test_mini_is_gpt2_in_small():
    gpt2 = train_gpt.PRESETS["gpt2"]
    assert (MINI.layers, MINI.groups, len(MINI.stages)) == (gpt2.layers, gpt2.groups, len(gpt2.stages))
    for name in ("share", "batch", "mtp"):
        assert [getattr(stage, name) for stage in MINI.stages] == [getattr(stage, name) for stage in gpt2.stages]
    source = (ROOT / "train_gpt.py").read_text()
    for idea in study.STUDIED:  # can be taken out
        study.take_out(source, study.ideas()[idea], mini=True)


def test_the_tools_take_mini_and_it_has_no_leaderboard(flags, corpus, tmp_path, capsys):
    (tmp_path / "text").write_text("def f():\n    return 1\n")
    own = ["--preset=mini", "--seed=1", "--cpu_threads=1", *flags]
    assert check.main(own) == 0
    assert check.main(["--preset=mini", "--num_heads=3", "--heads_per_matrix=1"]) == 2
    assert "--num_heads 3: expected" in capsys.readouterr().err
    result = train_gpt.main([*own, f"--log_dir={tmp_path}", "--run_id=m"])
    assert 0 < result["val_loss"] < 8
    capsys.readouterr()
    assert sample.main([f"{tmp_path}/m.pt", "--tokens=3", "--seed=1"]) == 0
    capsys.readouterr()
    evaluate.evaluate([f"{tmp_path}/m.pt", f"--text={tmp_path}/text"])
    assert json.loads(capsys.readouterr().out)["texts"][f"{tmp_path}/text"]["bytes"] == 22
    plan = dict(scripts=[dict(sha256="a")] * 2, flags=["--preset", "mini"], pairs=8, seed=1, nproc_per_node=1)
    assert race.obstacle(plan, []) == "mini has no leaderboard, it screens ideas for gpt2"
    with pytest.raises(ToolError, match="preset 'mini' is no track"):
        track_of(Log(tmp_path / "m.txt"))


def test_an_idea_of_the_stages_is_taken_out_of_mini():
    source, flags = study.take_out("stages=MINI_STAGES,", study.ideas()["losses of further tokens"], mini=True)
    assert (source, flags) == ("stages=tuple(row._replace(mtp=((1, 1),)) for row in MINI_STAGES),", [])
    with pytest.raises(train_gpt.UserError, match="0 times: update"):
        study.take_out("", study.ideas()["losses of further tokens"], mini=True)


@pytest.mark.slow
def test_study_goes_on_after_a_kill_and_damage_and_tells_differences(tmp_path, command, capsys):
    path = tmp_path / "study.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", "study", *command("run")], cwd=ROOT)
    while not path.exists() or path.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.02)
    assert study.main(command("table")) == 0  # while it runs
    with pytest.raises(SystemExit, match="2"):
        study.main(command("run"))
    assert "another study is writing it" in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.wait()
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, '{"idea": 1}', "7", '{"idea": "big']))  # cut as by a full disk
    assert study.main(command("run")) == 0
    runs = study.read(path)
    told = capsys.readouterr().err
    assert [f"line {number}: not a run" in told for number in (1, 2, 3, 4, 5)] == [False, True, True, True, False]
    ideas = ["", "bigrams", "losses of further tokens"]
    assert [(run.idea, run.seed) for run in runs] == [(idea, seed) for seed in (1, 2) for idea in ideas]
    assert [json.loads(line)["val_loss"] for line in [first, *others]] == [
        run.val_loss for run in runs[: 1 + len(others)]
    ]
    assert {run.steps for run in runs} == {3}
    losses = {(run.idea, run.seed): run.val_loss for run in runs}
    a, b = (losses["bigrams", seed] - losses["", seed] for seed in (1, 2))
    assert study.main(command("table")) == 0
    half = 12.7062 * abs(a - b) / 2  # Student's t of one degree of freedom
    mean = (a + b) / 2
    row = f"| bigrams | 2 | {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}) | 62 | 1765 to 1600 steps |"
    assert row in capsys.readouterr().out.splitlines()
    assert study.main(command("draw", f"--out={tmp_path}/study.png")) == 0
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"


def test_the_clock_times_the_steps_of_all_stages(monkeypatch, capsys):
    """Here a step takes as long as it has tokens: 64, 128 and 192 by stage, and 128 if batches do not grow."""
    now, steps, build = [0], [], study.build

    def step(number: int, batch: list) -> None:
        steps.append(number)
        now[0] += sum(len(tokens) for tokens, _ in batch)

    def with_step(*args) -> tuple:
        module, trainer = build(*args)
        monkeypatch.setattr(trainer, "train_step", step)
        return module, trainer

    monkeypatch.setattr(study, "build", with_step)
    monkeypatch.setattr(study.time, "perf_counter", lambda: now[0])
    sizes = dict(model_dim=48, head_dim=8, num_iterations=12, bigram_rows=64)
    sizes |= dict.fromkeys(("train_seq_len", "batch_tokens", "val_seq_len", "val_tokens"), 64)
    words = ["clock", "--ideas", "batches that grow", "--repeats", "2", "--", *(f"--{k}={v}" for k, v in sizes.items())]
    assert study.main(words) == 0
    ratio = 12 * 128 / (3 * 64 + 4 * 128 + 5 * 192)
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"| batches that grow | {ratio:.2f} ({ratio:.2f} to {ratio:.2f}) |"
    )
    assert steps[:8] == [0, 1, 4, 5, 8, 9, 10, 11]
    for *wrong, told in ("--repeats=0", "at least 1"), ("--threads=0", "at least 1"), ("--", "--foo=3", "no such flag"):
        with pytest.raises(SystemExit, match="2"):
            study.main(["clock", *wrong])
        assert told in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_tried_again(tmp_path, command, monkeypatch, capsys):
    tried = []

    def train(source, idea, seed, *_):
        tried.append((idea, seed))
        if idea == "bigrams" and len(tried) < 4:
            raise RuntimeError("exit code 3: NaN")
        return dict(steps=3, val_loss=1.0, train_loss=1.0)

    monkeypatch.setattr(study, "train", train)
    assert study.main(command("run")) == 1
    assert "seed 1, without bigrams: failed: exit code 3: NaN" in capsys.readouterr().err
    assert len(tried) == 6
    assert study.main(command("run")) == 0
    assert tried[6:] == [("bigrams", 1)]
    path = tmp_path / "study.jsonl"
    path.write_text(re.sub('"script": "[0-9a-f]{12}"', '"script": "other"', path.read_text()))
    with pytest.raises(SystemExit, match="2"):
        study.main(command("table"))
    assert "6 runs of other scripts or flags are left out" in capsys.readouterr().err
    assert study.main(command("table", "--like", "other")) == 0


def test_the_page_shows_the_results(capsys):
    page = (ROOT / "docs" / "mini.md").read_text()
    (script,) = set(re.findall(r"--like (\w{12})\b", page))
    for flags in [], ["--", "--num_iterations", "362"]:
        assert study.main(["table", "--like", script, *flags]) == 0
        for line in filter(None, capsys.readouterr().out.splitlines()):
            assert line in page, "fill in anew what `table` prints"
