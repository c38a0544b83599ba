"""Slow twin of the coder of `best`: reads a payload as its documentation says it is laid out.

Nothing of the package is imported but the prior weights, which are data. Integers are Python's, of
any length; the few roundings of float32 are done by numpy, one at a time.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from support.naive_trellis import level, quantisers

LANES, TOTAL, PLOTS = 16, 1 << 14, 25


class Bits:
    """The bits in front of a payload, lowest first."""

    def __init__(self, payload: bytes) -> None:
        self.number, self.size, self.at = int.from_bytes(payload, "little"), 8 * len(payload), 0

    def take(self, n: int) -> int:
        value = self.number >> self.at & ((1 << n) - 1)
        self.at += n
        return value

    def golomb(self, order: int) -> int:
        zeros = 0
        while not self.take(1):
            zeros += 1
        n = zeros + order
        return (1 << n | self.take(n)) - (1 << order)

    def signed(self, order: int) -> int:
        v = self.golomb(order)
        return -(v + 1) // 2 if v % 2 else v // 2


class Words:
    """The words at the end of a payload, backwards."""

    def __init__(self, payload: bytes) -> None:
        self.payload, self.at = payload, len(payload)

    def take(self) -> int:
        self.at -= 2
        return int.from_bytes(self.payload[self.at : self.at + 2], "little")


def shares(weights) -> list[int]:
    """Frequencies of weights: what is below each, in proportion and rounded down, and one each."""
    factor = np.float32(TOTAL - 16) / np.float32(sum(weights))
    below = [int(np.float32(sum(weights[:i])) * factor) + i for i in range(16)] + [TOTAL]
    return [b - a for a, b in itertools.pairwise(below)]


class Tables:
    """Frequencies of all columns; `priors` as in counts.PRIORS, for each column's class."""

    def __init__(self, classes, priors, plots: bool) -> None:
        self.priors = [[[int(v) for v in priors[c][q]] for q in (0, 1)] for c in classes]
        self.counts = [[[0] * 16 for _ in (0, 1)] for _ in classes]
        self.low = [max(0, (c - 6) // 2) for c in classes]
        self.reach = [
            int(2**17 / 0.7 / (math.sqrt(2) if (c - 3) % 2 else 1.0) * 2.0 ** -((c - 3) // 2))
            for c in classes[:2]
        ]
        self.plots = plots and len(classes) > 1
        self.fine: dict[tuple[int, int, int], list] = {}  # counts, shares
        self.rows, self.due = 0, 1
        self.renew()

    def renew(self) -> None:
        self.coarse = [
            [shares([256 * n + p for n, p in zip(*pair, strict=True)]) for pair in pairs]
            for pairs in (
                list(zip(*both, strict=True)) for both in zip(self.counts, self.priors, strict=True)
            )
        ]

    def of(self, j: int, q: int, plot: int) -> list[int]:
        if self.plots and j and (j, q, plot) in self.fine:
            return self.fine[j, q, plot][1]
        return self.coarse[j][q]

    def count(self, j: int, q: int, plot: int, symbol: int) -> None:
        self.counts[j][q][symbol] += 1
        if self.plots and j:
            entry = self.fine.setdefault((j, q, plot), [[0] * 16, None])
            entry[0][symbol] += 1
            weights = zip(entry[0], self.coarse[j][q], strict=True)
            entry[1] = shares([2048 * n + p for n, p in weights])

    def row(self) -> None:
        self.rows += 1
        if self.rows == self.due:
            self.due = self.rows + 1 + self.rows // 8
            self.renew()

    def stretch(self, axis: int, k: int) -> int:
        far = min((abs(k) * self.reach[axis] + 32768) >> 16, 2)
        return 2 - far if k < 0 else 2 + far


def block(
    bits: Bits, words: Words, rows: int, tables: Tables, num_states: int, halves: bool = False
) -> list[list[int]]:
    """Levels of a block, one list a row."""
    K = len(tables.low)
    depth = -(-rows // LANES)
    states = []
    for _ in range(num_states):
        high = words.take()
        states.append(high << 16 | words.take())
    past = [[] for _ in range(LANES)]  # indices of each lane so far
    got = [[0] * K for _ in range(rows)]
    for r in range(depth):
        lanes = [i for i in range(LANES) if i * depth + r < rows]
        plots = [0] * LANES
        for j in range(K):
            for i in lanes:
                q = 0 if halves else quantisers([k & 1 for k in past[i]] + [0])[-1]
                table = tables.of(j, q, plots[i])
                slot = states[i % num_states] % TOTAL
                symbol, below = 0, 0
                while below + table[symbol] <= slot:
                    below += table[symbol]
                    symbol += 1
                tables.count(j, q, plots[i], symbol)
                state = table[symbol] * (states[i % num_states] // TOTAL) + slot - below
                if state < 1 << 16:
                    state = state << 16 | words.take()
                states[i % num_states] = state
                rest = bits.take(tables.low[j])
                e = symbol - 8
                if symbol == 0:
                    negative = bits.take(1)
                    e = bits.golomb(2) + 8
                    e = -e if negative else e
                k = e * 2 ** tables.low[j] + rest
                if j == 0:
                    plots[i] = 5 * tables.stretch(0, k) + 2
                elif j == 1:
                    plots[i] += tables.stretch(1, k) - 2
                past[i].append(k)
                got[i * depth + r][j] = 2 * k + 1 if halves else level(k, q)
        tables.row()
    return got
