"""Know NVIDIA's cards, and estimate what a training of gpt2 takes on them and where its loss ends."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Card(NamedTuple):
    """Hold what NVIDIA's data sheets and the CUDA C++ Programming Guide say; products are dense, summed in fp32."""

    name: str  # as torch names it, in full: others with nearly the same name are slower
    arch: int  # compute capability, times ten
    bf16: float  # 10^12 operations a second
    fp8: float  # the same; of cards without FP8 the one in bf16
    bandwidth: float  # 10^12 bytes a second
    memory_mib: int  # as torch reports it, rounded: 300 to 900 less than nvidia-smi says
    processors: int = 132
    threads: int = 2048  # of each processor
    shared_limit: int = 232_448  # bytes of shared memory that a block may have
    l2_cache: int = 50  # MiB


H100 = Card("NVIDIA H100 80GB HBM3", 90, 989, 1979, 3.35, 81_000)
A100 = Card("NVIDIA A100-SXM4-80GB", 80, 312, 312, 2.039, 81_000, 108, 2048, 166_912, 40)
A100_40GB = A100._replace(name="NVIDIA A100-SXM4-40GB", bandwidth=1.555, memory_mib=40_000)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", 89, 165, 330, 1.008, 24_200, 128, 1536, 101_376, 72)
H200 = H100._replace(name="NVIDIA H200", bandwidth=4.8, memory_mib=143_000)
CARDS = {card.name: card for card in (H200, H100, A100, A100_40GB, RTX_4090)}
# Loss of public record 92 by rows of n-grams: all, a quarter, and a few, two runs each. With a pointer, proposal 379
# ended at 3.2769 (n = 8) with all rows; that fewer cost it as much is assumed
DOSES = {84_602_880: 3.2791, 21_150_720: 3.2844, 377_280: 3.3150}
POINTER_LOSS = 3.2769
# Measured on one H100 with 16 cores: compiling a training's seven graphs, beside two others that compiled, too; and all
# steps of it with an eighth of the tokens
COMPILE_MINUTES, EIGHTH_SECONDS = 9, 45.7
CUDA_MIB = 500  # of a card's memory that CUDA takes, assumed
PRICE = 3.0  # dollars for an hour of one card, assumed
PREDICTED = Path(__file__).with_name("h100.json")  # made by `python -m speedrun lower --arch 90 89 80 --update`


def predicted(arch: int = H100.arch) -> dict:
    return json.loads(PREDICTED.read_text())["gpus"][str(arch)]


def step_seconds(card: Card, processes: int, sequences: int = 8) -> list[tuple[int, float]]:
    """Return for each stage its steps, and the seconds of one, from the prediction of a step as one rank of eight.

    sequences: of a step, of which gpt2 has 8; the optimizers do not depend on them. An H100 would take the prediction
    for the graphs of the card's kind; each part takes longer by the ratio of the peaks that limit it. Nothing is known
    of the links of other cards: communication is as on 8 H100.
    """
    found = predicted(card.arch)
    slower = dict.fromkeys(found["predicted"][0]["ms"], H100.bandwidth / card.bandwidth)
    slower |= dict.fromkeys(("attention", "products in bf16"), H100.bf16 / card.bf16)
    slower |= {"products in FP8": H100.fp8 / card.fp8, "communication": 1}
    share = dict.fromkeys(slower, sequences / processes)
    share |= {"optimizers, averages": found["one_of"] / processes, "communication": processes > 1}
    stages = []
    for stage, step in zip(found["stages"], found["predicted"], strict=True):
        ms = sum(slower[part] * share[part] * n for part, n in step["ms"].items())
        stages.append((stage["steps"], ms / 1000))
    return stages


def run_seconds(card: Card, processes: int, sequences: int = 8) -> float:
    return sum(steps * seconds for steps, seconds in step_seconds(card, processes, sequences))


def costs(card: Card, processes: int = 1) -> tuple[tuple[float, float], float, float]:
    """Return the least and the most ms of a step, minutes of a run, and those of 8 pairs of an eighth of the batch."""
    ms = [1000 * seconds for _, seconds in step_seconds(card, processes)]
    pairs = 16 * run_seconds(card, processes, sequences=1)
    return (min(ms), max(ms)), run_seconds(card, processes) / 60, pairs / 60


def loss_of(rows: int) -> float:
    """Return the loss to expect with so many rows of n-grams: on a line through the doses, by the rows' logarithm."""
    logs, losses = [math.log(n) for n in reversed(DOSES)], [*reversed(DOSES.values())]
    return POINTER_LOSS + float(np.interp(math.log(rows), logs, losses)) - losses[-1]
