"""What a run touches besides its log: no other file, no network, no code that was downloaded; and what a step calls."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt
from test_train import ROOT, corpus, flags  # noqa: F401  (fixtures)
from test_world_size import free_ports


def audited_run(tmp_path: Path, size: int, run_flags: list[str]) -> list[dict]:
    """What each process of a run noted, in a fresh home, temporary folder and working directory."""
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    names = ("RANK", "WORLD_SIZE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= dict(HOME=str(folders["home"]), TMPDIR=str(folders["tmp"]), PYTHONDONTWRITEBYTECODE="1")
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={size}", f"--master_port={free_ports(1)[0]}"]
    command = [*launcher, ROOT / "tests" / "audited_worker.py"] if size > 1 else [ROOT / "tests" / "audited_worker.py"]
    notes = tmp_path / "notes"
    subprocess.run([sys.executable, *command, notes, *run_flags], cwd=folders["cwd"], env=env, check=True, timeout=120)
    assert list(folders["cwd"].rglob("*")) == []
    assert list(folders["home"].rglob("*")) == []
    left = {path.relative_to(folders["tmp"]).parts[0] for path in folders["tmp"].rglob("*") if path.is_file()}
    assert all(name.startswith("torchelastic_") for name in left), left  # torchrun's own
    return [json.loads(line) for line in notes.read_text().splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the sockets in /proc")
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_written_but_logs_and_no_host_is_reached(flags, tmp_path, size):  # noqa: F811
    notes = audited_run(tmp_path, size, [*flags, "--checkpoint_every", "2", "--run_id", "r"])
    assert len(notes) == size
    logs = tmp_path / "logs"
    assert {path.relative_to(logs).parts[0] for path in logs.rglob("*")} == {"r.txt", "r.json", "r.checkpoints"}
    for note in notes:
        outside = [path for path in note["written"] if not Path(path).is_relative_to(logs) and path != os.devnull]
        assert [path for path in outside if not Path(path).is_relative_to(tmp_path / "tmp")] == []
        assert note["hosts"] == []
        assert set(note["peers"]) <= ({"127.0.0.1", "::1"} if size > 1 else set())
        assert set(note["programs"]) <= {"git", "sed", "nvidia-smi"}
    assert size == 1 or any(note["peers"] for note in notes)  # or this test sees none
    assert str(logs / "r.txt") in notes[0]["written"] + notes[-1]["written"]


def calls_of(source: Path) -> list[tuple[str, ast.Call]]:
    """The calls in a file, by the dotted name of what is called."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_what_is_downloaded_or_resumed_is_never_executed():
    """No file but the repository's own is run or unpickled: shards are read as numbers, checkpoints as tensors."""
    sources = [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("records/*.py")]
    assert len(sources) > 8
    loads = 0
    for source in sources:
        for name, call in calls_of(source):
            where = f"{source.relative_to(ROOT)}:{call.lineno}: {name}"
            if name == "torch.load":
                loads += 1
                assert ast.literal_eval({k.arg: k.value for k in call.keywords}["weights_only"]) is True, where
            if name in ("exec", "eval", "compile"):
                assert source.name == "check.py", where  # definitions of our own train_gpt.py
            unpicklers = ("pickle.load", "pickle.loads", "np.load", "numpy.load", "joblib.load", "marshal.loads")
            assert name not in (*unpicklers, "runpy.run_path", "importlib.import_module", "os.system"), where
            keywords = {keyword.arg for keyword in call.keywords}
            assert not keywords & {"allow_pickle", "trust_remote_code", "shell"}, where
    assert loads


def test_a_step_calls_nothing_but_its_work_and_the_log(flags, monkeypatch):  # noqa: F811
    """Checkpoints and summaries cost a step that makes none a comparison: no function of theirs is called in it."""
    called: dict[int, set[str]] = {}
    step = -1

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == train_gpt.__file__:
            called.setdefault(step, set()).add(frame.f_code.co_qualname if sys.version_info >= (3, 11) else "")

    def counted(*args):
        nonlocal step
        step += 1
        sys.setprofile(profile)
        return original(*args)

    original = train_gpt.train_step
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args: None)
    monkeypatch.setattr(train_gpt, "train_step", counted)
    try:
        train_gpt.main([*flags, "--num_iterations", "9", "--val_loss_every", "0", "--checkpoint_every", "3"])
    finally:
        sys.setprofile(None)
    work = {
        *("Muon.reduce", "Muon.update", "Muon.finish", "Adam.reduce", "Adam.update", "Adam.finish", "step_optimizers"),
        *("World.reduce_scatter", "World.all_gather", "World.all_reduce", "Pending.wait", "as_stack", "train_step"),
        *("zeropower_via_newtonschulz5", "lr_multiplier", "muon_momentum", "window_blocks", "read_batches"),
        *("LossWatch.put", "LossWatch.check", "RunLog.step", "RunLog.write", "Clock.read"),
    }
    own = {
        name.partition(".<locals>")[0]
        for name in called[6]
        if not name.startswith(("GPT", "Block", "Causal", "HeadLoss", "ReluSquared", "RMSNorm"))
    }
    model = {
        "CastedLinear.forward",
        "MLP.forward",
        "Rotary.forward",
        "document_block_mask",
        "gathered_attention",
    }
    model |= {"GatheredMask.__init__", "Hyperparameters.batch_sequences", "head_loss"}
    assert own - work - model == set()
    assert {"write_checkpoint", "run_identity", "Clock.stop", "Clock.start"} <= called[5]  # after step 6 of 9
    assert torch.is_grad_enabled()
