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
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np

from hpcvfl.codecs import best_side
from hpcvfl.codecs.base import Array, Bytes, Codec, as_float32, check_status, known_options
from hpcvfl.codecs.best_encoder import STEP_ORDER, blocks_of, encode_matrix, states_of
from hpcvfl.codecs.best_side import Side
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import golomb, lanes, rans
from hpcvfl.kernels.compiling import IS_INF, IS_NAN
from hpcvfl.kernels.counts import HALF_PRIORS, PRIORS, Model
from hpcvfl.kernels.trellis import LANES

# legend: R rows, C columns, K coded columns, B bytes, N values of a block

_LARGEST = 1e38


@dataclass(frozen=True, eq=False)
class BestCodec(Codec):
    """As small an error as is known to us at `bits` a value, everything counted.

    bits : 0.1 to 8, with at most three decimals
    A payload has ceil(n * bits / 8) bytes, and at least min(n, 8) + 4. In front, lowest bits first:
    the step that side information is in units of (16 bits of a float32; 0: all values are 0), side
    information (best_side.py), then for each block of rows its step and the bits that are written
    as they are; from the end backwards, the coder's words (kernels/rans.py); between them, zeros.

    A tensor of fewer than 48 rows is one column. An error of the encoder's making has no bound but
    the budget: a value may be missed by more than a step where many others pay for its bits.
    """

    bits: Decimal

    name = "best"
    zeros_decode = False  # step 0: nothing is decoded at all
    examples = tuple(f"best:bits={b}" for b in ("0.1", "0.25", "0.5", "1", "1.75", "3", "8"))

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> BestCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits",))
        if "bits" not in options:
            raise ConfigError(
                "codec best: bits is missing; possible: 0.1 to 8, e.g. best:bits=0.75"
            )
        text = options["bits"]
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
        x = as_float32(x)
        peak = max(-float(x.min()), float(x.max()))
        if not math.isfinite(peak):
            check_status(IS_NAN if math.isnan(float(x.min())) else IS_INF)
        if peak > _LARGEST:
            raise NonFiniteError(f"a value of {peak:.3g} is beyond what codec best can carry, 1e38")
        out_B[:] = 0
        if peak >= 2.0**-125:  # below, no normal float is a step of it
            encode_matrix(x.reshape(best_side.matrix_shape(x.shape)), peak, out_B)

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
        to_RC = out.reshape(R, C) if out.dtype == np.float32 else np.empty((R, C), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            side, raw_at = best_side.read_side(payload_B, 16, R, C, best_side.step_of(code))
            _decode_rows(payload_B, raw_at, code, side, to_RC)
        if not math.isfinite(float(to_RC.max()) - float(to_RC.min())):
            raise WireError("a payload decodes to values that are not finite; it is corrupt")
        if out.dtype != np.float32:
            out[...] = to_RC.reshape(out.shape)


def _decode_rows(payload_B: Bytes, raw_at: int, code: int, side: Side, to_RC: np.ndarray) -> None:
    """Write the rows of a payload whose side information is read."""
    R, K = len(to_RC), len(side.column_K)
    turned = side.basis_KC is not None
    if turned or to_RC.shape[1] > K:
        to_RC[...] = side.mean_C
    if not K:
        return
    y_RK = np.zeros((R, K), np.float32) if turned else to_RC
    centre_K = np.zeros(K, np.float32) if turned else side.mean_C[side.column_K]
    halves = side.form == best_side.HALVES
    model = Model.start(side.class_K, turned, HALF_PRIORS if halves else PRIORS)
    blocks = blocks_of(R, K)
    num_states = states_of(payload_B.size, len(blocks))
    word_at = payload_B.size
    state_S, path_L = np.empty(4, np.uint32), np.empty(LANES, np.int32)
    plot_L = np.empty(LANES, np.int64)
    level_N = np.empty(max(-(-rows // LANES) for _, rows in blocks) * K * LANES, np.int32)
    for first, rows in blocks:
        away, raw_at = golomb.get_number(payload_B, raw_at, STEP_ORDER)
        if not away:
            to_RC[first : first + rows] = side.mean_C
            continue
        code += away // 2 if away & 1 else -(away // 2)
        if not best_side.SMALLEST_CODE <= code <= best_side.LARGEST_CODE:
            raise WireError("the step of a block is no positive number; the payload is corrupt")
        block_N = level_N[: -(-rows // LANES) * K * LANES]
        word_at, raw_at = rans.decode_block(
            payload_B, word_at, raw_at, rows, model, halves, num_states, state_S, path_L, plot_L,
            block_N,
        )  # fmt: skip
        if word_at < 0 or raw_at > 8 * payload_B.size:
            raise WireError("a payload ends before its values do; it is corrupt")
        step = best_side.step_of(code)
        lanes.store_block(block_N, first, rows, step, side.column_K, centre_K, y_RK)
    if turned:
        lanes.expand_rows(y_RK, side.basis_KC, to_RC)
