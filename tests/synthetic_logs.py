"""Logs and records that no run wrote."""

import json
from pathlib import Path

from speedrun.logs import RULE, Log, digest
from speedrun.proof import Race, Run, Script, figures_of
from speedrun.store import OLDER, RUNS, TRACKS, joined, logs_of

SOURCE = "import torch\n\nmodel = torch.compile(torch.nn.Identity(), dynamic=False)"
LOSSES = (1.431, 1.428, 1.433, 1.430, 1.429)  # by seed

# What a race starts: SLOWNESS scales its steps and its loss
SCRIPT = """
import pathlib, sys, zlib
from synthetic_logs import log_text
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
log = pathlib.Path(flags["--log_dir"], flags["--run_id"] + ".txt")
assert not [*log.parent.glob(f"{log.stem}.*")]
for kind in ".pt", ".ngrams0", ".json":
    log.with_suffix(kind).touch()
if "--stop" in flags and pathlib.Path(flags["--stop"]).read_text() == log.stem:
    sys.exit("first line\\nstopped")
seed, source = int(flags["--seed"]), pathlib.Path(__file__).read_text().rstrip("\\n")
step_ms = SLOWNESS * (40 + 0.1 * (zlib.crc32(log.name.encode()) % 5))
more = dict(preset=flags.get("--preset", "nano"), flags=sys.argv[1:], source=source)
log.write_text(log_text(seed, 1.4 + seed / 1000 + SLOWNESS / 100, step_ms=step_ms, **more))
"""


def log_text(seed=1, val_loss=1.43, steps=20, source=SOURCE, preset="nano", step_ms=40.3, batch_tokens=1024, **more):
    """Write the log of a whole run, whose step k ends at k times step_ms."""
    track = TRACKS[preset]
    starts = range(0, track.shard_tokens - batch_tokens, batch_tokens)
    shards = [Path(track.shard.format(track.first_shard + i)).name for i in range((steps - 1) // len(starts) + 1)]
    gpus = more.get("gpus", ["NVIDIA H100 80GB HBM3"] * 8 if track.machines else [])
    flags = more.get("flags") or f"--seed {seed} --log_dir x --run_id race-{seed}-a".split()
    config = dict(preset=preset, batch_tokens=batch_tokens, num_iterations=steps, seed=seed)
    config |= dict(device="cuda" if gpus else "cpu", run_id="".join(flags[5:6]), train_seq_len=more.get("length", 1024))
    lines = [source, RULE, f"{len(gpus) or 1} processes, 2 threads each, 2 cores", "Model name: Some Processor"]
    lines += [f"|   {i}  {gpu:<30} On  |   00000000:2D:00.0 Off |    0 |" for i, gpu in enumerate(gpus)]
    lines += [f"train shard: {shard}, {2 * track.shard_tokens + 1024} bytes" for shard in shards]
    lines += [f"flags: {json.dumps(flags)}", f"configuration: {json.dumps(config)}"]
    lines += [f"validation tokens: {track.val_tokens}, sha256 {more.get('val_sha256', track.val_sha256 or 64 * 'a')}"]
    lines += [RULE, f"seed: {seed}, log: x"]
    curve = more.get("curve") or {step: val_loss + 1 - step / steps for step in [*range(0, steps, 5), steps]}
    for step in range(steps + 1):
        timing = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms if step else 0:.2f}ms"
        lines += [f"step:{step}/{steps} train_loss:{2.5 + seed / 1000:.4f} {timing}"] if step else []
        lines += [f"step:{step}/{steps} val_loss:{curve[step]:.4f} {timing}"] if step in curve else []
    lines += ["recompiles after the clock started: 0", "peak memory: 499 MiB"]
    return "\n".join([*lines, f"val_loss {curve[steps]:.4f} after {steps * step_ms / 1000:.2f} s", ""])


def write_record(root: Path, name: str, texts: list[str], source=SOURCE, readme="# Name\n", **card) -> Path:
    """Write a record's folder; `card` are fields of its record.json."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    card = dict(date="2026-01-02", what="one line that says what", kind="idea", after=None, ranked=True) | card
    parts = [text.partition(f"\n{RULE}\n") for text in texts]  # a record's logs have the script's hash alone
    stored = {f"run{i}.txt": digest(part[0]) + part[1] + part[2] for i, part in enumerate(parts)}
    files = {"train_gpt.py": source, "README.md": readme, "record.json": json.dumps(card), RUNS: joined(stored)}
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def write_race(folder: Path, *sources: str, losses=LOSSES, ratio=0.9, ms=806.0, drop=0.0) -> None:
    """Add the race of a record's script, which comes first; each takes `ratio` of the time of the next."""
    scripts = [Script(f"script {i}", digest(source)) for i, source in enumerate(sources)]
    found = Race(scripts, [], len(losses), seed=0, nproc_per_node=1)
    texts = {log.name: log.stored for log in logs_of(folder)}
    for seed, script in found.order:
        run_id, step_ms = found.run_id(seed, script), ms * ratio**-script / 20
        more = dict(source=sources[script], flags=f"--seed {seed} --log_dir x --run_id {run_id}".split())
        log = Log(folder / f"{run_id}.txt", log_text(seed, losses[seed] - drop * script, step_ms=step_ms, **more))
        found.runs.append(Run(script, seed, **figures_of(log)))
        texts |= {f"{OLDER}/{log.name}": log.stored} if script else {}
    (folder / RUNS).write_text(joined(texts))
    found.write(folder / "race.json")
