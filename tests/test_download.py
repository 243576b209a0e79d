"""data/cached_fineweb10B.py, run as a process against a local server that speaks the hub's protocol, with faults."""

import hashlib
import os
import re
import signal
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
from shards import shard_header
from world_worker import wait_for

SCRIPT = Path(cached_fineweb10B.__file__)
VAL, TRAIN_1, TRAIN_2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"


def shard(seed: int, num_tokens: int = 1000) -> bytes:
    return shard_header(num_tokens) + np.random.default_rng(seed).bytes(2 * num_tokens)


class Hub(ThreadingHTTPServer):
    """Serve `files` (name: bytes) as the hub does. `faults[method, name]` are used up one by one, per request.

    A fault is a status code, "cut" (the connection ends within the body), "stall" (so does the body, but not the
    connection) or "flip" (the last bit is another one). A token is refused, as the hub refuses one that has expired.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {VAL: shard(0), TRAIN_1: shard(1), TRAIN_2: shard(2)}
        self.faults, self.asked = defaultdict(list), []  # asked: for the content, request by request
        self.closing, self.handle_error = threading.Event(), Mock()  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version, log_message = "HTTP/1.1", Mock()

    def do_HEAD(self) -> None:
        hub, name = self.server, self.path.removeprefix("/datasets/kjj0/fineweb10B-gpt2/resolve/main/")
        faults = hub.faults[self.command, name]
        fault = 401 if "Authorization" in self.headers else faults.pop(0) if faults else None
        body, status = hub.files.get(name, b""), 200 if name in hub.files else 404
        etag = hashlib.sha256(body).hexdigest()
        if isinstance(fault, int):
            body, status = b"", fault
        if fault == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(status)
        for header in dict(ETag=f'"{etag}"', **{"X-Repo-Commit": "c0" * 20, "Content-Length": len(body)}).items():
            self.send_header(*header)
        self.end_headers()
        self.close_connection = fault in ("cut", "stall")
        if self.command == "GET":
            hub.asked.append(name)
            self.wfile.write(body[: len(body) // 2] if self.close_connection else body)
        if fault == "stall":
            hub.closing.wait()

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
    """Return a function that starts the script; its cache is `tmp_path`/home, its shards go to `tmp_path`/out."""
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
    assert not [*folder.glob(".download-*"), *folder.parent.rglob("*.incomplete")], "a partial download was left behind"
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_fetches_what_is_missing_or_damaged_and_nothing_else(hub, start, tmp_path):
    out = tmp_path / "out"
    hub.faults["HEAD", VAL], hub.faults["GET", TRAIN_1] = [503], ["cut"]  # huggingface_hub tries again
    code, told, _ = end(start("2"))
    assert (code, told, shards_in(out)) == (0, f"{out}: 3 shards complete, 3 of them new\n", hub.files)
    hub.asked.clear()
    (out / TRAIN_1).unlink()
    (out / TRAIN_1).write_bytes(shard(9, 50))
    os.truncate(out / TRAIN_2, 1500)  # in the cache, too: the two are one file
    assert end(start("2")) == (0, f"{out}: 3 shards complete, 1 of them new\n", [])
    assert (hub.asked, shards_in(out)) == ([TRAIN_2], hub.files | {TRAIN_1: shard(9, 50)})


def test_what_the_cache_has_needs_no_hub(hub, start, tmp_path):
    assert end(start("1", "--out", tmp_path / "login"))[0] == 0
    hub.asked.clear()
    code, _, err = end(start("2", HF_HUB_OFFLINE="1"))
    assert (code, len(err), "offline mode is enabled" in err[0], hub.asked) == (1, 1, True, [])
    assert shards_in(tmp_path / "out") == {name: hub.files[name] for name in (VAL, TRAIN_1)}


def test_a_token_that_has_expired_does_not_matter(hub, start, tmp_path):
    assert end(start("0", HF_TOKEN="hf_expired")) == (0, f"{tmp_path}/out: 1 shards complete, 1 of them new\n", [])
    hub.faults["HEAD", TRAIN_1] = [401, 401]
    code, _, err = end(start("1"))
    assert (code, len(err), "401" in err[0], hub.faults["HEAD", TRAIN_1]) == (1, 1, True, [])


@pytest.mark.parametrize("wrong", [b"<html>" + bytes(5000), shard(1)[:-2], b"", "flip"])
def test_a_wrong_or_missing_file_is_one_line_and_gets_no_name(hub, start, tmp_path, wrong):
    if wrong == "flip":
        hub.faults["GET", TRAIN_1] = [wrong, wrong]
    elif wrong:
        hub.files[TRAIN_1] = wrong
    else:
        del hub.files[TRAIN_1]
    code, _, err = end(start("2"))
    why = r"http\S+ sends a wrong file: .*" if wrong else r".*Error: .* '404 .*"
    left = "2 of 3 files are missing, the same command continues"
    assert (code, len(err), bool(re.fullmatch(f"{SCRIPT.name}: {TRAIN_1}: {why}; {left}", err[0]))) == (1, 1, True), err
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}
    hub.files[TRAIN_1] = shard(1)
    assert (end(start("2"))[0], shards_in(tmp_path / "out")) == (0, hub.files)


def test_two_downloads_at_once_ask_once(hub, start, tmp_path):
    for process in [start("2"), start("2")]:
        assert end(process)[0] == 0
    assert (sorted(hub.asked), shards_in(tmp_path / "out")) == (sorted(hub.files), hub.files)


def test_interrupt_ends_at_once_and_leaves_nothing_half_written(hub, start, tmp_path):
    hub.faults["GET", TRAIN_1] = ["stall"]
    process = start("1", HF_HUB_DOWNLOAD_TIMEOUT="90")
    wait_for(lambda: TRAIN_1 in hub.asked)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=45)  # less than the library waits for a stalled server
    assert (process.returncode, err) == (130, f"\n{SCRIPT.name}: interrupted; the same command continues\n")
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}


def test_a_cache_on_another_disk_is_copied_and_a_failed_copy_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "cached").write_bytes(shard(0))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    monkeypatch.setattr(cached_fineweb10B, "download", Mock(return_value=tmp_path / "cached"))
    assert cached_fineweb10B.fetch(tmp_path / "out" / VAL) is None
    assert shards_in(tmp_path / "out") == {VAL: shard(0)}
    monkeypatch.setattr("shutil.copyfile", lambda source, new: (new.write_bytes(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        cached_fineweb10B.fetch(tmp_path / "out" / TRAIN_1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [VAL]


def test_bad_arguments_end_before_the_download(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments in (["--out", f"{tmp_path}/file"], ["104"]):
        with pytest.raises(SystemExit, match="2"):
            cached_fineweb10B.main(arguments)
        assert re.fullmatch(r".*: error: .*(File exists; fix|expected 0 to 103).*\n", capsys.readouterr().err)
