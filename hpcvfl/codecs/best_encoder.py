"""The search of `best`: the finest step with which a message fits into its payload.

Side information is written once; then block by block a step is looked for. Bits used fall as the
step grows, nearly along a line in its logarithm, whose slope is known beforehand. For a message of
many blocks a step is looked for on a sample of its rows; each block takes the step at which it and
what follows should use what is left, and the last one is fitted.

Legend: R rows, C columns, K coded columns, B bytes, N values of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcvfl.codecs import best_side
from hpcvfl.codecs.base import Bytes
from hpcvfl.codecs.best_side import HALVES, LARGEST_CODE, ROTATED, TRELLIS, Stats, step_of
from hpcvfl.kernels import golomb, lanes, rans, trellis
from hpcvfl.kernels.counts import HALF_PRIORS, PRIORS, Model
from hpcvfl.kernels.prices import prices_of
from hpcvfl.kernels.trellis import LANES

BLOCK_STEPS = 4096
"""Steps of a lane in a block: its scratch stays in the second-level cache."""

STEP_ORDER = 3
"""Order of the Golomb code in which the step of a block is written: 0: all of the block is 0;
otherwise 1 + the distance to the step before it, folded as in golomb.put_numbers.
"""

_PRICE = 0.22
"""Squared steps that a bit is worth; 0.2 to 0.3 is best at all rates from 1 to 3 bits on a normal
and a Laplace density (bench/LOG.md)."""

FLAT = 2.4
"""Flatness below which a message may be better off without a level at the centre of its columns,
between 0.5 and 2.5 bits a value; a uniform density has 1.8, tanh of a normal 1.6."""

_SAMPLE = 8192
"""Values of which the step of a long message is guessed."""

_TRIES = 9
_ROOM_SIDE = 40  # bits that a block has at least, beside the side information
_FAR = 64  # codes, a quarter of an octave: farther away, side information is made anew


def blocks_of(rows: int, K: int) -> list[tuple[int, int]]:
    """(first row, rows) of each block; all have as many rows, but the last one."""
    most = LANES * max(1, BLOCK_STEPS // max(K, 1))
    size = -(-rows // -(-rows // most))
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def rows_of_sample(C: int) -> int:
    """Rows of a long message that its first step is tried on."""
    return max(LANES, _SAMPLE // C)


def states_of(nbytes: int, num_blocks: int) -> int:
    """States of the coder: each costs about two bytes a block, and more of them are faster."""
    each = nbytes // num_blocks
    return 1 if each < 2048 else 2 if each < 8192 else 4


def encode_matrix(x_RC: np.ndarray, peak: float, out_B: Bytes) -> None:
    """Write the payload of a float32 matrix whose largest magnitude is `peak`."""
    stats = Stats.of(x_RC, peak)
    budget = 8.0 * out_B.size - _ROOM_SIDE
    form = TRELLIS
    step, error = stats.guess(TRELLIS, budget)
    if stats.axes_CC is not None and stats.guess(ROTATED, budget)[1] < 0.98 * error:
        form = ROTATED
        step, _ = stats.guess(ROTATED, budget, saved=0.15)
    # No value may be farther than 2**20 steps from 0.
    least = best_side.code_above(peak * 2.0**-19)
    encoder = Encoder(x_RC, stats, form, least, out_B)
    encoder.fit(max(least, best_side.code_above(step)))
    bits = budget / x_RC.size
    if form == TRELLIS and stats.flatness < FLAT and 0.5 <= bits <= 2.5:
        other = Encoder(x_RC, stats, HALVES, least, np.empty_like(out_B))
        other.fit(max(least, min(best_side.code_above(0.9 * step), other.two)))
        if other.error < encoder.error:
            out_B[:] = other.out_B


@dataclass
class _Piece:
    """What one try made of a block."""

    code: int
    used: int  # bits, with the rest of the byte in which its bits end
    raw: bytes
    raw_end: int  # bits after the first byte of raw
    words: bytes
    model: Model
    error: float  # sum of squares, 0 where nobody compares them


class Encoder:
    """Writes one message into one payload."""

    def __init__(self, x_RC: np.ndarray, stats: Stats, form: int, least: int, out_B: Bytes) -> None:
        self.x_RC, self.stats, self.form, self.least = x_RC, stats, form, least
        self.out_B = out_B
        self.prices: np.ndarray | None = None
        self.error = 0.0  # about the sum of squared errors, once written, if they are compared
        self.compared = stats.flatness < FLAT or (form == ROTATED and x_RC.size < 4 * _SAMPLE)
        self.kept_K = np.empty(0)  # variances of what is coded
        # Two levels take at most a bit, and this step is best for them. What is asked for beyond
        # it means that more values go to one of the two.
        self.two = best_side.code_above(stats.reach)
        # What `_begin` sets: where bits and words stand, and how the message is cut.
        self.at, self.words_end, self.num_states = 0, 0, 0
        self.blocks: list[tuple[int, int]] = []
        self.model: Model
        self.y_RK: Any = x_RC
        self.column_K: Any = None
        self.centre_K: Any = None
        self._room: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def fit(self, code: int) -> int:
        """`write`, for a long message after a sample of it; once more if the step that was found
        is far from the one that side information was made for, because that one decides what is
        coded, and how.
        """
        R, C = self.x_RC.shape
        if 4 * rows_of_sample(C) <= R:
            return self.write(self.sample(code))
        best: tuple[float, Bytes, int] | None = None
        for _ in range(4):
            found = self.write(code)
            if best is None or self.error < best[0]:
                best = self.error, self.out_B.copy(), found
            if abs(found - code) <= _FAR or self.form == HALVES:
                break
            code = (code + found) // 2
        assert best
        self.error, self.out_B[:], found = best
        return found

    def write(self, code: int) -> int:
        """Write the payload, side information made for the step `code`; returns the step that the
        last block has, where it could be fitted.
        """
        R = len(self.x_RC)
        while not self._begin(code):
            if code == LARGEST_CODE:
                self.out_B[:] = 0
                return code
            code = min(code + _FAR, LARGEST_CODE)
        budget = 8 * (self.out_B.size - (self.at >> 3))
        slope = self.stats.slope(self.form, float(step_of(code))) / 256 / R  # bits a row
        before = code
        for b, (first, rows) in enumerate(self.blocks):
            left = 8 * (self.words_end - (self.at >> 3)) - 16 * (len(self.blocks) - 1 - b)
            last = b == len(self.blocks) - 1
            due = left * rows / (R - first)
            piece = self._search(
                b, code, before, (due - 0.004 * budget) if last else 0.0, due if last else left,
                due - 0.0015 * budget, slope * rows,
            )  # fmt: skip
            if piece is None:
                self.error += rows * float(self.kept_K.sum())
                self.at = golomb.put_number(self.out_B, self.at, 0, STEP_ORDER)
                continue
            self._append(piece)
            before = code = piece.code
            if not last:
                self._learn()
                spent = 8 * (self.words_end - (self.at >> 3))
                miss = piece.used / rows - spent / (R - first - rows)  # bits a row
                code = min(max(code + round(0.7 * miss / slope), self.least), LARGEST_CODE)
        return code

    def sample(self, code: int) -> int:
        """A step that fits some rows into their part of the budget; learns prices."""
        R, C = self.x_RC.shape
        row_N = best_side.spread_rows(R, rows_of_sample(C))
        sample_RC = np.ascontiguousarray(self.x_RC[row_N])
        stats = replace(self.stats, rows=len(sample_RC))
        room_B = np.zeros(best_side.room_of(C, self.form), np.uint8)
        _, side_bits = best_side.write_side(self.stats, self.form, step_of(code), room_B, 16)
        bits = max(0, 8 * self.out_B.size - side_bits) * len(sample_RC) / R
        _, side_bits = best_side.write_side(stats, self.form, step_of(code), room_B, 16)
        trial_B = np.zeros(int(bits + side_bits) // 8 + 4, np.uint8)
        trial = Encoder(sample_RC, stats, self.form, self.least, trial_B)
        found = trial.fit(code)
        self.prices = trial.prices
        return found

    # -- one block -------------------------------------------------------------------------------

    def _search(
        self, b: int, code: int, before: int, low: float, high: float, target: float, slope: float
    ) -> _Piece | None:
        """The piece within `high` bits with the least error, if that is known, or that uses most
        of them; the first that uses at least `low` will do.

        Prices are learned in the first tries and then stay, so that what is used depends on the
        step alone: left free, they may drift to where all is 0, and back.
        """
        bracket = _Bracket(slope)
        best: _Piece | None = None
        start = self.model
        tries = 0
        while tries < _TRIES or (best is None and tries < 3 * _TRIES):
            tries += 1
            self.model = start.copy()
            piece = self._try(b, code, before)
            fits = piece.used <= high
            if fits:
                piece.error = self._error(code)
            if fits and (best is None or (piece.error, -piece.used) < (best.error, -best.used)):
                best = piece
            if fits and piece.used >= low:
                break
            if tries <= 3 and 0.6 * high < piece.used < 1.6 * high:
                self._learn()
            bracket.add(code, piece.used, fits)
            following = bracket.next(target, self.least)
            if following is None:
                break
            code = following
        if best is None:
            self.model = start
        return best

    def _try(self, b: int, code: int, before: int) -> _Piece:
        """Quantise and code a block with a step."""
        first, rows = self.blocks[b]
        K = len(self.column_K)
        room = self._last = self._arrays(-(-rows // LANES) * K * LANES)
        raw_B = room["raw_B"]
        start = self.at & 7
        raw_B[0] = self.out_B[self.at >> 3] if start else 0
        two, shift = code >= self.two, np.float32(min(max(0, code - self.two) / 512, 1))
        if self.form == HALVES:
            code = min(code, self.two)
        away = code - before
        start = golomb.put_number(
            raw_B, start, 1 + (2 * away if away >= 0 else -2 * away - 1), STEP_ORDER
        )
        u_N, k_N, path_N = room["u_N"], room["k_N"], room["path_N"]
        lanes.load_block(
            self.y_RK, first, rows, self.column_K, self.centre_K, 1 / step_of(code), u_N
        )
        if self.form == HALVES:
            trellis.find_halves(u_N, two, shift, path_N, k_N)
        else:
            trellis.find_path(
                u_N, len(u_N) // LANES, self.prices, path_N, k_N,
                room["cost_4L"], room["even_8L"], room["odd_8L"], room["path_L"],
            )  # fmt: skip
        end = rans.model_block(
            k_N, path_N, rows, self.model, room["plot_L"], room["op_N"],
            raw_B, start,
        )  # fmt: skip
        num_words = rans.code_block(room["op_N"], self.num_states, room["state_S"], room["word_W"])
        raw = raw_B[: -(-end // 8)].tobytes()
        raw_B[: len(raw)] = 0
        words = room["word_W"][:num_words].astype("<u2").tobytes()
        return _Piece(code, 8 * (len(raw) + len(words)), raw, end, words, self.model, 0.0)

    def _error(self, code: int) -> float:
        """Sum of squares of the block that was tried last, where that decides something: what has
        one form, one block and nothing to leave out needs no comparison.
        """
        if not self.compared:
            return 0.0
        u_N, k_N, path_N = (self._last[name] for name in ("u_N", "k_N", "path_N"))
        level_N = 2 * k_N + 1 if self.form == HALVES else 2 * k_N - np.sign(k_N) * (path_N & 1)
        miss_N = (u_N - level_N)[self._last["op_N"] > 0]
        if self.form == HALVES:
            code = min(code, self.two)
        return float(step_of(code)) ** 2 * float(miss_N @ miss_N)

    def _append(self, piece: _Piece) -> None:
        front = self.at >> 3
        self.out_B[front : front + len(piece.raw)] = np.frombuffer(piece.raw, np.uint8)
        self.at = 8 * front + piece.raw_end
        end, self.words_end = self.words_end, self.words_end - len(piece.words)
        self.out_B[self.words_end : end] = np.frombuffer(piece.words, np.uint8)
        self.model = piece.model
        self.error += piece.error

    # -- parts -----------------------------------------------------------------------------------

    def _begin(self, code: int) -> bool:
        """Side information for a step, and all that follows from it; False if it does not fit."""
        R, C = self.x_RC.shape
        side_B = np.zeros(best_side.room_of(C, self.form), np.uint8)
        side_B[0], side_B[1] = code & 255, code >> 8
        side, self.at = best_side.write_side(self.stats, self.form, step_of(code), side_B, 16)
        K = len(side.column_K)
        var_C = self.stats.variances(self.form)
        self.kept_K = var_C[side.column_K]
        self.error = R * float(var_C.sum() - self.kept_K.sum())
        self.blocks = blocks_of(R, K) if K else []
        # A block has its step at least, and its words begin a byte.
        room = _ROOM_SIDE + 16 * (len(self.blocks) - 1) if K else 0
        if self.at + room > 8 * self.out_B.size:
            return False
        self.out_B[:] = 0
        used = -(-self.at // 8)
        self.out_B[:used] = side_B[:used]
        self.words_end = self.out_B.size
        if not K:
            return True
        self.num_states = states_of(self.out_B.size, len(self.blocks))
        prior = HALF_PRIORS if self.form == HALVES else PRIORS
        self.model = Model.start(side.class_K, self.form == ROTATED, prior)
        self.column_K, self.centre_K = side.column_K, side.mean_C[side.column_K]
        self.y_RK = self.x_RC
        if side.basis_KC is not None:
            to_axes_CK = best_side.to_axes(side.basis_KC)
            self.y_RK = best_side.product(self.x_RC - side.mean_C, to_axes_CK)
            self.column_K, self.centre_K = np.arange(K), np.zeros(K, np.float32)
        if self.prices is None or len(self.prices) != trellis.PRICES * K:
            self._learn()
        return True

    def _learn(self) -> None:
        """Prices of bits as the model has them now."""
        self.prices = prices_of(self.model.table_XE, self.model.low_K, _PRICE)

    def _arrays(self, N: int) -> dict[str, Any]:
        """Scratch for a block of N values; raw_B is zero. Made once: new memory costs a fault for
        each page of it.
        """
        if len(self._room.get("u_N", ())) < N:
            self._room = {
                "raw_B": np.zeros(8 * N + 64, np.uint8),
                "u_N": np.empty(N, np.float32),
                "path_N": np.empty(N, np.uint8),
                "k_N": np.empty(N, np.int32),
                "op_N": np.empty(N, np.uint32),
                "word_W": np.empty(N + 8, np.uint16),
                "cost_4L": np.empty(4 * LANES, np.float32),
                "even_8L": np.empty(8 * LANES, np.float32),
                "odd_8L": np.empty(8 * LANES, np.float32),
                "path_L": np.empty(LANES, np.int32),
                "plot_L": np.empty(LANES, np.int64),
                "state_S": np.empty(4, np.uint32),
            }
        cut = {name: self._room[name][:N] for name in ("u_N", "path_N", "k_N", "op_N")}
        return self._room | cut


class _Bracket:
    """Steps that were tried for a block, and the next one to try."""

    def __init__(self, slope: float) -> None:
        self.slope = slope  # bits a code, positive; as expected, then as seen
        self.fine: tuple[int, int] | None = None  # the coarsest step that was too fine, its bits
        self.fits: tuple[int, int] | None = None  # the finest that fits
        self.last: tuple[int, int] | None = None
        self.same_side = 0

    def add(self, code: int, used: int, fits: bool) -> None:
        """Note what a step used."""
        if self.last and self.last[0] != code:
            seen = (self.last[1] - used) / (code - self.last[0])
            self.slope = min(max(seen, self.slope / 4), 2 * self.slope)
        self.last = code, used
        side = 1 if fits else -1
        self.same_side = self.same_side + side if self.same_side * side > 0 else side
        if fits and (self.fits is None or code < self.fits[0]):
            self.fits = code, used
        if not fits and (self.fine is None or code > self.fine[0]):
            self.fine = code, used

    def next(self, target: float, least: int) -> int | None:
        """A step that may use `target` bits; None if there is nothing left to try."""
        assert self.last
        code, used = self.last
        if self.fine and self.fits:
            gap = self.fits[0] - self.fine[0]
            part = (self.fine[1] - target) / max(self.fine[1] - self.fits[1], 1)
            part = 0.5 if abs(self.same_side) > 1 else min(max(part, 0.1), 0.9)
            code = self.fine[0] + min(max(round(part * gap), 1), gap - 1)
            return code if gap > 1 else None
        move = math.ceil(min(abs(used - target) / self.slope, 1024)) + abs(self.same_side) - 1
        code += max(move, 1) if self.fits is None else -max(move, 1)
        code = min(max(code, least), LARGEST_CODE)
        return None if code == self.last[0] else code
