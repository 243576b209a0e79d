"""Make golden.npz of a record from VeFused on, of public numbers: PUBLIC.npz, and PUBLIC.json that describes them.

    PYTHONPATH=data python tests/make_golden.py PUBLIC SEED records/NAME

SEED is that of the parameters. Arrays that no test compares are left out, and large ones made small (public_records).
"""

import json
import re
import sys
import zlib
from pathlib import Path

import numpy as np

from public_records import digest, draw, project

KEPT = r"(train1?|val)/(inputs|targets|bigram|sign)|(grad_norm|loss|block_rms|\w+_sample|\w+_table)"
KEPT += r"|(opt|grad|schedule\w*|hash|token_loss)/.*"
KEPT += r"|pack/(shard\d|.*/(inputs|targets|bigram))|run/(\w*shard\d?|\d+/inputs|digest/.*)"
KEPT += r"|run/(grad_norm|loss_per_token|val_steps|val_loss)"


def main(public: str, seed: str, folder: str) -> None:
    numbers, about = np.load(f"{public}.npz"), json.loads(Path(f"{public}.json").read_text(encoding="utf-8"))
    rng, params, kept = np.random.default_rng(int(seed)), [], dict(seed=int(seed), spreads=[], bounds=[])
    for key in about["param_names"]:
        x = numbers[f"param/{key}"].astype(np.int16)
        kept["bounds"].append(np.abs(x).max() if x.size > 1000 else 50)
        drawn = draw(rng, int(seed), x.shape, kept["bounds"][-1])
        kept["spreads"].append((x * drawn).sum() / (drawn * drawn).sum() if x.size > 1000 else 0)  # small ones: whole
        kept[f"param/{key}"] = x - np.rint(kept["spreads"][-1] * drawn).clip(-127, 127).astype(np.int16)
        params.append(x.ravel())
    kept["units"] = [2.0 ** -about["param_scale_log2"][key] for key in about["param_names"]]
    kept["checksum"] = zlib.crc32(np.concatenate(params).astype(np.int8))
    kept |= {f"run/indices/{key}": i for key, i in about["config"]["run"]["digest_index"].items()}
    for key in numbers:
        if re.fullmatch(KEPT, name := re.sub("/tokens$", "/inputs", key)):
            x, small = numbers[key], digest if key.startswith("opt/from") else None
            small = project if key.endswith((":rows", ":cols")) else small
            kept[name] = np.array([small(row) for row in x]) if small else x[:, :16] if key.endswith(":sample") else x
    np.savez_compressed(Path(folder, "golden.npz"), **kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
