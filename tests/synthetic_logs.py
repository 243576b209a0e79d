"""Logs and records that no run wrote."""

import json
from collections.abc import Sequence
from pathlib import Path

from speedrun.logs import RULE, Log, digest
from speedrun.proof import Race, Run, Script, figures_of
from speedrun.store import OLDER, RUNS, TRACKS, joined, logs_of

SOURCE = "import torch\n\nmodel = torch.compile(torch.nn.Identity(), dynamic=False)\n"
NANO_VAL = TRACKS["nano"].val_sha256
LOSSES = (1.431, 1.428, 1.433, 1.430, 1.429)  # by seed
README = "# Name\n\nWhat changed, and why.\n"

# What a race starts: SLOWNESS scales its steps and its loss. Only the log states them, the JSON lies
SCRIPT = """
import json, pathlib, sys, zlib
from synthetic_logs import log_text
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--stop" in flags and pathlib.Path(flags["--stop"]).read_text() == flags["--run_id"]:
    for kind in "txt", "checkpoint", "0.rank0":
        pathlib.Path(flags["--log_dir"], f"{flags['--run_id']}.{kind}").write_text("cut short")
    sys.exit("first line\\nstopped")
seed, log = int(flags["--seed"]), pathlib.Path(flags["--log_dir"]) / (flags["--run_id"] + ".txt")
assert not [*log.parent.glob(f"{log.stem}.*")]
disturbed = 3 if "--stop" in flags and seed == 9 else 1
step_ms = disturbed * SLOWNESS * (40 + 0.1 * (zlib.crc32(log.name.encode()) % 5))
loss = 1.4 + 0.001 * (seed % 100) + SLOWNESS / 100
log.with_suffix(".pt").touch()
log.with_suffix(".ngrams0").touch()
own = dict(flags=sys.argv[1:], source=pathlib.Path(__file__).read_text().rstrip("\\n"))
own |= dict(every=int(flags.get("--val_loss_every", 5)) or 20)
own |= dict(val_sha256="cd" * 32) if SLOWNESS == 9 else dict()
log.write_text(log_text(seed=seed, val_loss=loss, step_ms=step_ms, **own))
log.with_suffix(".json").write_text(json.dumps(dict(val_loss=1, train_time_ms=1, seed=1)))
"""


def log_text(seed=1, val_loss=1.43, steps=20, source=SOURCE, preset="nano", step_ms=40.3, batch_tokens=1024, **more):
    """Write the log of a whole run, whose step k ends at k times step_ms."""
    track = TRACKS[preset]
    starts = range(0, track.shard_tokens - batch_tokens, batch_tokens)
    shards = [track.shard.format(track.first_shard + i) for i in range((steps - 1) // len(starts) + 1)]
    gpus = more.get("gpus", ["NVIDIA H100 80GB HBM3"] * 8 if preset == "gpt2" else [])
    device = "cuda" if gpus else "cpu"
    config = dict(preset=preset, batch_tokens=batch_tokens, num_iterations=steps, seed=seed, device=device)
    flags = more.get("flags") or f"--seed {seed} --log_dir x --run_id race-{seed}-{more.get('side', 'a')}".split()
    config["run_id"] = flags[flags.index("--run_id") + 1] if "--run_id" in flags else "x"
    config["val_loss_every"] = every = more.get("every", 5)
    size = f"{2 * track.shard_tokens + 1024} bytes"
    lines = [source, RULE, "Running Python 3.11.7 (main, May  9 2026) [GCC 12.2.0]"]
    lines += ["Running PyTorch 2.13.0+cpu, numpy 2.4.6", f"{len(gpus) or 1} processes, 2 threads each, 2 cores"]
    lines += [f"|   {i}  {gpu:<30} On  |   00000000:2D:00.0 Off |    0 |" for i, gpu in enumerate(gpus)]
    lines += ["$ lscpu", f"  Model name:   {more.get('cpu', 'Some Processor')}"]
    lines += [f"train shard: {shard}, {size}" for shard in shards] + [f"val shard: nano_val_000000.bin, {size}"]
    lines += [f"environment: {json.dumps(more.get('environment'))}"] * ("environment" in more)
    lines += [f"flags: {json.dumps(flags)}", f"configuration: {json.dumps(config)}"]
    lines += [f"validation tokens: {track.val_tokens}, sha256 {more.get('val_sha256', NANO_VAL)}"]
    lines += [RULE, f"seed: {seed}, log: x"]
    curve = more.get("curve") or {step: val_loss + 1 - step / steps for step in [*range(0, steps, every), steps]}
    for step in range(steps + 1):
        timing = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms if step else 0:.2f}ms"
        lines += [f"step:{step}/{steps} train_loss:{2.5 + seed / 1000:.4f} {timing}"] if step else []
        lines += [f"step:{step}/{steps} val_loss:{curve[step]:.4f} {timing}"] if step in curve else []
    lines += [f"first batch: {shards[0]} position 0"]
    lines += [f"last batch: {shards[-1]} position {starts[(steps - 1) % len(starts)]}"]
    lines += ["recompiles after the clock started: 0", f"step time: median {step_ms:.2f}ms", "peak memory: 499 MiB"]
    lines += [f"val_loss {curve[steps]:.4f} after {steps * step_ms / 1000:.2f} s; target 1.45 reached; log: x", ""]
    return "\n".join(lines)


def write_record(root: Path, name: str, texts: list[str], source=SOURCE, readme=README, **card) -> Path:
    """Write a record's folder; `card` are fields of its record.json."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text(readme)
    card = dict(date="2026-01-02", what="one line that says what", kind="idea", after=None, ranked=True) | card
    (folder / "record.json").write_text(json.dumps(card))
    write_logs(folder, {f"run{i}.txt": text for i, text in enumerate(texts)})
    return folder


def write_logs(folder: Path, texts: dict[str, str]) -> None:
    """Write logs as records keep them."""
    parts = {name: text.partition(f"\n{RULE}\n") for name, text in texts.items()}
    texts = {name: digest(script.rstrip("\n")) + rest + end for name, (script, rest, end) in parts.items()}
    (folder / RUNS).write_text(joined(texts))


def write_race(folder: Path, *sources: str, losses: Sequence[float] = LOSSES, ratio=0.9, ms=806.0, drop=0.0) -> dict:
    """Write the race of these scripts, each in `ratio` of the time of the next, the first in that of `log_text`.

    Each ends `drop` above the next. The record keeps its own logs, and gets those of the other scripts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scripts = [Script(f"script {i}", digest(source.rstrip("\n"))) for i, source in enumerate(sources)]
    found = Race(scripts, [], len(losses), seed=0, nproc_per_node=1)
    texts = {log.name: log.stored for log in logs_of(folder)}
    for seed, script in found.order:
        more = dict(source=sources[script].rstrip("\n"), side="abc"[script], step_ms=ms * ratio**-script / 20)
        log = Log(folder / f"{found.run_id(seed, script)}.txt", log_text(seed, losses[seed] - drop * script, **more))
        found.runs.append(Run(script, seed, **figures_of(log)))
        texts |= {f"{OLDER}/{log.name}": log.stored} if script else {}
    (folder / RUNS).write_text(joined(texts))
    found.write(folder / "race.json")
    return json.loads((folder / "race.json").read_text())
