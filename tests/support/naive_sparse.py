"""Slow twins of the sparse codecs: subsets as Python integers, sorts as Python sorts."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np


def largest(magnitudes, count):
    """Ascending places of the `count` largest, of equal ones the first."""
    order = sorted(range(len(magnitudes)), key=lambda i: (-float(magnitudes[i]), i))
    return sorted(order[:count])


def columns_by_sum(x, count):
    """Columns with the largest sums of |x|, in exact order of addition."""
    sums = [math.fsum(abs(float(v)) for v in x[:, c]) for c in range(x.shape[1])]
    return largest(sums, count)


def share(amount, n, up):
    """How many of n an Amount keeps: its k, or its share in exact decimals."""
    if amount.k is not None:
        return min(n, amount.k)
    numerator, denominator = decimal_ratio(repr(amount.ratio))
    whole = -(-numerator * n // denominator) if up else numerator * n // denominator
    return min(n, max(1, whole))


def decimal_ratio(text):
    """ "0.25" -> (25, 100), also "1e-05"."""
    digits, _, power = text.partition("e")
    before, _, after = digits.partition(".")
    shift = int(power or 0) - len(after)
    number = int(before + after)
    return (number * 10**shift, 1) if shift >= 0 else (number, 10**-shift)


def rank(subset):
    """Place of an ascending subset among those of its size, by comparing from the last index."""
    places = itertools.combinations(range(subset[-1] + 1), len(subset))
    return sorted(places, key=lambda s: s[::-1]).index(tuple(subset))


def mark_bits(subset, places):
    """One bit a place, as a string, place 0 first."""
    return "".join("1" if c in subset else "0" for c in range(places))


def gap_bits(subset, places, low):
    """Low bits of each index (lowest first), then high parts in unary: zeros up to it, a one."""
    text = "".join(format(c % 2**low, f"0{low}b")[::-1] for c in subset) if low else ""
    at = 0
    for c in subset:
        text += "0" * ((c >> low) - at) + "1"
        at = c >> low
    return text + "0" * (((places - 1) >> low) - at)


def as_bytes(text):
    """A string of bits as bytes, first bit lowest."""
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


def split_key(key):
    """The two 32-bit halves of a key after splitmix64's finaliser."""
    low64 = (1 << 64) - 1
    z = (key + 0x9E3779B97F4A7C15) & low64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def hashes(key, count):
    """One 32-bit hash a place, in Python integers."""
    k0, k1 = split_key(key)
    values = []
    for n in range(count):
        h = (k0 + n * (k1 | 1)) & 0xFFFFFFFF
        h ^= h >> 16
        h = (h * 0x7FEB352D) & 0xFFFFFFFF
        h ^= h >> 15
        h = (h * 0x846CA68B) & 0xFFFFFFFF
        values.append(h ^ (h >> 16))
    return values


def qsgd_codes(x, scales, bits, key):
    """Codes of a line, a scale a value: 24 binary places of x * scale, plus 24 random ones."""
    levels = 2 ** (bits - 1) - 1
    codes = []
    for value, scale, h in zip(x, scales, hashes(key, len(x)), strict=True):
        product = np.float32(np.float32(value) * np.float32(scale))  # one rounding
        t = round(Fraction(float(product)) * 2**24)  # exact but for that; ties to even
        t = min(max(t, -(levels << 24)), levels << 24)
        codes.append(((t + (h >> 8)) >> 24) + levels)
    return np.array(codes, np.uint16)
