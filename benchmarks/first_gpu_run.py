"""Collect what the first run on a GPU machine shows: docs/first_gpu_run.md."""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import train_gpt
from check import why_no_gpu
from records.process import ENVIRONMENT, ROOT
from train_gpt import Hyperparameters, UserError

INTRODUCTION = """Run what docs/first_gpu_run.md describes, and write all that it shows to one JSON file to send back:
versions, driver, GPUs, check, self-test, a short run with its log, benchmarks. Names of host and user and their folders
are left out. A stage that fails is recorded, and the others still run.

    python -m benchmarks first_gpu_run [--out FILE] [flags of train_gpt.py, such as --train_seq_len 8192]
    python -m benchmarks first_gpu_run --preset nano --device cpu        try it without a GPU

Exit codes: 0 done, 1 a stage failed (the file says how), 2 no GPU or bad input, 130 interrupted."""
LIMIT = 3600  # seconds for a stage
MOST = 200_000  # characters of a stage's output, and of each of its files, from the end


def scrubbed(text: str) -> str:
    """Return a text without folders, host and user of this machine."""
    host, home = platform.node(), Path.home()
    names = {str(ROOT): "REPOSITORY", str(home): "~", tempfile.gettempdir(): "TMP", home.name: "USER"}
    names |= {host: "HOST", host.partition(".")[0]: "HOST"}
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 1 and name not in ("localhost", "root"):  # no letter or digit beside it
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", names[name], text, flags=re.IGNORECASE)
    return text


def lines(path: Path) -> list[str]:
    """Return the lines of the end of a text, of a log those behind the script's source."""
    text = path.read_text(encoding="utf-8", errors="replace").expandtabs()  # the t of JSON's \\t would hide a name
    return text.partition(f"\n{'=' * 100}\n")[2][-MOST:].splitlines() or text[-MOST:].splitlines()


def run_stage(command: Sequence[str], folder: Path, limit: float) -> dict:
    """Run a command to its end, or for `limit` seconds; return exit code, output, and the files it left in `folder`."""
    began, output = time.monotonic(), folder / "output"
    folder.mkdir()
    environment = ENVIRONMENT | dict(PYTHON=sys.executable) | os.environ
    stage = dict(command=list(command), exit_code=None, seconds=0.0)
    try:
        with open(output, "wb") as file:
            options = dict(cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            stage["exit_code"] = process.wait(limit)
        except BaseException as error:  # interrupted, or too long: end it with all that it started
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            stage["problem"] = f"not done in {limit:.0f} s"
    except OSError as error:
        stage["problem"] = str(error)
    stage["seconds"], stage["output"] = round(time.monotonic() - began, 1), lines(output)
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".json", ".md"))
    return stage | dict(files={path.name: lines(path) for path in files})


def stages(cfg: Hyperparameters, flags: list[str], processes: int, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of each stage, in the order of docs/first_gpu_run.md."""
    on_cpu, python = cfg.device == "cpu", sys.executable
    is_default = cfg.num_iterations == train_gpt.PRESETS[cfg.preset].num_iterations
    short = [*flags, "--num_iterations=100"] if is_default else flags
    yield "versions", [python, "-m", "torch.utils.collect_env"]
    if not on_cpu:
        yield "nvidia-smi", ["nvidia-smi"]
        yield "topology", ["nvidia-smi", "topo", "-m"]
    yield "check", ["./run.sh", "--check", *short]
    yield "self-test", ["./test.sh", *(["tests/test_gpu.py"] if on_cpu else ["-m", "gpu"])]
    yield "short run", ["./run.sh", *short, f"--log_dir={folder / 'short run'}", "--run_id=short"]
    out = f"--out={folder / 'benchmarks'}"
    yield "benchmarks", [python, "-m", "benchmarks", *(["--quick"] if on_cpu else []), out, *flags]
    if processes > 1:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        yield "benchmarks on all", [*torchrun, "-m", "benchmarks", f"{out} on all", *flags]


def collect(cfg: Hyperparameters, flags: list[str], processes: int, out: Path) -> int:
    """Run all stages, rewrite the file after each, and return the exit code."""
    document = dict(flags=flags, stages={})
    with tempfile.TemporaryDirectory(prefix="first-gpu-run-", ignore_cleanup_errors=True) as folder:
        for name, command in stages(cfg, flags, processes, Path(folder)):
            print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
            document["stages"][name] = stage = run_stage(command, Path(folder) / name, LIMIT)
            out.write_text(scrubbed(json.dumps(document, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8")
            last = next(filter(str.strip, reversed(stage["output"])), "no output")
            told = "ok" if stage["exit_code"] == 0 else stage.get("problem", f"FAILED, exit code {stage['exit_code']}")
            print(f"{name}: {told} after {stage['seconds']} s: {last.strip()[:200]}", flush=True)
    print(f"look through {out}, and send it back")
    return int(any(stage["exit_code"] != 0 for stage in document["stages"].values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m benchmarks first_gpu_run", description=INTRODUCTION, **options)
    out = Path("logs") / time.strftime("first-gpu-run-%Y%m%d-%H%M%S.json")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="default: logs/first-gpu-run-TIME.json")
    args, flags = parser.parse_known_args(argv)
    try:
        cfg = train_gpt.parse_args(flags)
        if cfg.device == "cpu" and cfg.preset == "gpt2":
            raise UserError("--device cpu: gpt2 takes a GPU; add --preset nano")
        is_for_cpu = cfg.device == "cpu" and any(flag.startswith(("--preset", "--device")) for flag in flags)
        if not is_for_cpu and not torch.cuda.is_available():
            raise UserError(f"{why_no_gpu()[0]}; --preset nano --device cpu tries this without one")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        gpus = torch.cuda.device_count() if cfg.device != "cpu" else 1
        processes = next(n for n in range(gpus, 0, -1) if cfg.batch_sequences % n == 0)
        return collect(cfg, flags, processes, args.out)
    except (UserError, OSError) as error:
        print(f"first_gpu_run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"first_gpu_run: interrupted; {args.out} has what was done", file=sys.stderr)
        return 130
