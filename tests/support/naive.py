"""Slow twins of the kernels: what the formulas say, one value at a time, with exact numbers.

Nothing here imports the package. `plain` turns a numba kernel into the Python it was written in,
including everything it calls, so that a test can run both.
"""

from __future__ import annotations

import math
import types
from fractions import Fraction

import numpy as np

BLOCK = 2048
"""Elements i and i + BLOCK / 2 of a block share a hash."""


def plain(kernel):
    """The pure Python function behind a numba kernel, with those it calls replaced likewise."""
    if not hasattr(kernel, "py_func"):
        return kernel
    function = kernel.py_func
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    seen = {name: plain(value) for name, value in used.items() if hasattr(value, "py_func")}
    cells = tuple(types.CellType(plain(cell.cell_contents)) for cell in function.__closure__ or ())
    return types.FunctionType(
        function.__code__, {**function.__globals__, **seen}, function.__name__, None, cells
    )


def pack(codes, bits: int) -> np.ndarray:
    """Code n occupies bits n * bits .. n * bits + bits - 1 of the payload, lowest first."""
    number = sum(int(code) << (n * bits) for n, code in enumerate(codes))
    length = math.ceil(len(codes) * bits / 8)
    return np.frombuffer(number.to_bytes(length, "little"), np.uint8)


def unpack(payload, bits: int, n: int) -> np.ndarray:
    number = int.from_bytes(bytes(payload), "little")
    mask = (1 << bits) - 1
    return np.array([(number >> (i * bits)) & mask for i in range(n)], np.uint16)


def dither_integers(key: int, start: int, n: int) -> list[int]:
    """k of elements start .. start + n - 1, in [-2**13, 2**13), in Python integers."""
    low32, low64 = (1 << 32) - 1, (1 << 64) - 1
    z = (key + 0x9E3779B97F4A7C15) & low64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low64
    z ^= z >> 31
    k0, k1 = z & low32, z >> 32
    values = []
    for i in range(start, start + n):
        block, place = divmod(i, BLOCK)
        half, word = divmod(place, BLOCK // 2)
        h = (k0 + (block * (BLOCK // 2) + word) * (k1 | 1)) & low32
        h ^= h >> 16
        h = (h * 0x7FEB352D) & low32
        h ^= h >> 15
        h = (h * 0x846CA68B) & low32
        h ^= h >> 16
        k = h >> 18 if half else h & 0x3FFF
        values.append(k - (1 << 14) if k >= 1 << 13 else k)
    return values


def dither(key: int, start: int, n: int) -> np.ndarray:
    """u = k / 2**14 as float32."""
    return np.array(dither_integers(key, start, n), np.float32) / np.float32(2**14)


def places(bits: int) -> int:
    return min(14, 22 - bits)


def codes_of(x, lo, inv_step, bits: int, dithered: bool, key: int = 0) -> np.ndarray:
    """Codes of a line of finite values; lo and inv_step are numbers or one value per element."""
    x = np.asarray(x, np.float32)
    lo, inv_step = (np.broadcast_to(np.float32(v), x.shape) for v in (lo, inv_step))
    k = dither_integers(key, 0, len(x)) if dithered else [0] * len(x)
    F, top = places(bits), 2**bits - 1
    codes = []
    for i in range(len(x)):
        with np.errstate(over="ignore"):
            q = (x[i] - lo[i]) * inv_step[i]  # two float32 roundings
        q = min(max(float(q), -1.0), top + 1.0)  # further out changes nothing
        if dithered:
            grid = round((Fraction(q) + Fraction(1, 2)) * 2**F)  # ties to even, as the hardware
            code = (grid + (k[i] >> (14 - F))) >> F
        else:
            code = round(Fraction(q))
        codes.append(min(max(code, 0), top))
    return np.array(codes, np.uint16)


def values_of(codes, lo, step, bits: int, dithered: bool, key: int = 0) -> np.ndarray:
    """lo + (code - u) * step in float32: one product, one sum."""
    F = places(bits)
    u = np.array([k >> (14 - F) for k in dither_integers(key, 0, len(codes))], np.float64) / 2**F
    exact = np.asarray(codes, np.float64) - (u if dithered else 0)
    return np.float32(lo) + exact.astype(np.float32) * np.float32(step)


def status(x) -> int:
    """0 all finite, 1 a NaN, 2 an infinity and no NaN."""
    values = [float(v) for v in np.asarray(x).ravel()]
    if any(math.isnan(v) for v in values):
        return 1
    return 2 if any(math.isinf(v) for v in values) else 0


def minmax(x) -> tuple[float, float]:
    values = [float(v) for v in x]
    return (min(values), max(values)) if values else (0.0, 0.0)


def moments(x) -> tuple[float, float]:
    """Mean and population standard deviation, in exact fractions until the root."""
    values = [Fraction(float(v)) for v in x]
    if not values:
        return 0.0, 0.0
    mean = sum(values) / len(values)
    return float(mean), math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
