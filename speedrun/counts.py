"""Predict bytes by counts of a text: interpolated Kneser-Ney with three discounts, in NumPy.

The probability of token w behind a context c of n - 1 tokens:

    P_n(w | c) = (count(c w) - D) / count(c) + left(c) P_{n-1}(w | c'),  c' without its oldest token

D is D_1, D_2 or D_3 by the count (1, 2, more), and left(c) what the discounts of c add up to. Where c never stood, P_n
is P_{n-1}; P_0 is the same for all tokens. The highest order counts occurrences, lower ones the different continuations
of the order above (Kneser and Ney 1995; the discounts are Chen and Goodman's, 1998). Orders need not be consecutive.
Counts of what is read can be added to those of a text, as if both were one, but with the text's discounts.
"""

import numpy as np

SYMBOLS = 257
ORDERS = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 40
BASE = 0x9E3779B97F4A7C15  # of the hashes: odd, so it has an inverse modulo 2**64
TOKEN_BITS = 9  # of an n-gram's key; the others are the upper bits of its context's hash, which depend on all tokens


def powers(base: int, n: int) -> np.ndarray:
    """Return base**0 ... base**(n - 1) modulo 2**64."""
    return np.multiply.accumulate(np.r_[np.uint64(1), np.full(n - 1, base, np.uint64)])


class Hashes:
    """Hash what stands before any position of a text: the sum of (token + 1) BASE**k, k = 1 for the nearest token."""

    def __init__(self, tokens: np.ndarray):
        self.tokens, n = tokens.astype(np.uint64), len(tokens) + 1
        self.scale = powers(BASE, n + 1)[1:]
        terms = (self.tokens + np.uint64(1)) * powers(pow(BASE, -1, 2**64), n)[1:]
        self.sums = np.r_[np.uint64(0), np.cumsum(terms, dtype=np.uint64)]

    def before(self, ends: np.ndarray, n: int) -> np.ndarray:
        """Return the upper bits of the hash (m,) of the n tokens, or fewer at the start, before each of `ends` (m,)."""
        return (self.sums[ends] - self.sums[np.maximum(ends - n, 0)]) * self.scale[ends] >> TOKEN_BITS


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """Return what is taken off a count of 0, 1, 2, and more, by how many n-grams occur once to four times."""
    of = [max(1, int((counts == k).sum())) for k in (1, 2, 3, 4)]
    y = of[0] / (of[0] + 2 * of[1])
    cuts = np.array([k - (k + 1) * y * of[k] / of[k - 1] for k in (1, 2, 3)]).clip(0.1, [0.95, 1.9, 2.9])
    return np.append(0, cuts)


class Counts:
    """Count the n-grams that end at the positions `at` (n,) of a text, n > 0, on top of what was counted `before`.

    tables: for each order its n-grams, context and token in one number, ascending, and their counts.
    """

    def __init__(self, text: Hashes, at: np.ndarray, before: "Counts | None" = None):
        self.before, self.tables = before, list[tuple[np.ndarray, np.ndarray]]()
        for i, n in reversed([*enumerate(ORDERS)]):
            ngrams = text.before(at, n - 1) << TOKEN_BITS | text.tokens[at]
            ngrams, first, counts = np.unique(ngrams, return_index=True, return_counts=True)
            at = at[first]  # an order below counts each n-gram once, wherever it was first
            if before:
                at = at[~before.has(i, ngrams)]
            self.tables.insert(0, (ngrams, counts))
        self.discounts: list[np.ndarray] = (
            before.discounts if before else [discounts_of(counts) for _, counts in self.tables]
        )

    def has(self, order: int, ngrams: np.ndarray) -> np.ndarray:
        """Return which n-grams (m,) were counted."""
        own, _ = self.tables[order]
        found = self.before.has(order, ngrams) if self.before else np.zeros(len(ngrams), bool)
        return found | (own[np.minimum(np.searchsorted(own, ngrams), len(own) - 1)] == ngrams if len(own) else False)

    def count(self, order: int, contexts: np.ndarray) -> np.ndarray:
        """Return how often each token (m, SYMBOLS) followed the contexts (m,)."""
        found = self.before.count(order, contexts) if self.before else np.zeros((len(contexts), SYMBOLS), np.int32)
        ngrams, counts = self.tables[order]
        begin = np.searchsorted(ngrams, contexts << TOKEN_BITS)
        end = np.searchsorted(ngrams, contexts << TOKEN_BITS | SYMBOLS, "right")
        sizes = end - begin
        entries = np.repeat(end - sizes.cumsum(), sizes) + np.arange(sizes.sum())
        tokens = ngrams[entries] & (2**TOKEN_BITS - 1)
        found[np.repeat(np.arange(len(contexts)), sizes), tokens.astype(np.int64)] += counts[entries]
        return found

    def predict(self, text: Hashes, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities (m, SYMBOLS) of what stands at the positions `at` (m,) of a text.

        Return, too, how many orders (m,) know what stands before.
        """
        p, known = np.full((len(at), SYMBOLS), 1 / SYMBOLS), np.zeros(len(at), np.int64)
        for order, n in enumerate(ORDERS):
            counts = self.count(order, text.before(at, n - 1))
            rows, tokens = counts.nonzero()
            counts = counts[rows, tokens]
            cut, total = self.discounts[order][np.minimum(counts, 3)], np.bincount(rows, counts, len(at))
            known[total > 0] = order + 1
            p *= np.divide(np.bincount(rows, cut, len(at)), total, out=np.ones(len(at)), where=total > 0)[:, None]
            p[rows, tokens] += (counts - cut) / total[rows]
        return p, known


def counts_of(tokens: np.ndarray) -> Counts:
    """Count the n-grams of a text of tokens (n,) below SYMBOLS, n > 0."""
    return Counts(Hashes(tokens), np.arange(len(tokens)))
