"""python -m speedrun: what verify lets through and what not, statistics, a race, the other commands, the picture."""

import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import train_gpt
from speedrun import logs, needs, plots, process, proof, race, rules, store
from speedrun.__main__ import MODULES, build_parser, main
from speedrun.logs import RULE, Log
from speedrun.process import ROOT
from speedrun.publish import BEGIN, END
from speedrun.store import TRACKS, lineage
from synthetic_logs import LOSSES, NANO_VAL, README, SCRIPT, SOURCE, log_text, write_race, write_record
from world_worker import wait_for

NAME = "nano/01_Good"
FORM = dict(kind="form", evidence="tests/test_x.py at commit d13ea94")
EMPTY_TABLES = f"# Records\n\n{BEGIN}\n{END}\n\nMore.\n"


def good(**settings) -> list[str]:
    return [log_text(seed=seed, val_loss=loss, **settings) for seed, loss in enumerate(LOSSES)]


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


@pytest.fixture
def tool(root, tmp_path, capsys, monkeypatch):
    """Run a command on the records in `root`; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speedrun.__main__.build_parser", functools.cache(build_parser))  # most of a command's time
    monkeypatch.setattr(race, "get_data", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")

    def run(command: str, *argv: object) -> tuple[int, str, str]:
        try:
            code = main([command, "--root", str(root), *map(str, argv)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def halved(match: re.Match) -> str:
    return f"train_time:{int(match[1]) / 2:.0f}ms step_avg:{float(match[2]) / 2:.2f}ms"


def edit(old: str, new: str):
    return lambda texts: [texts[0].replace(old, new), *texts[1:]]


GPT2 = dict(preset="gpt2", batch_tokens=393216, steps=510)  # two shards of 254 batches each, and two more
FAULTS = {
    "cut short": (edit("step:20/20 val_loss", "no"), r"run0\.txt: ends at step 20 of 20 without .*: cut short"),
    "a step missing": (edit("step:7/20", "tep:7/20"), r"run0\.txt: lacks a step line"),
    "resumed": (edit("step:1/20", "resumed at step 1\nstep:1/20"), r"run0\.txt: has the line 'resumed"),
    "other script": (edit("import torch\n", "import os\n"), r"run0\.txt: the script of the log is not the folder's"),
    "one seed twice": (lambda t: [*t, log_text(seed=2, val_loss=1.4312)], r"run5\.txt: has seed 2, as run2\.txt has"),
    "no seed": (edit("seed: 0, log", "log"), r"run0\.txt: says seed '0' and 'None'"),
    "validation hash": (edit(NANO_VAL, "ab" * 32), r"run0\.txt: other validation tokens, sha256 abab"),
    "other settings": (
        edit('"preset"', '"muon_lr": 1, "preset"'),
        r"4 logs, first run1\.txt: unlike run0\.txt in muon_lr",
    ),
    "shard name": (edit("000000.bin, 8", "000001.bin, 8"), r"run0\.txt: the training stream .* shards"),
    "first batch": (edit("position 0", "position 1024"), r"run0\.txt: the training stream .* first batch is .* 1024"),
    "last batch": (edit("position 19456", "position 19455"), r"run0\.txt: the training stream .* last batch cannot"),
    "clock falls": (edit("time:403ms", "time:303ms"), r"run0\.txt: train_time falls at step 10"),
    "recompiled": (edit("started: 0", "started: 2"), r"run0\.txt: 2 graphs compiled after the clock"),
    "threads": (edit("1 processes, 2 threads", "2 processes, 2 threads"), r"run0\.txt: uses 4 CPU threads"),
    "a GPU": (edit('"device": "cpu"', '"device": "cuda"'), r"run0\.txt: ran on a GPU"),
    "two seeds": (edit('"seed": 0', '"seed": 7'), r"run0\.txt: says seed '0' and '7'"),
    "two numbers of steps": (
        edit('iterations": 20', 'iterations": 21'),
        r"run0\.txt: says num_iterations '21' and '20'",
    ),
    "one time halved": (edit("time:403ms", "time:401ms"), r"run0\.txt: says ms at step 10 '401.0' and '403.0'"),
    "all times halved but one": (
        lambda t: [re.sub(r"train_time:(\d+)ms step_avg:([\d.]+)ms", halved, t[0]), *t[1:]],
        r"run0\.txt: says ms at the end '403.0' and '810.0'",
    ),
    "no track": (edit('"preset": "nano"', '"preset": "own"'), r"run0\.txt: preset 'own' is no track"),
    "own flag": (edit('"--seed"', '"--muon_lr=1", "--seed"'), r"run0\.txt: has the flag --muon_lr: put settings"),
    "compiler": (
        lambda t: good(environment=dict(TORCHINDUCTOR_MAX_AUTOTUNE="1")),
        "5 logs, first run0.txt: ran with TOR",
    ),
    "above target": (lambda t: [log_text(seed=i, val_loss=1.459 + i / 1000) for i in (0, 2)], "mean 1.4600 is above"),
    "p too large": (lambda t: [t[0], log_text(seed=9, val_loss=1.449)], r"n too small: p=0\.23 is not .* at n=2;"),
    "other tokens": (lambda t: [log_text(i, val_sha256="ab"[i] * 64, **GPT2) for i in (0, 1)], "run1.txt: unlike run0"),
    "hardware": (lambda t: [log_text(**GPT2, gpus=["NVIDIA A100"] * 2)], "run0.txt: ran on 2x NVIDIA A100; gpt2's tr"),
    "GPU's flag": (lambda t: [log_text(**GPT2, flags=["--train_seq_len=8"])], "run0.txt: has the flag --train_seq_len"),
    "one run": (lambda t: t[:1], r"n too small: no p for one run"),
    "no logs": (lambda t: [], "has no logs"),
    "one run twice": (lambda t: [*t, re.sub(r"(seed\W+|race-)0\b", r"\g<1>8", t[0])], r"run5\.txt: has all training"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_fault(tool, root, fault):
    change, message = FAULTS[fault]
    assert change(good()) != good()
    write_record(root, NAME, change(good()))
    code, out, _ = tool("verify", "good")
    assert code == 1
    assert re.search(f"^FAIL {NAME}: (?:{message})", out, re.MULTILINE), out


COMPILER_FLAGS = {
    "torch._inductor.config.coordinate_descent_tuning = True": "_inductor",
    "import torch._dynamo.config as config": "_dynamo",
    "torch.compile(print, mode='max-autotune')": "torch.compile(mode=)",
    "torch.compile(print, **settings)": "torch.compile(**=)",
    "os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'": "TORCHINDUCTOR_MAX_AUTOTUNE",
}


@pytest.mark.parametrize("line", COMPILER_FLAGS)
def test_verify_finds_compiler_flags(line):
    plain = "torch._dynamo.utils.counters\ntorch.compile(print, fullgraph=True, dynamic=False)"
    assert [*rules.compiler_flags(f"{plain}\n{line}\n")] == [f"line 3 uses {COMPILER_FLAGS[line]}"]
    assert "is not one Python script" in str([*rules.compiler_flags(f"{plain}\n{RULE}\n")])


def test_verify_wants_a_written_page_and_a_script(tool, root):
    source = "import torch._dynamo\n"
    page = f"{README}\n<say what>, <say who>\n<say why>\n"
    folder = write_record(root, NAME, good(source=source), source, page, what="<say it>")
    out = tool("verify")[1]
    asked = [*((f"README.md line {line}", f"<say {word}>") for line, word in ((5, "what"), (5, "who"), (6, "why")))]
    assert re.findall(r": (.*): write what '(.*)' asks for", out) == [("record.json", "<say it>"), *asked]
    assert "the track allows no compiler flags" in out
    (folder / "train_gpt.py").unlink()
    assert "train_gpt.py is missing" in tool("verify")[1]


def test_verify_passes_a_good_record_and_a_form_by_its_mean(tool, root):
    write_record(root, NAME, good(environment=dict(TORCHINDUCTOR_CACHE_DIR="x", OMP_NUM_THREADS="2")))
    assert tool("verify")[:2] == (0, f"ok {NAME}: n=5 mean 1.4302 sd 0.0019 p=1.1e-05 (nano, 20 steps)\n")
    for loss, told in (1.431, f"ok {NAME}: n=1"), (1.4501, f"FAIL {NAME}: mean 1.4501 is"):
        write_record(root, NAME, [log_text(val_loss=loss)], **FORM)
        assert tool("verify")[1].startswith(told)


HOSTILE = ["-" * 200_000 + "1", "1+" * 300_000 + "1", "(" * 100_000, "torch" + ".a" * 100_000 + "()", "\0"]


@pytest.mark.parametrize("script", HOSTILE, ids=["signs", "sums", "brackets", "dots", "null"])
def test_scripts_that_python_cannot_read_get_one_line(script, tmp_path):
    for told in rules.compiler_flags(script):
        assert re.match(r"is not one Python script \(.*\); take", told)
    (tmp_path / "my.py").write_text(script)
    with contextlib.suppress(logs.ToolError):
        assert race.modules_beside(tmp_path / "my.py", script) == []


def test_the_batch_may_change_in_a_run(tool, root):
    """Half a batch in the first half of the steps: 10 x 512 and 10 x 1,024 tokens, the last batch begins at 14,336."""
    for position, code in (14336, 0), (14335, 1):
        texts = [
            text.replace('"preset"', '"stages": [[0.5, 0.5, 0, {}], [0.5, 1, 0, {}]], "preset"')
            .replace("validation tokens: ", f"training tokens: 15360, sha256 {'ab' * 32}\nvalidation tokens: ")
            .replace("position 19456", f"position {position}")
            for text in good()
        ]
        write_record(root, NAME, texts)
        assert tool("verify")[0] == code


def test_scripts_that_run_alone_have_the_tracks_numbers():
    for name, track in TRACKS.items():
        cfg = train_gpt.PRESETS[name]
        assert (cfg.target_loss, cfg.val_tokens, cfg.val_sha256) == (track.target, track.val_tokens, track.val_sha256)
        assert fnmatch.fnmatch(track.shard.format(track.first_shard), Path(cfg.train_files).name)


def test_names_of_before_and_of_the_history_still_work(tool, monkeypatch):
    """A shallow clone, as CI has, lacks the history."""
    for name in (
        "2025-01-26_BatchSize",
        "records/2025-01-26_BatchSize/train_gpt.py",
        "batchsize",
        "21",
        "gpt2/21_BatchS",
    ):
        assert store.find_record(name, store.RECORDS).name == "21_BatchSize"
    assert "is neither a file nor a record" in tool("diff", "Unheard", "21")[2]
    if store.git("cat-file", "-t", store.COMMITS[-1]):
        for name in "2025-12-29_VeSkipGates", "ThreeTables", "groups":
            assert main(["verify", name]) == 0
            assert store.read_script(name, store.RECORDS)[1].startswith('"""')
    monkeypatch.setenv("PATH", "")
    assert "is neither a file nor a record" in tool("diff", "VeSkipGates", "21")[2], "there may be no git"


def test_against_names_the_first_deviation(tool, tmp_path):
    def against(text: str) -> tuple[int, str]:
        (tmp_path / "log.txt").write_text(text)
        return tool("verify", "--against", "record21", tmp_path / "log.txt")[:2]

    (record,) = (record for record in proof.public_history()["records"] if record["number"] == 21)
    curve = {int(step): loss for step, loss in record["curve"].items()}
    told = "follows record21 within 0.05 at 16 points, within 0.01 at its end\n"
    gpt2 = dict(preset="gpt2", steps=1770, batch_tokens=393216)
    assert against(log_text(**gpt2, curve=curve)) == (0, told)
    code, told = against(log_text(**gpt2, curve=curve | {1770: curve[1770] + 0.0101}))
    assert (code, told[:40]) == (1, "leaves record21 first at step 1770: 3.28")
    off = {step: loss + (0.0501 if step >= 750 else 0.0499) for step, loss in curve.items() if step != 500}
    told = "leaves record21 first at step 750: 3.6531, the curve 3.6030 (compared at 15 points; 1 more it lacks)\n"
    assert against(log_text(**gpt2, curve=off)) == (1, told)


def test_a_log_that_is_cut_short_never_gives_a_traceback(tool, root):
    path, text = root / "run0.txt", log_text()
    for end in range(0, len(text), 199):
        write_record(root, NAME, [text[:end]])
        assert tool("verify")[0] == 1
        path.write_text(text[:end])
        code, _, err = tool("stats", path)
        told = f"python -m speedrun: {path}: "
        assert (code, err.count("\n")) == ((2, 1) if err.startswith(told) else (0, 0))


def test_runs_are_compared_by_pairs_of_one_seed():
    newer = [proof.Run(0, seed, loss, ms) for seed, loss, ms in ((1, 1.44, 401.0), (2, 1.43, 409.0), (3, 1.42, 405.0))]
    older = [proof.Run(1, seed, loss, 806.0) for seed, loss in ((3, 1.46), (2, 1.45), (1, 1.43))]
    found = proof.compare(newer, older, slack=0.005)
    times = stats.ttest_1samp(np.log([401 / 806, 409 / 806, 405 / 806]), 0).confidence_interval()
    losses = stats.ttest_1samp([0.01, -0.02, -0.04], 0).confidence_interval()
    assert [found["train_time"][end] for end in ("low", "high")] == pytest.approx([*np.exp(times)], abs=1e-6)
    assert [found["val_loss"][end] for end in ("low", "high")] == pytest.approx([*losses], abs=1e-6)


def test_stats(tool, root, tmp_path):
    """The target is that of the track, if the logs state it, or the user's."""
    write_record(root, NAME, good())
    assert "if the true mean and sd are these): 3 in all" in tool("stats", "good")[1]
    assert re.match(
        r"n=5 .* p=0\.1 against 1\.4315\nruns .*: 32 in all", tool("stats", "good", "--target", "1.4315")[1]
    )
    sample = proof.describe(LOSSES)
    for target, runs in {1.4315: "32", 1.4302001: "more than 1000", 1.43: "more than 1000"}.items():
        assert proof.runs_needed(target - sample.mean, sample.sd) == runs
    for message, change in {"as run1.txt": dict(seed=1), "scripts": dict(seed=9, source="")}.items():
        (tmp_path / "other.txt").write_text(log_text(**change))
        assert message in tool("stats", "good", tmp_path / "other.txt")[2]
    (tmp_path / "other.txt").write_text(log_text(val_sha256="ab" * 32))
    assert "other validation tokens, sha256 abab" in tool("stats", tmp_path / "other.txt")[2]


def test_verify_computes_the_hash_of_the_training_tokens(tmp_path, monkeypatch):
    """The script's own hash, of 5 batches of two sequences, is the one wanted."""
    tokens = np.random.default_rng(0).integers(257, size=99).astype("<u2")
    (tmp_path / "shard.bin").write_bytes(bytes(1024) + tokens.tobytes())
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], train_seq_len=8, batch_tokens=16)
    batch = [(str(tmp_path / "shard.bin"), np.array([[i, i + 9]])) for i in range(0, 80, 8)]
    digest = train_gpt.hash_tokens([batch], cfg, targets=True)
    monkeypatch.setattr(rules, "nano_shard", tokens.tobytes)
    text = f'"training tokens: "{log_text(steps=5, batch_tokens=16)}'.replace('"preset"', '"train_seq_len":8, "preset"')
    for stated, problem in {
        f"training tokens: 80, sha256 {digest}\n": "",
        f"training tokens: 80, sha256 {'ab' * 32}\n": f"its tokens are 80, sha256 abab.* are 80, sha256 {digest}",
        "": "states no training tokens",
    }.items():
        (tmp_path / "log.txt").write_text(text.replace("validation tokens: ", f"{stated}validation tokens: "))
        found = [*rules.data_problems(log := Log(tmp_path / "log.txt"), TRACKS["nano"], log.source)]
        assert (len(found), bool(re.search(problem, "".join(found)))) == (bool(problem), True), found


@pytest.fixture
def scripts(tmp_path) -> list[Path]:
    paths = {tmp_path / "fast.py": "1.0", tmp_path / "slow.py": "1.5", tmp_path / "other.py": "9"}
    for path, slowness in paths.items():
        path.write_text(SCRIPT.replace("SLOWNESS", slowness))
    return [*paths]


def test_race_takes_turns_and_compares_each_with_the_next_and_the_last(tool, tmp_path, scripts, monkeypatch):
    fast, slow, _ = scripts
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0, 0))
    _, out, err = tool("race", slow, fast, slow, "--pairs", "4", "--out", tmp_path / "race")
    found = json.loads((tmp_path / "race" / "race.json").read_text())
    first, second, last = found["comparisons"]
    assert [last["val_loss"][key] for key in ("difference", "low", "high")] == [0, 0, 0]
    said = re.findall(r"verdict: screen of 4 pairs: (\w+).*; to decide, race again with fresh seeds and --pairs 5", out)
    assert said == ["slower", "faster", "undecided"]
    assert 1.4 < first["train_time"]["low"] < 1.5 < first["train_time"]["high"]
    assert first["step_time"]["ratio"] == pytest.approx(1.5, abs=0.02)
    assert [first["val_loss"][key] for key in ("difference", "low", "high")] == pytest.approx([0.005] * 3)
    assert second["train_time"]["ratio"] == pytest.approx(1 / 1.5, abs=0.02)
    assert ("load of the last minute is 1.5" in err, "something else ran" in err) == (True, False)
    order = "1-a 1-b 1-c 2-c 2-b 2-a 3-a 3-b 3-c 4-c 4-b 4-a".split()
    assert re.findall(r"race-\dof4-(\d-\w): .*/12, 0:\d\d:\d\d left", err) == order
    assert not [*tmp_path.rglob("*.pt")]


def test_a_race_goes_on_after_a_stop_with_what_it_began_with(tool, tmp_path, scripts):
    fast, slow, _ = scripts
    folder, stop = tmp_path / "race", tmp_path / "stop"
    flags = ("--pairs", "3", "--seed", "7", "--", "--stop", stop)
    new, argv = (("race", slow, fast, option, folder, *flags) for option in ("--out", "--resume"))
    for name, command, done in ("race-1of3-7-a", new, 0), ("race-2of3-8-a", argv, 3):
        stop.write_text(name)
        assert f"run {name} failed: 'exit code 1: stopped'" in tool(*command)[2]
        document = json.loads((folder / "race.json").read_text())
        assert len(document["runs"]) == done
    stop.write_text("")
    assert "is there already: go on with --resume" in tool(*new)[2]
    for other in (*argv[:-1], "elsewhere"), (*argv[:6], "4", *argv[7:]), ("race", fast, *argv[2:]):
        assert "begun with other scripts, flags, pairs" in tool(*other)[2]
    code, out, err = tool(*argv)
    assert (code, re.findall(r"race-\dof3-(\d-\w):", err)) == (0, ["8-a", "9-a", "9-b"])
    assert re.findall(r"(\w+)\.py took .* something else ran", err) == ["slow", "fast"]
    assert {path.suffix for path in folder.glob("race-*")} == {".txt", ".json"}
    assert re.search(r"slow.py against .*fast.py: n=3 pairs of one seed \(7, 8, 9\).*\n  train time: 1\.\d+ \(", out)


VERDICTS = [  # mean ratio of times, mean difference of losses, pairs
    (0.9, -0.001, 5, "faster", "$"),
    (0.9, 0.002, 20, "faster", "$"),
    (0.9, 0.002, 5, "faster at a loss that may be too high", "take more pairs"),
    (0.9, 0.02, 5, "faster at a loss that may be too high", "take more steps"),
    (1.1, 0.02, 5, "slower", "$"),
    (1.1, -0.02, 5, "slower", "its loss is lower: take fewer steps"),
    (0.99, 0.02, 5, "undecided, would take about 31 pairs", "race again with fresh seeds and as many --pairs"),
    (0.99, -0.02, 5, "undecided, would take about 31 pairs", "its loss is lower: take fewer steps"),
    (0.9, -0.02, 4, "screen of 4 pairs: faster", "to decide, race again"),
    (0.9, -0.02, 1, "screen of 1 pair: no interval", "to decide, race again"),
]


@pytest.mark.parametrize(("ratio", "drop", "n", "verdict", "advice"), VERDICTS)
def test_a_comparison_ends_with_a_verdict(ratio, drop, n, verdict, advice):
    older = [proof.Run(1, seed, 1.44, 800.0) for seed in range(n)]
    spread = [(-1) ** seed * (seed > 0) for seed in range(n)]
    newer = [proof.Run(0, i, 1.44 + drop + x * 0.004, 800 * ratio * (1 + x / 60)) for i, x in enumerate(spread)]
    found = proof.compare(newer, older, slack=0.005)
    assert (found["verdict"], bool(re.match(advice, found["advice"]))) == (verdict, True), found
    assert verdict in proof.told("a", "b", found)


def test_the_rules_are_worded_as_the_verdict_is():
    assert proof.FASTER in " ".join((ROOT / "records" / "RULES.md").read_text().split())


def test_what_was_raced_is_a_table_that_fits_a_terminal(tool, root, tmp_path, scripts, monkeypatch):
    """An idea that is only a flag is one of them. The newest comes last, damaged files are named."""
    monkeypatch.setenv("COLUMNS", "100")
    fast, slow, _ = scripts
    assert "no race has a pair yet" in tool("tried")[2]
    assert tool("race", f"{fast} --val_loss_every 0", fast, slow, "--pairs", "2", "--note", "an\tidea|\x1b")[0] == 0
    (folder,) = Path("logs").iterdir()
    flags = [Log(folder / f"race-1of2-1-{letter}.txt").flags[6:] for letter in "abc"]
    assert flags == [["--val_loss_every", "0"], [], []]
    for name in "nano/01_Old", "nano/02_Same":
        write_record(root, name, [])
        write_race(root / name, "", SOURCE)
    (root / "nano/03_Odd").mkdir()
    (root / "nano/03_Odd" / "race.json").write_text("half")
    code, out, err = tool("tried")
    head, *rows = out.splitlines()
    assert (code, head.split(), len(rows)) == (0, "date script against n time loss verdict note".split(), 4)
    assert rows[0] == "26-01-02 script 0      script 1      5   0.900 ±0.0%  +0.0000 ±0.0000 faster"
    assert re.search(r"fast --val_lo slow          2   0\.6\d\d ±\d+\.\d%.* screen    an idea\|\?$", out, re.M)
    assert max(map(len, rows)) <= 100
    assert "Odd/race.json: no JSON object" in err
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, tool("tried")[1].splitlines())) <= 80


TWO = (signal.SIGINT, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGKILL, 1), TWO])
def test_a_stopped_race_leaves_no_process(tmp_path, number, processes):
    script = tmp_path / "wait.py"
    script.write_text("import os, sys, time; open(f'{sys.argv[-1]}/{os.getpid()}.pid', 'w').close(); time.sleep(60)")
    command = f"-m speedrun race {script} {script} --nproc_per_node {processes} --out {tmp_path}/race -- {tmp_path}"
    heed = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # though these tests may run under nohup
    options = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    racing = subprocess.Popen([sys.executable, *command.split()], **options)
    wait_for(lambda: len([*tmp_path.glob("*.pid")]) == processes)
    racing.send_signal(number)
    told = racing.communicate(timeout=20)[1].splitlines()[-1]
    killed = number == signal.SIGKILL
    assert (racing.returncode, told == "python -m speedrun: interrupted") == ((-9, False) if killed else (130, True))
    for path in tmp_path.glob("*.pid"):  # it may stay in /proc until its new parent asks; then without command line
        line = Path(f"/proc/{path.stem}/cmdline")
        wait_for(lambda line=line: not line.exists() or not line.read_bytes(), seconds=20)


def test_a_race_that_cannot_be_run_says_so_in_one_line(tool, tmp_path, scripts, monkeypatch):
    fast, _, other = scripts
    zero = tmp_path / "zero.py"
    (tmp_path / "two.py").write_text("import sys\nimport\n")
    (tmp_path / "silent.py").write_text("run_id = log_dir = 0\n")
    assert "needs 2 to 26 scripts" in tool("race", fast)[2]
    assert "leave them out" in tool("race", fast, fast, "--", "--seed=1")[2]
    assert "leave them out" in tool("race", fast, f"{fast} --seed 1")[2]
    assert "perhaps with flags (No closing quotation)" in tool("race", fast, f"{fast} '--seed")[2]
    zero.write_text(SCRIPT.replace("SLOWNESS", "0"))
    told = f"{tmp_path}/z/race-1of6-1-a.txt: val_loss 1.401, train_time 0.0: expec"
    assert told in tool("race", zero, fast, "--out", "z")[2]
    assert "its runs differ in val_sha256: race with the same data" in tool("race", fast, other)[2]
    told = f"wrote no {tmp_path}/r/race-1of6-1-a.txt. A script has to"
    assert told in tool("race", "silent.py", fast, "--out", "r")[2]
    monkeypatch.setattr(race, "run_script", lambda *_: pytest.fail("a run for nothing"))
    assert "--seed 2147483646: all seeds" in tool("race", fast, other, "--pairs", "3", "--seed", str(2**31 - 2))[2]
    assert "two.py: is not one Python script ('invalid syntax" in tool("race", "two.py", fast)[2]
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    code, _, err = tool("race", fast, fast)
    assert (code, "scipy" in err, err.count("\n")) == (2, True, 1)


def test_a_race_of_a_foreign_script_says_what_it_takes(tool, tmp_path, scripts):
    """It runs where it lies if it imports what is beside it."""
    lines = "\n".join(["'its source'", RULE, RULE, "step:2/2 val_loss:3.1 train_time:5ms step_avg:1.0ms", ""])
    (tmp_path / "beside.py").write_text(f"TEXT = {lines!r}\n")
    code = "import sys, beside\nflags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    code += 'open("/".join(flags["--" + x] for x in ("log" "_dir", "run" "_id")) + ".txt", "w").write(beside.TEXT)\n'
    (tmp_path / "foreign.py").write_text(code)
    _, out, err = tool("race", "foreign.py", scripts[0], "--pairs", "1", "--out", tmp_path / "race")
    told = ["foreign.py does not look like one of our scripts. A script has to accept --seed N, --log_dir"]
    told += ["foreign.py imports beside beside it, so it runs where it lies", "foreign.py states no validation tokens"]
    assert [text in err for text in told] == [True] * 3, err
    assert "n=1 pairs" in out


def test_a_race_gets_its_data_first_and_leaves_nothing_if_that_fails(tool, tmp_path, scripts, monkeypatch):
    fast, *_ = scripts
    asked = []
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)

    def preflight(command, **settings):
        asked.append((command[1:], settings["env"]["NPROC"]))
        return types.SimpleNamespace(returncode=2)

    monkeypatch.setattr(race.subprocess, "run", preflight)
    argv = ("race", fast, f"{fast} --preset mini", "--", "--preset", "nano", "--muon_lr", "1")
    assert "the data are not ready, see above" in tool(*argv)[2]
    assert asked[0] == (["-m", "speedrun", "check", "--preset=nano"], "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.py", "other.py", "records", "slow.py"]
    assert tool("race", fast, fast, "--", "--train_files", "own")[0] == 2, "the script's own failure"
    assert len(asked) == 1


def test_race_says_before_it_begins_why_no_record_can_come_of_it(tool, root, tmp_path, scripts, monkeypatch):
    monkeypatch.setattr(race, "in_turn", lambda plan, *_, **__: plan)
    fast, slow, other = scripts
    write_record(root, NAME, [], slow.read_text())
    (tmp_path / "long.py").write_text(fast.read_text() + 199 * "# line\n")
    (tmp_path / "a").mkdir()
    write_race(tmp_path / "a", "", "")  # of seeds 0 to 4
    for argv, problem in (
        ((fast, fast, slow), "two of these scripts are the same"),
        ((fast, other), "no record can come of this race: none of its scripts is Good: race YOUR_SCRIPT Good"),
        ((fast, slow, "--pairs", "4"), "no record can come of this race: fewer than 5 pairs"),
        ((fast, slow, "--", "--muon_lr=1"), "no record can come of this race: flags --muon_lr: put"),
        ((fast, slow, "--nproc_per_node", "8", "--", "--train_seq_len=8192"), "no record can come of this race: flags"),
        ((fast, slow, "--seed", "3", "--out", tmp_path / "b"), "no record can come of this race: its seeds are not"),
        ((tmp_path / "long.py", slow), f"no record can come of this race: 205 lines change against {NAME}, for an"),
    ):
        said = tool("race", *argv)[2]
        assert (said.startswith(problem), said.count("\n")) == (True, 1), said
    fresh = ("--seed", "5", "--out", tmp_path / "b")
    for flags in ("--preset", "nano"), ("--train_seq_len", "8192"):  # gpt2 on one GPU may shorten sequences
        assert tool("race", fast, slow, *fresh, "--", *flags)[2] == ""


def test_from_a_race_to_a_pull_request(tool, root, tmp_path, scripts):
    """From a copy of the root's script, which is the newest record's, to what verify accepts, by submit, twice."""
    fast, slow, _ = (path.read_text() for path in scripts)
    write_record(root, NAME, good(source=slow.rstrip("\n")), slow)
    (root / "README.md").write_text(EMPTY_TABLES)
    Path("train_gpt.py").write_text(slow)
    Path("my.py").write_text(fast)  # with the idea
    argv = ("my.py", "train_gpt.py", "--pairs", "8", "--seed", "101", "--out", "logs/MyIdea", "--note", "my idea")
    assert "no record can" not in tool("race", *argv, "--", "--preset", "nano")[2]
    paths = sorted(tmp_path.glob("logs/MyIdea/race-*-a.txt"))
    assert "p=" in tool("stats", *paths)[1]
    code, out, _ = tool("submit", "MyIdea", *paths, "--race", "logs/MyIdea/race.json")
    folder, *left = out.splitlines()
    (readme,) = root.glob("*/*_MyIdea/README.md")
    assert (code, folder) == (1, f"{readme.parent}: what is left to do")
    files = {path.name for path in readme.parent.iterdir()}
    assert files == {"README.md", "record.json", "train_gpt.py", "race.json", "runs.txt"}
    assert [len(store.logs_of(readme.parent, beside=beside)) for beside in ("", "older")] == [8, 8]
    assert "import json" not in (readme.parent / "runs.txt").read_text(), "no copies of the script"
    card = dict(date=str(datetime.date.today()), what="my idea", kind="idea", after=NAME, ranked=True)
    assert json.loads((readme.parent / "record.json").read_text()) == card
    kinds = ["write what '<say what the", "write what '<say why", "cp ", "README.md: its rows", "./test.sh"]
    assert [kind in line for kind, line in zip(kinds, left, strict=True)] == [True] * 5
    readme.write_text(re.sub("<say.*>", "said", readme.read_text()))
    Path("train_gpt.py").write_text(fast)
    code, out, _ = tool("submit", "MyIdea")
    assert (code, out.count("\n")) == (0, 3)
    assert "(nano, 20 steps" in tool("verify")[1]
    Path("bad.txt").write_text(log_text(source="import sys\nimport"))
    Path("bare.txt").write_text(Log(paths[0]).stored)
    for argv, told in (
        (["Other"], "name the logs"),
        (["../up", *paths], "no name for a record"),
        (["good", *paths], f"{NAME} has that name"),
        (["Bare", "bare.txt"], "bare.txt: states no script but its SHA-256"),
        (["Bad", "bad.txt"], "bad.txt: is not one Python script ('invalid syntax"),
    ):
        assert told in tool("submit", *argv)[2]
    assert len(list(root.glob("*/*"))) == 2, "a refused record leaves nothing"
    path, document = readme.with_name("race.json"), json.loads(readme.with_name("race.json").read_text())
    path.write_text(json.dumps(document | dict(seed=103, pairs=6, runs=document["runs"][4:])))
    kept = {log.name: log.stored for log in store.logs_of(path.parent) if log.seed > 102}
    (path.parent / "runs.txt").write_text(store.joined(kept))
    assert "race.json: no sound log of its run race-1of6-103-a" in tool("verify", "MyIdea")[1], "rounds were left out"
    assert re.search(r"### nano: at most .*_MyIdea\) \| my idea \|", (root / "README.md").read_text(), re.S)
    assert '"MyIdea"' in Image.open(root / "curves.png").text["Comment"]


NEWER, NEXT = SOURCE + "# newer\n", "nano/02_Next"


def test_verify_wants_the_race_against_the_record_before(tool, root):
    write_record(root, NAME, good())
    idea = dict(source=f"{SOURCE}# of gpt2\n", ranked=False)
    write_record(root, "gpt2/01_Idea", [], **idea, after=NAME)
    folder = write_record(root, NEXT, good(source=NEWER), source=NEWER, after="gpt2/01_Idea")
    path = folder / "race.json"
    write_race(folder, NEWER, idea["source"])
    against = "loss +0.0000 (+0.0000 to +0.0000), against"
    assert f"{against} gpt2/01_Idea" in tool("verify")[1], "the newest one, though it is not ranked"
    document = write_race(folder, NEWER, SOURCE)
    assert f"steps); faster: train time 0.900 (0.900 to 0.900), {against} {NAME}\n" in tool("verify")[1]
    scripts, runs, other = document["scripts"], document["runs"], dict(sha256="ab" * 32)
    for problem, change in {
        "lacks this record's script": dict(scripts=[scripts[0] | other, scripts[1]]),
        "none of its scripts is Good or Idea: race YOUR_SCRIPT Good": dict(scripts=[scripts[0], scripts[1] | other]),
        "the log of its run race-0-a says otherwise": dict(runs=[runs[0] | dict(train_time=900.0), *runs[1:]]),
        "the log of its run race-0-b says otherwise": dict(runs=[runs[0], runs[1] | dict(val_loss=1.4), *runs[2:]]),
        "has 9 runs, not 5 of each script; --resume the race. So far screen of 4 pairs: faster": dict(runs=runs[:-1]),
        "has 1 runs, not 5 of each script; --resume the race. So far it has no pair": dict(runs=runs[:1]),
        "its runs are not those of a race in order": dict(runs=[*runs[:8], runs[0], runs[9]]),
        "its runs differ in hardware: race": dict(runs=[*runs[:9], runs[9] | dict(hardware="another")]),
        "flags --muon_lr, --seq: put": dict(flags=["--preset", "nano", "--muon_lr=-1", "--seq", "-8"]),
        "not what `race` wrote": dict(runs=[{}]),
        "no sound log of its run race-0-a, with the race's flags, is in": dict(flags=["--preset", "nano"]),
    }.items():
        path.write_text(json.dumps(document | change))
        assert tool("verify", "next")[1].startswith(f"FAIL {NEXT}: race.json: {problem}")
    for problem, settings in {
        f"against {NAME} faster at a loss that may be too high: train time 0.900 (0.900 to 0.900)": dict(drop=0.006),
        "has 6 runs of the script, there are 5 sound logs: leave none out": dict(losses=[*LOSSES, 1.47]),
        "fewer than 5 pairs are a screen: race with --pairs 5. So far screen of 4": dict(losses=LOSSES[1:]),
        f"against {NAME} slower: train time 1.100 (1.100 to 1.100), loss +0.0000": dict(ratio=1.1),
    }.items():
        write_race(folder, NEWER, SOURCE, **settings)
        assert problem in tool("verify", "next")[1]
    card = folder / "record.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | FORM))
    assert tool("verify", "next")[0] == 0, "a form need not gain"
    texts = {path.relative_to(folder): text for path, text in store.texts_of(folder).items()}
    (folder / "runs.txt").write_text(store.joined({k: v for k, v in texts.items() if k.name != "race-3-b.txt"}))
    lacking = f"no sound log of its run race-3-b, with the race's flags, is in its runs.txt, nor in that of {NAME}"
    assert lacking in tool("verify", "next")[1]
    kept = (root / NAME / "runs.txt").read_text()
    (root / NAME / "runs.txt").write_text(kept + store.joined({k.name: v for k, v in texts.items() if "-b" in k.name}))
    assert tool("verify", "next")[0] == 0, "the older record has it"
    (root / NAME / "runs.txt").write_text(kept)
    path.unlink()
    assert "race.json: is missing; race the script against" in tool("verify", "next")[1]
    (root / "README.md").write_text(EMPTY_TABLES)
    waiting = (
        f"waiting for {NEXT}: finish it ({needs.PYTHON} -m speedrun verify {NEXT}) or move it away: {path}: is missing"
    )
    assert waiting in tool("table")[2]


def test_the_runs_of_a_record_come_back_as_they_were(tmp_path):
    texts = {"a b.txt": "one\n\n", "c.txt": "", "older/c.txt": "==> two\nend"}
    (tmp_path / "runs.txt").write_text(store.joined(texts))
    assert {str(path.relative_to(tmp_path)): text for path, text in store.texts_of(tmp_path).items()} == texts
    (tmp_path / "runs.txt").write_text(store.joined(texts) + store.joined({"c.txt": ""}))
    with pytest.raises(logs.ToolError, match="has one of them twice"):
        store.texts_of(tmp_path)


@pytest.mark.parametrize("odd", ['{"preset": []}', '{"stages": [1]}', '{"batch_tokens": -1}', "7"])
def test_an_odd_configuration_of_a_log_is_named(tool, root, odd):
    write_record(root, NAME, [re.sub("(?m)^configuration: .*", f"configuration: {odd}", text) for text in good()])
    code, out, _ = tool("verify")
    assert (code, "run0.txt: " in out) == (1, True)
    assert tool("stats", "good")[0] in (0, 2)


def test_each_kind_of_gpu_has_a_leaderboard_that_its_first_record_opens(tool, root):
    """It needs no race, and the next record of nano races the newest one of nano, or the newest of all."""
    write_record(root, NAME, good())
    on_gpu = dict(preset="gpt2", batch_tokens=393216, gpus=["NVIDIA GeForce RTX 4090"], source=f"{SOURCE}# more\n")
    on_gpu |= dict(flags=["--train_seq_len=8192"])
    runs = [log_text(seed=seed, val_loss=3.27 + loss / 1000, **on_gpu) for seed, loss in enumerate(LOSSES)]
    write_record(root, NEXT, runs, on_gpu["source"], after=NAME)
    assert re.search(rf"ok {NEXT}: n=5 mean 3.2714 .* \(gpt2 on 1x NVIDIA GeForce RTX 4090, 20", tool("verify")[1])
    write_record(root, "nano/03_Third", good(source=NEWER), NEWER, after=NEXT)
    assert f"is missing; race the script against {NAME} or {NEXT}" in tool("verify", "third")[1]
    write_record(root, "gpt2/01_Fourth", runs, on_gpu["source"], after="nano/03_Third")
    assert f"is missing; race the script against {NEXT} or nano/03_Third" in tool("verify", "fourth")[1]


def test_record_json_says_what_kind_of_record_it_is(tool, root):
    """An idea changes at most 200 lines; others may change more. A form names a test, now or at a commit."""
    write_record(root, NAME, good())
    more = dict(after=NAME, ranked=False, date="2025-11-29")
    write_record(root, "gpt2/46_Next", [], SOURCE + "# line\n" * 200, **more)
    assert tool("verify", "next")[0] == 0
    for card, wrong in (
        (dict(kind="idea"), f"201 lines change against {NAME}, for an idea at most 200"),
        (dict(kind="idea", evidence="2026-01-01_Gone at commit e5eb9b8"), None),
        (dict(kind="idea", evidence="2026-01-01_Gone"), "evidence names no step"),
        (FORM, None),
        (FORM | dict(evidence="tests/test_nothing.py"), "evidence names no step (of an idea) or test"),
        (dict(kind=rules.ONE_CARD, readme="# Measured on one H100"), None),
        (dict(kind=rules.ONE_CARD), "is not ranked, and its page says 'measured on one'"),
        (dict(kind=rules.ONE_CARD, readme="measured on one", ranked=True), "is not ranked, and its page"),
        (dict(kind="milestone", evidence="public record 46"), None),
        (dict(kind="milestone", evidence="public record 55"), "not 'public record N' of its date"),
        (dict(kind="ideas"), "its kind is 'ideas'"),
    ):
        write_record(root, "gpt2/46_Next", [], SOURCE + "# line\n" * 201, **more | card)
        code, out, _ = tool("verify", "next")
        assert (code, wrong is None or wrong in out) == (int(wrong is not None), True), out


def test_records_follow_each_other_by_their_cards(tool, root):
    write_record(root, NAME, good())
    write_record(root, NEXT, good(), after=NAME)
    assert [*map(store.name_of, lineage(root))] == [NAME, NEXT]
    third = write_record(root, "nano/03_Third", good(), after=NAME)
    assert f"{NEXT} and nano/03_Third both come after {NAME}: mend" in tool("verify")[2]
    write_record(root, "nano/00_Third", good(), after=NEXT)
    (third / "record.json").unlink()
    third.rename(root / "gone")
    assert f"nano/00_Third comes after {NAME}: give it a higher number" in tool("verify")[2]
    (root / "nano/00_Third").rename(third)
    write_record(root, "nano/03_Third", good(), after="nano/09_Gone")
    assert "nano/03_Third: no line leads there from the first record" in tool("verify")[2]
    for odd in "{}", "[1]", '{"date": "", "what": 1, "kind": "idea", "after": null, "ranked": true}', '{"more": 1}':
        (third / "record.json").write_text(odd)
        code, _, err = tool("verify")
        assert (code, err.count("\n"), "Third/record.json" in err) == (2, 1, True), err


def test_diff_is_coloured_on_terminals_and_begins_at_the_root(tool, root, tmp_path, monkeypatch):
    (tmp_path / "train_gpt.py").write_text(SOURCE)
    (tmp_path / "my.py").write_text(SOURCE + "more\x1b[2J\n")
    _, plain, told = tool("diff", "my.py")
    assert (plain.splitlines()[-1], told) == ("+more?[2J", "0 lines removed, 1 added\n")
    assert tool("diff", "my.py", "train_gpt.py")[1].splitlines()[-1] == "-more?[2J"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert tool("diff", "my.py")[1].splitlines()[-1] == "\x1b[32m+more?[2J\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert tool("diff", "my.py")[1] == plain


def test_table_is_idempotent_checked_and_safe(tool, root):
    readme = root / "README.md"
    readme.write_text(EMPTY_TABLES)
    write_record(root, NAME, good())
    folder = write_record(root, NEXT, good(source=NEWER), source=NEWER, after=NAME)
    write_race(folder, "", NEWER, SOURCE, ms=810.0)
    hostile = good(cpu="<img src=x>|\x1b[2J", source="\x1b[2J")
    folder = write_record(root, "nano/04_Hostile", hostile, "\x1b[2J", what="<b>|", after=NEXT)
    write_race(folder, "\x1b[2J", NEWER, ms=810.0)
    assert (tool("table", "--check")[0], readme.read_text()) == (1, EMPTY_TABLES)
    assert tool("table")[0] == 0
    text = readme.read_text()
    cells = "one line that says what | 20 | 1.4302 (sd 0.0019, n=5) | 1e-05 | 0.81 (sd 0.00)"
    assert f"| [Good]({NAME}) | {cells} |  | 1.000 | 499 | Some Proc" in text
    assert f"| [Next]({NEXT}) | {cells} | 0.900 (0.900 to 0.900) | 0.900 | 499 | Some Proc" in text
    assert "&#60;img src=x&#62;&#124;?&#91;2J" in text
    assert (tool("table", "--check")[0], tool("table")[0], readme.read_text()) == (0, 0, text)
    more = dict(after="nano/04_Hostile", ranked=False, kind=rules.ONE_CARD)
    write_record(root, "gpt2/01_Form", [], NEWER + "#", **more)
    follower = write_record(root, "nano/06_Six", good(source="six"), "six", after="gpt2/01_Form")
    write_race(follower, "six", NEWER + "#", ms=810.0)
    assert tool("table")[0] == 0
    new = "\n".join(line for line in readme.read_text().splitlines() if line not in text)
    assert "### gpt2: measured on one card, no whole run\n| [Form](gpt2/01_Form) | one line that" in new
    assert re.search(r"_Six\) \|.* 0\.900 \(0\.900 to 0\.900\), against gpt2/01_Form \|  \| 499", new)


def test_the_picture_shows_what_its_command_draws_today(tmp_path):
    """The PNG carries what it shows."""
    assert main(["plot", "-o", str(tmp_path / "new.png")]) == 0
    shipped, new = (
        json.loads(Image.open(path).text["Comment"]) for path in (store.RECORDS / "curves.png", tmp_path / "new.png")
    )
    assert shipped == new, "draw it anew: python -m speedrun plot"
    assert new["curves"][-1]["name"] == "plain GPT"


PUBLIC_LINES = [  # as public logs have them, main and medium track first, then those of the optimizer track
    "step:{0}/250 val_loss:{1:.4f} train_time:{2}ms step_avg:96.38ms",
    "step:{0}/250 val_loss:{1:.5f} train_time:{3:.3f}s step_avg:191.72ms",
    "step:{0}/250 val_loss:{1:.5f} train_time:{3:.3f}s step_avg:nanms",
    "step:{0}/250 val_loss:{1:.5f} val_avg_loss:9.1 val_ema_loss:4.5 train_time:{3:.3f}s step_avg:191.72ms",
    "step:{0}/250 val_loss:{1:.5f} train_time:{3:.3f}s step_avg:191.72ms ema_beta:0.998",
    "step:{0}/250 val_loss:{1:.5f} train_time:{3:.3f}s step_avg:nanms extrap_count:3 extrap_rel:1.2e-03 handoff:keep",
]


@pytest.mark.parametrize("form", PUBLIC_LINES)
def test_public_logs_of_all_tracks_are_read(tool, tmp_path, form):
    for name, end in dict(a=3.27, b=3.275).items():
        points = (0, 10.82584, 0), (125, 4.62997, 23_965), (250, end, 47_930)
        lines = [form.format(step, loss, ms, ms / 1000) for step, loss, ms in points]
        (tmp_path / f"{name}.txt").write_text("\n".join(["import sys", RULE, "Running Python 3", RULE, *lines, ""]))
    told = "n=2 mean 3.2725 sd 0.0035"
    assert tool("stats", "a.txt", "b.txt", "--target", "3.28")[1].startswith(f"{told} p=0.1 against 3.28")
    assert (
        tool("stats", "a.txt", "b.txt")[1]
        == f"{told}; the logs state no track, so give its target for a p: --target LOSS\n"
    )
    assert tool("plot", "a.txt", "b.txt", "-o", "x.png")[0] == 0
    (curve, _) = json.loads(Image.open("x.png").text["Comment"])["curves"]
    assert (curve["seconds"], curve["mean"][1]) == ([0, 23.965, 47.93], pytest.approx(4.63, abs=1e-4))


def test_a_plot_shows_what_there_is(tool, root, tmp_path):
    """A run that only validates at its end has a smoothed training loss; what holds no curve is named, not drawn."""
    losses, text = itertools.count(1), log_text(steps=60, curve={60: 1.43})
    text = re.sub(r"train_loss:[\d.]+", lambda _: f"train_loss:{next(losses)}", text)
    begun = text[: text.index("step:1/60")]
    for name, part in dict(begun=begun, cut="cut short", half=text[: text.index("step:31/60")], whole=text).items():
        Path(f"{name}.txt").write_text(part)
    code, _, err = tool("plot", *sorted(tmp_path.glob("*.txt")), "-o", "x.png")
    told = r"left out: .*begun\.txt: no step lines.*\nleft out: .*cut\.txt: not a log.*\n.*half\.txt: ends at step 30"
    assert (code, bool(re.match(told, err))) == (0, True)
    half, dot, whole = json.loads(Image.open("x.png").text["Comment"])["curves"]
    assert [curve["is_training"] for curve in (half, dot, whole)] == [True, False, True]
    assert (dot["steps"], dot["mean"], whole["steps"], half["steps"][-1]) == ([60], [1.43], [*range(3, 61)], 30)
    assert whole["mean"] == pytest.approx([*range(2, 60)]), "of three steps each"
    write_record(root, NAME, [text, text[: text.index("step:31/60")]])
    assert re.search(r"run1\.txt: ends at step 30 of 60: left out", tool("plot", "good", "-o", "x.png")[2])
    assert json.loads(Image.open("x.png").text["Comment"])["curves"][1]["steps"] == whole["steps"]
    assert "Good: no curve, only its end: SCRIPT=" in tool("plot", "-o", "x.png")[2]
    assert [curve["steps"] for curve in json.loads(Image.open("x.png").text["Comment"])["curves"]] == [[60]]
    (root / NAME / "curve").mkdir()
    (root / NAME / "curve" / "run.txt").write_text(log_text(curve={30: 1.6, 60: 1.43}, steps=60))
    assert "no curve" not in tool("plot", "-o", "x.png")[2]
    assert "nothing to draw" in tool("plot", "cut.txt")[2]


def test_a_plot_tells_runs_apart_and_draws_the_target_of_their_text_alone(root, tmp_path):
    paths = [tmp_path / name for name in ("a/r.txt", "b/r.txt", "x__y$.txt")]
    for i, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text(log_text(val_loss=0.2 + i, val_sha256="ab" * 32))
    drawn = plots.plot_curves(plots.curves_of(paths, root), tmp_path / "x.png").axes
    assert [text.get_text().strip() for panel in drawn for text in panel.texts] == ["a/r", "b/r", "x__y$"]
    assert len({line.get_color() for line in drawn[0].lines}) == 3
    paths[0].write_text(log_text(step_ms=900))
    drawn = plots.plot_curves(plots.curves_of(paths, root), tmp_path / "x.png").axes
    texts = [[text.get_text().strip() for text in panel.texts] for panel in drawn]
    assert texts == [["a/r", "target 1.45"], ["b/r", "x__y$"]]
    many = [log_text(step_ms=ms, seed=ms) for ms in (40, 900)]
    for path, text in zip(paths, many, strict=False):
        path.write_text(text)
    [panel] = plots.plot_curves(plots.curves_of(paths[:2], root), tmp_path / "x.png").axes
    assert panel.get_xscale() == "log"


FAILURES = {  # what rank 1 does and what is told; rank 0 waits for it, and loses it
    "sys.exit('train_gpt.py: mend this')": "exit code 1: train_gpt.py: mend this",
    "raise ValueError('mend this')": r"exit code 1: \[rank1\]: ValueError: mend this",
    "os.kill(os.getpid(), 9)": r"exit code 1: .*failed \(exitcode: -9\) local_rank: 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_race_tells_what_the_rank_said_that_failed(tool, tmp_path, failure):
    script = tmp_path / "fails.py"
    begin = "import os, sys\nfrom torch.distributed import *\ninit_process_group('gloo')\n"
    script.write_text(f"{begin}if get_rank():\n    {failure}\nbarrier()")
    told = tool("race", script, script, "--nproc_per_node", "2", "--out", tmp_path / "race")[2]
    assert re.search(rf"run race-1of6-1-a failed: ['\"]{FAILURES[failure]}", told), told


def test_modules_are_commands_and_the_benchmark_gets_the_environment_of_a_training(capsys, monkeypatch):
    options: list[tuple[int, int]] = []
    monkeypatch.setattr(process, "LIBC", types.SimpleNamespace(mallopt=lambda *option: options.append(option)))
    for name in sorted(MODULES, key="bench".__eq__):
        monkeypatch.setattr(os, "environ", {"MALLOC_TRIM_THRESHOLD_": "7"})
        seen = types.SimpleNamespace(main=lambda argv: [argv, os.environ.get("PYTORCH_ALLOC_CONF")])
        monkeypatch.setitem(sys.modules, f"speedrun.{name}", seen)
        expandable = "expandable_segments:True" if name == "bench" else None
        assert main([name, "--preset", "nano"]) == [["--preset", "nano"], expandable]
    assert (options, os.environ["GOMP_SPINCOUNT"]) == ([(-1, 7), (-3, 33554432)], "10000")
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    names = "check evaluate bench race tried diff stats verify table submit plot".split()
    assert [name for name in names if not re.search(rf"^    {name} ", told, re.M)] == []
