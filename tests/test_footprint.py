"""What a run touches besides its log: no other file, no network; and no code that was downloaded."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from synthetic_logs import ROOT, write_corpus

SHORT = (
    "--preset nano --device cpu --dtype float32 --cpu_threads 1 --num_iterations 4 --model_dim 32 --num_heads 2 "
    "--head_dim 16 --train_seq_len 128 --batch_tokens 256 --val_seq_len 256 --val_tokens 1024 --checkpoint_every 2"
).split()
UNSAFE = "exec eval compile pickle.load pickle.loads np.load numpy.load joblib.load marshal.loads os.system".split()


def test_nothing_is_written_but_logs_and_no_host_is_reached(tmp_path: Path):
    """Train in a fresh home, temporary folder and working directory."""
    home, temporary, cwd, logs = folders = [tmp_path / name for name in ("home", "tmp", "cwd", "logs")]
    for folder in folders[:3]:
        folder.mkdir()
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name and "RANK" not in name}
    env |= dict(HOME=str(home), TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1")
    command = [ROOT / "tests" / "audited_worker.py", tmp_path / "notes", *SHORT, *write_corpus(tmp_path)]
    command += ["--log_dir", logs, "--run_id", "r"]
    subprocess.run([sys.executable, *command], cwd=cwd, env=env, check=True, timeout=120)
    assert [path for folder in folders[:3] for path in folder.rglob("*") if path.is_file()] == []
    assert {path.relative_to(logs).parts[0] for path in logs.rglob("*")} <= {"r.txt", "r.json", "r.pt", "r.checkpoint"}
    notes = json.loads((tmp_path / "notes").read_text())
    inside = (logs, temporary, Path("/dev"), Path("/proc"))
    assert [path for path in notes["written"] if not any(map(Path(path).is_relative_to, inside))] == []
    assert str(logs / "r.txt") in notes["written"], "or this test sees nothing"
    assert notes["hosts"] == []
    assert {Path(program).name for program in notes["programs"]} <= {"git", "lscpu", "sed", "nvidia-smi"}


def test_what_is_downloaded_or_resumed_is_never_executed():
    """Shards are read as numbers and checkpoints as tensors: nothing is unpickled, evaluated or given to a shell."""
    found = []
    for source in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("records/*.py")]:
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                name, keywords = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
                is_unsafe = name in UNSAFE or (name == "torch.load" and keywords.get("weights_only") != "True")
                if is_unsafe or keywords.keys() & {"allow_pickle", "trust_remote_code", "shell"}:
                    found.append(f"{source.name}:{call.lineno}: {name}")
    assert found == []
