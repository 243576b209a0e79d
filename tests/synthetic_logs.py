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
log.with_suffix(".pt").touch()
if "--stop" in flags and pathlib.Path(flags["--stop"]).read_text() == log.stem:
    sys.exit("first line\\nstopped")
seed, source = int(flags["--seed"]), pathlib.Path(__file__).read_text().rstrip("\\n")
step_ms = SLOWNESS * (40 + 0.1 * (zlib.crc32(log.name.encode()) % 5))
more = dict(preset=flags.get("--preset", "nano"), flags=sys.argv[1:], source=source)
log.write_text(log_text(seed, 1.4 + seed / 1000 + SLOWNESS / 100, step_ms=step_ms, **more))
"""


def log_text(seed=1, val_loss=1.43, source=SOURCE, preset="nano", step_ms=40.3, run_id="", **more) -> str:
    """Write the log of a whole run of 20 steps, of which step k ends at k times step_ms."""
    track = TRACKS[preset]
    gpus = more.get("gpus", ["NVIDIA H100 80GB HBM3"] * 8 if track.machines else [])
    flags = more.get("flags") or f"--seed {seed} --log_dir x --run_id {run_id or f'race-{seed}-a'}".split()
    config = dict(preset=preset, batch_tokens=1024, train_seq_len=512, seed=seed)
    lines = [source, RULE, f"{len(gpus) or 1} processes, 2 threads each, 2 cores", "Model name: Some Processor"]
    lines += [f"|   {i}  {gpu:<30} On  |   00000000:2D:00.0 Off |    0 |" for i, gpu in enumerate(gpus)]
    lines += [f"train shard: {track.shard.format(track.first_shard)}, {2 * track.shard_tokens + 1024} bytes"]
    lines += [f"flags: {json.dumps(flags)}", f"configuration: {json.dumps(config)}"]
    lines += [f"validation tokens: {track.val_tokens}, sha256 {more.get('val_sha256', track.val_sha256 or 64 * 'a')}"]
    lines += [RULE, f"seed: {seed}, log: x"]
    for step in range(21):
        timing = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"
        lines += [f"step:{step}/20 train_loss:{2.5 + seed / 1000:.4f} {timing}"] if step else []
        lines += [f"step:{step}/20 val_loss:{val_loss + 1 - step / 20:.4f} {timing}"] if step % 5 == 0 else []
    return "\n".join([*lines, "recompiles after the clock started: 0", "peak memory: 499 MiB", ""])


def write_record(root: Path, name: str, texts: list[str], source=SOURCE, readme="# Name\n", **card) -> Path:
    """Write a record's folder; `card` are fields of its record.json."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    card = dict(date="2026-01-02", what="one line that says what", kind="idea", after=None, ranked=True) | card
    stored = {f"run{i}.txt": Log(folder, text).stored for i, text in enumerate(texts)}
    files = {"train_gpt.py": source, "README.md": readme, "record.json": json.dumps(card), RUNS: joined(stored)}
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def write_race(folder: Path, *sources: str, losses=LOSSES, drop=0.0) -> None:
    """Add the race of a record's script, which comes first; each takes 0.9 of the time of the next."""
    scripts = [Script(f"script {i}", digest(source)) for i, source in enumerate(sources)]
    found = Race(scripts, [], len(losses), seed=0, nproc_per_node=1)
    texts = {log.name: log.stored for log in logs_of(folder)}
    for seed, script in found.order:
        run_id = found.run_id(seed, script)
        more = dict(step_ms=40.3 / 0.9**script, run_id=run_id)
        log = Log(folder / f"{run_id}.txt", log_text(seed, losses[seed] - drop * script, sources[script], **more))
        found.runs.append(Run(script, seed, **figures_of(log)))
        texts |= {f"{OLDER}/{log.name}": log.stored} if script else {}
    (folder / RUNS).write_text(joined(texts))
    found.write(folder / "race.json")
