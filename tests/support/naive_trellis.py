"""Slow twin of kernels/trellis.py, from the definition of the code; imports nothing of the package.

The code is all sequences of (quantiser q, parity p) with
    sum_i h0[i] q[n - i] + h1[i] p[n - i] = 0 (mod 2),   h0 = 13, h1 = 04 (octal, bit i is h[i]),
and q = p = 0 before the first value. A state is what is left of the sum: the parts that q[n],
q[n + 1] and q[n + 2] owe to what is past.
"""

from __future__ import annotations

import itertools

H0, H1, MEMORY = 0o13, 0o4, 3


def quantisers(parities) -> list[int]:
    """The quantiser of each value, by the parity check alone."""
    q: list[int] = []
    for n in range(len(parities) + 1):
        total = 0
        for i in range(1, MEMORY + 1):
            if n - i >= 0:
                total += (H0 >> i & 1) * q[n - i] + (H1 >> i & 1) * parities[n - i]
        q.append(total % 2)  # h0[0] = 1 and h1[0] = 0
    return q[:-1]


def level(k: int, q: int) -> int:
    """0, +-2, +-4, .. or 0, +-1, +-3, ..."""
    size = 0 if k == 0 else 2 * abs(k) - q
    return size if k > 0 else -size


def candidate(u: float, q: int, parity: int, shy: float = 0.04) -> int:
    """Index of that parity nearest to u; the larger one only if it is nearer by 8 * shy steps."""
    size = abs(u)
    best = parity
    for k in range(parity + 2, int(size) + 6, 2):
        if abs(size - level(best, q)) - abs(size - level(k, q)) >= 8 * shy:
            best = k
    return -best if u < 0 else best


def price(k: int, four) -> float:
    zero, a, b, c = (float(v) for v in four)
    return zero if k == 0 else a + b * abs(k) + c * k * k


def cost(values, indices, prices) -> float:
    """Squared error in steps, plus prices; prices[t] = (four of even, four of odd quantiser)."""
    qs = quantisers([k & 1 for k in indices])
    return sum(
        (float(u) - level(k, q)) ** 2 + price(k, eight[4 * q : 4 * q + 4])
        for u, k, q, eight in zip(values, indices, qs, prices, strict=True)
    )


def cheapest(values, prices) -> float:
    """Least cost of all paths, by trying every one."""
    best = float("inf")
    for parities in itertools.product((0, 1), repeat=len(values)):
        qs = quantisers(parities)
        ks = [candidate(float(u), q, p) for u, q, p in zip(values, qs, parities, strict=True)]
        best = min(best, cost(values, ks, prices))
    return best
