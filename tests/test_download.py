"""data/cached_fineweb10B.py, run as a process against a local server that speaks the hub's protocol, with faults."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import numpy as np
import pytest

from data import cached_fineweb10B
from data.shards import shard_header
from world_worker import wait_for

VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000001.bin"
FILES = {name: shard_header(1000) + np.random.default_rng(i).bytes(2000) for i, name in enumerate((VAL, TRAIN))}


class Handler(BaseHTTPRequestHandler):
    """Serve `files`, and state the hashes of FILES. A token is refused, as the hub refuses one that has expired."""

    protocol_version, log_message = "HTTP/1.1", Mock()

    def do_GET(self) -> None:
        hub, name = self.server, self.path.rpartition("/")[2]
        body = hub.files[name]
        self.send_response(401 if "Authorization" in self.headers else 200 if body else 404)
        self.send_header("ETag", f'"{hashlib.sha256(FILES[name]).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c0" * 20)
        self.send_header("Content-Length", str(len(body) + hub.held_back))
        self.end_headers()
        if self.command == "GET":
            hub.asked.append(name)
            self.wfile.write(body)
            hub.closing.wait(60 * hub.held_back)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.handle_error = True, Mock()  # a client that hangs up is part of the tests
        server.files, server.asked, server.held_back, server.closing = dict(FILES), [], 0, threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture
def start(hub, tmp_path):
    """Return a function that starts the script; its cache is `tmp_path`/home, its shards go to `tmp_path`/out."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("HF_")}
    env |= dict(HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_HOME=f"{tmp_path}/home", NO_PROXY="127.0.0.1")
    env |= dict(HF_HUB_DISABLE_TELEMETRY="1", PYTHONSAFEPATH="1")
    command = [sys.executable, cached_fineweb10B.__file__, "1", "--out", tmp_path / "out"]
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return lambda **variables: subprocess.Popen(command, env=env | variables, **how)


@pytest.fixture
def ends(tmp_path):
    """Return a function that waits for the script: its exit code, the last line it wrote, and its shards."""

    def ends(process: subprocess.Popen) -> tuple[int, str, dict[str, bytes]]:
        out, err = process.communicate(timeout=60)
        assert not re.search("Traceback|\r", err), "a traceback, or a progress bar where there is no terminal"
        assert not [*tmp_path.rglob("out/.*")], "a part of a file is left"
        files = {path.name: path.read_bytes() for path in tmp_path.glob("out/*.bin")}
        return process.returncode, (out + err).splitlines()[-1], files

    return ends


def test_fetches_what_is_missing_or_damaged_and_nothing_else(hub, start, ends, tmp_path):
    out = tmp_path / "out"
    assert ends(start()) == (0, f"{out}: 2 shards complete", FILES)
    hub.asked.clear()
    (out / VAL).unlink()
    (out / VAL).write_bytes(shard_header(0))  # sound, so it stays
    os.truncate(out / TRAIN, 1500)  # in the cache, too: the two are one file
    assert ends(start(HF_TOKEN="hf_expired"))[::2] == (0, {VAL: shard_header(0), TRAIN: FILES[TRAIN]})
    assert hub.asked == [TRAIN]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (FILES[TRAIN][:-1] + b"?", r"RuntimeError: http\S+ sends no such shard, .*"),
        (b"<html>" + bytes(5000), r"RuntimeError: http\S+ sends no such shard, .*"),
        (b"", r"\w*Error: .*404 .*"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_gets_no_name(hub, start, ends, content, why):
    hub.files[TRAIN] = content
    code, line, files = ends(start())
    assert (code, files) == (1, {VAL: FILES[VAL]})
    assert re.fullmatch(f"cached_fineweb10B.py: {TRAIN}: {why}; the same command continues", line)
    hub.files = FILES
    assert ends(start())[::2] == (0, FILES)


def test_interrupt_ends_at_once_and_leaves_nothing_half_written(hub, start, ends):
    hub.held_back = 1
    process = start(HF_HUB_DOWNLOAD_TIMEOUT="90")  # the test waits for 60 s
    wait_for(lambda: hub.asked)
    process.send_signal(signal.SIGINT)
    assert ends(process) == (130, "cached_fineweb10B.py: interrupted; the same command continues", {})


def test_a_cache_on_another_disk_is_copied(tmp_path, monkeypatch):
    (tmp_path / "cached").write_bytes(FILES[VAL])
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    monkeypatch.setattr(cached_fineweb10B, "hf_hub_download", Mock(return_value=tmp_path / "cached"))
    cached_fineweb10B.fetch(tmp_path / VAL)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(("cached", VAL), FILES[VAL])
