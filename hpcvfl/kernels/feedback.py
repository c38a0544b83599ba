"""What error feedback and its metrics need of memory: gather, subtract, add, sums of squares.

All of it costs O(rows of the batch), whatever the number of rows of the memory.

Legend: S rows of the memory, N rows of the batch, P values a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import helper, kernel, prefetch_row, wide

LANES = 128
"""Partial sums of `squares`; their fixed number and order make the result the same everywhere."""

AHEAD = 4
"""Rows that are asked for before they are needed; they lie anywhere in a large memory."""


@helper
def _subtract_row(x_NP, state_SP, n, s, out_NP):  # type: ignore[no-untyped-def]
    wide()
    for p in range(np.uint64(x_NP.shape[1])):
        out_NP[n, p] = x_NP[n, p] - state_SP[s, p]


@helper
def _add_row(change_NP, state_SP, n, s, out_NP):  # type: ignore[no-untyped-def]
    wide()
    # Two loops, since `out` may be `change`: one that reads and writes it is not vectorised.
    for p in range(np.uint64(change_NP.shape[1])):
        state_SP[s, p] = np.float32(state_SP[s, p] + change_NP[n, p])
    for p in range(np.uint64(change_NP.shape[1])):
        out_NP[n, p] = state_SP[s, p]


@kernel
def subtract_rows(x_NP, state_SP, rows_N, out_NP):  # type: ignore[no-untyped-def]
    """out = x - state[rows].

    x_NP     : float32 or float64, shape (N, P)
    state_SP : float32, shape (S, P)
    rows_N   : int64, shape (N,)   each in [0, S); not checked here
    out_NP   : dtype of x, shape (N, P); overwritten; may be x itself
    """
    N = rows_N.shape[0]
    for n in range(N):
        if n + AHEAD < N:
            prefetch_row(state_SP, np.uint64(rows_N[n + AHEAD]))
        _subtract_row(x_NP, state_SP, np.uint64(n), np.uint64(rows_N[n]), out_NP)


@kernel
def add_rows(change_NP, state_SP, rows_N, out_NP):  # type: ignore[no-untyped-def]
    """state[rows] += change, in float32; out = state[rows].

    change_NP, out_NP : float32 or float64, shape (N, P); may be one array
    state_SP, rows_N  : as in `subtract_rows`; no row twice
    """
    N = rows_N.shape[0]
    for n in range(N):
        if n + AHEAD < N:
            prefetch_row(state_SP, np.uint64(rows_N[n + AHEAD]))
        _add_row(change_NP, state_SP, np.uint64(n), np.uint64(rows_N[n]), out_NP)


@helper
def _squares(x_N, y_N, at, n, sums_2L):  # type: ignore[no-untyped-def]
    wide()
    for j in range(np.uint64(n)):
        x = np.float64(x_N[at + j])
        d = x - np.float64(y_N[at + j])
        sums_2L[0, j] += d * d
        sums_2L[1, j] += x * x


@kernel
def _squares_of_all(x_N, y_N, sums_2L):  # type: ignore[no-untyped-def]
    N = x_N.shape[0]
    for at in range(0, N - N % LANES, LANES):
        _squares(x_N, y_N, np.uint64(at), LANES, sums_2L)
    _squares(x_N, y_N, np.uint64(N - N % LANES), N % LANES, sums_2L)


def squares(x_N: Any, y_N: Any) -> tuple[float, float]:
    """(sum of (x - y)**2, sum of x**2), added in float64 in a fixed order.

    x_N, y_N : float32 or float64, shape (N,)
    """
    sums_2L = np.zeros((2, LANES))
    _squares_of_all(x_N, y_N, sums_2L)
    error, energy = sums_2L.sum(axis=1).tolist()
    return error, energy
