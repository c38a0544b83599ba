"""Decodes a payload of `best` from what its documentation says; slow, for short messages."""

from __future__ import annotations

import math

import numpy as np
from support.naive_rans import Bits, Tables, Words, block

STEPS = 4096
"""Steps of a lane in a block."""


def step_of(code: int) -> np.float32:
    """A float32 without sign whose low 15 bits are 0."""
    return np.frombuffer((code << 15).to_bytes(4, "little"), "<f4")[0]


def decode(payload: bytes, shape: tuple[int, ...], priors, half_priors) -> np.ndarray:
    n = math.prod(shape)
    R, C = (n, 1) if len(shape) < 2 or n // shape[-1] < 48 else (n // shape[-1], shape[-1])
    bits, words = Bits(payload), Words(payload)
    code = bits.take(16)
    if not code:
        return np.zeros(shape, np.float32)
    fine = min(8, R.bit_length() // 2)
    form = bits.golomb(0)
    rotated, halves = form == 1, form == 2
    order = bits.golomb(2)
    unit = step_of(code) * np.float32(2.0**-fine)
    mean = [np.float32(bits.signed(order)) * unit for _ in range(C)]
    K = bits.golomb(3) if rotated else C
    classes = [5]
    for _ in range(K):
        classes.append(classes[-1] + bits.signed(0))
    classes = classes[1:]
    axes = []
    if rotated:
        for c in classes:
            places = min(max(fine + (c - 3) // 2, 2), 14)
            order = max(0, places - C.bit_length() // 2)
            axes.append([np.float32(bits.signed(order) * 2.0**-places) for _ in range(C)])
    columns = [j for j, c in enumerate(classes) if c >= 0]
    coded = [classes[j] for j in columns]
    out = np.tile(np.array(mean, np.float32), (R, 1))
    if not coded:
        return out.reshape(shape)
    most = 16 * max(1, STEPS // len(coded))
    size = -(-R // -(-R // most))
    each = len(payload) // -(-R // size)
    num_states = 1 if each < 2048 else 2 if each < 8192 else 4
    tables = Tables(coded, half_priors if halves else priors, rotated)
    for first in range(0, R, size):
        rows = min(size, R - first)
        away = bits.golomb(3)
        if not away:
            continue
        code += away // 2 if away % 2 else -(away // 2)
        step = step_of(code)
        for r, levels in enumerate(block(bits, words, rows, tables, num_states, halves), first):
            for j, value in enumerate(levels):
                y = np.float32(value) * step
                if rotated:
                    for c in range(C):
                        out[r, c] = out[r, c] + y * axes[j][c]
                else:
                    out[r, columns[j]] = mean[columns[j]] + y
    return out.reshape(shape)
