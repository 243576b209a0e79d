"""python -m records: what verify lets through and what not, the statistics, a race, and the other commands."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import synthetic_logs
import train_gpt
from records import proof, race, rules
from records.__main__ import build_parser, main
from records.logs import RECORDS, read_log
from records.publish import BEGIN, END
from shards import write_shard
from synthetic_logs import SOURCE, log_text, public_text, write_record

ROOT = Path(train_gpt.__file__).parent
NAME = "2026-01-02_Good"
LOSSES = (1.431, 1.428, 1.433, 1.430, 1.429)
EMPTY_TABLES = f"# Records\n\n{BEGIN}\n{END}\n\nMore.\n"
COMMANDS = ("new", "diff", "verify", "stats", "race", "plot", "mask", "table")


def good(**settings) -> list[str]:
    return [log_text(seed=seed, val_loss=loss, **settings) for seed, loss in enumerate(LOSSES)]


@pytest.fixture
def tool(tmp_path, capsys):
    """Runs a command on the records in tmp_path/records: exit code, stdout, stderr."""

    def run(command: str, *argv: object) -> tuple[int, str, str]:
        try:
            code = main([command, "--root", str(tmp_path / "records"), *map(str, argv)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    (tmp_path / "records").mkdir()
    return run


@pytest.fixture
def root(tmp_path, tool) -> Path:
    return tmp_path / "records"


# verify


def test_verify_passes_a_good_record(tool, root):
    folder = write_record(root, NAME, good())
    result = {"val_loss": LOSSES[0] + 0.00003, "train_time_ms": 806.3, "seed": 0}
    (folder / "run0.json").write_text(json.dumps(result))
    code, out, _ = tool("verify")
    assert (code, out) == (0, f"ok {NAME}: n=5 mean 1.4302 sd 0.0019 p=1.1e-05 (nano, 20 steps)\n")


def edit(old: str, new: str):
    """Changes the first log."""

    def change(texts: list[str]) -> list[str]:
        assert old in texts[0]
        return [texts[0].replace(old, new), *texts[1:]]

    return change


FAULTS = {
    "cut short": (edit("step:20/20 val_loss", "no"), r"run0\.txt: ends at step 20 of 20 without .*: cut short"),
    "cut in a line": (lambda t: [t[0][: t[0].index("step:12/") + 12], *t[1:]], r"run0\.txt: 'step:12/20 t' is no step"),
    "cut early": (lambda t: [t[0][: t[0].index("commit")], *t[1:]], r"run0\.txt: not a log, or cut short"),
    "a step missing": (edit("step:7/20 train_time:282ms step_avg:40.30ms\n", ""), r"run0\.txt: .*first at step 7"),
    "interrupted": (edit("first batch", "interrupted: the run\nfirst batch"), r"run0\.txt: has the line 'interrupted"),
    "resumed": (edit("step:1/20", "resumed at step 1\nstep:1/20"), r"run0\.txt: has the line 'resumed"),
    "edited script": (
        edit("import torch\n", "import torch, sys\n"),
        r"run0\.txt: the script in the log is not the folder",
    ),
    "one seed twice": (lambda t: [*t, log_text(seed=2, val_loss=1.4312)], r"run5\.txt: has seed 2, as run2\.txt has"),
    "validation hash": (edit(synthetic_logs.NANO_VAL, "ab" * 32), r"run0\.txt: other validation tokens, sha256 abab"),
    "validation count": (edit("tokens: 262144", "tokens: 8192"), r"run0\.txt: validates on 8192 tokens, the track on"),
    "other flags": (edit('"preset"', '"muon_lr": 1, "preset"'), r"run0\.txt: configured unlike run1\.txt in muon_lr"),
    "shard name": (edit("train_000000.bin, 4", "train_000001.bin, 4"), r"run0\.txt: the training stream .* shards"),
    "shard header": (
        edit("header sha256 4", "header sha256 5"),
        r"run0\.txt: the training stream .* has another header",
    ),
    "first batch": (edit("position 0", "position 1024"), r"run0\.txt: the training stream .* first batch is .* 1024"),
    "last batch": (edit("position 19456", "position 20480"), r"run0\.txt: the training stream .* last batch is"),
    "no last batch": (edit("last batch", "end"), r"run0\.txt: the training stream .* last batch is not stated"),
    "step_avg": (edit("train_time:403ms step", "train_time:400ms step"), r"run0\.txt: step_avg at step 10 is 40\.3 ms"),
    "clock falls": (edit("time:403ms", "time:303ms"), r"run0\.txt: train_time falls from 363 to 303 ms at step 10"),
    "median": (edit("median 40.30", "median 30.30"), r"run0\.txt: states a median step of 30\.3 ms"),
    "recompiled": (edit("started: 0", "started: 2"), r"run0\.txt: 2 graphs compiled after the clock"),
    "threads": (edit("1 processes, 2 threads", "2 processes, 2 threads"), r"run0\.txt: uses 4 CPU threads"),
    "a GPU": (edit("commit: unknown", "gpu: NVIDIA H100, 80000 MiB, NCCL 2"), r"run0\.txt: ran on a GPU"),
    "no track": (edit('"preset": "nano"', '"preset": "own"'), r"run0\.txt: preset 'own' is no track"),
    "public form": (lambda t: [public_text({20: 1.43}, 20), *t[1:]], r"run0\.txt: states no configuration"),
    "above target": (
        lambda t: [log_text(seed=i, val_loss=1.46) for i in range(3)],
        r"mean 1\.4600 is above the target",
    ),
    "p too large": (
        lambda t: [log_text(seed=i, val_loss=1.44 + 0.008 * i) for i in range(3)],
        r"n too small: mean 1\.4480 is at most 1\.45, but p=0\.35 .* at n=3; run more seeds \(about \d+ in all",
    ),
    "one run": (lambda t: t[:1], r"n too small: one log, the test needs at least 2"),
    "no logs": (lambda t: [], "has no logs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_fault(tool, root, fault):
    change, message = FAULTS[fault]
    write_record(root, NAME, change(good()))
    code, out, _ = tool("verify", "good")
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 1, out
    assert re.match(f"FAIL {NAME}: (?:{message})", lines[0]), out


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import torch\ntorch._inductor.config.coordinate_descent_tuning = True\n", "uses torch._inductor.config"),
        ("import torch._dynamo.config as c\nc.x = 1\n", "uses torch._dynamo.config"),
        ("from torch._inductor import config\n", "uses torch._inductor.config"),
        ("import torch\nsetattr(getattr(torch._inductor, 'config'), 'x', 1)\n", "uses torch._inductor.config"),
        ("import torch\nf = torch.compile(print, mode='max-autotune')\n", "gives the compiler mode="),
        ("import torch\n@torch.compile(options={})\ndef f(): pass\n", "gives the compiler options="),
        ("from torch import compile as c\nfrom functools import partial\nd = partial(c, backend='x')\n", "backend="),
        ("import functools, torch\nc = functools.partial(torch.compile, dynamic=False)\nc(1, mode='x')\n", "mode="),
        ("import os\nos.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\n", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        ("import os\nos.environ.update(TORCHINDUCTOR_FREEZING='1')\n", "TORCHINDUCTOR_FREEZING"),
        ("def broken(:\n", "cannot be parsed"),
    ],
)
def test_verify_finds_compiler_flags(tool, root, script, message):
    write_record(root, NAME, good(source=script), source=script)
    code, out, _ = tool("verify")
    assert code == 1
    assert len(out.splitlines()) == 1
    assert message in out


def test_the_trainer_has_no_compiler_flags():
    assert not list(rules.compiler_flags((ROOT / "train_gpt.py").read_text()))


def test_verify_wants_the_readme_written_and_the_json_of_the_run(tool, root):
    folder = write_record(root, NAME, good(), readme="# Name: one line\n\n<say what>\n")
    (folder / "run1.json").write_text('{"val_loss": 1.4, "train_time_ms": 806.0, "seed": 1}')
    code, out, _ = tool("verify")
    assert code == 1
    readme, result = out.splitlines()
    assert "README.md line 3 still has a <say" in readme
    assert "run1.txt: run1.json says val_loss '1.4', the log 1.428" in result
    (folder / "README.md").unlink()
    (folder / "train_gpt.py").unlink()
    (folder / "run1.json").write_text("{")
    assert "train_gpt.py is missing" in tool("verify")[1]


def test_a_systems_record_needs_no_p_but_the_mean(tool, root):
    readme = "# Name: one line\n\nSystems record: the same training, other kernels.\n"
    write_record(root, NAME, good()[:1], readme=readme)
    write_record(root, "2026-01-03_Bad", [log_text(val_loss=1.4501)], readme=readme)
    code, out, _ = tool("verify")
    assert code == 1
    assert out.splitlines()[0] == f"ok {NAME}: n=1 mean 1.4310 p waived: systems record (nano, 20 steps)"
    assert out.splitlines()[1].startswith("FAIL 2026-01-03_Bad: mean 1.4501 is above the target 1.45")


def test_gpt2_records_agree_on_the_validation_tokens(tool, root):
    gpt2 = dict(preset="gpt2", batch_tokens=393216, steps=510, threads="8 processes, 4 threads")
    texts = [log_text(seed=i, val_loss=3.27 + 0.001 * i, **gpt2) for i in range(4)]
    folder = write_record(root, NAME, texts)
    code, out, _ = tool("verify")
    assert code == 0, out
    assert "fineweb_train_000003.bin position 393216\n" in texts[0], "two shards of 254 batches each come first"
    assert "note 2026-01-02_Good: the hash of gpt2's validation tokens is not known here" in out
    (folder / "run3.txt").write_text(log_text(seed=3, val_loss=3.27, **gpt2, val_sha256="cd" * 32))
    code, out, _ = tool("verify")
    assert code == 1
    assert "run3.txt: other validation tokens than run0.txt" in out


def test_against_names_the_first_deviation(tool, tmp_path):
    curve = {int(step): loss for step, loss in proof.public_history()["records"][-1]["curve"].items()}
    for text in public_text(curve, 1770), log_text(preset="gpt2", steps=1770, batch_tokens=393216, curve=curve):
        (tmp_path / "log.txt").write_text(text)
        assert tool("verify", "--against", "record21", tmp_path / "log.txt")[:2] == (
            0, "follows record21 within 0.05 at 16 points\n",
        )  # fmt: skip
    off = {step: loss + (0.0501 if step >= 750 else 0.0499) for step, loss in curve.items() if step != 500}
    (tmp_path / "log.txt").write_text(public_text(off, 1770))
    code, out, _ = tool("verify", "--against", "record21", tmp_path / "log.txt")
    assert code == 1
    assert out.startswith("leaves record21 first at step 750: 3.6531, the curve 3.6030 (compared at 15 points; 1 more")
    assert tool("verify", "--against", "record18", tmp_path / "log.txt")[0] == 1
    for name, text, message in (
        ("record13", public_text(curve, 1770), "choose one of record14, record15, record18, record20, record21"),
        ("record21", log_text(), "a log of the nano track"),
        ("record21", public_text({3: 1.0, 4: 1.0}, 4), "no validation at a step of the curve"),
    ):
        (tmp_path / "log.txt").write_text(text)
        code, _, err = tool("verify", "--against", name, tmp_path / "log.txt")
        assert code == 2
        assert message in err


# Logs


def test_both_forms_are_read(tmp_path):
    (tmp_path / "own.txt").write_text(log_text(seed=7, val_loss=1.4321))
    (tmp_path / "public.txt").write_text(public_text({0: 10.8258, 20: 3.2788}, 20))
    own, public = read_log(tmp_path / "own.txt"), read_log(tmp_path / "public.txt")
    assert (own.seed, own.track, own.num_threads, own.peak_mib, own.has_gpu) == (7, "nano", 2, 499, False)
    assert (own.val_loss, own.train_time, own.num_steps, own.recompiles) == (1.4321, 806, 20, 0)
    assert own.source == SOURCE.rstrip("\n")
    assert own.first_batch == ("nano_train_000000.bin", 0)
    assert own.step_time == pytest.approx(40.3, abs=0.1)
    assert (public.seed, public.configuration, public.val_sha256, public.recompiles) == (None,) * 4
    assert public.source == "import sys\nprint(sys.version)"
    assert (public.python, public.torch) == ("3.12.7", "2.7.0.dev20250125+cu126")
    assert (public.hardware, public.peak_mib) == ("8x NVIDIA H100 80GB HBM3", 29898)
    assert public.curve == {0: (10.8258, 0), 20: (3.2788, 1000)}
    assert [line.average for line in public.training[8:12]] == [None, None, 100, 100]
    assert public.incomplete is None


@pytest.mark.parametrize("step_ms", [38.02, 38.5, 40.3, 96.77, 101.6])
def test_step_time_tells_tenths_of_rounded_lines(tmp_path, step_ms):
    (tmp_path / "log.txt").write_text(log_text(steps=500, step_ms=step_ms))
    assert read_log(tmp_path / "log.txt").step_time == pytest.approx(step_ms, abs=0.25)


def mutilated() -> st.SearchStrategy[bytes]:
    text = (log_text() + "\n").encode()
    cut = st.integers(0, len(text)).map(lambda n: text[:n])
    pieces = st.tuples(st.integers(0, len(text)), st.integers(0, 80), st.binary(max_size=20))
    overwritten = pieces.map(lambda p: text[: p[0]] + p[2] + text[p[0] + p[1] :])
    digits = st.tuples(
        st.sampled_from(re.findall(rb"[:\s](\d+)", text)), st.sampled_from([b"9" * 5000, b"-1", b"0", b"e"])
    )
    numbers = digits.map(lambda p: text.replace(p[0], p[1]))
    nested = st.just(re.sub(rb"configuration: .*", b"configuration: " + b"[" * 100_000, text))
    return st.one_of(st.binary(max_size=200), cut, overwritten, numbers, nested)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=mutilated(), result=st.one_of(st.none(), st.binary(max_size=50), st.just(b'{"val_loss": ' + b"9" * 999 + b"}"))
)
def test_garbage_never_gives_a_traceback(tool, root, tmp_path, log, result):
    shutil.rmtree(root)
    folder = write_record(root, NAME, good()[:2])
    (folder / "run0.txt").write_bytes(log)
    if result is not None:
        (folder / "run0.json").write_bytes(result)
    files = (folder / "run0.txt", folder / "run1.txt")
    (root / "README.md").write_text(EMPTY_TABLES)
    for command, *argv in (
        ("verify",),
        ("verify", "--against", "record21", files[0]),
        ("stats", *files),
        ("diff", files[0], files[1]),
        ("new", "Other", files[0], "--date", "2026-02-03"),
        ("table",),
    ):
        code, out, err = tool(command, *argv)
        assert code in (0, 1, 2)
        assert "Traceback" not in out + err
        assert (code == 2) == err.startswith("python -m records: "), (command, code, err)
        if code == 2:
            assert err.count("\n") == 1, err


# Statistics


def test_p_is_the_t_test_and_never_nan():
    values = [1.44, 1.445, 1.448]
    t = (np.mean(values) - 1.45) / (np.std(values, ddof=1) / np.sqrt(3))
    # Student's t with two degrees of freedom has a distribution function in closed form
    assert proof.p_below(values, 1.45) == pytest.approx(0.5 * (1 + t / np.sqrt(2 + t * t)))
    assert proof.p_below([1.44], 1.45) is None
    assert proof.p_below([1.44, 1.44], 1.45) == 0
    assert proof.p_below([1.45, 1.45], 1.45) == 1


@pytest.mark.parametrize(("gap", "sd"), [(0.0013, 0.0019), (0.02, 0.02), (0.02, 0.006)])
def test_runs_needed_is_what_simulation_says(gap, sd):
    needed = proof.runs_needed(gap, sd)
    rng = np.random.default_rng(0)

    def passes(n: int) -> float:
        from scipy.stats import ttest_1samp

        draws = rng.normal(3.28 - gap, sd, size=(20_000, n))
        return float(np.mean(ttest_1samp(draws, 3.28, axis=1, alternative="less").pvalue < 0.01))

    assert passes(needed) > 0.9 - 0.01
    assert passes(needed - 1) < 0.9 + 0.01
    assert proof.power_below(gap, sd, needed) == pytest.approx(passes(needed), abs=0.01)


def test_runs_needed_at_the_edges():
    assert proof.runs_needed(0, 0.01) is None
    assert proof.runs_needed(-0.1, 0.01) is None
    assert proof.runs_needed(0.1, 0) == 2
    assert proof.runs_needed(100, 0.001) == 2
    assert proof.runs_needed(1e-9, 0.01) is None


def test_peeking_passes_far_too_often():
    from scipy.stats import t

    values = np.random.default_rng(0).standard_normal((20_000, 20))
    n = np.arange(1, 21)
    means = values.cumsum(1) / n
    sds = np.sqrt(((values**2).cumsum(1) - n * means**2)[:, 2:] / (n - 1)[2:])
    p = t.cdf(means[:, 2:] / (sds / np.sqrt(n[2:])), n[2:] - 1)
    assert (p[:, -1] < 0.01).mean() == pytest.approx(0.01, abs=0.003), "one look"
    peeking = (p < 0.01).any(1).mean()
    assert peeking > 0.03
    assert f"about {peeking:.0%} of the time" in proof.PEEKING


def test_intervals_of_a_race_cover_the_truth_and_have_the_power_computed():
    rng = np.random.default_rng(0)
    pairs, sd, truth = 6, 0.01, 0.013
    covered = found = 0
    for _ in range(2000):
        drift = rng.normal(0, 0.05, pairs)
        log_a, log_b = (np.log(100) + mean + drift + rng.normal(0, sd / np.sqrt(2), pairs) for mean in (truth, 0))
        _, low, high = proof.ratio_interval(np.exp(log_a), np.exp(log_b))
        covered += low < np.exp(truth) < high
        found += not low < 1 < high
    assert 0.93 < covered / 2000 < 0.97
    assert found / 2000 == pytest.approx(proof.power_of_pairs(truth, sd, pairs), abs=0.03)
    assert 0.5 < found / 2000 < 0.9, "a power that tests nothing"
    assert proof.power_of_pairs(proof.detectable(sd, pairs), sd, pairs) == pytest.approx(0.9, abs=0.001)


def test_stats(tool, root, tmp_path):
    folder = write_record(root, NAME, good())
    code, out, _ = tool("stats", "good")
    assert code == 0
    first, second, third = out.splitlines()
    assert first == "n=5 mean 1.4302 sd 0.0019 p=1.1e-05 against 1.45"
    assert second.endswith(": 3 in all")
    assert third == proof.PEEKING
    assert "never, at this mean" in tool("stats", "good", "--target", "1.43")[1]
    assert "unknown from one run" in tool("stats", folder / "run0.txt")[1]
    for text, message in (
        (log_text(seed=1), "have the same seed 1"),
        (log_text(seed=9, steps=21), "has 21 steps"),
        (log_text(seed=9, source="pass\n"), "are of different scripts"),
        (log_text(seed=9).replace("step:20/20 val_loss", ""), "cut short"),
    ):
        (tmp_path / "other.txt").write_text(text)
        code, _, err = tool("stats", "good", tmp_path / "other.txt")
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


# Race

SCRIPT = """
import json, pathlib, sys, zlib
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed, folder = int(flags["--seed"]), pathlib.Path(flags["--log_dir"])
if flags.get("--fail"):
    sys.exit("first line\\nlast line")
sys.path.insert(0, flags["--helper"])
from synthetic_logs import log_text
folder.mkdir(exist_ok=True, parents=True)
step_ms = SLOWNESS * (40 + 0.1 * (zlib.crc32(flags["--run_id"].encode()) % 5))
log = folder / (flags["--run_id"] + ".txt")
log.write_text(log_text(seed=seed, val_loss=1.4 + 0.001 * seed + SLOWNESS / 100, step_ms=step_ms, source="pass\\n"))
result = dict(val_loss=1.4 + 0.001 * seed + SLOWNESS / 100, train_time_ms=20 * step_ms, seed=seed)
log.with_suffix(".json").write_text(json.dumps(result))
"""


def test_race_alternates_pairs_seeds_and_reads_the_logs(tool, tmp_path):
    for name, slowness in ("fast", "1.0"), ("slow", "1.5"):
        (tmp_path / f"{name}.py").write_text(SCRIPT.replace("SLOWNESS", slowness))
    helper = str(Path(__file__).parent)
    argv = (tmp_path / "slow.py", tmp_path / "fast.py", "--pairs", "4", "--warmup", "1", "--keep", tmp_path / "kept")
    code, out, err = tool("race", "--json", *argv, "--", "--helper", helper)
    assert code == 0, err
    found = json.loads(out)
    assert found["train_time"]["low"] < 1.5 < found["train_time"]["high"]
    assert found["train_time"]["low"] > 1.4
    assert found["step_time"]["ratio"] == pytest.approx(1.5, abs=0.02)
    assert found["val_loss"]["difference"] == pytest.approx(0.005)
    assert (found["val_loss"]["low"], found["val_loss"]["high"]) == pytest.approx((0.005, 0.005))
    order = [line.split(",")[0].removeprefix("race-") for line in err.splitlines()]
    assert order == "warmup0-b warmup0-a pair0-a pair0-b pair1-b pair1-a pair2-a pair2-b pair3-b pair3-a".split()
    for side in "ab":
        assert [run["seed"] for run in found["runs"][side]] == [1, 2, 3, 4]
    assert len(list((tmp_path / "kept").glob("*.txt"))) == 10
    argv = (tmp_path / "slow.py", tmp_path / "fast.py", "--pairs", "2", "--", "--helper", helper)
    code, out, err = tool("race", *argv)
    assert code == 0, err
    assert re.search(r"^median step A/B: 1\.[45]\d+ \(\S+ to \S+\)", out, re.MULTILINE)


def test_a_failed_run_ends_the_race_with_its_last_line(tool, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("SLOWNESS", "1.0"))
    scripts = (tmp_path / "script.py", tmp_path / "script.py")
    code, _, err = tool("race", *scripts, "--", "--fail", "yes")
    assert (code, err.count("\n")) == (2, 1)
    assert "run race-pair0-a failed with exit code 1: 'last line'" in err
    assert "at least --pairs 2" in tool("race", *scripts, "--pairs", "1")[2]
    assert "leave them out" in tool("race", *scripts, "--", "--seed", "1")[2]


def test_a_race_misses_scipy_before_the_first_run(tool, tmp_path: Path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(race, "run_script", lambda *_: pytest.fail("a run for nothing"))
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    code, _, err = tool("race", tmp_path / "script.py", tmp_path / "script.py")
    assert code == 2
    assert re.search(r"scipy.*pip install .*requirements\.txt", err)


def test_a_race_wants_the_same_validation_tokens_for_both(tool, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("pass\n")

    def run_script(script: Path, seed: int, run_id: str, *_) -> race.Run:
        return race.Run(seed, 1.4, 800.0, 40.0, run_id[-1])

    monkeypatch.setattr(race, "run_script", run_script)
    code, _, err = tool("race", tmp_path / "script.py", tmp_path / "script.py")
    assert code == 2
    assert "validate on different tokens" in err


@pytest.mark.slow
def test_a_race_sees_a_step_that_takes_twice_as_long(tmp_path):
    """Live: the trainer against a copy that sleeps for a median step in each step."""
    if not (ROOT / "data/nano/nano_val_000000.bin").exists():
        subprocess.run([sys.executable, "data/pack_nano.py"], cwd=ROOT, check=True)
    flags = ["--num_iterations", "15", "--val_loss_every", "0", "--val_tokens", "8192", "--cpu_threads", "1"]
    flags += ["--preset", "nano", "--device", "cpu", "--val_sha256", ""]
    first = race.run_script(ROOT / "train_gpt.py", 1, "first", tmp_path, flags)
    source = (ROOT / "train_gpt.py").read_text()
    step = "        watch.put(step, loss.wait())\n"
    assert source.count(step) == 1
    slow = tmp_path / "slow.py"
    slow.write_text(source.replace(step, f"        time.sleep({first.step_time / 1000})\n{step}"))
    found = race.race([str(slow), str(ROOT / "train_gpt.py")], 5, 0, 1, flags, RECORDS, None)
    for key in "train_time", "step_time":
        assert 1 < found[key]["low"] < found[key]["ratio"], found
    assert found["val_loss"]["difference"] == 0, "the same training"


# The other commands


def test_new_makes_a_record_that_lacks_only_words(tool, root, tmp_path):
    write_record(root, "2026-01-01_Before", [], source=SOURCE.replace("dynamic=False", "dynamic=True"))
    write_record(root, "2026-03-01_After", [], source="pass\n")
    paths = []
    for i, text in enumerate(good()):
        paths.append(tmp_path / f"log{i}.txt")
        paths[-1].write_text(text)
    paths[0].with_suffix(".json").write_text('{"val_loss": 1.431, "train_time_ms": 806.0, "seed": 0}')
    argv = ("new", "Fresh", *paths, "--date", "2026-02-03")
    code, out, err = tool(*argv)
    assert code == 0, err
    folder = root / "2026-02-03_Fresh"
    assert str(folder) in out
    assert (folder / "train_gpt.py").read_text() == SOURCE
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["README.md", "train_gpt.py", "log0.json", *(path.name for path in paths)]
    )
    readme = (folder / "README.md").read_text()
    for wanted in (
        "# Fresh: <say",
        "n=5 mean 1.4302 sd 0.0019, p=1.1e-05",
        "mean 0.81 s, sd 0.00 s",
        "mean 40.30 ms",
        "1 lines removed, 1 added against [2026-01-01_Before]",
        "Some Processor, 1 processes of 2 threads",
        "torch 2.13.0+cpu",
        "## What changed\n\n<say",
        "## Why\n\n<say",
    ):
        assert wanted in readme
    code, out, _ = tool("verify", "fresh")
    assert code == 1
    assert len(out.splitlines()) == 1
    assert "<say" in out
    (folder / "README.md").write_text(re.sub("<say.*>", "said", readme))
    assert tool("verify", "fresh")[0] == 0
    assert "is there already" in tool(*argv)[2]
    paths[0].write_text(log_text(source="pass\n"))
    assert "different scripts" in tool("new", "Mixed", *paths)[2]
    paths[0].write_text(log_text().replace("first batch", "stopped: loss nan\nfirst batch"))
    assert "has the line 'stopped" in tool("new", "Stopped", *paths)[2]
    assert "is no name" in tool("new", "../up", *paths)[2]
    assert "is no date" in tool("new", "X", *paths, "--date", "today")[2]
    assert len(list(root.iterdir())) == 3, "a refused record leaves nothing"


def test_diff(tool, root, tmp_path):
    write_record(root, "2026-01-01_ValueEmbed", good())
    write_record(root, "2026-01-02_UNetValueEmbed", [], source=SOURCE + "extra = 1\nmore = 2\n")
    (tmp_path / "log.txt").write_text(log_text())
    code, out, err = tool("diff", "2026-01-01_valueembed", "unet")
    assert (code, err) == (0, "0 lines removed, 2 added\n")
    assert "+extra = 1\n+more = 2\n" in out
    assert tool("diff", "unet", tmp_path / "log.txt", "--stat")[:2] == (0, "2 lines removed, 0 added\n")
    assert tool("diff", root / "2026-01-01_ValueEmbed", tmp_path / "log.txt", "--stat")[1].startswith(
        "0 lines removed, 0"
    )
    assert tool("diff", "valueembed", "unet", "--stat")[:2] == (0, "0 lines removed, 2 added\n")
    code, _, err = tool("diff", "Embed", "unet")
    assert code == 2
    assert "is part of 2 names; name one of: 2026-01-01_ValueEmbed, 2026-01-02_UNetValueEmbed" in err
    assert "neither a file nor a record" in tool("diff", "nothing", "unet")[2]


def test_table_is_idempotent_and_checked(tool, root):
    readme = root / "README.md"
    write_record(root, NAME, good())
    write_record(root, "2026-01-03_NoRuns", [])
    readme.write_text("no markers\n")
    assert "lacks the lines <!-- leaderboards" in tool("table")[2]
    readme.write_text(EMPTY_TABLES)
    assert tool("table", "--check")[0] == 1
    assert readme.read_text() == EMPTY_TABLES
    assert tool("table")[0] == 0
    text = readme.read_text()
    assert text.startswith("# Records\n")
    assert text.endswith("<!-- end of leaderboards -->\n\nMore.\n")
    cells = (
        "one line that says what | 20 | 1.4302 (sd 0.0019, n=5) | 1e-05 | 0.81 (sd 0.00) | 40.30 | 499 | Some Processor"
    )
    assert f"| [{NAME}]({NAME}) | {cells}" in text
    assert "NoRuns" not in text
    assert "KellerJordan/modded-nanogpt" in text
    assert "not measured here\n\n| #" in text
    assert "| 21 | 2025-01-26 | BatchSize | 1,770 | 393,216 | 100.00 | 176.00 | 2.933 |" in text
    assert tool("table", "--check")[0] == 0
    assert tool("table")[0] == 0
    assert readme.read_text() == text


def test_plots(tool, root, tmp_path):
    write_record(root, NAME, good())
    (tmp_path / "public.txt").write_text(public_text({0: 10.8, 10: 4.0, 20: 3.28}, 20))
    for argv in ("good", tmp_path / "public.txt"), ("--history",):
        code, out, err = tool("plot", *argv, "-o", tmp_path / "figure.png")
        assert code == 0, err
        assert out == f"{tmp_path / 'figure.png'}\n"
        data = (tmp_path / "figure.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        (tmp_path / "figure.png").unlink()
    assert tool("plot", "good", "-o", tmp_path / "none" / "figure.png")[0] == 2
    assert tool("plot", "good", "-o", tmp_path / "figure.xyz")[0] == 2
    assert tool("plot")[0] == 2


def test_every_command_has_help_and_json(tool, root, tmp_path):
    write_record(root, NAME, good())
    (root / "README.md").write_text(EMPTY_TABLES)
    (tmp_path / "log.txt").write_text(log_text())
    (tmp_path / "script.py").write_text(SCRIPT.replace("SLOWNESS", "1.0"))
    script, helper = str(tmp_path / "script.py"), ["--", "--helper", str(Path(__file__).parent)]
    write_shard(tmp_path / "val.bin", np.zeros(9000, dtype=np.int64))
    files = ["--val_files", str(tmp_path / "val.bin")]
    argvs = {
        "new": ["Fresh", str(tmp_path / "log.txt")],
        "diff": ["good", script],
        "verify": [],
        "stats": ["good"],
        "race": [script, script, "--pairs", "2", *helper],
        "plot": ["good", "-o", str(tmp_path / "figure.png")],
        "mask": ["-o", str(tmp_path / "mask.png"), "--", "--preset", "nano", *files, "--val_tokens", "8192"],
        "table": [],
    }
    assert set(argvs) == set(COMMANDS)
    for command, argv in argvs.items():
        code, out, _ = tool(command, "--help")
        assert code == 0
        assert "--json" in out
        code, out, err = tool(command, "--json", *argv)
        assert code in (0, 1), err
        assert isinstance(json.loads(out), dict)
    assert all(name in build_parser().format_help() for name in COMMANDS)


def test_wrong_commands_are_one_line(tool):
    for argv in (
        ["verify", "--nonsense"],
        ["stats"],
        ["race", "a", "b", "--pairs", "-3"],
        ["new", "X"],
        ["verify", "x"],
        ["stats", "x", "--target", "nan"],
    ):
        code, out, err = tool(*argv)
        assert (code, out, err.count("\n")) == (2, "", 1), argv


def test_the_tools_start_without_torch_scipy_and_matplotlib():
    program = "import sys, records.__main__ as m; m.build_parser(); print([n for n in HEAVY if n in sys.modules])"
    heavy = program.replace("HEAVY", "('torch', 'train_gpt', 'scipy', 'matplotlib', 'numpy')")
    done = subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
