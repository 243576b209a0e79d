"""data/cached_fineweb10B.py, run as a process against a local server that speaks the hub's protocol, with faults."""

import hashlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import cached_fineweb10B
from speedrun import needs
from shards import lock_folder, shard_header
from test_train import wait_for

SCRIPT = Path(cached_fineweb10B.__file__)
VAL, TRAIN_1, TRAIN_2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
CHUNK = 10 * 2**20  # bytes that huggingface_hub 2.4.0 collects before it writes them to the file


def shard(seed: int, num_tokens: int = 1000) -> bytes:
    return shard_header(num_tokens) + np.random.default_rng(seed).bytes(2 * num_tokens)


class Hub(ThreadingHTTPServer):
    """Serve `files` (name: bytes) as the hub does. `faults[method, name]` are used up one by one, per request.

    A fault is a status code, "cut" or "reset" (the connection ends within the body), "stall" (so does the body, but not
    the connection), "short" (one byte less, and a length that says so) or "flip" (the last bit is another one).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {VAL: shard(0), TRAIN_1: shard(1), TRAIN_2: shard(2)}
        self.faults, self.asked = defaultdict(list), defaultdict(list)  # asked: first bytes, request by request
        self.closing, self.handle_error = threading.Event(), Mock()  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version, log_message = "HTTP/1.1", Mock()

    def do_HEAD(self) -> None:
        hub, method = self.server, self.command
        name = self.path.removeprefix("/datasets/kjj0/fineweb10B-gpt2/resolve/main/")
        first = int(self.headers.get("Range", "bytes=0-")[6:-1])
        hub.asked[method, name].append(first)
        fault = hub.faults[method, name].pop(0) if hub.faults[method, name] else None
        whole = hub.files.get(name, b"")
        body = whole[first : len(whole) - (fault == "short")]
        status = fault if isinstance(fault, int) else 206 if first else 200 if name in hub.files else 404
        body = b"" if status >= 400 else body[:-1] + bytes([body[-1] ^ 1]) if fault == "flip" else body
        if (method, fault) != ("HEAD", "reset"):
            self.send_response(status)
            headers = {"ETag": f'"{hashlib.sha256(whole).hexdigest()}"', "X-Repo-Commit": "c0" * 20}
            headers |= {"Content-Length": len(body), "Content-Range": f"bytes {first}-{len(whole) - 1}/{len(whole)}"}
            for header in (headers | ({"X-Error-Code": "EntryNotFound"} if status == 404 else {})).items():
                self.send_header(*header)
            self.end_headers()
        self.close_connection = fault in ("cut", "reset", "stall")
        if method == "GET":
            self.wfile.write(body[: len(body) * 7 // 8] if self.close_connection else body)
        if fault == "stall":
            hub.closing.wait()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    do_GET = do_HEAD


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture
def start(hub, tmp_path):
    """Return a function that starts the script; its shards go to `tmp_path`/out."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [sys.executable, SCRIPT, "--out", tmp_path / "out"]
    return lambda *arguments, **variables: subprocess.Popen([*command, *arguments], env=env | variables, **pipes)


def end(process: subprocess.Popen) -> tuple[int, str, list[str]]:
    """Wait for the script. Return its exit code, stdout and the lines of stderr."""
    out, err = process.communicate(timeout=60)
    assert not re.search("Traceback|\r", err), "a traceback, or a progress bar where there is no terminal"
    return process.returncode, out, err.splitlines()


def shards_in(folder: Path) -> dict[str, bytes]:
    assert not list(folder.rglob("*.incomplete")), "a partial download was left behind"
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_fetches_what_is_missing_or_damaged_and_nothing_else(hub, start, tmp_path):
    out = tmp_path / "out"
    assert end(start("2")) == (0, f"{out}: 3 shards complete, 3 of them new\n", [])
    assert shards_in(out) == hub.files
    hub.asked.clear()
    assert end(start("2", HF_HUB_OFFLINE="1")) == (0, f"{out}: 3 shards complete, 0 of them new\n", [])
    (out / TRAIN_2).unlink()
    code, _, err = end(start("2", HF_HUB_OFFLINE="1"))
    assert (code, len(err), "offline mode is enabled" in err[0], dict(hub.asked)) == (1, 2, True, {})
    for name, content in {VAL: hub.files[VAL][:-2], TRAIN_1: shard(9, 50), TRAIN_2: b""}.items():
        mtime = (out / VAL).stat().st_mtime
        (out / name).write_bytes(content)
        os.utime(out / name, (mtime, mtime))  # now the library's own record says that it is up to date
    assert end(start("2"))[0] == 0
    assert {name for _, name in hub.asked} == {VAL, TRAIN_2}
    assert shards_in(out) == hub.files | {TRAIN_1: shard(9, 50)}, "a sound shard of other tokens is not touched"


def test_one_fault_per_file_is_survived(hub, start, tmp_path):
    hub.files |= {f"fineweb_train_{i:06d}.bin": shard(i) for i in range(3, 8)}
    hub.files[VAL] = shard(3, CHUNK // 2 + 1_000_000)
    faults = "GET cut", "HEAD 503", "HEAD reset", "GET 503", "GET 429", "GET reset", "GET short", "GET flip"
    for name, (method, kind) in zip(hub.files, map(str.split, faults), strict=True):
        hub.faults[method, name].append(int(kind) if kind.isdigit() else kind)
    code, _, err = end(start("7"))
    assert (code, sum("its SHA-256 is" in line for line in err)) == (0, 1), err  # the flipped bit
    assert not any(hub.faults.values()), "a fault did not happen"
    assert hub.asked["GET", VAL] == [0, CHUNK], "the download resumes where it was cut"
    assert shards_in(tmp_path / "out") == hub.files


def test_a_mirror_that_lies_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_fineweb10B, "RETRY_WAITS", (0, 0))
    monkeypatch.setattr(cached_fineweb10B, "get_hf_file_metadata", Mock(return_value=Mock(etag="0" * 64)))
    download = Mock(side_effect=lambda repo, name, local_dir, **_: (local_dir / name).write_bytes(shard(0)))
    monkeypatch.setattr(cached_fineweb10B, "hf_hub_download", download)
    assert "its SHA-256 is" in cached_fineweb10B.fetch(VAL, tmp_path)
    assert (download.call_count, shards_in(tmp_path)) == (3, {})


def test_a_wrong_file_is_removed_and_reported(hub, start, tmp_path):
    out, wrong = tmp_path / "out", "header starts with 1836345404, 15980 instead of 20240520, 1; removed;"
    hub.files = {VAL: shard(0), TRAIN_1: b"<html>" + bytes(5000), TRAIN_2: shard(1)[:-2]}
    code, _, err = end(start("3"))
    assert (code, len(err)) == (1, 4)
    problems = [wrong, "3022 bytes, but the header's 1000 tokens need 3024; removed;", "RemoteEntryNotFoundError: 404"]
    for i, problem in enumerate(problems):
        assert re.match(f"{SCRIPT.name}: fineweb_train_00000{i + 1}.bin: .*{problem}", err[i])
    assert err[3] == f"3 of 4 files are missing in {out}; to continue: {needs.PYTHON} data/{SCRIPT.name} 3 --out {out}"
    assert all(asked == [0] for (method, _), asked in hub.asked.items() if method == "GET"), "asked for once"
    assert shards_in(out) == {VAL: shard(0)}


def test_two_downloads_at_once(hub, start, tmp_path):
    with lock_folder(tmp_path / "out"):
        processes = [start("2"), start("2")]
        lines = [process.stderr.readline() for process in processes]
        assert all("another download is running there; waiting for it" in line for line in lines)
        assert not hub.asked
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(re.search(r"\d+ of them new", out)[0] for out in outputs) == ["0 of them new", "3 of them new"]
    assert [len(asked) for (method, _), asked in hub.asked.items() if method == "GET"] == [1, 1, 1]
    assert shards_in(tmp_path / "out") == hub.files


def test_interrupt_ends_at_once_and_leaves_nothing_half_written(hub, start, tmp_path):
    out = tmp_path / "out"
    hub.faults["GET", TRAIN_1] = ["stall"]
    process = start("1", HF_HUB_DOWNLOAD_TIMEOUT="90")
    wait_for(lambda: (out / VAL).exists() and list(out.rglob("*.incomplete")))
    waiting = start("1")
    waiting.stderr.readline()
    for interrupted, message in (
        (waiting, ""),
        (process, f"; to continue: {needs.PYTHON} data/{SCRIPT.name} 1 --out {out}"),
    ):
        interrupted.send_signal(signal.SIGINT)
        _, err = interrupted.communicate(timeout=45)  # less than the library waits for a stalled server
        assert (interrupted.returncode, err.strip().removeprefix(f"{SCRIPT.name}: ")) == (130, f"interrupted{message}")
    assert shards_in(out) == {VAL: hub.files[VAL]}
