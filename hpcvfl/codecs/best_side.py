"""What `best` sends besides its symbols: a centre, a class of deviation, perhaps a basis.

Everything is in units of the step D that the message is quantised with, so that it is as fine as
it has to be: an error of the mean, or of an axis times the deviation along it, is shared by all R
rows, and D / sqrt(R) there weighs as much as D in a value.

Legend: R rows, C columns of a message, K columns that are coded, B bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcvfl.errors import WireError
from hpcvfl.kernels import rans

Floats = np.ndarray

_FEW_ROWS = 48
"""A tensor with fewer rows is one column: counts of each column would not pay."""
_WIDEST = 256
"""Most columns of a message that is rotated; its axes are found in time of C**3."""
_SAMPLE = 1 << 17
"""Values on which means, deviations and axes are estimated."""
_DEAD, _DEAD_AXIS = 0.3, 0.6
"""A column, or an axis, along which the deviation is fewer steps than this is not coded; an axis
has its coordinates to pay for."""
_FINEST, _COARSEST = 14, 2
_MAX_NUMBER = 1 << 28


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(R, C) as which a tensor is coded."""
    n = math.prod(shape)
    if len(shape) < 2 or n // shape[-1] < _FEW_ROWS:
        return n, 1
    return n // shape[-1], shape[-1]


def step_of(code: int) -> np.float32:
    """D of its 16 bits: a float32 without sign and without its 15 lowest bits."""
    return np.array([code << 15], np.uint32).view(np.float32)[0]


SMALLEST_CODE, LARGEST_CODE = 1 << 8, (254 << 8) | 255  # normal, finite floats


def code_above(step: float) -> int:
    """Code of the least step that is not below `step`."""
    bits = int(np.array([step], np.float32).view(np.uint32)[0])
    return min(max((bits >> 15) + 1, SMALLEST_CODE), LARGEST_CODE)


@dataclass
class Stats:
    """What the encoder knows of a message: moments, and principal axes where they may pay.

    mean_C, var_C : float64
    peak          : largest |x|
    axes_CC       : float64, row j is the axis of the j-th largest variance; None if not looked for
    spread_C      : float64, the variances along the axes
    """

    rows: int
    mean_C: Floats
    var_C: Floats
    peak: float
    axes_CC: Floats | None
    spread_C: Floats | None

    @classmethod
    def of(cls, x_RC: Floats, peak: float) -> Stats:
        """Of a float32 matrix, from evenly spaced rows if it is large."""
        R, C = x_RC.shape
        stride = max(1, R * C // _SAMPLE)
        sample_RC = x_RC[::stride].astype(np.float64)
        mean_C = sample_RC.mean(axis=0)
        sample_RC -= mean_C
        axes_CC = spread_C = None
        if 1 < C <= _WIDEST and len(sample_RC) > C and peak < 1e15:
            cov_CC = sample_RC.T @ sample_RC / len(sample_RC)
            var_C = cov_CC.diagonal().copy()
            spread_C, axes_CC = np.linalg.eigh(cov_CC)
            spread_C, axes_CC = np.maximum(spread_C[::-1], 0), axes_CC.T[::-1]
        else:
            var_C = (sample_RC**2).mean(axis=0)
        return cls(R, mean_C, var_C, peak, axes_CC, spread_C)

    def variances(self, rotated: bool) -> Floats:
        """Variances of the columns, or along the axes."""
        if not rotated:
            return self.var_C
        assert self.spread_C is not None
        return self.spread_C

    def guess(self, rotated: bool, budget: float) -> tuple[float, float]:
        """(D, error of a row) at which about `budget` bits are used, by the laws of a Gaussian."""
        var = self.variances(rotated)
        C = len(var)
        top = float(var.max())
        if top <= 0:
            return 0.0, 0.0
        low, high = 0.5 * math.log2(top) - 24, 0.5 * math.log2(top) + 3
        for _ in range(18):
            middle = (low + high) / 2
            ratio = np.sqrt(var) * 2.0**-middle
            bits = self.rows * _rate(ratio).sum()
            if rotated:
                active = ratio > _DEAD_AXIS
                finer = np.log2(ratio[active] + 1) + 0.5 * math.log2(self.rows)
                bits += C * (np.maximum(finer - 0.5 * math.log2(C), 0) + 2.5).sum()
            low, high = (middle, high) if bits > budget else (low, middle)
        step = 2.0**high
        return step, float(np.minimum(var, 0.2 * step * step).sum())

    def slope(self, rotated: bool, step: float) -> float:
        """Bits that a message has more at half the step."""
        var = self.variances(rotated)
        power = 5 * var / (step * step)
        return float(self.rows * (power / (1 + power)).sum()) + 1


def _rate(ratio: Floats) -> Floats:
    """Bits of a value whose deviation is `ratio` steps, about."""
    return 0.5 * np.log2(1 + 5 * ratio**2) * np.clip((ratio - _DEAD) / 0.4, 0, 1)


@dataclass
class Side:
    """Side information as both sides know it.

    column_K : int64, columns that are coded (0..K-1 if rotated)
    class_K  : int64, see rans.NUM_CLASSES
    mean_C   : float32, what every row starts from
    basis_KC : float32, None if not rotated
    """

    column_K: Floats
    class_K: Floats
    mean_C: Floats
    basis_KC: Floats | None

    @property
    def low_bits(self) -> Floats:
        """Bits of an index that are sent as they are, int32."""
        return np.maximum(0, (self.class_K - 5) // 2).astype(np.int32)


def _fineness(rows: int) -> int:
    return min(8, rows.bit_length() // 2)


def _axis_places(rows: int, class_K: Floats) -> Floats:
    """Binary places of an axis, by the class of its component."""
    return np.clip(_fineness(rows) + (class_K - 3) // 2, _COARSEST, _FINEST)


def _axis_order(places: int, C: int) -> int:
    return max(0, int(places) - C.bit_length() // 2)


def write_side(
    stats: Stats, rotated: bool, step: np.float32, raw_B: Floats, at: int
) -> tuple[Side, int]:
    """Write what `read_side` reads; returns what the receiver will know, and the bit after it.

    raw_B : uint8, zeros from bit `at` on, 64 bits a number long
    """
    C = len(stats.mean_C)
    unit = float(step) * 2.0 ** -_fineness(stats.rows)
    mean_C = np.clip(np.rint(stats.mean_C / unit), -_MAX_NUMBER, _MAX_NUMBER).astype(np.int64)
    ratio = np.sqrt(stats.variances(rotated)) / float(step)
    class_C = np.rint(2 * np.log2(np.maximum(ratio, 1e-9))).astype(np.int64) + 3
    class_C = np.where(
        ratio > (_DEAD_AXIS if rotated else _DEAD), np.clip(class_C, 0, rans.NUM_CLASSES - 1), -1
    )
    at = rans.put_numbers(np.array([-1 if rotated else 0], np.int64), 0, raw_B, at)
    order = _best_order(mean_C)
    at = rans.put_numbers(np.array([order], np.int64), 1, raw_B, at)
    at = rans.put_numbers(mean_C, order, raw_B, at)
    if rotated:
        class_C = class_C[: int((class_C >= 0).sum())]
        at = rans.put_numbers(np.array([len(class_C)], np.int64), 3, raw_B, at)
    at = rans.put_numbers(np.diff(class_C, prepend=5), 0, raw_B, at)
    axes = None
    if rotated:
        axes = np.empty((len(class_C), C), np.int64)
        for j, places in enumerate(_axis_places(stats.rows, class_C)):
            axes[j] = np.rint(stats.axes_CC[j] * 2.0**places)  # type: ignore[index]
            at = rans.put_numbers(axes[j], _axis_order(places, C), raw_B, at)
    return _side(stats.rows, step, mean_C, class_C, axes), at


def read_side(payload_B: Floats, at: int, rows: int, C: int, step: np.float32) -> tuple[Side, int]:
    """Inverse of `write_side`; WireError for what it cannot have written."""

    def numbers(count: int, order: int) -> Floats:
        nonlocal at
        got = np.empty(count, np.int64)
        at = rans.get_numbers(payload_B, at, order, got)
        if at > 8 * payload_B.size:
            raise WireError("side information runs past the end of a payload; it is corrupt")
        return got

    rotated, order = bool(numbers(1, 0)[0]), int(numbers(1, 1)[0])
    if not 0 <= order <= 24 or (rotated and not 1 < C <= _WIDEST):
        raise WireError(_CORRUPT)
    mean_C = numbers(C, order)
    K = int(numbers(1, 3)[0]) if rotated else C
    if not 0 <= K <= C:
        raise WireError(_CORRUPT)
    class_C = np.cumsum(numbers(K, 0)) + 5
    if K and not -int(not rotated) <= class_C.min() <= class_C.max() < rans.NUM_CLASSES:
        raise WireError(_CORRUPT)
    axes = None
    if rotated:
        axes = np.empty((K, C), np.int64)
        for j, places in enumerate(_axis_places(rows, class_C)):
            axes[j] = numbers(C, _axis_order(places, C))
    return _side(rows, step, mean_C, class_C, axes), at


_CORRUPT = "side information in a payload is out of range; it is corrupt"


def _side(
    rows: int, step: np.float32, mean_C: Floats, class_C: Floats, axes: Floats | None
) -> Side:
    """The same on both sides: integers, powers of two, and one product a number."""
    unit = np.float32(step * np.float32(2.0 ** -_fineness(rows)))
    column_K = np.flatnonzero(class_C >= 0)
    basis_KC = None
    if axes is not None:
        scale_K = (2.0 ** -_axis_places(rows, class_C).astype(np.float64)).astype(np.float32)
        basis_KC = axes.astype(np.float32) * scale_K[:, None]
    return Side(column_K, class_C[column_K], mean_C.astype(np.float32) * unit, basis_KC)


def _best_order(values: Floats) -> int:
    """Order of the exponential Golomb code with the fewest bits for signed values."""
    folded = np.where(values >= 0, 2 * values, -2 * values - 1).astype(np.float64)
    orders = np.arange(25)
    lengths = 2 * np.floor(np.log2(folded[:, None] + 2.0**orders)) + 1 - orders
    return int(lengths.sum(axis=0).argmin())
