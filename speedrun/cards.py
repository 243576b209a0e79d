"""Estimate what a training of gpt2 takes on NVIDIA cards, and where its loss ends, without running anything there."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Card(NamedTuple):
    """Hold a card's peaks by NVIDIA's data sheets: dense, summed up in fp32."""

    bf16: float  # 10^12 operations a second
    fp8: float  # the same; of cards without FP8 the one in bf16
    bandwidth: float  # 10^12 bytes a second
    arch: int = 90  # compute capability, whose graphs were lowered


CARDS = {  # by torch's whole name of it, as others with nearly the same name are slower
    "NVIDIA H200": Card(989, 1979, 4.8),
    "NVIDIA H100 80GB HBM3": Card(989, 1979, 3.35),
    "NVIDIA A100-SXM4-80GB": Card(312, 312, 2.039, 80),
    "NVIDIA A100-SXM4-40GB": Card(312, 312, 1.555, 80),
    "NVIDIA GeForce RTX 4090": Card(165, 330, 1.008, 89),
}
# Loss of public record 92 by rows of n-grams, two runs each; with a pointer proposal 379 ended at 3.2769 (n = 8) with
# all rows. That fewer rows cost it as much is assumed
DOSES = {84_602_880: 3.2791, 21_150_720: 3.2844, 377_280: 3.3150}
POINTER_LOSS = 3.2769
PREDICTED = Path(__file__).with_name("h100.json")


def step_seconds(card: Card, processes: int, sequences: int = 8) -> list[tuple[int, float]]:
    """Return for each stage its steps, and the seconds of one, from the prediction of a step as one rank of eight.

    sequences: of a step, of which gpt2 has 8; the optimizers do not depend on them. An H100 would take the prediction
    for the graphs of the card's kind; each part takes longer by the ratio of the peaks that limit it. Nothing is known
    of the links of other cards: communication is as on 8 H100.
    """
    found, h100 = json.loads(PREDICTED.read_text())["gpus"][str(card.arch)], CARDS["NVIDIA H100 80GB HBM3"]
    slower = dict.fromkeys(found["predicted"][0]["ms"], h100.bandwidth / card.bandwidth)
    slower |= dict.fromkeys(("attention", "products in bf16"), h100.bf16 / card.bf16)
    slower["products in FP8"] = h100.fp8 / card.fp8
    share = dict.fromkeys(slower, sequences / processes)
    share |= {"optimizers, averages": found["one_of"] / processes, "communication": processes > 1}
    slower["communication"] = 1
    stages = []
    for stage, step in zip(found["stages"], found["predicted"], strict=True):
        ms = sum(slower[part] * share[part] * n for part, n in step["ms"].items())
        stages.append((stage["steps"], ms / 1000))
    return stages


def run_seconds(card: Card, processes: int, sequences: int = 8) -> float:
    return sum(steps * seconds for steps, seconds in step_seconds(card, processes, sequences))


def loss_of(rows: int) -> float:
    """Return the loss to expect with so many rows of n-grams: on a line through the doses, by the rows' logarithm."""
    logs, losses = [math.log(n) for n in reversed(DOSES)], [*reversed(DOSES.values())]
    return POINTER_LOSS + float(np.interp(math.log(rows), logs, losses)) - losses[-1]
