"""Runs train_gpt.main and notes what it touches: audited_worker.py NOTES [flags]

NOTES gets a line of JSON per process: the paths that Python opened for writing, made, renamed or removed, the hosts it
looked up or connected to, the programs it started, and the peers of the sockets that were open in a training step
(which C++ libraries opened, too), from /proc.
"""

import json
import os
import re
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt

written, hosts, programs, peers = set(), set(), set(), set()


def audit(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], (str, bytes)):
        path, mode, flags = args
        if (mode and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.add(os.path.abspath(os.fsdecode(path)))
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
        written.add(os.path.abspath(os.fsdecode(args[0])))
    elif event in ("os.rename", "os.link", "os.symlink"):
        written.update(os.path.abspath(os.fsdecode(path)) for path in args[:2])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        hosts.add(str(args[0]))
    elif event == "socket.connect":
        hosts.add(str(args[1]))
    elif event in ("subprocess.Popen", "os.exec", "os.system", "os.posix_spawn"):
        programs.add(Path(os.fsdecode(args[0])).name)


def open_peers() -> set[str]:
    """The other ends of this process's TCP and UDP sockets; listening ones have none."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for kind in ("tcp", "udp", "tcp6", "udp6"):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                digits = fields[2].partition(":")[0]
                words = [struct.pack("=I", int(word, 16)) for word in re.findall(".{8}", digits)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.add(socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:"))
    return found - {"0.0.0.0", "::"}


def watched(*args):
    peers.update(open_peers())
    return step(*args)


step, train_gpt.train_step = train_gpt.train_step, watched
sys.addaudithook(audit)
train_gpt.main(sys.argv[2:])
notes = dict(written=sorted(written), hosts=sorted(hosts), programs=sorted(programs), peers=sorted(peers))
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(notes) + "\n")
