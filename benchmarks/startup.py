"""Starts as train_gpt.py does, up to the end of its first step, and prints what took how long, in seconds, as JSON.

    python -m benchmarks.startup TIME_OF_START [flags of train_gpt.py ...]

A process of its own, as imports and compilation happen once in a process.
"""

import json
import sys
import time
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    now = float(argv[0])  # by time.time(), before this process began
    seconds: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal now
        before, now = now, time.time()
        seconds[name] = now - before

    import train_gpt
    from benchmarks.measure import Spans, Trainer, synchronize

    lap("interpreter and imports")
    world = train_gpt.World()
    cfg = train_gpt.resolve(train_gpt.parse_args(argv[1:]))
    plans = train_gpt.plan_data(cfg)
    cfg, device = train_gpt.set_up(cfg, world)
    train_gpt.describe_data(cfg, plans)
    lap("data: plan and hash")
    trainer = Trainer.build(cfg, world, device)
    synchronize(device)
    lap("model and optimizers")
    trainer.warm_up()
    synchronize(device)
    lap("warm-up")
    trainer.step(trainer.batches(plans[0][:4]), Spans(device))
    synchronize(device)
    lap("first step")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
