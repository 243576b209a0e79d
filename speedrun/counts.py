"""Predict bytes by counts of a text: interpolated Kneser-Ney with three discounts, in NumPy.

The probability of token w behind a context c of n - 1 tokens:

    P_n(w | c) = (count(c w) - D) / count(c) + left(c) P_{n-1}(w | c'),  c' without its oldest token

D is D_1, D_2 or D_3 by the count (1, 2, more), and left(c) what the discounts of c add up to. Where c never stood, P_n
is P_{n-1}; P_0 is the same for all tokens. The highest order counts occurrences, lower ones the different continuations
of the order above (Kneser and Ney 1995; the discounts are Chen and Goodman's, 1998). Orders need not be consecutive.
"""

from typing import NamedTuple

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
        n = len(tokens) + 1
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers(pow(BASE, -1, 2**64), n)[1:]
        self.scale = powers(BASE, n + 1)[1:]
        self.sums = np.r_[np.uint64(0), np.cumsum(terms, dtype=np.uint64)]

    def before(self, ends: np.ndarray, n: int) -> np.ndarray:
        """Return the upper bits of the hash (m,) of the n tokens, or fewer at the start, before each of `ends` (m,)."""
        return (self.sums[ends] - self.sums[np.maximum(ends - n, 0)]) * self.scale[ends] >> TOKEN_BITS


class Table(NamedTuple):
    """Hold the contexts of an order: their hashes, ascending, and left(c); and what followed each.

    What followed contexts[i] is tokens[begins[i] : begins[i + 1]], with (count - D) / count(c) as shares.
    """

    contexts: np.ndarray
    left: np.ndarray
    begins: np.ndarray
    tokens: np.ndarray
    shares: np.ndarray


class Counts:
    """Count the n-grams of a text of tokens (n,) below SYMBOLS, n > 0."""

    def __init__(self, tokens: np.ndarray):
        hashes, at = Hashes(tokens), np.arange(len(tokens))
        self.tables: list[Table] = []
        for n in reversed(ORDERS):
            ngrams = hashes.before(at, n - 1) << TOKEN_BITS | tokens[at].astype(np.uint64)
            ngrams, first, counts = np.unique(ngrams, return_index=True, return_counts=True)
            at = at[first]  # an order below counts each of these once
            of = [max(1, int((counts == i).sum())) for i in (1, 2, 3, 4)]
            y = of[0] / (of[0] + 2 * of[1])
            discounts = np.array([i - (i + 1) * y * of[i] / of[i - 1] for i in (1, 2, 3)]).clip(0.1, [0.95, 1.9, 2.9])
            cut = discounts[np.minimum(counts, 3) - 1]
            contexts, begins, sizes = np.unique(ngrams >> TOKEN_BITS, return_index=True, return_counts=True)
            total = np.add.reduceat(counts, begins)
            left, shares = np.add.reduceat(cut, begins) / total, (counts - cut) / np.repeat(total, sizes)
            followed = (ngrams & (2**TOKEN_BITS - 1)).astype(np.uint16)
            table = Table(contexts, left, np.append(begins, len(ngrams)), followed, shares.astype(np.float32))
            self.tables.insert(0, table)

    def predict(self, tokens: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities (m, SYMBOLS) of what stands at the positions `at` (m,) of a text.

        Return, too, how many orders (m,) know what stands before.
        """
        hashes, known = Hashes(tokens), np.zeros(len(at), np.int64)
        p = np.full((len(at), SYMBOLS), 1 / SYMBOLS)
        for order, (n, table) in enumerate(zip(ORDERS, self.tables, strict=True), start=1):
            wanted = hashes.before(at, n - 1)
            place = np.minimum(np.searchsorted(table.contexts, wanted), len(table.contexts) - 1)
            rows = np.flatnonzero(table.contexts[place] == wanted)
            begin, end, known[rows] = table.begins[place[rows]], table.begins[place[rows] + 1], order
            sizes = end - begin
            entries = np.repeat(end - sizes.cumsum(), sizes) + np.arange(sizes.sum())
            p[rows] *= table.left[place[rows], None]
            p[np.repeat(rows, sizes), table.tokens[entries]] += table.shares[entries]
        return p, known
