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

import train_gpt
from speedrun import ROOT, TRACKS, process, race, records
from speedrun.__main__ import main
from world_worker import wait_for

NANO = "--", "--preset", "nano"
RACE = "race", "fast.py", "slow.py", "--pairs", "5", "--seed", "7", "--out", "logs/a", *NANO


def edit(path: Path | str, old: str, new: str, count: int = 1) -> None:
    Path(path).write_text(re.sub(old, new, Path(path).read_text(), count=count))


def fill_in(*names: str) -> None:
    """Write what submit asks for."""
    for path in [records.RECORDS / "nano" / name / file for name in names for file in ("README.md", "record.json")]:
        edit(path, "<say.*?>", "a|b", count=0)


def run_of(script: int, seed: int, val_loss: float, ms: float) -> race.Run:
    return race.Run(script, seed, val_loss, ms, preset="nano", is_on_track=True, val_sha256=None, hardware=None)


@pytest.fixture(scope="module")
def raced(tmp_path_factory) -> Path:
    """Make a folder with two scripts, their race, and its records: the older one is a form."""
    (root := tmp_path_factory.mktemp("raced") / "records").mkdir()
    (root / "README.md").write_text(f"# Records\n\n{records.BEGIN}\n{records.END}\n\nMore.\n")
    for name, slowness in dict(fast=1.0, slow=1.5).items():
        shutil.copy(ROOT / "tests" / "fake_training.py", root.parent / f"{name}.py")
        edit(root.parent / f"{name}.py", "SLOWNESS = 1.0", f"SLOWNESS = {slowness}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root.parent)
        patch.setattr(records, "RECORDS", root)
        assert main(RACE) == 0
        assert main(["submit", "Fast", "logs/a"]) == 0
        fill_in("01_BeforeFast", "02_Fast")
    return root.parent


@pytest.fixture
def tool(raced, tmp_path, monkeypatch, capsys):
    """Stand in a copy of that folder; return what runs a command, and returns exit code, stdout and stderr."""
    shutil.copytree(raced, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    return lambda *argv: (main([*map(str, argv)]), *capsys.readouterr())


def test_from_a_race_to_boards_and_curves(tool):
    runs = [f"{seed}-{letter}" for seed in range(7, 12) for letter in ("ab" if seed % 2 else "ba")]
    stored = json.loads(Path("logs/a/race.json").read_text())["runs"]
    assert [f"{it['seed']}-{'ab'[it['script']]}" for it in stored] == runs
    assert {path.suffix for path in Path("logs/a").iterdir()} == {".json", ".txt"}, "no model stays"
    code, out, err = tool(*RACE)
    assert (code, err.startswith("10/10 runs; to stop: kill -TERM ")) == (0, True)
    assert re.search(r"fast.py: n=5 mean 1.4222 sd 0.0008, p=9.8e-08 against 1.45\n5 pairs from seed 7 on", out)
    assert out.endswith(": faster: train time 0.673 (0.668 to 0.679), loss -0.0005 (-0.0005 to -0.0005)\n")
    assert tool("diff", "slow.py", "fast.py")[2] == "1 lines removed, 1 added\n"
    out, result = (
        tool("verify")[1],
        "n=5 mean 1.4222 sd 0.0008 p=9.8e-08 (nano, 20 steps); faster: train time 0.673 (0.668 to 0.679)",
    )
    result += ", loss -0.0005 (-0.0005 to -0.0005), against nano/01_BeforeFast"
    assert out.splitlines()[1] == f"ok nano/02_Fast: {result}"
    assert (tool("table", "--check")[0], tool("table")[0], tool("table", "--check")[0]) == (1, 0, 0)
    row = r"\| \[Fast\]\(nano/02_Fast\) \| a&#124;b \| 20 \| 1.4222 \(sd 0.0008, n=5\) \| .* \| 0.673 \|"
    assert re.search(rf"measured here on Some &#124;(.|\n)*{row}", Path("records/README.md").read_text())
    tool("plot", "-o", "x.png")
    curves = json.loads(Image.open("x.png").text["Comment"])["curves"]
    found = [(it["name"], it["target"], it["steps"][-1]) for it in curves]
    assert found == [("BeforeFast", 1.45, 20), ("Fast", 1.45, 20)]


FAULTS = {  # what verify says, and what is replaced in the logs of a record
    "ends at step 20 of 20 without the last validation": ("step:20/20 val_loss", "no"),
    "ends at step 20 of 20 without the last": (r"(step:20/20 val_loss:)\S+", r"\1nan"),
    "the script of the log is not": ("\n[0-9a-f]{64}\n", f"\n{'ab' * 32}\n"),
    "two of its runs have one seed": ("\nseed: 7", "\nseed: 8"),
    "validates on other tokens: 26": (r"(validation tokens.*sha256 ).*", rf"\1{'ab' * 32}"),
    "trains on": ("train_000000.bin, ", "train_000001.bin, "),
    "has the flag --muon_lr": (r"flags: \[", 'flags: ["--muon_lr=1", '),
    "recompiles after the clock started: 2": ("started: 0", "started: 2"),
    "uses 4 CPU threads": ("1 processes, 2", "2 processes, 2"),
    "n too small: p=nan": ("(?s)(==> .*?)==> .*", r"\1"),
    "n too small: p=0.5": (r"(step:20/20 val_loss:)\S+", r"\g<1>1.56"),
    "mean 1.4578 is above the target": (r"(step:20/20 val_loss:)\S+", r"\g<1>1.6"),
    "cut short or edited .*int": ("step:7/20", "step:x/20"),
    "race.json: its 5 runs of the script are not the 4 logs": ("(?s)==> .*?(?===> )", ""),
}


def test_verify_names_the_fault_of_a_log(tool):
    path = Path("records/nano/02_Fast/runs.txt")
    text = path.read_text()
    for message, (old, new) in FAULTS.items():
        path.write_text(text)
        edit(path, old, new)
        code, out, _ = tool("verify", "Fast")
        assert (code, bool(re.search(f"FAIL nano/02_Fast: .*{message}", out))) == (1, True), (message, out)
    assert "that verify refuses:\nFAIL nano/02_Fast: " in tool("table")[2]
    edit("records/nano/01_BeforeFast/runs.txt", "(?s)(==> .*?)==> .*", r"\1")
    assert tool("verify", "BeforeFast")[1].startswith("ok nano/01_BeforeFast: n=1"), "a form needs no p"


def test_verify_names_the_fault_of_a_race(tool):
    path = Path("records/nano/02_Fast/race.json")
    plan, other = json.loads(path.read_text()), dict(sha256="ab" * 32)
    scripts, runs = plan["scripts"], plan["runs"]
    for problem, change in {
        "no race.json has its script and that of nano/01": dict(scripts=[scripts[0] | other, scripts[1]]),
        "no race.json has its script and that of nano/01_Be": dict(scripts=[scripts[0], scripts[1] | other]),
        "race.json: 9 runs, not 5 of each": dict(runs=runs[:-1]),
        "race.json: its runs differ in val_sha256": dict(runs=[*runs[:9], runs[9] | dict(val_sha256="z")]),
        "race.json: screen of 4 pairs: faster": dict(pairs=4, runs=runs[:8]),
        "race.json: not what `race` wrote": dict(scripts=[dict(name="x"), scripts[1]]),
    }.items():
        path.write_text(json.dumps(plan | change))
        assert re.match(f"FAIL nano/02_Fast: {problem}", tool("verify", "Fast")[1]), problem


def test_unfinished_records_are_named_and_left_out(tool):
    tool("table")
    assert [tool("submit", name, "logs/a")[0] for name in ("../Draft", "fast")] == [2, 2], "and the records stay"
    told = tool("submit", "Draft", "logs/a")[1]
    assert ("03_Draft: fill in" in told, "FAIL nano/03_Draft: record.json: write" in told) == (True, True), told
    for message, file in ("record.json: write what '<say", "record.json"), ("README.md: write what '<say", "README.md"):
        code, _, err = tool("table", "--check")
        assert (code, bool(re.search(f"nano/03_Draft is left out: .*{message}", err))) == (0, True), err
        assert tool("verify")[1].splitlines()[-1].startswith("FAIL nano/03_Draft: ")
        edit(f"records/nano/03_Draft/{file}", "<say.*?>", "x", count=0)


def test_a_form_and_an_idea_come_from_one_race_of_three(tool):
    """Fast is in the line; Same is Fast in another form, which has raced it, and Quick changes one line of Same."""
    shutil.copy("fast.py", "same.py")
    edit("same.py", "SLOWNESS = 1.0", "SLOWNESS = 1.0  # as before")
    shutil.copy("same.py", "quick.py")
    edit("quick.py", "SLOWNESS = 1.0", "SLOWNESS = 0.5")
    argv = "race", "quick.py", "same.py", "Fast", "--pairs", 5, "--seed", 20, "--out", "logs/b", *NANO
    told = tool(*argv)[1].splitlines()
    pairs = ["quick.py against same.py", "quick.py against nano/02_Fast", "same.py against nano/02_Fast"]
    assert [line.partition(":")[0] for line in told[2:]] == pairs
    names = re.findall("(\\w*): fill in", tool("submit", "Quick", "logs/b")[1])
    assert names == ["03_BeforeQuick", "04_Quick"]
    page = Path("records/nano/04_Quick/README.md").read_text()
    assert page.count("<say") == page.count("- line 9, `SLOWNESS`: <say what") == 1, page
    fill_in("03_BeforeQuick", "04_Quick")
    ok = tool("verify", "BeforeQuick", "Quick")[1].splitlines()
    assert [re.sub(r"(^\S+ \S+):.*(, against .*)", r"\1\2", line) for line in ok] == [
        "ok nano/03_BeforeQuick, against nano/02_Fast",
        "ok nano/04_Quick, against nano/03_BeforeQuick",
    ]
    assert tool("diff", "Quick")[2] == "1 lines removed, 1 added\n"
    with open("records/nano/04_Quick/train_gpt.py", "a") as file:
        file.write("#\n" * 201)
    assert "changes 202 lines of nano/03_BeforeQuick" in tool("verify", "Quick")[1]


def test_a_form_that_raced_nothing_older_has_no_ratio(tool):
    edit("fast.py", "SLOWNESS = 1.0", "SLOWNESS = 0.9")
    edit("slow.py", "SLOWNESS = 1.5", "SLOWNESS = 1.2")
    with open("fast.py", "a") as file:
        file.write("#\n" * 200)
    tool("race", "fast.py", "slow.py", "--pairs", 5, "--seed", 20, "--out", "logs/b", *NANO)
    tool("submit", "Faster", "logs/b")
    assert '"kind": "form"' in Path("records/nano/04_Faster/record.json").read_text(), "too much for an idea"
    fill_in("03_BeforeFaster", "04_Faster")
    assert tool("verify")[0] == tool("table")[0] == 0
    rows = Path("records/README.md").read_text().splitlines()
    ratios = [row.split(" | ")[6:8] for row in rows if "](nano/" in row]
    assert [ratio for ratio, _ in ratios[::2]] == ["", "not raced"]
    assert ratios[1][1] == ratios[2][1] != ratios[3][1]


def test_a_comparison_ends_with_a_verdict():
    for ratio, drop, n, verdict in (  # mean ratio of times, mean difference of losses, pairs
        (0.9, 0.002, 20, "faster"),
        (0.9, 0.002, 5, "faster at a loss that may be too high"),
        (1.1, -0.02, 5, "slower at a lower loss"),
        (0.99, 0.02, 5, "undecided, would take about 30 pairs"),
    ):
        nano = race.Race([race.Script("x", "ab"), race.Script("y", "cd")], ["--preset=nano"], n, 0, 1)
        spread = np.array([(-1) ** seed * (seed > 0) for seed in range(n)])
        times, losses = ratio * (1 + spread / 60), drop + spread * 0.004
        for seed, i in nano.order:
            loss, ms = (1.44, 800.0) if i else (1.44 + losses[seed], 800 * times[seed])
            nano.runs.append(run_of(i, seed, loss, ms))
        assert nano.compare(0, 1)["verdict"] == verdict


def test_a_script_raced_against_its_copy_shows_how_the_machine_varies(tool, monkeypatch):
    shutil.copy("fast.py", "copy.py")
    times = iter([900.0, 800.0, 820.0, 910.0, 890.0, 810.0])  # by seeds 900/800, 910/820, 890/810
    monkeypatch.setattr(race, "run_script", lambda _, log, i, seed: run_of(i, seed, 1.44 + seed / 1e3, next(times)))
    code, out, _ = tool("race", "fast.py", "copy.py", "--pairs", 3, *NANO)
    assert (code, "train time 1.111 (1.079 to 1.144)" in out, "the two are equal" in out) == (0, True, True), out


def test_a_script_races_the_root_and_other_tokens_have_no_target(tool, monkeypatch):
    monkeypatch.setattr("speedrun.__main__.ROOT", Path("root"))
    Path("root").mkdir()
    shutil.copy("slow.py", "root/train_gpt.py")
    out = tool("race", "fast.py", "--pairs", 1, *NANO, "--val_tokens", "8192")[1]
    assert "n=1 mean 1.4220, no target: of other tokens" in out
    assert "fast.py against root/train_gpt.py: screen of 1 pair: no interval: train time 0.6" in out


def test_a_race_says_in_one_line_what_is_wrong_and_goes_on(tool):
    argv = "race", "fast.py", "slow.py", "--pairs", 1, "--out", "race"
    assert "mend?this\n" in tool(*argv, *NANO, "--fail", "mend\x1bthis")[2]
    for wrong, message in (
        ((*argv, *NANO, "--fail", "mend\x1bthis"), "run race-1of1-1-a failed, .*: mend it.* has to take --seed"),
        (("race", *["fast.py"] * 27), "needs 2 to 26 scripts"),
        ((*argv, "--", "--seed", "1"), "--seed, --log_dir and --run_id are the race's own"),
        ((*argv[:6], "race2", "--", "--cut", "1"), "race-1of1-1-a.txt: ends at step 20 of 20 without"),
        (("race", "fast.py", "none.py"), "'none.py' is neither a file nor a record"),
        ((*argv, *NANO), "was begun with other scripts, flags, pairs or seed"),
    ):
        code, _, err = tool(*wrong)
        assert (code, bool(re.match(f"python -m speedrun: .*{message}", err.splitlines()[-1]))) == (2, True), err
    with process.held(Path("race"), ""):
        assert "another race runs there: wait for it, or choose another --out" in tool(*argv, *NANO)[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_race_ends_its_run_and_goes_on(tool, number):
    (here := Path.cwd() / "gate").mkdir()
    command = [sys.executable, "-m", "speedrun", "race", f"{here.parent}/fast.py", f"{here.parent}/slow.py"]
    command += ["--pairs", "1", "--out", f"{here.parent}/race", *NANO, "--gate", str(here)]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    racing = subprocess.Popen(command, **options)
    wait_for((here / "running").exists)
    racing.send_signal(number)
    err = racing.communicate(timeout=20)[1]
    assert (racing.returncode, err.splitlines()[-1]) == (130, "python -m speedrun: interrupted")
    with process.held(Path("race"), "the run holds the lock until it ends"):
        (here / "open").touch()
    done = subprocess.run(command, timeout=60, **options)
    assert (done.returncode, "screen of 1 pair" in done.stdout) == (0, True)


def test_a_picture_is_of_logs_and_over_none(tool):
    assert "fast.py: not a log, or cut short" in tool("plot", "fast.py", "-o", "x.png")[2]
    for flags in ["a.txt"], ["--line"]:
        assert "a.txt: expected -o NAME." in tool("plot", *flags, "-o", "a.txt")[2]
    assert "--line draws all" in tool("plot", "--line", "a.txt", "-o", "x.svg")[2]


def test_the_picture_of_the_records_is_what_its_command_draws(tmp_path):
    assert main(["plot", "-o", str(tmp_path / "new.png")]) == 0
    new, kept = (Image.open(path).text["Comment"] for path in (tmp_path / "new.png", ROOT / "records" / "curves.png"))
    assert json.loads(new) == json.loads(kept), "draw it anew: python -m speedrun plot -o records/curves.png"


def test_the_pictures_of_the_line_have_the_texts_that_their_command_writes(tmp_path):
    assert main(["plot", "--line", "-o", str(tmp_path / "speedrun.svg")]) == 0
    for name in "speedrun.svg", "speedrun-dark.svg":
        new, kept = (re.findall(">(.+)</text>", (folder / name).read_text()) for folder in (tmp_path, ROOT / "docs"))
        assert new == kept != [], "draw them anew: python -m speedrun plot --line -o docs/speedrun.svg"


def test_scripts_and_pages_have_the_numbers_of_tracks_and_public_records():
    for name, track in TRACKS.items():
        cfg = train_gpt.PRESETS[name]
        assert (cfg.target_loss, cfg.val_tokens, cfg.val_sha256) == (track.target, track.val_tokens, track.val_sha256)
    for it in json.loads(records.PUBLIC.read_text())["records"]:
        row = f"| {it['number']} | {it['date']} | {it['name']} | {it['steps']:,} | {it['train_time_s']:.2f} | "
        assert re.search(row.replace("|", r"\|"), (ROOT / "records" / "README.md").read_text())
