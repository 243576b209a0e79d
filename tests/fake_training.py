"""A training script that trains nothing: it writes the log of a run. SLOWNESS scales its steps and its loss."""

import json
import sys
import time
import tomllib
from pathlib import Path

SLOWNESS = 1.0

given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
log, seed = Path(given["--log_dir"], given["--run_id"] + ".txt"), int(given["--seed"])
log.with_suffix(".pt").touch()
if fails := given.get("--fail"):
    sys.exit(f"first line\n{fails}")
if gate := given.get("--gate"):
    Path(gate, "running").touch()
    while not Path(gate, "open").exists():
        time.sleep(0.01)
track, rule = tomllib.loads(Path("records/tracks.toml").read_text())["nano"], "=" * 100
lines = [Path(__file__).read_text().rstrip("\n"), rule, "1 processes, 2 threads each, 2 cores"]
lines += ["Model name: Some | Processor", f"flags: {json.dumps(sys.argv[1:])}", 'configuration: {"preset": "nano"}']
lines += [f"train shard: {track['shard'].format(track['first_shard'])}, {2 * track['shard_tokens'] + 1024} bytes"]
lines += [f"validation tokens: {given.get('--val_tokens', track['val_tokens'])}, sha256 {track['val_sha256']}"]
lines += [rule, f"seed: {seed}"]
for step in range(21):
    timing = f"train_time:{step * (40 * SLOWNESS + seed % 3):.0f}ms step_avg:40.00ms"
    lines += [f"step:{step}/20 train_loss:2.5 {timing}"] if step else []
    if step % 5 == 0 and not (step == 20 and "--cut" in given):
        lines.append(f"step:{step}/20 val_loss:{2.42 - step / 20 + (seed % 3 + SLOWNESS) / 1000:.4f} {timing}")
log.write_text("\n".join([*lines, "recompiles after the clock started: 0", "peak memory: 499 MiB", ""]))
