"""A training script that trains nothing: it writes the log of a run. SLOWNESS scales its steps and its loss."""

import json
import sys
import time
import tomllib
from pathlib import Path

SLOWNESS = 1.0


def log_text(seed=1, val_loss=1.43, source="print()", flags=(), step_ms=40.0, **settings) -> str:
    """Write the log of a whole run of 20 steps on nano."""
    track = tomllib.loads(Path("records/tracks.toml").read_text())["nano"]
    rule, shard = "=" * 100, track["shard"].format(track["first_shard"])
    configuration = dict(preset="nano", batch_tokens=1024, seed=seed) | settings
    lines = [source, rule, "1 processes, 2 threads each, 2 cores", "Model name: Some | Processor"]
    lines += [f"train shard: {shard}, {2 * track['shard_tokens'] + 1024} bytes"]
    lines += [f"validation tokens: {track['val_tokens']}, sha256 {track['val_sha256']}"]
    lines += [f"flags: {json.dumps([*flags])}", f"configuration: {json.dumps(configuration)}", rule, f"seed: {seed}"]
    for step in range(21):
        timing = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"
        lines += [f"step:{step}/20 train_loss:{2.5 + seed / 1000:.4f} {timing}"] if step else []
        lines += [f"step:{step}/20 val_loss:{val_loss + 1 - step / 20:.4f} {timing}"] if step % 5 == 0 else []
    return "\n".join([*lines, "recompiles after the clock started: 0", "peak memory: 499 MiB", ""])


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    log, seed = Path(given["--log_dir"], given["--run_id"] + ".txt"), int(given["--seed"])
    log.with_suffix(".pt").touch()
    if fails := given.get("--fail"):
        sys.exit(f"first line\n{fails}")
    if gate := given.get("--gate"):
        Path(gate, "running").write_text("")
        while not Path(gate, "open").exists():
            time.sleep(0.01)
    source, noise = Path(__file__).read_text().rstrip("\n"), seed % 3
    text = log_text(seed, 1.42 + noise / 1000 + SLOWNESS / 1000, source, sys.argv[1:], 40 * SLOWNESS + noise)
    log.write_text(text.replace("step:20/20 val", "no") if "--cut" in given else text)
