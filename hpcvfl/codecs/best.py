"""`best`: trellis-coded quantisation and an adaptive entropy coder under a fixed budget.

What beats `scalar` and `lattice` at the same bytes (bench/LOG.md): a message of rows is turned to
its principal axes where that pays for sending them, quantised with one step for all of it along
the cheapest path of an eight-state trellis (kernels/trellis.py), and coded with as many bits as
each value needs (kernels/rans.py). The encoder looks for the finest step with which the message
fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from hpcvfl.codecs import best_side
from hpcvfl.codecs.base import Array, Bytes, Codec, check_status, known_options
from hpcvfl.codecs.best_side import Side, Stats
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import lanes, rans, scan, trellis
from hpcvfl.kernels.rans import Model
from hpcvfl.kernels.trellis import LANES

# legend: R rows, C columns, K coded columns, B bytes, N values of a block

_LARGEST = 1e38
_BLOCK_STEPS = 4096
_ZERO_BLOCK = 24
"""Bits of a block that is left out: its step, which is 0, and a byte begun."""
_PRICE = 0.22
"""Squared steps that a bit is worth; 0.2 to 0.3 is best at all rates from 1 to 3 bits on a normal
and a Laplace density (bench/LOG.md)."""


@dataclass(frozen=True, eq=False)
class BestCodec(Codec):
    """As small an error as is known to us at `bits` a value, everything counted.

    bits : 0.1 to 8, with at most three decimals
    A payload has ceil(n * bits / 8) bytes, and at least min(n, 8) + 4. It holds the step (16 bits),
    side information (best_side.py), then for each block of rows the bits that are written as they
    are, after the step of the block (from the second on); from the end backwards, the coder's
    words; between them, zeros. Step 0: everything is 0.
    """

    bits: Decimal

    name = "best"
    examples = tuple(f"best:bits={b}" for b in ("0.1", "0.25", "0.5", "1", "1.75", "3", "8"))

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> BestCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits",))
        text = options.get("bits", "missing")
        try:
            bits = Decimal(text)
        except InvalidOperation:
            bits = Decimal(0)
        if not (bits.is_finite() and Decimal("0.1") <= bits <= 8 and bits == round(bits, 3)):
            raise ConfigError(
                f"codec best: bits = {text!r}; possible: 0.1 to 8, at most three decimals,"
                f" e.g. best:bits=0.75"
            )
        return cls(bits)

    @property
    def spec(self) -> str:
        """The number of bits without zeros at its end."""
        return f"best:bits={self.bits.normalize():f}"

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """The budget, or a little more for a handful of values."""
        n = math.prod(shape)
        return max(math.ceil(n * self.bits / 8), min(n, 8) + 4) if n else 0

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Several passes over a small message; one, after a sample of it, over a large one."""
        if x.size == 0:
            return
        if x.dtype != np.float32:
            with np.errstate(over="ignore"):
                x = x.astype(np.float32)
        ends_2 = np.empty(2, np.float32)
        check_status(scan.minmax(x.reshape(-1), ends_2))
        peak = float(np.abs(ends_2).max())
        if peak > _LARGEST:
            raise NonFiniteError(f"a value of {peak:.3g} is beyond what codec best can carry, 1e38")
        x_RC = x.reshape(best_side.matrix_shape(x.shape))
        out_B[:] = 0
        if peak < 2.0**-125:  # no normal float is a step of it
            return
        stats = Stats.of(x_RC, peak)
        budget = 8.0 * out_B.size - 64
        rotated = False
        step, error = stats.guess(False, budget)
        if stats.axes_CC is not None:
            turned_step, turned_error = stats.guess(True, budget)
            if turned_error < 0.98 * error:
                rotated, step = True, turned_step
        Encoder(x_RC, stats, rotated, out_B).fit(step)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """One pass; WireError if the side information or a sum is out of range."""
        if out.size == 0:
            return
        R, C = best_side.matrix_shape(out.shape)
        code = int(payload_B[0]) | int(payload_B[1]) << 8
        if not code:
            out[...] = 0
            return
        if not best_side.SMALLEST_CODE <= code <= best_side.LARGEST_CODE:
            raise WireError("the step in a payload is no positive number; it is corrupt")
        to_RC = np.empty((R, C), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            side, raw_at = best_side.read_side(payload_B, 16, R, C, best_side.step_of(code))
            _decode_rows(payload_B, raw_at, code, side, to_RC)
        if scan.minmax(to_RC.reshape(-1), np.empty(2, np.float32)):
            raise WireError("a payload decodes to values that are not finite; it is corrupt")
        out[...] = to_RC.reshape(out.shape)


def blocks_of(rows: int, K: int) -> list[tuple[int, int]]:
    """(first row, rows) of each block; all have as many rows, but the last one."""
    most = LANES * max(1, _BLOCK_STEPS // max(K, 1))
    size = -(-rows // -(-rows // most))
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def states_of(nbytes: int, num_blocks: int) -> int:
    """States of the coder: each costs about two bytes a block, and more of them are faster."""
    each = nbytes // num_blocks
    return 1 if each < 2048 else 2 if each < 8192 else 4


def _decode_rows(payload_B: Bytes, raw_at: int, code: int, side: Side, to_RC: np.ndarray) -> None:
    """Write the rows of a payload whose side information is read."""
    R, K = len(to_RC), len(side.column_K)
    to_RC[...] = side.mean_C
    if not K:
        return
    turned = side.basis_KC is not None
    y_RK = np.zeros((R, K), np.float32) if turned else to_RC
    centre_K = np.zeros(K, np.float32) if turned else side.mean_C[side.column_K]
    model, blocks = Model.start(side.class_K, turned), blocks_of(R, K)
    num_states = states_of(payload_B.size, len(blocks))
    word_at = payload_B.size
    state_S, path_L = np.empty(4, np.uint32), np.empty(LANES, np.int32)
    plot_L = np.empty(LANES, np.int64)
    for b, (first, rows) in enumerate(blocks):
        if b:
            code, raw_at = rans.read_bits(payload_B, raw_at, 16), raw_at + 16
            if not code:
                continue
            if code < best_side.SMALLEST_CODE or code > best_side.LARGEST_CODE:
                raise WireError("the step of a block is no positive number; the payload is corrupt")
        level_N = np.empty(-(-rows // LANES) * K * LANES, np.int32)
        word_at, raw_at = rans.decode_block(
            payload_B, word_at, raw_at, rows, model, num_states, state_S, path_L, plot_L, level_N
        )
        if word_at < 0 or raw_at > 8 * payload_B.size:
            raise WireError("a payload ends before its values do; it is corrupt")
        step = best_side.step_of(code)
        lanes.store_block(level_N, first, rows, step, side.column_K, centre_K, y_RK)
    if turned:
        lanes.expand_rows(y_RK, side.basis_KC, to_RC)


class Encoder:
    """Search for the finest step with which a message fits into its payload."""

    def __init__(self, x_RC: np.ndarray, stats: Stats, rotated: bool, out_B: Bytes) -> None:
        self.x_RC, self.stats, self.rotated, self.out_B = x_RC, stats, rotated, out_B
        # No value may be farther than 2**20 steps from 0.
        self.least = best_side.code_above(stats.peak * 2.0**-19)
        self.prices: np.ndarray | None = None
        self._room: dict[str, np.ndarray] = {}

    def fit(self, step: float) -> None:
        """Write the payload; `step` is where the search begins."""
        code = max(self.least, best_side.code_above(step))
        single = self._begin(code)
        if single is None or len(self.blocks) == 1:
            self._fit_single(code)
        else:
            self._fit_blocks(code)

    # -- one block -------------------------------------------------------------------------------

    def _fit_single(self, code: int) -> None:
        """Search; prices are learned in the first tries and then stay, so that what is used depends
        on the step alone (left free, they may drift to where all is 0, and back).
        """
        budget = 8 * self.out_B.size
        fine: tuple[int, int] | None = None  # finest step that did not fit, and its bits
        fits: tuple[int, int] | None = None  # and the finest that did
        most = -1
        for count in range(12):
            used = self._try(code)
            if count < 4 and 0.6 * budget < used < 1.6 * budget:
                self._learn()
            if used <= budget:
                if fits is None or code < fits[0]:
                    fits = code, used
                if used > most:
                    most = used
                    self._commit()
                if used >= 0.996 * budget:
                    return
            elif fine is None or code > fine[0]:
                fine = code, used
            code = self._next(code, used, budget, fine, fits)
            if code < self.least or (fine and code <= fine[0]) or (fits and code >= fits[0]):
                return

    def _next(
        self, code: int, used: int, budget: int, fine: tuple[int, int] | None,
        fits: tuple[int, int] | None,
    ) -> int:  # fmt: skip
        """Next step to try: between the two nearest, or along the expected slope."""
        target = 0.9985 * budget
        if fine and fits:
            gap = fits[0] - fine[0]
            part = gap * (fine[1] - target) / max(fine[1] - fits[1], 1)
            return fine[0] + int(min(max(part, 0.1 * gap), 0.9 * gap) + 0.5)
        slope = self.stats.slope(self.rotated, float(best_side.step_of(code))) / 256
        move = min(max((used - target) / slope, -256), 2048)
        code = code + max(1, math.ceil(move)) if fits is None else code - max(1, math.ceil(-move))
        return min(code, best_side.LARGEST_CODE)

    def _try(self, code: int) -> int:
        """Bits of the message with a step; the parts are kept for `_commit`."""
        if not self._begin(code):
            return 8 * -(-self.raw_at // 8)
        self.raw_end, self.num_words = self._run(0, code, self.raw_B, self.raw_at)
        return 8 * (-(-self.raw_end // 8)) + 16 * self.num_words

    def _commit(self) -> None:
        self.out_B[:] = 0
        front = -(-self.raw_end // 8)
        self.out_B[:front] = self.raw_B[:front]
        if self.num_words:
            words_B = self._room["word_W"][: self.num_words].astype("<u2").view(np.uint8)
            self.out_B[-words_B.size :] = words_B

    # -- many blocks -----------------------------------------------------------------------------

    def _fit_blocks(self, code: int) -> None:
        """A step for a sample of the rows first; then block by block, each with the step at which
        it and all that follow will use what is left; the last one is fitted.
        """
        code = max(self.least, self._sample(code))
        self._begin(code)
        budget = 8 * self.out_B.size
        at, words_end = self.raw_at, self.out_B.size
        self.out_B[: -(-at // 8)] = self.raw_B[: -(-at // 8)]
        slope = self.stats.slope(self.rotated, float(best_side.step_of(code))) / 256
        R = len(self.x_RC)
        for b, (first, rows) in enumerate(self.blocks):
            spare = _ZERO_BLOCK * (len(self.blocks) - 1 - b)
            left = 8 * words_end - 8 * -(-at // 8)
            due = (left - spare) * rows / (R - first)
            last = b == len(self.blocks) - 1
            code, at, words_end = self._fit_block(
                b, code, at, words_end, (0.996 if last else 0.9) * due, left - spare,
                due, slope * rows / R,
            )  # fmt: skip
            left = 8 * words_end - 8 * -(-at // 8)
            if not last:
                # Half of what was used too much or too little comes from the data, not the step.
                miss = (left - spare) / (R - first - rows) - budget / R
                code += math.ceil(-0.5 * miss * R / slope / max(1, len(self.blocks) - b))
                code = min(max(code, self.least), best_side.LARGEST_CODE)

    def _sample(self, code: int) -> int:
        """A step that fits a sample of the rows into its part of the budget."""
        C = self.x_RC.shape[1]
        rows = max(LANES, LANES * max(1, _BLOCK_STEPS // C) // 4)
        sample_RC = np.ascontiguousarray(self.x_RC[:: max(1, len(self.x_RC) // rows)][:rows])
        part = len(sample_RC) / len(self.x_RC)
        bits = (8 * self.out_B.size - self.raw_at) * part
        stats = replace(self.stats, rows=len(sample_RC))
        trial = Encoder(sample_RC, stats, self.rotated, np.zeros(8, np.uint8))
        trial._begin(code)
        trial.out_B = np.zeros(int(bits + trial.raw_at) // 8, np.uint8)
        trial.fit(float(best_side.step_of(code)))
        if trial.prices is not None and trial.out_B.any():
            self.prices = trial.prices
            code = int(trial.out_B[0]) | int(trial.out_B[1]) << 8
        return code

    def _fit_block(
        self, b: int, code: int, at: int, words_end: int, low: float, high: float, due: float,
        slope: float,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Write a block with at least `low` bits if that can be had in a few tries, never more than
        `high`; returns (step, bit after its bits, byte before which its words stand).
        """
        before = self.model.copy()
        front = at >> 3
        kept: tuple[int, bytes, bytes, int, Model] | None = None
        for _ in range(6):
            self.raw_B[:] = 0
            start = at & 7
            self.raw_B[0] = self.out_B[front] if start else 0
            if b:
                start = rans.write_bits(self.raw_B, start, code, 16)
            end, words = self._run(b, code, self.raw_B, start)
            used = 8 * -(-end // 8) + 16 * words - (at & 7)
            if used <= high and (kept is None or code < kept[0]):
                words_B = self._room["word_W"][:words].astype("<u2").tobytes()
                raw = self.raw_B[: -(-end // 8)].tobytes()
                kept = code, raw, words_B, 8 * front + end, self.model.state()
            if low <= used <= high or (b == 0 and used <= high):
                break
            move = math.ceil((used - (due if low < 0.99 * due else 0.998 * due)) / slope)
            if used > high:
                code = min(code + max(1, move), best_side.LARGEST_CODE)
            else:
                code = max(code + min(-1, move), self.least)
            if kept and code >= kept[0]:
                break
            self.model = before.copy()
        if kept is None:
            self.model = before.copy()
            end = rans.write_bits(self.out_B, at, 0, 16) if b else at
            return code, end, words_end
        code, raw, words_B, end, after = kept
        self.model = after
        self.out_B[front : front + len(raw)] = np.frombuffer(raw, np.uint8)
        if words_B:
            self.out_B[words_end - len(words_B) : words_end] = np.frombuffer(words_B, np.uint8)
        return code, end, words_end - len(words_B)

    # -- parts -----------------------------------------------------------------------------------

    def _begin(self, code: int) -> bool:
        """Side information for a step; whether any column is coded."""
        R, C = self.x_RC.shape
        step = best_side.step_of(code)
        room = 64 + 8 * (3 * C + 8) + (8 * C * C if self.rotated else 0)
        self.raw_B = np.zeros(
            room + 16 * min(self.x_RC.size, LANES * max(C, _BLOCK_STEPS) * 2), np.uint8
        )
        self.raw_B[0], self.raw_B[1] = code & 255, code >> 8
        self.side, self.raw_at = best_side.write_side(
            self.stats, self.rotated, step, self.raw_B, 16
        )
        self.raw_end, self.num_words = self.raw_at, 0
        K = len(self.side.column_K)
        self.blocks = blocks_of(R, K)
        if not K:
            return False
        self.model = Model.start(self.side.class_K, self.rotated)
        self.num_states = states_of(self.out_B.size, len(self.blocks))
        self.column_K, self.centre_K = self.side.column_K, self.side.mean_C[self.side.column_K]
        self.y_RK = self.x_RC
        if self.side.basis_KC is not None:
            # Axes are rounded, so not quite orthogonal: the nearest point in their span.
            basis_KC = self.side.basis_KC.astype(np.float64)
            to_axes_CK = np.linalg.pinv(basis_KC).astype(np.float32)
            self.y_RK = (self.x_RC - self.side.mean_C) @ to_axes_CK
            self.column_K, self.centre_K = np.arange(K), np.zeros(K, np.float32)
        if self.prices is None or len(self.prices) != trellis.PRICES * K:
            self.prices = np.empty(trellis.PRICES * K, np.float32)
            rans.fit_prices(self.model.table_XE, self.model.low_K, _PRICE, self.prices)
        return True

    def _run(self, b: int, code: int, raw_B: Bytes, raw_at: int) -> tuple[int, int]:
        """Quantise and code a block; returns (bit after its bits in raw_B, number of words)."""
        first, rows = self.blocks[b]
        K = len(self.column_K)
        N = -(-rows // LANES) * K * LANES
        room = self._arrays(N)
        inverse = np.float32(1) / best_side.step_of(code)
        lanes.load_block(self.y_RK, first, rows, self.column_K, self.centre_K, inverse, room["u_N"])
        trellis.find_path(
            room["u_N"], N // LANES, self.prices, room["path_N"], room["k_N"],
            room["cost_4L"], room["even_8L"], room["odd_8L"], room["path_L"],
        )  # fmt: skip
        raw_at = rans.model_block(
            room["k_N"], room["path_N"], rows, self.model, room["plot_L"], room["op_N"],
            raw_B, raw_at,
        )  # fmt: skip
        num_words = rans.code_block(room["op_N"], self.num_states, room["state_S"], room["word_W"])
        return raw_at, num_words

    def _learn(self) -> None:
        """Prices of bits as the last block had them."""
        if self.prices is not None:
            rans.fit_prices(self.model.table_XE, self.model.low_K, _PRICE, self.prices)

    def _arrays(self, N: int) -> dict[str, Any]:
        """Scratch for a block of N values."""
        if "u_N" not in self._room or len(self._room["u_N"]) != N:
            self._room = {
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
        return self._room
