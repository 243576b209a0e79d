"""A script that trains nothing: it writes the log of 20 steps of nano. SLOWNESS scales times and losses."""

import json
import sys
import time
import tomllib
from pathlib import Path

SLOWNESS = 1.0

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
    track, rule = tomllib.loads(Path("records/tracks.toml").read_text())["nano"], "=" * 100
    shard, noise = track["shard"].format(track["first_shard"]), seed % 3
    lines = [Path(__file__).read_text().rstrip("\n"), rule, "1 processes, 2 threads each, 2 cores"]
    lines += ["Model name: Some | Processor", f"train shard: {shard}, {2 * track['shard_tokens'] + 1024} bytes"]
    lines += [f"validation tokens: {track['val_tokens']}, sha256 {track['val_sha256']}"]
    lines += [f"flags: {json.dumps(sys.argv[1:])}", 'configuration: {"preset": "nano"}', rule, f"seed: {seed}"]
    for step in range(21):
        timing = f"train_time:{step * (40 * SLOWNESS + noise):.0f}ms step_avg:0ms"
        lines += [f"step:{step}/20 train_loss:2.5 {timing}"] * (step > 0)
        loss = 2.42 + noise / 1000 + SLOWNESS / 1000 - step / 20
        lines += [f"step:{step}/20 val_loss:{loss:.4f} {timing}"] * (step % 5 == 0)
    log.write_text("\n".join([*lines, "recompiles after the clock started: 0", "peak memory: 499 MiB", ""]))
