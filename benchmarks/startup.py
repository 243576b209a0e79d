"""Start as train_gpt.py does, up to the end of its first step, and print the seconds of each part as JSON.

    python -m benchmarks.startup TIME_OF_START [flags of train_gpt.py ...]

This needs a process of its own: a process imports and compiles only once.
"""

import json
import sys
import time
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    now, seconds = float(argv[0]), {}  # by time.time(), before this process began

    import torch

    import train_gpt
    from benchmarks.measure import read

    def lap(name: str) -> None:
        nonlocal now
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        before, now = now, time.time()
        seconds[name] = now - before

    lap("interpreter and imports")
    cfg, plans, *_ = train_gpt.prepare(argv[1:], train_gpt.Ranks())
    lap("data: plan and hash")
    trainer = train_gpt.Trainer(cfg, train_gpt.Ranks())
    lap("model and optimizers")
    trainer.warm_up()
    lap("warm-up, compilation included")
    trainer.train_step(0, next(read(trainer, plans["train"])))
    lap("first step")
    print(json.dumps(seconds | dict(total=sum(seconds.values()))))


if __name__ == "__main__":
    main(sys.argv[1:])
