"""data/cached_fineweb10B.py against a local server that speaks the hub's protocol, with faults.

The script runs as users run it, in a process of its own, because huggingface_hub reads HF_ENDPOINT when imported.
"""

import hashlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import cached_fineweb10B
from shards import shard_header

SCRIPT = Path(cached_fineweb10B.__file__)
VAL, TRAIN_1, TRAIN_2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
CHUNK = 10 * 2**20  # bytes that huggingface_hub 2.4.0 collects before it writes them to the file


def shard(seed: int, num_tokens: int = 1000) -> bytes:
    tokens = np.random.default_rng(seed).integers(50257, size=num_tokens, dtype=np.uint16)
    return shard_header(num_tokens) + tokens.astype("<u2").tobytes()


class Hub(ThreadingHTTPServer):
    """Serves `files` (name: bytes) as the hub does. `faults[method, name]` are worked off one by one, per request.

    A fault is a status code, "cut" (the connection ends after `sent` bytes of the body), "reset" (likewise, with a
    TCP reset; no answer at all to HEAD), "short" (one byte less, and a length that says so), "stall" (the body
    stops after `sent` bytes) or "flip" (the last bit is another one).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {VAL: shard(0), TRAIN_1: shard(1), TRAIN_2: shard(2)}
        self.faults = defaultdict(list)
        self.sent = 500
        self.requests = []  # (method, name, first byte asked for)
        self.closing = threading.Event()

    def asked(self, method: str, name: str) -> list[int]:
        """The first bytes asked for, request by request."""
        return [first for m, n, first in self.requests if (m, n) == (method, name)]

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer("HEAD")

    def do_GET(self) -> None:
        self.answer("GET")

    def answer(self, method: str) -> None:
        hub = self.server
        prefix = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
        name = self.path.removeprefix(prefix)
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(span[1]) if span else 0
        hub.requests.append((method, name, first))
        faults = hub.faults[method, name]
        fault = faults.pop(0) if faults else None
        if not self.path.startswith(prefix) or name not in hub.files:
            return self.head(404, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})
        if isinstance(fault, int):
            return self.head(fault, {"Content-Length": "0"})
        whole = hub.files[name]
        body = whole[first : len(whole) - (fault == "short")]
        if fault == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers = {
            "ETag": f'"{hashlib.sha256(whole).hexdigest()}"',
            "X-Repo-Commit": "c0" * 20,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(body)),
        }
        if span:
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{first + len(body)}"
        if (method, fault) != ("HEAD", "reset"):
            self.head(206 if span else 200, headers)
        if method == "GET":
            self.wfile.write(body[: hub.sent] if fault in ("cut", "reset", "stall") else body)
        if fault == "stall":
            hub.closing.wait()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        self.close_connection = fault in ("cut", "reset", "stall")
        return None

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture
def start(hub, tmp_path):
    """Starts the script with the arguments given; its shards go to `tmp_path`/out."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("HF_")}
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }

    def popen(*arguments: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env=env | variables, cwd=tmp_path, **pipes)

    return popen


@pytest.fixture
def download(start):
    """Runs the script to its end. Returns its exit code, stdout and the lines of stderr."""

    def run(*arguments: str, **variables: str) -> tuple[int, str, list[str]]:
        process = start(*arguments, **variables)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        assert "\r" not in err, "a progress bar where there is no terminal"
        return process.returncode, out, err.splitlines()

    return run


def shards_in(folder: Path) -> dict[str, bytes]:
    assert not list(folder.rglob("*.incomplete")), "a partial download was left behind"
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_fetches_what_is_missing_and_nothing_else(hub, download, tmp_path):
    code, out, err = download("2")
    assert (code, err) == (0, [])
    assert "3 shards complete, 3 of them new" in out
    assert shards_in(tmp_path / "out") == hub.files

    hub.requests.clear()
    stats = {path: path.stat() for path in (tmp_path / "out").glob("*.bin")}
    code, out, err = download("2", HF_HUB_OFFLINE="1")
    assert (code, err) == (0, [])
    assert "3 shards complete, 0 of them new" in out
    assert hub.requests == []
    assert {path: path.stat() for path in stats} == stats

    # whole, but of other tokens than the hub's: somebody's own, not to be touched
    own = shard(9, 50)
    (tmp_path / "out" / TRAIN_1).write_bytes(own)
    (tmp_path / "out" / TRAIN_2).unlink()
    assert download("2")[0] == 0
    assert {name for _, name, _ in hub.requests} == {TRAIN_2}
    assert shards_in(tmp_path / "out") == hub.files | {TRAIN_1: own}


def test_garbage_under_the_final_name_is_replaced(hub, download, tmp_path):
    download("2")
    for name, damaged in {VAL: hub.files[VAL][:-2], TRAIN_1: b"garbage", TRAIN_2: b""}.items():
        path = tmp_path / "out" / name
        mtime = path.stat().st_mtime
        path.write_bytes(damaged)
        os.utime(path, (mtime, mtime))  # now the library's own record says that it is up to date
    assert download("2")[0] == 0
    assert shards_in(tmp_path / "out") == hub.files


def test_resumes_a_download_that_breaks_off(hub, download, tmp_path):
    hub.files[VAL] = shard(3, CHUNK // 2 + 1_000_000)
    hub.sent = CHUNK + 1000
    hub.faults["GET", VAL] = ["cut"]
    assert download("0")[0] == 0
    assert hub.asked("GET", VAL) == [0, CHUNK]
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_one_fault_per_file_is_survived(hub, download, tmp_path, method):
    hub.files["fineweb_train_000003.bin"] = shard(3)
    faults = {(method, name): fault for name, fault in zip(hub.files, [503, 429, "reset", "short"], strict=True)}
    hub.faults.update({key: [fault] for key, fault in faults.items()})
    code, out, err = download("3")
    assert code == 0, err
    assert "4 shards complete, 4 of them new" in out
    assert not any(hub.faults[key] for key in faults), "a fault did not happen"
    assert shards_in(tmp_path / "out") == hub.files


def test_what_the_hub_does_not_have_is_reported_and_not_asked_for_again(hub, download, tmp_path):
    code, _, err = download()
    assert code == 1
    absent = [f"fineweb_train_{i:06d}.bin" for i in range(3, 8)]
    assert [line.split(" (")[0] for line in err[:-1]] == [
        f"{SCRIPT.name}: {name}: RemoteEntryNotFoundError: 404 Client Error." for name in absent
    ]
    out = tmp_path / "out"
    assert err[-1] == f"5 of 8 files are missing in {out}; to go on: python data/{SCRIPT.name} 7 --out {out}"
    assert all(hub.asked("HEAD", name) == [0] for name in absent)
    assert shards_in(out) == hub.files


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<html>" + bytes(5000), "header starts with 1836345404, 15980 instead of 20240520, 1"),
        (shard(1)[:-2], "3022 bytes, but the header's 1000 tokens need 3024"),
        (b"abc", "3 bytes are no shard header"),
    ],
    ids=["other content", "truncated on the hub", "tiny"],
)
def test_a_wrong_file_is_removed_and_reported(hub, download, tmp_path, content, problem):
    good, hub.files[TRAIN_1] = hub.files[TRAIN_1], content
    code, _, err = download("1")
    assert code == 1
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    assert err[0].startswith(f"{SCRIPT.name}: {TRAIN_1}: {endpoint} sent a wrong file: {problem}; removed;")
    assert len(err) == 2
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}

    hub.files[TRAIN_1] = good
    assert download("1")[0] == 0
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL], TRAIN_1: good}


def test_a_bit_that_flips_is_fetched_again(hub, download, tmp_path):
    """The length is right and the header sound: only the hash tells."""
    hub.faults["GET", TRAIN_1] = ["flip"]
    code, _, err = download("1")
    assert code == 0
    assert "its SHA-256 is" in err[0]
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL], TRAIN_1: hub.files[TRAIN_1]}


@pytest.mark.slow
def test_a_mirror_that_lies_leaves_nothing(hub, download, tmp_path):
    hub.faults["GET", TRAIN_1] = ["flip"] * 100
    code, _, err = download("1")
    assert code == 1
    assert err[-2].startswith(f"{SCRIPT.name}: {TRAIN_1}: OSError: its SHA-256 is")
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}


def test_two_downloads_at_once(hub, start, tmp_path):
    """The second waits for the first, and finds nothing left to do."""
    hub.files[VAL] = shard(3, 5_000_000)
    processes = [start("2"), start("2")]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    new = sorted(int(re.search(r"(\d+) of them new", out)[1]) for out, _ in outputs)
    assert new == [0, 3]
    assert len(hub.asked("GET", VAL)) == 1
    assert sum("another download is under way" in err for _, err in outputs) == 1
    assert shards_in(tmp_path / "out") == hub.files


def test_offline(hub, download, tmp_path):
    code, _, err = download("1", HF_HUB_OFFLINE="1")
    assert code == 1
    assert len(err) == 3
    assert all("offline mode is enabled" in line for line in err[:2])
    assert hub.requests == []


def test_interrupt_ends_at_once_and_leaves_nothing_half_written(hub, start, tmp_path):
    hub.faults["GET", TRAIN_1] = ["stall"]
    process = start("1", HF_HUB_DOWNLOAD_TIMEOUT="90")
    deadline = time.monotonic() + 20
    val = tmp_path / "out" / VAL
    while not (hub.asked("GET", TRAIN_1) and val.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list((tmp_path / "out").rglob("*.incomplete")), "nothing to clean up: the test tests nothing"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=45)  # less than the library waits for a stalled server
    assert process.returncode == 130
    assert err.strip() == f"interrupted; to go on: python data/{SCRIPT.name} 1 --out {tmp_path / 'out'}"
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}


@pytest.mark.slow
def test_gives_up_downloads_that_always_fail(hub, download, tmp_path):
    hub.faults["GET", VAL] = [503] * 100
    hub.faults["GET", TRAIN_1] = ["short"] * 100
    code, _, err = download("2")
    assert code == 1
    assert err[-3].startswith(f"{SCRIPT.name}: {VAL}: HfHubHTTPError: Server error '503 Service Unavailable'")
    assert err[-2].startswith(f"{SCRIPT.name}: {TRAIN_1}: OSError: Consistency check failed: file should be of size")
    for name in (VAL, TRAIN_1):
        assert len(hub.asked("GET", name)) == 1 + len(cached_fineweb10B.RETRY_WAITS)
    assert shards_in(tmp_path / "out") == {TRAIN_2: hub.files[TRAIN_2]}


@pytest.mark.slow
def test_resumes_a_download_that_stalls(hub, download, tmp_path):
    hub.faults["GET", VAL] = ["stall"]
    assert download("0")[0] == 0
    assert hub.asked("GET", VAL) == [0, 0]
    assert shards_in(tmp_path / "out") == {VAL: hub.files[VAL]}


@pytest.mark.slow
def test_gives_up_a_hub_that_does_not_answer(hub, download, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = download("0", HF_ENDPOINT=endpoint)
    assert code == 1
    assert err[-2] == f"{SCRIPT.name}: {VAL}: ConnectError: [Errno 111] Connection refused"
    assert shards_in(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["104"], "N is 104: expected 0 to 103"),
        (["-1"], "expected 0 to 103"),
        (["seven"], "invalid int value: 'seven'"),
        (["1", "2"], "unrecognized arguments: 2"),
        (["--out", "x" * 300], "File name too long"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, monkeypatch, arguments, words):
    def reach_out(*args, **kwargs):  # HF_ENDPOINT is not the test's here
        pytest.fail("began to download")

    monkeypatch.setattr(cached_fineweb10B, "hf_hub_download", reach_out)
    with pytest.raises(SystemExit) as stop:
        cached_fineweb10B.main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_record_shards_are_what_the_record_configuration_reads():
    batch = 8 * 48 * 1024
    per_shard = (100_000_000 - 1) // batch
    assert -(-1770 // per_shard) == cached_fineweb10B.RECORD_SHARDS
