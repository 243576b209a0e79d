"""python -m speedrun: what verify lets through and what not, statistics, a race, the other commands, the picture."""

import dataclasses
import functools
import hashlib
import importlib
import json
import re
import shutil
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
from speedrun import ROOT, process, proof, race, rules, store
from speedrun.__main__ import build_parser, main
from speedrun.logs import RULE, Log
from speedrun.publish import BEGIN, END
from speedrun.store import TRACKS
from synthetic_logs import LOSSES, SCRIPT, SOURCE, log_text, write_race, write_record
from world_worker import wait_for

NAME, NEXT = "nano/01_Good", "nano/02_Next"
NEWER = f"{SOURCE}\n# newer"
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

    return lambda command, *argv: (main([command, "--root", str(root), *map(str, argv)]), *capsys.readouterr())


def edit(old: str, new: str):
    return lambda texts: [re.sub(old, new, texts[0]), *texts[1:]]


FAULTS = {
    "cut short": (edit("step:20/20 val_loss", "no"), "run0.txt: ends at step 20 of 20 without .*: cut short"),
    "a step missing": (edit("step:7/20", "tep:7/20"), "run0.txt: lacks a step line"),
    "other script": (edit("import torch\n", "import os\n"), "run0.txt: the script of the log is not the folder's"),
    "one seed twice": (lambda t: [*t, log_text(seed=2)], "run5.txt: has seed 2, as run2.txt has"),
    "one run twice": (lambda t: [*t, re.sub(r"(seed\W+|race-)0\b", r"\g<1>8", t[0])], "run5.txt: has all training"),
    "validation tokens": (edit("sha256 .*", f"sha256 {'ab' * 32}"), "run0.txt: other validation tokens, sha256 abab"),
    "texts": (lambda t: [log_text(i, preset="gpt2", val_sha256=f"{i}" * 64) for i in (0, 1)], "run1.txt: unlike run0"),
    "shards": (edit("train_000000.bin, ", "train_000001.bin, "), "run0.txt: the training stream is not the track's"),
    "recompiled": (edit("started: 0", "started: 2"), "run0.txt: recompiles after the clock started: 2"),
    "threads": (edit("1 processes, 2", "2 processes, 2"), "run0.txt: uses 4 CPU threads"),
    "a GPU": (lambda t: [log_text(gpus=["NVIDIA T4"])], "run0.txt: ran on a GPU"),
    "hardware": (lambda t: [log_text(preset="gpt2", gpus=["NVIDIA A100"] * 2)], "run0.txt: ran on 2x NVIDIA A100"),
    "own flag": (edit('"--seed"', '"--muon_lr=1", "--seed"'), "run0.txt: has the flag --muon_lr: put settings"),
    "compiler": (edit("flags:", 'environment: {"TORCHINDUCTOR_X": "1"}\nflags:'), "run0.txt: ran with TORCHINDUCTOR_X"),
    "one run": (lambda t: t[:1], "n too small: p=nan is not"),
    "p too large": (lambda t: [t[0], log_text(seed=9, val_loss=1.449)], r"n too small: p=0\.23 is not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_fault(tool, root, fault):
    change, message = FAULTS[fault]
    write_record(root, NAME, change(good()))
    code, out, _ = tool("verify", "good")
    assert (code, bool(re.search(f"^FAIL {NAME}: (?:{message})", out, re.MULTILINE))) == (1, True), out


def test_verify_passes_a_good_record_and_a_form_by_its_mean(tool, root):
    write_record(root, NAME, good())
    assert tool("verify")[:2] == (0, f"ok {NAME}: n=5 mean 1.4302 sd 0.0019 p=1.1e-05 (nano, 20 steps)\n")
    for loss, told in (1.431, f"ok {NAME}: n=1"), (1.4501, f"FAIL {NAME}: mean 1.4501 is"):
        write_record(root, NAME, [log_text(val_loss=loss)], **FORM)
        assert tool("verify")[1].startswith(told)


def test_eight_h100_are_the_machine_of_gpt2_and_four_are_another():
    for n, board in (8, "gpt2 on 8xH100"), (4, "gpt2 on 4x NVIDIA H100 80GB HBM3"):
        text = log_text(preset="gpt2", gpus=["NVIDIA H100 80GB HBM3"] * n)
        assert store.board_of(Log(Path("x.txt"), text)) == board


def test_verify_finds_compiler_flags(tool, root):
    for line, told in (
        ("torch._inductor.x = True", "_inductor"),
        ("torch.compile(f(), mode='x')", r"torch.compile\(f\(\), mode="),
        ("x('TORCHINDUCTOR_X')", "TORCHINDUCTOR_X"),
    ):
        source = f"torch._dynamo.utils.counters\ntorch.compile(print, fullgraph=True, dynamic=False)\n{line}"
        write_record(root, NAME, good(source=source), source)
        assert re.match(f"FAIL .*: line 3 uses '{told}'; the track allows no compiler flags", tool("verify")[1])


def test_scripts_and_rules_have_the_numbers_of_the_tracks():
    for name, track in TRACKS.items():
        cfg = train_gpt.PRESETS[name]
        assert (cfg.target_loss, cfg.val_tokens, cfg.val_sha256) == (track.target, track.val_tokens, track.val_sha256)
    assert proof.FASTER in " ".join((ROOT / "records" / "RULES.md").read_text().split())


def test_stats_of_one_experiment_against_a_target(tool, root):
    """The target is that of the track, if the logs state it, or the user's."""
    write_record(root, NAME, good())
    assert re.search(r"p=1.1e-05 against 1.45\n.*: 3 in all", tool("stats", "good")[1])
    assert re.search(r"p=0.1 against 1.4315\n.*: 32 in all", tool("stats", "good", "--target", "1.4315")[1])
    Path("other.txt").write_text(log_text(seed=9, source="", val_sha256="ab" * 32))
    assert "other.txt: is of another script" in tool("stats", "good", "other.txt")[2]
    assert "other validation tokens, sha256 abab" in tool("stats", "other.txt")[2]


def test_runs_are_compared_by_pairs_of_one_seed():
    newer = [proof.Run(0, seed, loss, ms) for seed, loss, ms in ((1, 1.44, 401.0), (2, 1.43, 409.0), (3, 1.42, 405.0))]
    older = [proof.Run(1, seed, loss, 806.0) for seed, loss in ((3, 1.46), (2, 1.45), (1, 1.43))]
    found = proof.compare(newer, older, slack=0.005)
    times = stats.ttest_1samp(np.log([401 / 806, 409 / 806, 405 / 806]), 0).confidence_interval()
    losses = stats.ttest_1samp([0.01, -0.02, -0.04], 0).confidence_interval()
    for key, ends in ("train_time", np.exp(times)), ("val_loss", losses):
        assert [found[key][end] for end in ("low", "high")] == pytest.approx([*ends], abs=1e-6)


def test_a_comparison_ends_with_a_verdict():
    nano = proof.Race([proof.Script("x", "ab")] * 2, ["--preset", "nano"], 20, 0, 1, date="2026-12-01")
    for ratio, drop, n, verdict in (  # mean ratio of times, mean difference of losses, pairs
        (0.9, 0.002, 20, "faster"),
        (0.9, 0.002, 5, "faster at a loss that may be too high"),
        (1.1, 0.02, 5, "slower"),
        (1.1, -0.02, 5, "slower at a lower loss"),
        (0.99, 0.02, 5, "undecided, would take about 31 pairs"),
        (0.9, -0.02, 1, "screen of 1 pair: no interval"),
    ):
        older = [proof.Run(1, seed, 1.44, 800.0) for seed in range(n)]
        spread = [(-1) ** seed * (seed > 0) for seed in range(n)]
        newer = [proof.Run(0, i, 1.44 + drop + x * 0.004, 800 * ratio * (1 + x / 60)) for i, x in enumerate(spread)]
        assert nano.compare(newer, older)["verdict"] == verdict, "by the slack of its track"


@pytest.fixture
def scripts(tmp_path) -> list[Path]:
    (tmp_path / "fast.py").write_text(SCRIPT.replace("SLOWNESS", "1.0"))
    (tmp_path / "slow.py").write_text(SCRIPT.replace("SLOWNESS", "1.5"))
    return [tmp_path / "fast.py", tmp_path / "slow.py"]


def test_race_takes_turns_compares_each_with_the_next_and_the_last_and_is_listed(tool, scripts):
    """An idea may be a flag alone."""
    fast, slow = scripts
    argv = (f"{slow} --muon_lr 1", fast, slow, "--pairs", "4", "--note", "an\tidea|\x1b", "--out", "logs/race")
    _, out, err = tool("race", *argv)
    first, second, last = json.loads(Path("logs/race/race.json").read_text())["comparisons"]
    assert re.findall(r"screen of 4 pairs: (\w+)", out) == ["slower", "faster", "undecided"]
    assert 1.4 < first["train_time"]["low"] < 1.5 < first["train_time"]["high"]
    assert (first["val_loss"]["high"], last["val_loss"]["difference"]) == (pytest.approx(0.005), 0)
    assert second["train_time"]["ratio"] == pytest.approx(1 / 1.5, abs=0.02)
    order = "1-a 1-b 1-c 2-c 2-b 2-a 3-a 3-b 3-c 4-c 4-b 4-a".split()
    assert re.findall(r"race-\dof4-(\d-\w): .*/12, 0:\d\d:\d\d left", err) == order
    flags = [Log(Path(f"logs/race/race-1of4-1-{letter}.txt")).flags[6:] for letter in "ac"]
    assert flags == [["--muon_lr", "1"], []]
    assert re.search(r"(?m)slow \w+ --muon_lr 1 +fast \w+ +4 1\.\d+ \(.*pairs: \w+ an\sidea\|\?$", tool("tried")[1])


def test_a_race_goes_on_after_a_stop_with_what_it_began_with(tool, tmp_path, scripts):
    fast, slow = scripts
    folder, stop = tmp_path / "race", tmp_path / "stop"
    flags = ("--pairs", "3", "--seed", "7", "--", "--stop", stop)
    argv = ("race", slow, fast, "--out", folder, *flags)
    for name, done in ("race-1of3-7-a", 0), ("race-2of3-8-a", 3):
        stop.write_text(name)
        assert f"run {name} failed: 'exit code 1: stopped'" in tool(*argv)[2]
        assert len(json.loads((folder / "race.json").read_text())["runs"]) == done
    stop.write_text("")
    for other in (*argv[:-1], "elsewhere"), (*argv[:6], "4", *argv[7:]), ("race", fast, *argv[2:]):
        assert "begun with other scripts, flags, pairs" in tool(*other)[2]
    code, _, err = tool(*argv)
    assert (code, re.findall(r"race-\dof3-(\d-\w):", err)) == (0, ["8-a", "9-a", "9-b"])
    assert {path.suffix for path in folder.glob("race-*")} == {".txt"}, "no model stays"


def test_a_race_is_not_begun_twice_in_a_folder(tool, tmp_path, scripts):
    """What inherits its lock holds it, too, until it is killed."""
    argv = ("race", *scripts, "--out", tmp_path / "race", "--pairs", "1")
    with process.held(tmp_path / "race", ""):
        heir = subprocess.Popen(["sleep", "60"], close_fds=False)
    assert "another race runs there: wait for it, or choose another --out" in tool(*argv)[2]
    heir.kill()
    heir.wait()
    assert tool(*argv)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_race_leaves_no_process(tmp_path, number):
    """Ctrl-C comes to one of two processes."""
    script, processes = tmp_path / "wait.py", 1 + (number == signal.SIGINT)
    script.write_text("import os, sys, time; open(f'{sys.argv[-1]}/{os.getpid()}.pid', 'w').close(); time.sleep(60)")
    command = f"-m speedrun race {script} {script} --nproc_per_node {processes} --out {tmp_path}/race -- {tmp_path}"
    heed = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # though these tests may run under nohup
    options = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    racing = subprocess.Popen([sys.executable, *command.split()], **options)
    wait_for(lambda: len([*tmp_path.glob("*.pid")]) == processes)
    racing.send_signal(number)
    told = racing.communicate(timeout=20)[1].splitlines()[-1]
    assert (racing.returncode, told[-11:]) == (130, "interrupted") or racing.returncode == -number == -9
    for path in tmp_path.glob("*.pid"):  # it may stay in /proc until its new parent asks; then without command line
        line = Path(f"/proc/{path.stem}/cmdline")
        wait_for(lambda line=line: not line.exists() or not line.read_bytes(), seconds=20)


@pytest.mark.slow
def test_a_race_tells_what_the_rank_said_that_failed(tool, tmp_path):
    """Rank 0 waits for rank 1, which fails, and loses it."""
    script = tmp_path / "fails.py"
    begin = "from torch.distributed import *\ninit_process_group('gloo')\n"
    script.write_text(f"{begin}if get_rank():\n    raise ValueError('mend this')\nbarrier()")
    told = tool("race", script, script, "--nproc_per_node", "2", "--out", tmp_path / "race")[2]
    assert "run race-1of6-1-a failed: 'exit code 1: [rank1]: ValueError: mend this" in told


def test_a_race_gets_its_data_first_and_leaves_nothing_if_that_fails(tool, tmp_path, scripts, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race.subprocess, "run", lambda argv, **_: types.SimpleNamespace(returncode="check" in argv))
    assert "the data are not ready" in tool("race", *scripts)[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.py", "records", "slow.py"]


def test_race_says_before_it_begins_what_is_wrong_or_why_no_record_can_come_of_it(tool, root, scripts, monkeypatch):
    monkeypatch.setattr(race, "in_turn", lambda plan, *_, **__: plan)
    slow = scripts[1].read_text()
    write_record(root, NAME, good(source=slow.rstrip("\n")), slow)
    write_record(root, "gpt2/46_Next", [], after=NAME, ranked=False)  # newer, but nano is not raced against it
    nano = ("--", "--preset", "nano")
    write_race(write_record(root.parent, "others/a", []), "", "")  # of seeds 0 to 4
    for argv, told in (
        (["fast.py", "fast.py --seed 1"], "leave them out"),
        (["fast.py", "slow.py", "--pairs", "4"], "no record can come of this race: fewer than 5 pairs"),
        (["fast.py", "slow.py", "--seed", "3", "--out", "others/b"], "its seeds are not fresh"),
    ):
        assert told in tool("race", *argv, *nano)[2].splitlines()[-1]
    assert tool("race", *scripts, *nano)[2] == ""


TINY = """
[tiny]
target = 1.55
unit = "word"
slack = 0.02
val_tokens = 4096
val_sha256 = ""
shard = "data/tiny_{:06d}.bin"
first_shard = 3
shard_tokens = 30_000
shard_sha256 = ""
machines = [["", "1x NVIDIA T4"]]
max_threads = 0
flags = ["preset", "train_files"]
flags_on_one_gpu = ["muon_lr"]
lettered = true
anchor = "tiny.json"
"""


@pytest.fixture
def tools_with_a_third_track(tmp_path, capsys, monkeypatch):
    """Copy the tools, and add a track and the curve of its plain GPT. Nothing of it stands elsewhere."""
    shutil.copytree(ROOT / "speedrun", tmp_path / "speedrun")
    (root := tmp_path / "records").mkdir()
    (root / "tracks.toml").write_text((store.RECORDS / "tracks.toml").read_text() + TINY)
    (root / "tiny.json").write_text('{"val_curve": [[0, 2.5, 0], [20, 1.5, 9000]]}')
    (root / "public.json").write_bytes(store.PUBLIC.read_bytes())
    (root / "README.md").write_text(EMPTY_TABLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'tests'}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "speedrun"]:
        monkeypatch.delitem(sys.modules, name)
    copied = importlib.import_module("speedrun.__main__").main
    return lambda *argv: (copied([*map(str, argv)]), *capsys.readouterr())


def test_from_a_race_to_a_pull_request_on_a_track_that_is_its_entry_alone(tools_with_a_third_track):
    """On one GPU, with a flag that the track has there alone."""
    tool, root = tools_with_a_third_track, Path("records").resolve()
    script = SCRIPT.replace("1.4 +", "1.5 +").replace("source=source", "source=source, gpus=['NVIDIA T4']")
    Path("train_gpt.py").write_text(script.replace("SLOWNESS / 100", "0.02").replace("SLOWNESS", "1.5"))
    Path("my.py").write_text(script.replace("SLOWNESS / 100", "0.03").replace("SLOWNESS", "1.0"))  # with the idea
    assert tool("diff", "my.py")[2] == "2 lines removed, 2 added\n"
    argv = ("my.py", "train_gpt.py", "--pairs", "7", "--out", "logs/MyIdea", "--note", "my idea", "--", "--preset")
    assert "no record can" not in tool("race", *argv, "tiny", "--train_files", "x", "--muon_lr", "1")[2]
    for name, run, its_race in ("Slow", "b", ()), ("MyIdea", "a", ("--race", "logs/MyIdea/race.json")):
        code, out, _ = tool("submit", name, *sorted(Path().glob(f"logs/MyIdea/race-*-{run}.txt")), *its_race)
        *_, folder = store.record_folders(root)  # a refused record leaves nothing
        assert (code, out.partition(":")[0]) == (1, str(folder))
        for path in folder / "README.md", folder / "record.json":
            path.write_text(re.sub("<say.*>", "said", path.read_text()))
        code, out, _ = tool("submit", name)
        assert code == 0, out
    told = r"\(tiny on 1x NVIDIA T4, 20 steps\); faster: train time 0.66.*, loss \+0.0100 .*, against tiny/00b_Slow"
    assert re.search(f"ok tiny/00c_MyIdea: n=7 mean 1.5340 .* {told}", out)
    table = r"### tiny on 1x NVIDIA T4: at most 1.55.*\| \[Slow\]\(.*\| \[MyIdea\]\(tiny/00c_MyIdea\) \| my idea \|"
    assert re.search(table, (root / "README.md").read_text(), re.S)
    drawn = [(curve["name"], curve["track"].partition(" ")[0], curve["target"]) for curve in shown(root / "curves.png")]
    assert drawn == [("Slow", "tiny", 1.55), ("MyIdea", "tiny", 1.55), ("plain GPT", "tiny", 1.55)]

    path, runs = folder / "race.json", folder / "runs.txt"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | dict(seed=3, pairs=5, runs=document["runs"][4:])))
    kept = {f"{log.path.relative_to(folder)}": log.stored for log in store.logs_of(folder) if log.seed > 2}
    runs.write_text(store.joined(kept))
    assert "race.json: no log of its run race-1of5-3-a" in tool("verify", "MyIdea")[1], "a round was left out"


def test_verify_computes_the_hash_of_training_tokens_as_the_script_does(tool, root, monkeypatch):
    tokens = np.random.default_rng(0).integers(257, size=30_512).astype("<u2").tobytes()  # its header, too
    (shard := root.parent / TRACKS["nano"].shard.format(0)).parent.mkdir(parents=True)
    shard.write_bytes(tokens)
    monkeypatch.setattr(TRACKS["nano"], "shard_sha256", hashlib.sha256(tokens).hexdigest())
    monkeypatch.setattr(rules, "ROOT", root.parent)
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], train_seq_len=512, batch_tokens=1024)
    batches = [[(str(shard), np.array([[i, i + 513]])) for i in (n, n + 512)] for n in range(0, 20480, 1024)]
    digest = train_gpt.hash_tokens(batches, cfg, targets=True)
    write_record(root, NAME, edit("validation", f"training tokens: 20480, sha256 {'ab' * 32}\nvalidation")(good()))
    assert f"in order they are 20480, sha256 {digest}; get" in tool("verify")[1]


def test_verify_wants_the_race_against_the_record_before_and_table_shows_it(tool, root):
    write_record(root, NAME, [text.replace("Some", "<img src=x>|\x1b[2J") for text in good()], what="<b>|")
    folder = write_record(root, NEXT, good(source=NEWER), NEWER, after=NAME)
    path, readme = folder / "race.json", root / "README.md"
    readme.write_text(EMPTY_TABLES)
    assert f"{path}: is missing; race the script against" in tool("table")[2]
    write_race(folder, NEWER, SOURCE)
    assert f"0.900 (0.900 to 0.900), loss +0.0000 (+0.0000 to +0.0000), against {NAME}\n" in tool("verify")[1]
    assert (tool("table", "--check")[0], readme.read_text(), tool("table")[0]) == (1, EMPTY_TABLES, 0)
    text, figures = readme.read_text(), "20 | 1.4302 (sd 0.0019, n=5) | 1e-05 | 0.81 (sd 0.00)"
    assert f"| &#60;b&#62;&#124; | {figures} |  | 1.000 | 499 | &#60;img src=x&#62;&#124;?&#91;2J" in text
    assert f"{figures} | 0.900 (0.900 to 0.900) | 0.900 | 499 | " in text
    assert (tool("table", "--check")[0], tool("table")[0], readme.read_text()) == (0, 0, text)
    document = json.loads(path.read_text())
    scripts, runs, other = document["scripts"], document["runs"], dict(sha256="ab" * 32)
    for problem, change in {
        "lacks this record's script": dict(scripts=[scripts[0] | other, scripts[1]]),
        "none of its scripts is Good": dict(scripts=[scripts[0], scripts[1] | other]),
        "the log of its run race-0-a says otherwise": dict(runs=[runs[0] | dict(train_time=900.0), *runs[1:]]),
        "the log of its run race-0-b says otherwise": dict(runs=[runs[0], runs[1] | dict(val_loss=1.4), *runs[2:]]),
        "has 9 runs, not 5 of each script; finish the race": dict(runs=runs[:-1]),
        "its runs are not those of a race in order": dict(runs=[*runs[:8], runs[0], runs[9]]),
        "its runs differ in val_sha256": dict(runs=[*runs[:9], runs[9] | dict(val_sha256="ab" * 32)]),
        "flags --muon_lr: put": dict(flags=["--preset", "nano", "--muon_lr=-1"]),
        "no log of its run race-0-a, with the race's flags, is there": dict(flags=["--preset", "nano"]),
    }.items():
        path.write_text(json.dumps(document | change))
        assert tool("verify", "next")[1].startswith(f"FAIL {NEXT}: race.json: {problem}")
    for problem, settings in {
        f"against {NAME} faster at a loss that may be too high": dict(drop=0.006),
        "has 6 runs of the script, there are 5 sound logs: leave none out": dict(losses=[*LOSSES, 1.47]),
    }.items():
        write_race(folder, NEWER, SOURCE, **settings)
        assert problem in tool("verify", "next")[1]


def test_record_json_says_the_kind_of_a_record_and_which_one_it_follows(tool, root):
    """An idea changes at most 200 lines; others may change more. A form names a test, now or at a commit."""
    write_record(root, NAME, good())
    more = dict(after=NAME, ranked=False, readme="# Measured on one H100")
    for card, wrong in (
        (dict(kind="idea"), f"201 lines change against {NAME}, for an idea at most 200"),
        (FORM, "ok"),
        (FORM | dict(evidence=""), "the evidence of this kind has to match"),
        (dict(kind=rules.ONE_CARD, ranked=True), "is not ranked, and its page"),
        (dict(kind="open proposal 9"), "and its page says 'not merged'"),
        (dict(kind="open proposal"), "its kind is 'open proposal'; take one of idea"),
    ):
        write_record(root, "gpt2/46_Next", [], SOURCE + "\n# line" * 201, **more | card)
        code, out, _ = tool("verify", "next")
        assert (code, wrong in out) == (int(wrong != "ok"), True), out
    (root.parent / "train_gpt.py").write_text(SOURCE + "\n# line" * 200)  # the root's script, which trains the same
    write_record(root, "gpt2/46_Next", [], SOURCE + "\n# line" * 201, **more | dict(kind="idea"))
    assert tool("verify", "next")[0] == 0
    write_record(root, "nano/03_Third", [], after="gpt2/46_Next")
    assert [*map(store.name_of, line := store.lineage(root))] == [NAME, "gpt2/46_Next", "nano/03_Third"]
    assert store.rivals(line[:2], "nano") == line[:2]
    for after, told in (NAME, f"both come after {NAME}: mend"), ("nano/09_Gone", "nano/03_Third: no line leads there"):
        write_record(root, "nano/03_Third", [], after=after)
        assert told in tool("verify")[2]


def shown(path: str | Path = "x.png") -> list[dict]:
    """Return the curves that a picture shows, which its PNG carries."""
    return json.loads(Image.open(path).text["Comment"])["curves"]


def test_the_picture_shows_what_its_command_draws_today(tmp_path):
    assert main(["plot", "-o", str(tmp_path / "new.png")]) == 0
    assert shown(store.RECORDS / "curves.png") == shown(tmp_path / "new.png"), "draw it anew: python -m speedrun plot"


def test_public_logs_of_all_tracks_are_read(tool):
    for form in (  # of the main, the medium and the optimizer track
        "step:{0}/250 val_loss:{1:.4f} train_time:{2}ms step_avg:96.38ms",
        "step:{0}/250 val_loss:{1:.5f} train_time:{3:.3f}s step_avg:nanms",
        "step:{0}/250 val_loss:{1:.5f} val_ema_loss:4.5 train_time:{3:.3f}s step_avg:191.7ms extrap:1e-3 handoff:keep",
    ):
        for name, end in dict(a=3.27, b=3.275).items():
            points = (0, 10.82584, 0), (125, 4.62997, 23_965), (250, end, 47_930)
            lines = [form.format(step, loss, ms, ms / 1000) for step, loss, ms in points]
            Path(f"{name}.txt").write_text("\n".join(["import sys", RULE, "Running Python 3", RULE, *lines, ""]))
        told = tool("stats", "a.txt", "b.txt", "--target", "3.28")[1]
        assert told.startswith("n=2 mean 3.2725 sd 0.0035 p=0.1 against")
        assert tool("plot", "a.txt", "b.txt", "-o", "x.png")[0] == 0
        assert (shown()[0]["seconds"], shown()[0]["mean"][1]) == ([0, 23.965, 47.93], pytest.approx(4.63, abs=1e-4))


def test_a_plot_names_what_is_no_log_and_draws_a_record_on_the_clock_of_its_race(tool, root):
    Path("cut.txt").write_text("cut short")
    Path("whole.txt").write_text(log_text())
    assert re.match(r"left out: cut\.txt: not a log.*", tool("plot", "cut.txt", "whole.txt", "-o", "x.svg")[2])
    assert Path("x.svg").read_text().startswith("<?xml")
    (curve := write_record(root, NAME, [log_text()]) / "curve" / "run.txt").parent.mkdir()
    curve.write_text(log_text(val_loss=1.44, step_ms=80.6))
    tool("plot", "-o", "x.png")
    assert (shown()[0]["mean"][-1], shown()[0]["seconds"][2:4]) == (1.44, pytest.approx([0.403, 0.6045], abs=1e-3))
