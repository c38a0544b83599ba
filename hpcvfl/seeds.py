"""Every random choice, keyed by what it is for, never by when it is drawn.

The same key gives the same numbers on every rank, on every transport and after a resume, without a
message.
"""

from __future__ import annotations

import hashlib

import numpy as np


def key64(seed: int, *parts: int | str) -> int:
    """A 64-bit key from the seed and the purpose, e.g. key64(seed, "dither", round, block, tensor).

    BLAKE2b over the parts, each spelled with its type, so that ("a", 1) and ("a1",) differ.
    """
    if any("," in part for part in parts if isinstance(part, str)):
        raise ValueError(f"seeds: a comma in {parts} would make two keys the same")
    spelled = ",".join(f"{type(p).__name__[0]}{p}" for p in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(spelled.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *parts: int | str) -> np.random.Generator:
    """numpy generator (Philox, counter-based) for one purpose."""
    return np.random.Generator(np.random.Philox(key=key64(seed, *parts)))


def subkey(key: int, index: int) -> int:
    """Key number `index` derived from `key`: one step of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_MASK = (1 << 64) - 1
