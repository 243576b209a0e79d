"""Counts of n-grams and their mixture with models: probabilities by a slow definition, weights by hand, files."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

import sample
from speedrun import counts, evaluate, mixture
from speedrun.counts import Counts, Hashes, counts_of
from speedrun.mixture import Mixture, load_mixture, write_mixture
from speedrun.model import load_model
from train_gpt import UserError

TEXT = np.random.default_rng(0).integers(4, size=300) * np.random.default_rng(1).integers(2, size=300)
TEXT[TEXT == 3] = 256  # an end of text


def slow_kneser_ney(texts: list[list[int]], orders: tuple[int, ...]):
    """Return P(w | history) by dictionaries of tuples, with the first text's discounts."""
    tables, places = {}, [(j, i) for j, text in enumerate(texts) for i in range(len(text))]
    for n in reversed(orders):
        ngrams = [tuple(texts[j][max(0, i - n + 1) : i + 1]) for j, i in places]
        count = Counter(ngrams)
        old = Counter(ngram for ngram, (j, _) in zip(ngrams, places, strict=True) if j == 0)
        places = sorted(dict(reversed([*zip(ngrams, places, strict=True)])).values())
        of = [max(1, sum(c == k for c in old.values())) for k in (1, 2, 3, 4)]
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


@pytest.mark.parametrize("texts", [[TEXT[:250]], [TEXT[:150], TEXT[100:250]]], ids=["one", "two"])
def test_probabilities_are_kneser_neys_and_add_up_to_1(monkeypatch, texts):
    """Of one text, and of a text on top of another, which has a part of it."""
    orders = 1, 2, 3, 5
    monkeypatch.setattr(counts, "ORDERS", orders)
    fast, slow = None, slow_kneser_ney([text.tolist() for text in texts], orders)
    for text in texts:
        fast = Counts(Hashes(text), np.arange(len(text)), fast)
    at = np.arange(200, 300)
    found, known = fast.predict(Hashes(TEXT), at)
    wanted = [[slow(TEXT[:i].tolist(), w) for w in range(counts.SYMBOLS)] for i in at]
    assert found == pytest.approx(np.array(wanted))
    assert found.sum(axis=1) == pytest.approx(1)
    seen = {tuple(text[max(0, i - n + 1) : i]) for text in texts for n in orders for i in range(len(text))}
    assert known.tolist() == [max(k for k, n in enumerate(orders, 1) if tuple(TEXT[i - n + 1 : i]) in seen) for i in at]


def slow_mixture(mixed: Mixture, texts: list[list[int]]) -> list[list[float]]:
    """Return the losses of each text, position by position."""
    parts, rows, before = len(mixed.models) + 2, [dict[int, np.ndarray]() for _ in range(3)], list[int]()
    losses, recount, counted, both = [], 0, 0, list[Counts]()
    for text in texts:
        nats = [torch.cat([*model.predictions(text)]).double().log_softmax(-1).numpy() for model in mixed.models]
        seen = Hashes(np.array([*before, *text]))
        for i in range(1, len(text)):
            if (i - 1) % mixture.STRETCH == 0:
                now = len(before) + i
                if i == 1 or now >= recount:
                    recount, counted = now + min(max(64, now // 16), 1024), now
                olds = [Counts(seen, np.arange(counted), some) for some in (mixed.counts, None)]
                both = [Counts(seen, np.arange(counted, now), old) if now > counted else old for old in olds]
            (p, known), (news, fresh) = ([it[0] for it in c.predict(seen, np.array([len(before) + i]))] for c in both)
            logs = np.array([*(n[i - 1] for n in nats), np.log(p), np.log(news)]).clip(-20)
            weights = [rows[j].setdefault(k, np.full(parts, 1 / parts)) for j, k in enumerate((0, known, fresh))]
            p = np.exp(np.mean(weights, axis=0) @ logs)
            p /= p.sum()
            losses.append(-np.log(p[text[i]]))
            for w in weights:
                w += mixture.RATE * (logs[:, text[i]] - logs @ p)
        before += text[:-1]
    return losses


def test_losses_are_those_by_definition_over_several_calls(model):
    mixed = Mixture([load_model(model, "cpu")], counts_of(TEXT))
    texts = [[256, *TEXT[100:300].tolist()], [256, *TEXT[:150].tolist()]]
    for _ in range(2):
        found = np.concatenate([mixed.losses(text).numpy() for text in texts])
        assert found == pytest.approx(slow_mixture(mixed, texts), rel=1e-6)
        mixed.begin()  # the second time is the first again


def test_a_mixture_is_written_read_and_sampled_and_predicts_as_it_scores(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    path, text = model.with_suffix(".mixture"), [256, TEXT[0]]
    trained = Mixture([load_model(model, "cpu")] * 2, counts_of(TEXT))
    trained.losses([256, *TEXT[:40].tolist()])
    write_mixture(path, [model.with_suffix(""), model], TEXT, trained.weights)
    mixed = load_mixture(path, "cpu")
    last = mixed.next_logits(text[:-1]).exp()
    assert last.sum().item() == pytest.approx(1, abs=1e-6)
    trained.begin()
    trained.weights[:] = mixed.weights
    assert -last[text[-1]].log() == pytest.approx(trained.losses(text)[-1].item(), rel=1e-5)
    for name in "once", "again":
        (model.parent.parent / name).write_text("some text of some words")
    assert evaluate.main(["--text=once", "--text=again"]) == 0
    once, again = json.loads(capsys.readouterr().out)["texts"].values()
    assert once == again, "each text is the first"
    assert sample.main(["--prompt", "ab", "--tokens", "5", "--seed", "1"]) == 0, "the newest file in logs/"
    assert capsys.readouterr().err.startswith(f"{path.relative_to(path.parent.parent)}, ")
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(models=["gone.pt"])))
    with pytest.raises(UserError, match=r"gone\.pt: there is no such file"):
        load_mixture(path, "cpu")


def test_a_text_is_scored_in_pieces_whose_tokens_are_read_once(model):
    """In pieces of 48 tokens, each after an end of text."""
    mixed, text = Mixture([load_model(model, "cpu")], counts_of(TEXT)), TEXT[:100].tolist()
    found = evaluate.losses(mixed, text, 48)
    mixed.begin()
    pieces = [[256, *text[i : i + 47]] for i in range(0, 100, 47)]
    assert found.tolist() == torch.cat([mixed.losses(piece) for piece in pieces]).tolist()
