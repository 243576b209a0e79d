"""Predict with several models of a text and its counts at once."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedrun.counts import SYMBOLS, Counts
from speedrun.model import Model, load_model
from train_gpt import UserError, refusing

# Of all weight, that flows back to all parts alike with each token. Two counts mixed, of four texts (n = 1): 0.005
# ended up to 0.008 bits per byte below 0.02, and 0.05 up to 0.016 above
SHARE = 0.01


class Mixture:
    """Mix the probabilities of parts: models, the last a count of the text they were trained on.

    A part's weight is the probability that it wrote the text so far, if any part goes on from the one before with
    probability 1 - SHARE ("fixed share", Herbster and Warmuth 1998). So weights follow the text.
    """

    def __init__(self, models: Sequence[Model], counts: Counts, weights: Sequence[float] = ()):
        self.models, self.counts = models, counts
        self.weights = np.array(weights or [1 / (len(models) + 1)] * (len(models) + 1))
        best = models[-1]
        self.cfg, self.device, self.size = best.cfg, best.device, sum(model.size for model in models)

    def mix(self, parts: np.ndarray) -> np.ndarray:
        """Return the mixed probabilities (n,) of tokens by those of the parts (k, n), and move the weights."""
        mixed = np.empty(parts.shape[1])
        for i, p in enumerate(parts.T):
            shares = self.weights * p
            mixed[i] = shares.sum()
            self.weights = (1 - SHARE) * shares / mixed[i] + SHARE / len(parts)
        return mixed

    def parts(self, tokens: Sequence[int]) -> np.ndarray:
        """Return what each part gives each token of a sequence but the first, (k, n - 1)."""
        read, at = np.array(tokens), np.arange(1, len(tokens))
        counted = self.counts.probabilities(read, at, read[1:])
        return np.array([*(model.losses(tokens).neg().exp().numpy() for model in self.models), counted])

    def losses(self, tokens: Sequence[int]) -> Tensor:
        """Return the loss (n - 1,) in nats of each token of a sequence but the first."""
        return torch.from_numpy(-np.log(self.mix(self.parts(tokens))))

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logarithms (SYMBOLS,) of the probabilities of the token that follows `tokens`."""
        every = np.arange(SYMBOLS)
        counted = self.counts.probabilities(np.array(tokens), np.full(SYMBOLS, len(tokens)), every)
        parts = [model.next_logits(tokens).double().softmax(0).cpu().numpy() for model in self.models]
        return torch.from_numpy(np.log(self.weights @ [*parts, counted]))


def write_mixture(path: Path, runs: Sequence[Path], tokens: np.ndarray, weights: np.ndarray) -> None:
    """Write what names the models of these runs, and beside it the tokens that are counted."""
    counted = path.with_suffix(".counts.npy")
    np.save(counted, tokens.astype("<u2"))
    parts = dict(models=[run.with_suffix(".pt").name for run in runs], counts=counted.name, weights=weights.tolist())
    path.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")


def load_mixture(path: Path, device: str) -> Mixture:
    """Load what `write_mixture` wrote, and the models beside it. Raise UserError if it is none."""
    with refusing(f"{path}: not a sound mixture"):
        parts = json.loads(path.read_text(encoding="utf-8"))
        models = [load_model(path.with_name(name), device) for name in parts["models"]]
        mixture = Mixture(models, Counts(np.load(path.with_name(parts["counts"]))), parts["weights"])
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
