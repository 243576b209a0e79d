"""data/cached_fineweb10B.py as a process, against a local server that speaks the hub's protocol."""

import signal
import struct
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import cached_fineweb10B
from world_worker import wait_for

NAMES = VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000001.bin"
SOUND = {name: struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + name[8:10].encode() * 100 for name in NAMES}


class Hub(BaseHTTPRequestHandler):
    """A hub that sends `files`, and refuses a token, as the real one does when it has expired."""

    def do_GET(self) -> None:
        name, status = self.path.rpartition("/")[2], 401 if "Authorization" in self.headers else 200
        hashes = f"ETag: {sha256(SOUND[name]).hexdigest()}\r\nX-Repo-Commit: {'c0' * 20}"
        self.wfile.write(f"HTTP/1.0 {status} -\r\n{hashes}\r\nContent-Length: 1224\r\n\r\n".encode())
        if self.command == "GET":
            self.server.asked.append(name)
            self.wfile.write(content := self.server.files[name])
            threading.Event().wait(60 * (len(content) < 1224))  # it stalls

    do_HEAD = do_GET


def test_shards_appear_whole_and_the_same_command_continues_whatever_happens(tmp_path):
    hub, out = ThreadingHTTPServer(("127.0.0.1", 0), Hub), tmp_path / "out"
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    env = dict(HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_HOME=f"{tmp_path}/home", NO_PROXY="127.0.0.1")
    env |= dict(HF_TOKEN="hf_expired", HF_HUB_DOWNLOAD_TIMEOUT="90")

    def run(sent: bytes) -> tuple[int, str, dict[str, bytes]]:
        hub.asked, hub.files = [], SOUND | {TRAIN: sent}
        command = [sys.executable, cached_fineweb10B.__file__, "1", "--out", out]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if len(sent) < 1224:
            wait_for(lambda: TRAIN in hub.asked)
            process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[0].strip()  # no traceback, and no bar where there is no terminal
        return process.returncode, told, {path.name: path.read_bytes() for path in out.glob("*.bin")}

    told = "cached_fineweb10B.py: interrupted; the same command continues"
    assert run(SOUND[TRAIN][:-1]) == (130, told, {VAL: SOUND[VAL]})
    code, told, _ = run(b"\0" + SOUND[TRAIN][1:])
    assert (code, told.partition(";")[0]) == (
        1,
        f"cached_fineweb10B.py: {TRAIN}: RuntimeError: the hub has sent no shard",
    )
    (out / TRAIN).write_bytes(SOUND[TRAIN][:-2])
    assert (run(SOUND[TRAIN]), hub.asked) == ((0, f"{out}: complete", SOUND), [TRAIN])
    hub.server_close()
