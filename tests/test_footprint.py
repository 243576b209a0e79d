"""What a run touches besides its log: no other file, no network, no downloaded code. An import touches nothing."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from world_worker import FORKS

# Events of Python's audit, and which of their arguments to note
HOSTS = {"socket.getaddrinfo": 0, "socket.gethostbyname": 0, "urllib.Request": 0, "socket.connect": 1}
PROGRAMS = {"subprocess.Popen": 0, "os.exec": 0, "os.system": 0, "os.posix_spawn": 0}
WRITTEN = dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.chmod"), 0)
EVENTS = dict(hosts=HOSTS, programs=PROGRAMS, written=WRITTEN | {"os.rename": 1, "os.link": 1, "os.symlink": 1})


def run_audited(cwd: Path, env: dict[str, str], notes_path: Path, flags: list[str]) -> None:
    """Import and run train_gpt.py. Write down what it wrote or removed, and the hosts and programs it used."""
    import torch.distributed
    import torch.nn.attention.flex_attention  # which may do as they please

    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.dont_write_bytecode = True
    assert "train_gpt" not in sys.modules
    notes: dict[str, set] = {kind: set() for kind in EVENTS}

    def audit(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str | bytes):
            path, mode, flags = args
            if set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                notes["written"].add(os.path.abspath(os.fsdecode(path)))
        for kind, events in EVENTS.items():
            if event in events:
                found = args[events[event]]
                notes[kind].add(os.path.abspath(os.fsdecode(found)) if kind == "written" else str(found))

    before = dict(os.environ)
    sys.addaudithook(audit)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        import train_gpt
    assert (dict(os.environ), told.getvalue(), any(notes.values())) == (before, "", False), "an import touches nothing"
    assert not torch.cuda.is_initialized()
    train_gpt.main(flags)
    assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"  # read when first needed
    notes_path.write_text(json.dumps({kind: sorted(found) for kind, found in notes.items()}))


def test_nothing_is_written_but_logs_and_no_host_is_reached(script_flags, tmp_path: Path):
    """Import and train in a fresh home, temporary folder, environment and working directory."""
    from conftest import TINY_FLAGS  # which imports train_gpt

    home, temporary, cwd, logs = folders = [tmp_path / name for name in ("home", "tmp", "cwd", "logs")]
    for folder in folders[:3]:
        folder.mkdir()
    env = dict(PATH=os.environ["PATH"], HOME=str(home), TMPDIR=str(temporary))
    flags = [*TINY_FLAGS, *script_flags, "--checkpoint_every=2", f"--log_dir={logs}", "--run_id=r"]
    process = FORKS.Process(target=run_audited, args=(cwd, env, tmp_path / "notes", flags))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert [path for folder in folders[:3] for path in folder.rglob("*") if path.is_file()] == []
    assert {path.relative_to(logs).parts[0] for path in logs.rglob("*")} <= {"r.txt", "r.json", "r.pt", "r.checkpoint"}
    notes = json.loads((tmp_path / "notes").read_text())
    inside = (logs, temporary, Path("/dev"), Path("/proc"))
    assert [path for path in notes["written"] if not any(map(Path(path).is_relative_to, inside))] == []
    assert str(logs / "r.txt") in notes["written"], "or this test sees nothing"
    assert notes["hosts"] == []
    assert {Path(program).name for program in notes["programs"]} <= {"git", "lscpu", "sed", "nvidia-smi"}
