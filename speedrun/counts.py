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


def powers(base: int, n: int) -> np.ndarray:
    """Return base**0 ... base**(n - 1) modulo 2**64."""
    return np.multiply.accumulate(np.r_[np.uint64(1), np.full(n - 1, base, np.uint64)])


class Hashes:
    """Hash what stands before any position of a text: the sum of (token + 1) BASE**k, the nearest token with k = 0."""

    def __init__(self, tokens: np.ndarray):
        n = len(tokens) + 1
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers(pow(BASE, -1, 2**64), n)[1:]
        self.scale = powers(BASE, n)
        self.sums = np.r_[np.uint64(0), np.cumsum(terms, dtype=np.uint64)]

    def before(self, ends: np.ndarray, n: int) -> np.ndarray:
        """Return the hash (m,) of the n tokens, or fewer at the beginning, before each of `ends` (m,)."""
        return (self.sums[ends] - self.sums[np.maximum(ends - n, 0)]) * self.scale[ends]


class Table(NamedTuple):
    """Hold hashes of n-grams, ascending, and their (count - D) / count(c); hashes of contexts, and left(c)."""

    ngrams: np.ndarray
    shares: np.ndarray
    contexts: np.ndarray
    left: np.ndarray


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of `wanted`, and which of them are there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return values[at], keys[at] == wanted


class Counts:
    """Count the n-grams of a text of tokens below SYMBOLS."""

    def __init__(self, tokens: np.ndarray):
        hashes, at = Hashes(tokens), np.arange(len(tokens))
        self.tables: list[Table] = []
        for n in reversed(ORDERS):
            context = hashes.before(at, n - 1)
            ngrams, first, counts = np.unique(self.key(context, tokens[at]), return_index=True, return_counts=True)
            at, context = at[first], context[first]  # an order below counts each of these once
            of = [max(1, int((counts == i).sum())) for i in (1, 2, 3, 4)]
            y = of[0] / (of[0] + 2 * of[1])
            discounts = np.array([i - (i + 1) * y * of[i] / of[i - 1] for i in (1, 2, 3)]).clip(0.1, [0.95, 1.9, 2.9])
            cut = discounts[np.minimum(counts, 3) - 1]
            contexts, inverse = np.unique(context, return_inverse=True)
            total = np.bincount(inverse, counts)
            left = np.bincount(inverse, cut) / total
            shares = (counts - cut) / total[inverse]
            self.tables.insert(0, Table(ngrams, shares.astype(np.float32), contexts, left.astype(np.float32)))

    @staticmethod
    def key(context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return context * np.uint64(BASE) + tokens.astype(np.uint64) + np.uint64(1)

    def probabilities(self, tokens: np.ndarray, at: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Return the probability (m,) of each of `following` (m,) at the positions `at` (m,) of a text."""
        hashes, p = Hashes(tokens), np.full(len(at), 1 / SYMBOLS)
        for n, table in zip(ORDERS, self.tables, strict=True):
            context = hashes.before(at, n - 1)
            share, is_known = look_up(table.ngrams, table.shares, self.key(context, following))
            left, was_seen = look_up(table.contexts, table.left, context)
            p = np.where(was_seen, share * is_known + left * p, p)
        return p
