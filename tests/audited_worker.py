"""Run train_gpt.py as a program and note what it touches: audited_worker.py NOTES [flags]

NOTES gets a line of JSON: the paths that Python opened for writing, made, renamed or removed, the hosts that it looked
up or connected to, and the programs that it started.
"""

import json
import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "train_gpt.py"
ARGUMENT = {  # which one of an event's to note
    "hosts": {"socket.getaddrinfo": 0, "socket.gethostbyname": 0, "urllib.Request": 0, "socket.connect": 1},
    "programs": {"subprocess.Popen": 0, "os.exec": 0, "os.system": 0, "os.posix_spawn": 0},
    "written": dict.fromkeys([f"os.{name}" for name in ("mkdir", "remove", "rmdir", "chmod")], 0)
    | dict.fromkeys(["os.rename", "os.link", "os.symlink"], 1),
}
notes: dict[str, set[str]] = {kind: set() for kind in ARGUMENT}


def audit(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str | bytes):
        path, mode, flags = args
        if (mode and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            notes["written"].add(os.path.abspath(os.fsdecode(path)))
    for kind, events in ARGUMENT.items():
        if event in events:
            found = args[events[event]]
            notes[kind].add(os.path.abspath(os.fsdecode(found)) if kind == "written" else str(found))


target, sys.argv = sys.argv[1], [str(SCRIPT), *sys.argv[2:]]
sys.addaudithook(audit)
try:
    runpy.run_path(str(SCRIPT), run_name="__main__")
finally:
    text = json.dumps({kind: sorted(found) for kind, found in notes.items()})
    with open(target, "a") as file:
        file.write(text + "\n")
