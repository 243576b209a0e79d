"""python -m speedrun: races and their statistics, records from submit to the boards, curves, bad input and signals."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import fake_training
import train_gpt
from speedrun import ROOT, process, race, records
from speedrun.__main__ import main
from speedrun.logs import RULE, TRACKS
from world_worker import wait_for

FAKE = Path(fake_training.__file__).read_text()


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Stand beside a folder of records that has none yet."""
    monkeypatch.chdir(tmp_path)
    (root := tmp_path / "records").mkdir()
    for name in "tracks.toml", "public.json":
        shutil.copy(ROOT / "records" / name, root)
    (root / "README.md").write_text(f"# Records\n\n{records.BEGIN}\n{records.END}\n\nMore.\n")
    for name, slowness in dict(fast=1.0, slow=1.5).items():
        Path(f"{name}.py").write_text(FAKE.replace("SLOWNESS = 1.0", f"SLOWNESS = {slowness}"))
    monkeypatch.setattr(records, "RECORDS", root)
    return root


@pytest.fixture
def newest(root) -> Path:
    """Copy two of our records, as if there were no others, and return the newer one's folder."""
    for name in "09_CopyHead", "10_LongSteps":
        shutil.copytree(ROOT / "records" / "nano" / name, root / "nano" / name)
    (root / "nano/09_CopyHead/race.json").unlink()
    info = root / "nano/09_CopyHead/record.json"
    info.write_text(info.read_text().replace('"nano/08_OneHead"', "null"))
    return root / "nano/10_LongSteps"


@pytest.fixture
def tool(root, capsys):
    return lambda *argv: (main([*map(str, argv)]), *capsys.readouterr())


def test_from_a_race_to_boards_and_curves(tool, root):
    """A race, the record that opens a board, the next one with the race, boards and picture."""
    argv = "race", "fast.py", "slow.py", "--pairs", 5, "--seed", 7, "--out", "logs/a", "--", "--preset", "nano"
    code, out, err = tool(*argv)
    order = "7-a 7-b 8-b 8-a 9-a 9-b 10-b 10-a 11-a 11-b"
    assert (code, " ".join(re.findall(r"race-\dof5-(\d+-\w): val_loss", err))) == (0, order)
    assert re.search(r"fast.py: n=5 mean 1.4222 sd 0.0008, p=9.8e-08 against 1.45\n5 pairs from seed 7 on", out)
    assert out.endswith(": faster: train time 0.673 (0.668 to 0.679), loss -0.0005 (-0.0005 to -0.0005)\n")
    assert sorted({path.suffix for path in Path("logs/a").iterdir()}) == [".json", ".txt"], "no model stays"
    assert tool("diff", "slow.py", "fast.py")[2] == "1 lines removed, 1 added\n"
    for name, letter, more in ("Slow", "b", ()), ("Fast", "a", ("--race", "logs/a/race.json")):
        submit = "submit", name, *sorted(Path("logs/a").glob(f"*-{letter}.txt")), *more
        assert tool(*submit)[0] == 0
        folder = records.find_record(name, root)
        assert "asks for" in tool("verify", name)[1]
        for path in folder / "README.md", folder / "record.json":
            path.write_text(re.sub("<say.*?>", "a|b", path.read_text()))
    assert (tool(*submit)[0], "02_Fast is there" in tool(*submit)[2]) == (2, True), "and it is as it was:"
    code, out, _ = tool("verify")
    assert re.fullmatch(
        r"ok nano/01_Slow: n=5 .*\nok nano/02_Fast: n=5 mean 1.4222 sd 0.0008 p=\S+ \(nano, 20 steps\); "
        r"faster: train time 0.673 .*, against nano/01_Slow\n",
        out,
    )
    assert (tool("table", "--check")[0], tool("table")[0], tool("table", "--check")[0]) == (1, 0, 0)
    row = r"\| \[Fast\]\(nano/02_Fast\) \| a&#124;b \| 20 \| 1.4222 \(sd 0.0008, n=5\) \| .* \| 0.673 \| 499 \| Some &#"
    assert re.search(row, (root / "README.md").read_text())
    assert tool("plot", "-o", "x.png")[0] == 0
    curves = json.loads(Image.open("x.png").text["Comment"])["curves"]
    expected = [(name, 1.45, [0, 5, 10, 15, 20]) for name in ("Slow", "Fast")]
    assert [(it["name"], it["target"], it["steps"]) for it in curves] == expected


FAULTS = {  # of its first log: a message, and what makes it
    "ends at step 32 of 32 without the last": ("step:32/32 val_loss", "no"),
    "the script of the log is not the folder's": ("312fd0", "412fd0"),
    "validates on other tokens: 262144 of sha256 f": ("sha256 e6", "sha256 f6"),
    "trains on": ("nano_train_000000.bin, ", "nano_train_000001.bin, "),
    "has the flag --muon_lr": (r'flags: \["', 'flags: ["--muon_lr=1", "'),
    "recompiles after the clock started: 2": ("clock started: 0", "clock started: 2"),
    "uses 4 CPU threads": ("2 threads each", "4 threads each"),
    "'step:x/32.*' is no step line": ("step:7/32", "step:x/32"),
    "two of its runs have one seed": ("seed: 6201", "seed: 6202"),
    "n too small: p=0.": ("val_loss:1.4359", "val_loss:1.4859"),
    "mean 1.4628 is above the target": ("val_loss:1.4359", "val_loss:1.7000"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_verify_names_the_fault_of_a_log(tool, newest, message):
    logs = newest / "runs.txt"
    logs.write_text(re.sub(*FAULTS[message], logs.read_text(), count=1))
    code, out, _ = tool("verify", "LongSteps")
    assert (code, bool(re.search(f"FAIL nano/10_LongSteps: (race-6201-a.txt: )?{message}", out))) == (1, True), out


def test_verify_names_the_fault_of_a_race(tool, newest):
    path = newest / "race.json"
    plan = json.loads(path.read_text())
    scripts, runs, other = plan["scripts"], plan["runs"], dict(sha256="ab" * 32)
    worse = [run | dict(val_loss=run["val_loss"] + 0.02 * (run["script"] == 0)) for run in runs]
    for problem, change in {
        "lacks the script of nano/10_LongSteps": dict(scripts=[scripts[0] | other, *scripts[1:]]),
        "lacks the script of nano/09_CopyHead": dict(scripts=[scripts[0], scripts[1] | other, *scripts[2:]]),
        "has 79 runs, not 10 of each script in turn; finish the race": dict(runs=runs[:-1]),
        "has 80 runs, not 10 of each script in turn": dict(runs=[*runs[:78], runs[79], runs[78]]),
        "its runs differ in val_sha256": dict(runs=[*runs[:79], runs[79] | dict(val_sha256="z")]),
        "screen of 4 pairs: faster": dict(pairs=4, runs=runs[:32]),
        "faster at a loss that may be too high: train time 0.714": dict(runs=worse),
        "its 10 runs of the script are not the 10 logs": dict(runs=[runs[0] | dict(train_time=1142.5), *runs[1:]]),
        "not what `race` wrote": dict(runs=[runs[0] | dict(train_time="1")]),
    }.items():
        path.write_text(json.dumps(plan | change))
        out = tool("verify", "LongSteps")[1]
        assert re.match(f"FAIL nano/10_LongSteps: race.json: {problem}", out), (problem, out)
    path.write_text(json.dumps(plan)[:-9])
    assert "race.json: no JSON object" in tool("verify", "LongSteps")[1]


def test_an_unfinished_record_is_named_and_left_out(tool, root, newest):
    """The boards are as they were, and whoever verifies all learns what is missing."""
    shutil.move(newest, root / "finished")
    tool("table")
    for make in (
        newest.mkdir,
        lambda: shutil.copytree(root / "finished", newest, dirs_exist_ok=True) / "README.md",
        (newest / "record.json").unlink,
    ):
        if page := make():
            page.write_text("<say why>")
        code, _, err = tool("table", "--check")
        assert (code, "10_LongSteps is left out: " in err) == (0, True), err
        code, out, _ = tool("verify")
        assert (code, "FAIL nano/10_LongSteps: " in out, "ok nano/09_CopyHead: " in out) == (1, True, True), out


def test_a_comparison_has_t_intervals_of_pairs_and_a_verdict():
    for ratio, drop, n, verdict in (  # mean ratio of times, mean difference of losses, pairs
        (0.9, 0.002, 20, "faster"),
        (0.9, 0.002, 5, "faster at a loss that may be too high"),
        (1.1, 0.02, 5, "slower"),
        (1.1, -0.02, 5, "slower at a lower loss"),
        (0.99, 0.02, 5, "undecided, would take about 30 pairs"),
        (0.9, 0.002, 4, "screen of 4 pairs: faster at a loss that may be too high"),
        (0.9, -0.02, 1, "screen of 1 pair: no interval"),
    ):
        nano = race.Race([race.Script("x", "ab"), race.Script("y", "cd")], ["--preset=nano"], n, 0, 1, "2026-12-01")
        spread = np.array([(-1) ** seed * (seed > 0) for seed in range(n)])
        times, losses = ratio * (1 + spread / 60), drop + spread * 0.004
        for seed, i in nano.order:
            loss, ms = (1.44, 800.0) if i else (1.44 + losses[seed], 800 * times[seed])
            nano.runs.append(race.Run(i, seed, loss, ms))
        comparison = nano.compare("ab", "cd")
        assert comparison["verdict"] == verdict
        if n > 1:
            ends = [stats.ttest_1samp(values, 0).confidence_interval() for values in (np.log(times), losses)]
            found = [[comparison[key][end] for end in ("low", "high")] for key in ("train_time", "val_loss")]
            assert np.allclose(found, [np.exp(ends[0]), ends[1]], atol=1e-6)


def test_a_race_says_in_one_line_what_is_wrong_and_goes_on(tool, root):
    argv = "race", "fast.py", "slow.py", "--pairs", 1, "--out", "race"
    nano = "--", "--preset", "nano"
    for wrong, message in (
        ((*argv, *nano, "--fail", "mend\x1bthis"), r"run race-1of1-1-a failed: 'exit code 1: mend.*this'; with that"),
        ((*argv[:2], *argv[3:], *nano), "needs 2 to 26 scripts"),
        ((*argv, "--", "--seed", "1"), "--seed, --log_dir and --run_id are the race's own"),
        (("race", "fast.py", "none.py"), "'none.py' is neither a file nor a record"),
        ((*argv, *nano), "was begun with other scripts, flags, pairs or seed"),
    ):
        code, _, err = tool(*wrong)
        assert (code, bool(re.match(f"python -m speedrun: .*{message}", err.splitlines()[-1]))) == (2, True), err
    (root.parent / "race/race.json").unlink()
    with process.held(Path("race"), ""):
        assert "another race runs there: wait for it, or choose another --out" in tool(*argv, *nano)[2]
    code, out, err = tool(*argv, *nano)
    assert (code, "screen of 1 pair" in out) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_race_ends_its_run_and_goes_on(root, number):
    Path("gate").mkdir()
    flags = f"--pairs 1 --out {root.parent}/race -- --preset nano --gate {root.parent}/gate"
    scripts = f"{root.parent}/fast.py {root.parent}/slow.py"
    command = [sys.executable, "-m", "speedrun", "race", *scripts.split(), *flags.split()]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    racing = subprocess.Popen(command, **options)
    wait_for(Path("gate/running").exists)
    racing.send_signal(number)
    err = racing.communicate(timeout=20)[1]
    assert (racing.returncode, err.splitlines()[-1]) == (130, "python -m speedrun: interrupted")
    with process.held(Path("race"), "the run holds the lock until it ends"):
        Path("gate/open").touch()
    done = subprocess.run(command, timeout=60, **options)
    assert (done.returncode, "screen of 1 pair" in done.stdout) == (0, True)


def test_a_public_log_is_drawn_and_an_input_is_never_the_output(tool):
    lines = "step:0/250 val_loss:10.8 train_time:0ms", "step:250/250 val_loss:3.27 val_ema_loss:4 train_time:47.930s"
    Path("a.txt").write_text(text := "\n".join(["import sys", RULE, "Running Python 3", RULE, *lines, ""]))
    assert tool("plot", "a.txt", "-o", "x.png")[0] == 0
    (curve,) = json.loads(Image.open("x.png").text["Comment"])["curves"]
    assert (curve["seconds"], curve["mean"]) == ([0, 47.93], [10.8, 3.27])
    for name, output, message in ("fast.py", "x.png", "fast.py: not a log"), ("a.txt", "a.txt", "the picture is a PNG"):
        code, _, err = tool("plot", name, "-o", output)
        assert (code, message in err, Path("a.txt").read_text()) == (2, True, text)


def test_scripts_have_the_numbers_of_the_tracks():
    for name, track in TRACKS.items():
        cfg = train_gpt.PRESETS[name]
        assert (cfg.target_loss, cfg.val_tokens, cfg.val_sha256) == (track.target, track.val_tokens, track.val_sha256)
