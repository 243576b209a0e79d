"""Statistics of runs: is the target reached, how many runs does that need, and how wide is an interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from records.logs import RECORDS, Log, ToolError, read_json

ALPHA = 0.01  # a record's p has to be below it
POWER = 0.9
MAX_RUNS = 1_000_000
TOLERANCE = 0.05  # nats that a log may be away from a public curve
PEEKING = (
    "Fix the number of runs before the first one: who looks after each of 3 to 20 runs and stops at the first "
    "p < 0.01 passes about 6% of the time, not 1%, with a script whose true mean is the target itself."
)


@dataclass(frozen=True)
class Sample:
    """n runs; sd is None for one run, p also where there is no target."""

    n: int
    mean: float
    sd: float | None
    p: float | None

    def __str__(self) -> str:
        sd = "" if self.sd is None else f" sd {self.sd:.4f}"
        return f"n={self.n} mean {self.mean:.4f}{sd}"


def p_below(values: Sequence[float], target: float) -> float | None:
    """One-sided one-sample t-test: p of a sample like this if the true mean were `target`. None for fewer than two."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0 if values[0] < target else 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, target, alternative="less").pvalue)


def describe(values: Sequence[float], target: float | None = None) -> Sample:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Sample(len(values), statistics.fmean(values), sd, None if target is None else p_below(values, target))


def power_below(gap: float, sd: float, n: int, alpha: float = ALPHA) -> float:
    """How often the one-sided test passes with n runs, if the true mean is `gap` below the target."""
    from scipy.stats import nct, t

    return float(nct.sf(t.isf(alpha, n - 1), n - 1, gap / sd * math.sqrt(n)))


def runs_needed(gap: float, sd: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """The smallest number of runs, at least 2, whose test has this power; None if none up to MAX_RUNS has."""
    if gap <= 0:
        return None
    if sd == 0:
        return 2
    high = 2
    while power_below(gap, sd, high, alpha) < power:
        high *= 2
        if high > MAX_RUNS:
            return None
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power_below(gap, sd, middle, alpha) >= power else (middle, high)
    return high


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean, and the ends of the t-interval for it. Needs two values."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    half = float(t.isf((1 - confidence) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """a / b of pairs: the geometric mean, and the 95% interval, of the t-interval on the logarithms."""
    mean, low, high = interval([math.log(x / y) for x, y in zip(a, b, strict=True)])
    return math.exp(mean), math.exp(low), math.exp(high)


def power_of_pairs(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """How often the interval of n pairs excludes zero, if their true mean is `effect`."""
    from scipy.stats import nct, t

    edge, shift = t.isf(alpha / 2, n - 1), abs(effect) / sd * math.sqrt(n)
    # Beyond 5 the far tail is below 1e-8, and scipy's nan in places
    far = nct.cdf(-edge, n - 1, shift) if shift < 5 else 0.0
    return float(nct.sf(edge, n - 1, shift) + far)


def detectable(sd: float, n: int, power: float = POWER) -> float:
    """The smallest true mean that n pairs tell from zero with this power."""
    from scipy.optimize import brentq

    return sd * float(brentq(lambda effect: power_of_pairs(effect, 1.0, n) - power, 1e-9, 100.0, xtol=1e-6))


def public_history() -> dict:
    """records/public.json: the public speedrun's history and curves; not measured here."""
    return read_json(RECORDS / "public.json")


def against_public(log: Log, name: str) -> dict:
    """Holds the validations of a gpt2 log against the curve of a public record, such as "record21"."""
    curves = {f"record{record['number']}": record["curve"] for record in public_history()["records"]}
    if name not in curves:
        raise ToolError(f"no public curve {name!r}; choose one of {', '.join(curves)}")
    if log.track != "gpt2":
        raise ToolError(f"{log.path}: a log of the {log.track} track; the public curves are of gpt2")
    points = [(int(step), loss) for step, loss in curves[name].items()]
    common = [(step, log.curve[step][0], loss) for step, loss in points if step in log.curve]
    if not common:
        raise ToolError(f"{log.path}: no validation at a step of the curve; run it with --val_loss_every 125")
    off = next((point for point in common if abs(point[1] - point[2]) > TOLERANCE), None)
    deviation = None if off is None else dict(zip(("step", "loss", "curve"), off, strict=True))
    return dict(log=str(log.path), curve=name, compared=len(common), lacking=len(points) - len(common), first=deviation)
