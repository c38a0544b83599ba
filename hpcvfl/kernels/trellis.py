"""Trellis-coded quantisation: the cheapest path through eight states, sixteen paths at a time.

Two scalar quantisers share the step D: one has the levels 0, +-2, +-4, .. (times D), the other 0,
+-1, +-3, +-5, ... A state says which of the two the next value goes through, and the parity of the
index k found there says which state follows, so that a decoder needs nothing but the indices. The
trellis is Ungerboeck's with eight states (1982, IEEE T-IT 28(1), table I, h0 = 13, h1 = 04 octal);
indices instead of subsets, and 0 in both quantisers, as in JPEG 2000 part 2 and VVC, so that an
entropy coder gets its zeros. The gain over an ideal entropy-coded scalar quantiser is 0.8-0.9 dB of
the 1.53 dB that there are (bench/LOG.md).

The encoder minimises (error / D)**2 + rate, where rate is a price for the bits of an index: for
k = 0 a number, otherwise a parabola in |k|, each of the two quantisers of each column its own.

A block of values lies step by step: value t * LANES + l is step t of lane l, and a lane's path
starts in state 0. Everything a decoder computes from an index is integer.

Legend: N = T * LANES values of a block (T steps), K columns (step t is column t % K), S states.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import helper, kernel, wide

LANES = 16
"""Independent paths of a block; one 512-bit vector of float32."""

NUM_STATES = 8

PRICES = 8
"""Prices of a column: (at k = 0, then c0, c1, c2 of c0 + c1 |k| + c2 k**2), for each quantiser."""

_F, _I, _U = np.float32, np.int32, np.uint64
_ZERO, _ONE = _F(0), _F(1)
_QUARTER, _HALF, _MORE = _F(0.25), _F(0.5), _F(0.75)
_SHY = _F(0.04)
"""Part of four steps by which the larger of two indices of one parity must be nearer to be taken:
it costs about 5 bits more there. Any value from 0 to 0.08 does as well (bench/LOG.md)."""
_FIRST = _F(0.375 + 0.04)  # 0 or +-3 for k even in the odd quantiser: they meet at 1.5 steps


@helper
def _indices(a):  # type: ignore[no-untyped-def]
    """|k| for a = |value| / D: the best even and odd index of each quantiser, as float32."""
    b = _F(a * _QUARTER)
    even0 = _F(_I(_F(b + _HALF) - _SHY))
    odd0 = _F(_I(_F(b - _SHY)))
    even1 = _F(_I(_F(b + _MORE) - _SHY))
    odd1 = _F(_I(_F(b + _QUARTER) - _SHY))
    even1 = _ZERO if b < _FIRST else even1
    return (
        _F(even0 + even0),
        _F(_F(odd0 + odd0) + _ONE),
        _F(even1 + even1),
        _F(_F(odd1 + odd1) + _ONE),
    )


@helper
def _metrics(u_N, at, price_8K, j, cost_4L):  # type: ignore[no-untyped-def]
    """Error and price of the four candidates of a step: (quantiser, parity) = 00, 01, 10, 11."""
    wide()
    z0, a0, b0, c0 = price_8K[j], price_8K[j + _U(1)], price_8K[j + _U(2)], price_8K[j + _U(3)]
    j += _U(4)
    z1, a1, b1, c1 = price_8K[j], price_8K[j + _U(1)], price_8K[j + _U(2)], price_8K[j + _U(3)]
    for i in range(_U(LANES)):
        a = abs(u_N[at + i])
        e0, o0, e1, o1 = _indices(a)
        d = _F(a - _F(e0 + e0))
        r = _F(a0 + _F(e0 * _F(b0 + _F(e0 * c0))))
        r = r if e0 > _ZERO else z0
        cost_4L[i] = _F(_F(d * d) + r)
        d = _F(a - _F(o0 + o0))
        r = _F(a0 + _F(o0 * _F(b0 + _F(o0 * c0))))
        cost_4L[i + _U(LANES)] = _F(_F(d * d) + r)
        v = _F(_F(e1 + e1) - _ONE)
        v = v if e1 > _ZERO else _ZERO
        d = _F(a - v)
        r = _F(a1 + _F(e1 * _F(b1 + _F(e1 * c1))))
        r = r if e1 > _ZERO else z1
        cost_4L[i + _U(2 * LANES)] = _F(_F(d * d) + r)
        d = _F(a - _F(_F(o1 + o1) - _ONE))
        r = _F(a1 + _F(o1 * _F(b1 + _F(o1 * c1))))
        cost_4L[i + _U(3 * LANES)] = _F(_F(d * d) + r)


@helper
def _less(a, b):  # type: ignore[no-untyped-def]
    return b if b < a else a


@helper
def _select(cost_4L, at, from_8L, to_8L, choice_N):  # type: ignore[no-untyped-def]
    """Add, compare, select: state v is reached from states s and s + 4, s = v2 | (v0 ^ v2) << 1,
    with the parities v1 and 1 - v1; bit v of the choice says that the second was cheaper.
    """
    wide()
    for i in range(_U(LANES)):
        e0, o0 = cost_4L[i], cost_4L[i + _U(LANES)]
        e1, o1 = cost_4L[i + _U(2 * LANES)], cost_4L[i + _U(3 * LANES)]
        s0, s1 = from_8L[i], from_8L[i + _U(LANES)]
        s2, s3 = from_8L[i + _U(2 * LANES)], from_8L[i + _U(3 * LANES)]
        s4, s5 = from_8L[i + _U(4 * LANES)], from_8L[i + _U(5 * LANES)]
        s6, s7 = from_8L[i + _U(6 * LANES)], from_8L[i + _U(7 * LANES)]
        a0, b0 = _F(s0 + e0), _F(s4 + o0)
        a1, b1 = _F(s2 + e0), _F(s6 + o0)
        a2, b2 = _F(s0 + o0), _F(s4 + e0)
        a3, b3 = _F(s2 + o0), _F(s6 + e0)
        a4, b4 = _F(s3 + e1), _F(s7 + o1)
        a5, b5 = _F(s1 + e1), _F(s5 + o1)
        a6, b6 = _F(s3 + o1), _F(s7 + e1)
        a7, b7 = _F(s1 + o1), _F(s5 + e1)
        low = _I(
            _I(_I(_I(b0 < a0) * _I(1)) | _I(_I(b1 < a1) * _I(2)))
            | _I(_I(_I(b2 < a2) * _I(4)) | _I(_I(b3 < a3) * _I(8)))
        )
        high = _I(
            _I(_I(_I(b4 < a4) * _I(16)) | _I(_I(b5 < a5) * _I(32)))
            | _I(_I(_I(b6 < a6) * _I(64)) | _I(_I(b7 < a7) * _I(128)))
        )
        choice_N[at + i] = np.uint8(_I(low | high))
        to_8L[i], to_8L[i + _U(LANES)] = _less(a0, b0), _less(a1, b1)
        to_8L[i + _U(2 * LANES)], to_8L[i + _U(3 * LANES)] = _less(a2, b2), _less(a3, b3)
        to_8L[i + _U(4 * LANES)], to_8L[i + _U(5 * LANES)] = _less(a4, b4), _less(a5, b5)
        to_8L[i + _U(6 * LANES)], to_8L[i + _U(7 * LANES)] = _less(a6, b6), _less(a7, b7)


@helper
def _back(state_L, at, choice_N):  # type: ignore[no-untyped-def]
    """One step back on every lane; the choices become quantiser | parity << 1 of the step."""
    wide()
    for i in range(_U(LANES)):
        v = state_L[i]
        b = _I(_I(_I(choice_N[at + i]) >> v) & _I(1))
        q = _I(v >> _I(2))
        parity = _I(_I(_I(v >> _I(1)) & _I(1)) ^ b)
        choice_N[at + i] = np.uint8(_I(q | _I(parity << _I(1))))
        state_L[i] = _I(_I(q | _I(_I(_I(v ^ q) & _I(1)) << _I(1))) | _I(b << _I(2)))


@helper
def _take(u_N, at, path_N, k_N):  # type: ignore[no-untyped-def]
    """Index of each lane's value in the quantiser and of the parity that its path has."""
    wide()
    for i in range(_U(LANES)):
        x, way = u_N[at + i], path_N[at + i]
        e0, o0, e1, o1 = _indices(abs(x))
        even = e1 if way & np.uint8(1) else e0
        odd = o1 if way & np.uint8(1) else o0
        k = _I(odd if way & np.uint8(2) else even)
        k_N[at + i] = _I(-k) if x < _ZERO else k


@kernel
def find_path(u_N, num_steps, price_8K, path_N, k_N, cost_4L, even_8L, odd_8L, state_L):  # type: ignore[no-untyped-def]
    """Write the cheapest indices of a block, and what a coder of them must know.

    u_N      : float32, shape (N,)     values / D, |u| < 2**21; N = num_steps * LANES
    price_8K : float32, shape (8 * K,) prices in squared steps, PRICES a column
    path_N   : uint8, shape (N,)       overwritten: quantiser | parity << 1
    k_N      : int32, shape (N,)       overwritten: the indices
    cost_4L, even_8L, odd_8L : float32, shapes (4 L,), (8 L,), (8 L,)   scratch
    state_L  : int32, shape (L,)       scratch
    """
    even_8L[:] = _F(1e30)
    even_8L[:LANES] = _ZERO
    j, size = _U(0), _U(price_8K.shape[0])
    for t in range(num_steps):
        at = _U(t * LANES)
        _metrics(u_N, at, price_8K, j, cost_4L)
        if t & 1:
            _select(cost_4L, at, odd_8L, even_8L, path_N)
        else:
            _select(cost_4L, at, even_8L, odd_8L, path_N)
        j += _U(PRICES)
        if j == size:
            j = _U(0)
    last_8L = odd_8L if num_steps & 1 else even_8L
    for i in range(LANES):
        best = 0
        for s in range(1, NUM_STATES):
            if last_8L[s * LANES + i] < last_8L[best * LANES + i]:
                best = s
        state_L[i] = best
    for t in range(num_steps - 1, -1, -1):
        _back(state_L, _U(t * LANES), path_N)
    for t in range(num_steps):
        _take(u_N, _U(t * LANES), path_N, k_N)


@helper
def next_state(state, k):  # type: ignore[no-untyped-def]
    """State after index k (int32) in `state` (int32); state & 1 is the quantiser."""
    s0 = _I(state & _I(1))
    b0 = _I(s0 ^ _I(_I(state >> _I(1)) & _I(1)))
    b1 = _I(_I(state >> _I(2)) ^ _I(k & _I(1)))
    return _I(_I(b0 | _I(b1 << _I(1))) | _I(s0 << _I(2)))


@helper
def level(k, quantiser):  # type: ignore[no-untyped-def]
    """Value of index k (int32) in steps D, int32; without a branch, which would often be missed."""
    return _I(_I(k + k) - _I(quantiser * _I(_I(k > _I(0)) - _I(k < _I(0)))))


@kernel
def find_halves(u_N, two, shift, path_N, k_N):  # type: ignore[no-untyped-def]
    """Without a trellis: levels 2 k + 1.

    two   : bool, only k = -1 and k = 0 are used
    shift : float32, 0..1, added to u / 2: the larger, the more of k = 0 there are
    Otherwise as find_path.
    """
    wide()
    most = _I(0) if two else _I(1 << 21)
    least = _I(-1 - most)
    for i in range(_U(u_N.shape[0])):
        k = _I(np.floor(_F(_F(u_N[i] * _HALF) + shift)))
        k_N[i] = min(max(k, least), most)
        path_N[i] = np.uint8(0)
