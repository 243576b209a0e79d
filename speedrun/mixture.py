"""Predict with several models of a text, its counts that go on counting, and counts of what was read alone.

The probability of a token v is proportional to the product of P_i(v) ** w_i over the parts i: logistic mixing, for bits
by Mahoney (PAQ), for alphabets by Mattern (2012). A sum of w_i P_i(v) took 1 to 16% more bits on six texts. After each
token the weights take a step along the gradient of its log probability, RATE (log P_i(token) - sum_v P(v) log P_i(v)),
so they follow the text. They are the mean of three rows: one for all tokens, one by how many orders of the text's
counts know what stands before, one by how many of the recent counts do. Where much is known, counts are right.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedrun.counts import ORDERS, Counts, Hashes, counts_of
from speedrun.model import Model, load_model
from train_gpt import UserError, refusing

RATE = 0.004  # half or twice as much: up to 1% more bits (5 texts, n = 1)
RECENT = 65_536  # tokens of what was read that are counted
FLOOR = -20.0  # of log P_i: no part forbids a token
STRETCH = 32  # tokens that are predicted by the same counts: with 1,024 JavaScript took 6% more bits (n = 1)
SETS = np.arange(3)  # of rows


class Mixture:
    """Hold models, counts, and weights (3, len(ORDERS) + 1, parts): of the models, the counts and the recent counts."""

    def __init__(self, models: Sequence[Model], counts: Counts, weights: np.ndarray | None = None):
        self.models, self.counts = models, counts
        parts = len(models) + 2
        self.first = np.full((3, len(ORDERS) + 1, parts), 1 / parts)
        if weights is not None:
            self.first = weights.reshape(self.first.shape)
        best = models[-1]
        self.cfg, self.device, self.size = best.cfg, best.device, sum(model.size for model in models)
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self.weights, self.recent = self.first.copy(), np.zeros(0, np.int64)

    def predict(self, read: np.ndarray, at: np.ndarray, logits: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Return what parts give positions `at` (m,) of `read`, log probabilities (m, parts, SYMBOLS), and rows (m, 3).

        `read` goes on from what was read before. logits: (m, SYMBOLS) of each model.
        """
        text, at = Hashes(np.append(self.recent, read)), at + len(self.recent)
        stretches, next_count, end = list[list[np.ndarray]](), 0, 0
        while end < len(at):
            seen = at[begin := end]
            end = begin + np.searchsorted(at[begin:], seen + STRETCH)
            if seen >= next_count:  # all is counted again, so that little is on top of it
                counted_to, next_count = seen, seen + min(max(64, seen // 16), 1024)
                both = [Counts(text, np.arange(seen), before) for before in (self.counts, None)]
            new = np.arange(counted_to, seen)
            latest = [Counts(text, new, counts) for counts in both] if len(new) else both
            stretches.append([it for counts in latest for it in counts.predict(text, at[begin:end])])
        counted, known, news, fresh = map(np.concatenate, zip(*stretches, strict=True))
        models = [z.double().log_softmax(-1).cpu().numpy() for z in logits]
        logs = np.stack([*models, np.log(counted), np.log(news)], axis=1).clip(FLOOR)
        return logs, np.stack([np.zeros_like(known), known, fresh], axis=1)

    def mix(self, logs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the log probabilities (SYMBOLS,) of one position by those of the parts (parts, SYMBOLS)."""
        mixed = self.weights[SETS, rows].mean(0) @ logs
        return mixed - np.logaddexp.reduce(mixed)

    def read(self, tokens: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield log probabilities for each token of a sequence but the first: of all (SYMBOLS,), of each part.

        The weights move, and the tokens are counted.
        """
        read = np.array(tokens)
        logits = [torch.cat([*model.predictions(tokens)]) for model in self.models]
        for logs, row, token in zip(*self.predict(read, np.arange(1, len(read)), logits), read[1:], strict=True):
            yield (mixed := self.mix(logs, row)), logs
            self.weights[SETS, row] += RATE * (logs[:, token] - logs @ np.exp(mixed))
        self.recent = np.append(self.recent, read[:-1])[-RECENT:]

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the losses in nats (1 + parts, n - 1) of all tokens but the first: of the mixture, of each part."""
        every = zip(self.read(tokens), tokens[1:], strict=True)
        return -np.array([[mixed[token], *logs[:, token]] for (mixed, logs), token in every]).T

    def losses(self, tokens: Sequence[int]) -> Tensor:
        """Return the loss (n - 1,) in nats of each token of a sequence but the first."""
        return torch.from_numpy(self.score(tokens)[0])

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the log probabilities (SYMBOLS,) of the token that follows `tokens`."""
        logits = [model.next_logits(tokens)[None] for model in self.models]
        [logs], [row] = self.predict(np.array(tokens), np.array([len(tokens)]), logits)
        return torch.from_numpy(self.mix(logs, row))


def write_mixture(path: Path, runs: Sequence[Path], tokens: np.ndarray, weights: np.ndarray) -> None:
    """Write what names the models of these runs, and beside it the tokens that are counted."""
    counted = path.with_suffix(".counts.npy")
    np.save(counted, tokens.astype("<u2"))
    parts = dict(models=[run.with_suffix(".pt").name for run in runs], counts=counted.name, weights=weights.tolist())
    path.write_text(json.dumps(parts) + "\n", encoding="utf-8")


def load_mixture(path: Path, device: str) -> Mixture:
    """Load what `write_mixture` wrote, and the models beside it. Raise UserError if it is none."""
    with refusing(f"{path}: not a sound mixture"):
        parts = json.loads(path.read_text(encoding="utf-8"))
        models = [load_model(path.with_name(name), device) for name in parts["models"]]
        mixture = Mixture(models, counts_of(np.load(path.with_name(parts["counts"]))), np.array(parts["weights"]))
    return mixture


def find_model(path: Path | None, device: str) -> tuple[Path, Model | Mixture]:
    """Load this model or mixture, or the newest in logs/, to this device or with `auto` the best."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU; leave the flag out")
    if path is None:
        found = [path for pattern in ("*.pt", "*.mixture") for path in Path("logs").glob(pattern)]
        path = max(found, key=lambda path: path.lstat().st_mtime_ns, default=Path("logs/*.pt"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return path, load_mixture(path, device) if path.suffix == ".mixture" else load_model(path, device)
