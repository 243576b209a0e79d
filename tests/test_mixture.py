"""Counts of n-grams and their mixture with models: probabilities by a slow definition, weights by hand, files."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

import sample
from speedrun import counts, mixture
from speedrun.counts import Counts
from speedrun.mixture import Mixture, load_mixture, write_mixture
from speedrun.model import load_model
from train_gpt import UserError

TEXT = np.random.default_rng(0).integers(4, size=300) * np.random.default_rng(1).integers(2, size=300)


def slow_kneser_ney(text: list[int], orders: tuple[int, ...]):
    """Return P(w | history) by dictionaries of tuples."""
    tables, places = {}, range(len(text))
    for n in reversed(orders):
        ngrams = [tuple(text[max(0, i - n + 1) : i + 1]) for i in places]
        count = Counter(ngrams)
        places = sorted({ngram: i for i, ngram in reversed([*zip(places, ngrams, strict=True)])}.values())
        of = [max(1, sum(c == k for c in count.values())) for k in (1, 2, 3, 4)]
        y = of[0] / (of[0] + 2 * of[1])
        limits = (0.1, 0.95), (0.1, 1.9), (0.1, 2.9)
        cut = [min(max(k - (k + 1) * y * of[k] / of[k - 1], low), high) for k, (low, high) in enumerate(limits, 1)]
        total, left = defaultdict(int), defaultdict(float)
        for ngram, c in count.items():
            total[ngram[:-1]] += c
            left[ngram[:-1]] += cut[min(c, 3) - 1]
        tables[n] = {g: c - cut[min(c, 3) - 1] for g, c in count.items()}, total, left

    def p(history: list[int], w: int) -> float:
        found = 1 / counts.SYMBOLS
        for n in orders:
            shares, total, left = tables[n]
            context = tuple(history[max(0, len(history) - n + 1) :]) if n > 1 else ()
            if context in total:
                found = (shares.get((*context, w), 0) + left[context] * found) / total[context]
        return found

    return p


def test_probabilities_are_kneser_neys_and_add_up_to_1(monkeypatch):
    monkeypatch.setattr(counts, "ORDERS", (1, 2, 3, 5))
    fast, slow = Counts(TEXT[:250]), slow_kneser_ney(TEXT[:250].tolist(), (1, 2, 3, 5))
    at = np.arange(200, 300)
    found = fast.probabilities(TEXT, at, TEXT[at])
    assert found == pytest.approx([slow(TEXT[:i].tolist(), TEXT[i]) for i in at], rel=1e-5)
    every = np.arange(counts.SYMBOLS)
    assert fast.probabilities(TEXT, np.full(counts.SYMBOLS, 260), every).sum() == pytest.approx(1, abs=1e-6)


def test_weights_follow_the_text(model):
    mixed = Mixture([load_model(model, "cpu")], Counts(TEXT))
    parts = np.array([[0.5, 0.1], [0.1, 0.5]])
    first = 0.5 * 0.5 + 0.5 * 0.1
    w = (1 - mixture.SHARE) * 0.5 * 0.5 / first + mixture.SHARE / 2
    assert mixed.mix(parts) == pytest.approx([first, w * 0.1 + (1 - w) * 0.5])


def test_a_mixture_is_written_read_and_sampled_and_predicts_as_it_scores(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    path = model.with_suffix(".mixture")
    write_mixture(path, [model.with_suffix(""), model], TEXT, np.array([0.2, 0.3, 0.5]))
    mixed, text = load_mixture(path, "cpu"), [256, *TEXT[:40].tolist()]
    last = mixed.next_logits(text[:-1]).exp()
    assert last.sum().item() == pytest.approx(1, abs=1e-6)
    parts = mixed.parts(text)[:, -1]
    assert last[text[-1]].item() == pytest.approx(mixed.weights @ parts, rel=1e-5)
    assert sample.main(["--prompt", "ab", "--tokens", "5", "--seed", "1"]) == 0, "the newest file in logs/"
    assert capsys.readouterr().err.startswith(f"{path.relative_to(path.parent.parent)}, ")
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(models=["gone.pt"])))
    with pytest.raises(UserError, match=r"gone\.pt: there is no such file"):
        load_mixture(path, "cpu")
    assert torch.isfinite(mixed.losses(text)).all()
