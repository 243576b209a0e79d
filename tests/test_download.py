"""data/cached_fineweb10B.py, run as a process against a local server that speaks the hub's protocol, with faults."""

import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import numpy as np
import pytest

import cached_fineweb10B
from shards import shard_header
from world_worker import wait_for

VAL, TRAIN_1, TRAIN_2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
FILES = {
    name: shard_header(1000) + np.random.default_rng(i).bytes(2000) for i, name in enumerate((VAL, TRAIN_1, TRAIN_2))
}


class Handler(BaseHTTPRequestHandler):
    """Serve `files` as the hub does. `faults` of a file are used up one by one, by requests for it.

    A fault is the status code of HEAD, or that of the body: "cut" (the connection ends within it), "stall" (it does not
    end) or "flip" (its last bit is another one). A token is refused, as the hub refuses one that has expired.
    """

    protocol_version, log_message = "HTTP/1.1", Mock()

    def do_GET(self) -> None:
        hub, name, gets = self.server, self.path.rpartition("/")[2], self.command == "GET"
        fault = (hub.faults[name] or [""])[0]
        fault = hub.faults[name].pop(0) if fault and gets == isinstance(fault, str) else ""
        fault = 401 if "Authorization" in self.headers else fault
        body = hub.files.get(name, b"")
        sent = body[: len(body) // 2] if fault in ("cut", "stall") else body
        self.send_response(fault if isinstance(fault, int) else 200 if body else 404)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c0" * 20)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = fault in ("cut", "stall")
        if gets:
            hub.asked.append(name)
            self.wfile.write(sent[:-1] + bytes([sent[-1] ^ 1]) if fault == "flip" else sent)
            self.wfile.flush()
        if fault == "stall":
            hub.closing.wait()

    do_HEAD = do_GET


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.handle_error = True, Mock()  # a client that hangs up is part of the tests
        server.files, server.faults, server.asked = dict(FILES), defaultdict(list), []  # asked: for content
        server.closing = threading.Event()
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
    command = [sys.executable, cached_fineweb10B.__file__, "--out", tmp_path / "out"]

    def start(*arguments, max_bytes: int = resource.RLIM_INFINITY, **variables) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, *arguments],
            env=env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes)),  # a disk that is full
        )

    return start


@pytest.fixture
def ends(tmp_path):
    """Return a function that waits for the script: its exit code, stdout, the last line of stderr, and its shards."""

    def ends(process: subprocess.Popen) -> tuple[int, str, str, dict[str, bytes]]:
        out, err = process.communicate(timeout=60)
        assert not re.search("Traceback|\r", err), "a traceback, or a progress bar where there is no terminal"
        assert not [*tmp_path.rglob("*.incomplete"), *tmp_path.rglob(".download-*")], "a part of a file is left"
        files = {path.name: path.read_bytes() for path in tmp_path.glob("out/*.bin")}
        return process.returncode, out, err[err.rstrip().rfind("\n") + 1 :], files

    return ends


def test_fetches_what_is_missing_or_damaged_and_nothing_else(hub, start, ends, tmp_path):
    out = tmp_path / "out"
    hub.faults[VAL], hub.faults[TRAIN_1] = [503], ["cut"]  # huggingface_hub tries again
    assert ends(start("2"))[:2] == (0, f"{out}: 3 shards complete, 3 of them new\n")
    hub.asked.clear()
    (out / TRAIN_1).unlink()
    (out / TRAIN_1).write_bytes(FILES[VAL])  # sound, so it stays
    os.truncate(out / TRAIN_2, 1500)  # in the cache, too: the two are one file
    complete = f"{out}: 3 shards complete, 1 of them new\n"
    assert ends(start("2", HF_TOKEN="hf_expired")) == (0, complete, "", FILES | {TRAIN_1: FILES[VAL]})
    assert hub.asked == [TRAIN_2]


def test_what_the_cache_has_needs_no_hub(hub, start, ends, tmp_path):
    for process in [start("1", "--out", tmp_path / name) for name in ("login", "other")]:
        assert ends(process)[0] == 0
    assert sorted(hub.asked) == [TRAIN_1, VAL], "two at once ask once"
    code, _, err, files = ends(start("2", HF_HUB_OFFLINE="1"))
    assert (code, "offline mode is enabled" in err, files) == (1, True, {name: FILES[name] for name in (VAL, TRAIN_1)})
    assert len(hub.asked) == 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("flip", r"RuntimeError: http\S+ sends a wrong file: its SHA-256 is .*: try another HF_ENDPOINT"),
        (b"<html>" + bytes(5000), r"RuntimeError: http\S+ sends a wrong file: header starts with .*"),
        (FILES[TRAIN_1][:-2], r"RuntimeError: http\S+ sends a wrong file: 3022 bytes, but the header's 1000 tokens .*"),
        (b"", r"\w*Error: .*404 .*"),
        (401, r"\w*Error: .*401 .*"),
        ("no space", r"OSError: \[Errno \d+\] \w.*"),
        pytest.param("no network", r"ConnectError: .*", marks=pytest.mark.slow),  # the library tries for 23 s
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_gets_no_name(hub, start, ends, fault, why):
    assert ends(start("0"))[0] == 0
    if isinstance(fault, bytes):
        hub.files[TRAIN_1] = fault
    elif "no " not in str(fault):
        hub.faults[TRAIN_1] = [fault] * 2
    nowhere = dict(HF_ENDPOINT="http://127.0.0.1:1") if fault == "no network" else {}
    code, _, err, files = ends(start("2", max_bytes=2000 if fault == "no space" else resource.RLIM_INFINITY, **nowhere))
    left = "2 of 3 files are missing, the same command continues"
    assert (code, files) == (1, {VAL: FILES[VAL]})
    assert re.fullmatch(f"cached_fineweb10B.py: {TRAIN_1}: {why}; {left}\n", err), err
    hub.files, hub.faults = FILES, defaultdict(list)
    assert ends(start("2"))[::3] == (0, FILES)


def test_interrupt_ends_at_once_and_leaves_nothing_half_written(hub, start, ends):
    hub.faults[TRAIN_1] = ["stall"]
    process = start("1", HF_HUB_DOWNLOAD_TIMEOUT="90")  # the test waits for 60 s
    wait_for(lambda: TRAIN_1 in hub.asked)
    process.send_signal(signal.SIGINT)
    told = "cached_fineweb10B.py: interrupted; the same command continues\n"
    assert ends(process) == (130, "", told, {VAL: FILES[VAL]})


def test_a_cache_on_another_disk_is_copied(tmp_path, monkeypatch):
    (tmp_path / "cached").write_bytes(FILES[VAL])
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    monkeypatch.setattr(cached_fineweb10B, "download", Mock(return_value=tmp_path / "cached"))
    cached_fineweb10B.fetch(tmp_path / VAL)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(("cached", VAL), FILES[VAL])


def test_bad_arguments_end_before_the_download(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments in (["--out", f"{tmp_path}/file"], ["104"]):
        with pytest.raises(SystemExit, match="2"):
            cached_fineweb10B.main(arguments)
        assert re.fullmatch(r".*: error: .*(File exists; fix|expected 0 to 103).*\n", capsys.readouterr().err)
