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
import torch

from hpcvfl.errors import WireError
from hpcvfl.kernels import counts, golomb, scan

Floats = np.ndarray

TRELLIS, ROTATED, HALVES = range(3)
"""Form of a message: its columns through the trellis; the same along its axes; or plain rounding to
+-1, +-3, .. steps, without a level at the centre, for what has few values there.
"""

_FEW_ROWS = 48
"""A tensor with fewer rows is one column: counts of each column would not pay."""
_WIDEST = 256
"""Most columns of a message that is rotated; its axes are found in time of C**3."""
_SAMPLE = 1 << 15
"""Values on which means, deviations and axes are estimated, or eight a column and row of them."""
_DEAD, _DEAD_AXIS = 0.3, 0.6
"""A column, or an axis, along which the deviation is fewer steps than this is not coded; an axis
has its coordinates to pay for."""
_FINEST, _COARSEST = 14, 2
_MAX_NUMBER = 1 << 28
_FIRST_CLASS = 5  # that of the first column is written as the distance from it


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
    flatness      : fourth moment over squared variance, mean of the columns; 3 for a normal
    reach         : mean distance of a value from its column's mean
    axes_CC       : float64, row j is the axis of the j-th largest variance; None if not looked for
    spread_C      : float64, the variances along the axes
    """

    rows: int
    mean_C: Floats
    var_C: Floats
    peak: float
    flatness: float
    reach: float
    axes_CC: Floats | None
    spread_C: Floats | None

    @classmethod
    def of(cls, x_RC: Floats, peak: float) -> Stats:
        """Of a float32 matrix; axes and shapes from some of its rows if it is large."""
        R, C = x_RC.shape
        row_N = spread_rows(R, max(8 * C, _SAMPLE // C))
        sample_RC = x_RC[row_N].astype(np.float64)
        mean_C = sample_RC.mean(axis=0)
        if len(row_N) < R:
            moments_C2 = np.empty((C, 2), np.float32)
            scan.moments_columns(x_RC, moments_C2)
            mean_C = moments_C2[:, 0].astype(np.float64)
        sample_RC -= mean_C
        peak_C = np.maximum(np.abs(sample_RC).max(axis=0), 1e-300)
        square_RC = np.square(sample_RC / peak_C)  # in range, and so is its square
        square_C = square_RC.mean(axis=0)
        var_C = square_C * peak_C**2
        if len(row_N) < R:  # of all rows: what is rare in the sample may be the message
            var_C = moments_C2[:, 1].astype(np.float64) ** 2
        fourth_C = np.square(square_RC, out=square_RC).mean(axis=0)
        flatness = float((fourth_C / (square_C**2 + 1e-30)).mean())
        axes_CC = spread_C = None
        if 1 < C <= _WIDEST and len(sample_RC) > C and peak * math.sqrt(C) < 1e38:
            cov_CC = product(sample_RC.T, sample_RC) / len(sample_RC)
            if _related(cov_CC, len(sample_RC)):
                found = torch.linalg.eigh(torch.from_numpy(cov_CC))
                spread_C, axes_CC = found.eigenvalues.numpy(), found.eigenvectors.numpy()
                spread_C, axes_CC = np.maximum(spread_C[::-1], 0), axes_CC.T[::-1]
        reach = float(np.abs(sample_RC).mean())
        return cls(R, mean_C, var_C, peak, flatness, reach, axes_CC, spread_C)

    def variances(self, form: int) -> Floats:
        """Variances of the columns, or along the axes."""
        if form != ROTATED:
            return self.var_C
        assert self.spread_C is not None
        return self.spread_C

    def guess(self, form: int, budget: float, saved: float = 0.0) -> tuple[float, float]:
        """(D, error of a row) at which about `budget` bits are used, by the laws of a Gaussian.

        saved : part of the first bits of a value that the data need less than these laws say
        """
        var_C = self.variances(form)
        top = float(var_C.max())
        if top <= 0:
            return 0.0, 0.0
        C = len(var_C)
        step_S = math.sqrt(top) * 2.0 ** np.arange(3, -24, -0.25)
        ratio_SC = np.sqrt(var_C) / step_S[:, None]
        rate_SC = _rate(ratio_SC)
        bits_S = self.rows * (rate_SC - saved * np.minimum(rate_SC, 1.5)).sum(axis=1)
        if form == ROTATED:
            finer_SC = np.log2(ratio_SC + 1) + 0.5 * math.log2(self.rows / C)
            axes_SC = np.where(ratio_SC > _DEAD_AXIS, np.maximum(finer_SC, 0) + 2.0, 0)
            bits_S += C * axes_SC.sum(axis=1)
        i = min(max(int((bits_S <= budget).sum()), 1), len(step_S) - 1)
        way = min(max((budget - bits_S[i - 1]) / max(bits_S[i] - bits_S[i - 1], 1.0), 0.0), 1.0)
        step = float(step_S[i - 1]) * 2.0 ** (-0.25 * way)
        return step, float(np.minimum(var_C, 0.2 * step * step).sum())

    def slope(self, form: int, step: float) -> float:
        """Bits that a message has more at half the step."""
        var = self.variances(form)
        power = 5 * var / (step * step)
        return float(self.rows * (power / (1 + power)).sum()) + 1


def _related(cov_CC: Floats, rows: int) -> bool:
    """Whether columns correlate more than those of independent numbers do by chance."""
    scale_C = np.sqrt(np.maximum(cov_CC.diagonal(), 1e-300))
    squares_CC = np.square(cov_CC / scale_C / scale_C[:, None])
    C = len(scale_C)
    return bool(squares_CC.sum() - squares_CC.trace() > 1.5 * C * (C - 1) / rows)


def _rate(ratio: Floats) -> Floats:
    """Bits of a value whose deviation is `ratio` steps, about."""
    return 0.5 * np.log2(1 + 5 * ratio**2) * np.clip((ratio - _DEAD) / 0.4, 0, 1)


@dataclass
class Side:
    """Side information as both sides know it.

    form     : TRELLIS, ROTATED or HALVES
    column_K : int64, columns that are coded (0..K-1 if rotated)
    class_K  : int64, see counts.NUM_CLASSES
    mean_C   : float32, what every row starts from
    basis_KC : float32, None if not rotated
    """

    form: int
    column_K: Floats
    class_K: Floats
    mean_C: Floats
    basis_KC: Floats | None


def _fineness(rows: int) -> int:
    return min(8, rows.bit_length() // 2)


def _axis_places(rows: int, class_K: Floats) -> Floats:
    """Binary places of an axis, by the class of its component."""
    return np.clip(_fineness(rows) + (class_K - 3) // 2, _COARSEST, _FINEST)


def _axis_orders(places_K: Floats, C: int) -> Floats:
    """Orders of the Golomb codes of axes."""
    return np.maximum(0, places_K - C.bit_length() // 2)


def room_of(C: int, form: int) -> int:
    """Bytes that `write_side` writes at most."""
    return 64 + 8 * (2 * C + (C * C if form == ROTATED else 0))


def write_side(
    stats: Stats, form: int, step: np.float32, raw_B: Floats, at: int
) -> tuple[Side, int]:
    """Write what `read_side` reads; returns what the receiver will know, and the bit after it.

    raw_B : uint8, room_of(C, form) long, zeros from bit `at` on
    """
    C = len(stats.mean_C)
    unit = float(step) * 2.0 ** -_fineness(stats.rows)
    mean_C = np.clip(np.rint(stats.mean_C / unit), -_MAX_NUMBER, _MAX_NUMBER).astype(np.int64)
    ratio_C = np.sqrt(stats.variances(form)) / float(step)
    class_C = np.rint(2 * np.log2(np.maximum(ratio_C, 1e-9))).astype(np.int64) + 3
    coded_C = ratio_C > (_DEAD_AXIS if form == ROTATED else _DEAD)
    class_C = np.where(coded_C, np.clip(class_C, 0, counts.NUM_CLASSES - 1), -1)
    order = _best_order(mean_C)
    at = golomb.put_number(raw_B, at, form, 0)
    at = golomb.put_number(raw_B, at, order, 2)
    at = golomb.put_rows(mean_C[None], np.array([order]), raw_B, at)
    axes_KC = None
    if form == ROTATED:
        class_C = class_C[: int(coded_C.sum())]
        at = golomb.put_number(raw_B, at, len(class_C), 3)
    at = golomb.put_rows(np.diff(class_C, prepend=_FIRST_CLASS)[None], np.array([0]), raw_B, at)
    if form == ROTATED:
        assert stats.axes_CC is not None
        places_K = _axis_places(stats.rows, class_C)
        scaled_KC = np.ldexp(stats.axes_CC[: len(class_C)], places_K[:, None].astype(np.int32))
        axes_KC = np.rint(scaled_KC).astype(np.int64)
        at = golomb.put_rows(axes_KC, _axis_orders(places_K, C), raw_B, at)
    return _side(form, stats.rows, step, mean_C, class_C, axes_KC), at


def read_side(payload_B: Floats, at: int, rows: int, C: int, step: np.float32) -> tuple[Side, int]:
    """Inverse of `write_side`; WireError for what it cannot have written."""
    form, at = golomb.get_number(payload_B, at, 0)
    order, at = golomb.get_number(payload_B, at, 2)
    if order > 24 or form > HALVES or (form == ROTATED and not 1 < C <= _WIDEST):
        raise WireError(_CORRUPT)
    mean_C = np.empty((1, C), np.int64)
    at = golomb.get_rows(payload_B, at, np.array([order]), mean_C)
    K = C
    if form == ROTATED:
        K, at = golomb.get_number(payload_B, at, 3)
        if K > C:
            raise WireError(_CORRUPT)
    moves_K = np.empty((1, K), np.int64)
    at = golomb.get_rows(payload_B, at, np.array([0]), moves_K)
    class_K = np.cumsum(moves_K[0]) + _FIRST_CLASS
    if (
        K
        and not (0 if form == ROTATED else -1)
        <= class_K.min()
        <= class_K.max()
        < counts.NUM_CLASSES
    ):
        raise WireError(_CORRUPT)
    axes_KC = None
    if form == ROTATED:
        axes_KC = np.empty((K, C), np.int64)
        orders_K = _axis_orders(_axis_places(rows, class_K), C)
        at = golomb.get_rows(payload_B, at, orders_K, axes_KC)
    if at > 8 * payload_B.size:
        raise WireError("side information runs past the end of a payload; it is corrupt")
    return _side(form, rows, step, mean_C[0], class_K, axes_KC), at


def to_axes(basis_KC: Floats) -> Floats:
    """float32 matrix (C, K) that takes a row to coordinates of the nearest point in the span of the
    basis: rounded axes are not quite orthogonal.
    """
    basis_KC = basis_KC.astype(np.float64)
    gram_KK = product(basis_KC, basis_KC.T)
    gram_KK.flat[:: len(gram_KK) + 1] += 1e-9  # an axis may be rounded to 0
    solved_KC = torch.linalg.solve(torch.from_numpy(gram_KK), torch.from_numpy(basis_KC)).numpy()
    return np.ascontiguousarray(solved_KC.T.astype(np.float32))


def product(a_IJ: Floats, b_JK: Floats) -> Floats:
    """Matrix product by torch, whose number of threads is the run's own and in its digest: that of
    numpy's library depends on the cores that a rank may use, and with it the last bits.
    """
    a, b = (torch.from_numpy(np.ascontiguousarray(m)) for m in (a_IJ, b_JK))
    return (a @ b).numpy()


def spread_rows(rows: int, count: int) -> np.ndarray:
    """int64: `count` of `rows` row numbers, or all of them, ascending: one from each of as many
    equal stretches, not at the same place of each, because rows of a message may be periodic. Of
    stretches shorter than two rows, neighbours may have the same one.
    """
    if count >= rows:
        return np.arange(rows)
    i = np.arange(count)
    place = (i * 0x9E3779B9 & 0xFFFFFFFF) * 2.0**-32  # multiples of the golden ratio
    return ((i + place) * (rows / count)).astype(np.int64)


_CORRUPT = "side information in a payload is out of range; it is corrupt"


def _side(
    form: int, rows: int, step: np.float32, mean_C: Floats, class_C: Floats, axes_KC: Floats | None
) -> Side:
    """The same on both sides: integers, powers of two, and one product a number."""
    unit = np.float32(step * np.float32(2.0 ** -_fineness(rows)))
    column_K = np.flatnonzero(class_C >= 0)
    basis_KC = None
    if axes_KC is not None:
        scale_K = np.ldexp(np.float32(1), -_axis_places(rows, class_C).astype(np.int32))
        basis_KC = axes_KC.astype(np.float32) * scale_K[:, None]
    return Side(form, column_K, class_C[column_K], mean_C.astype(np.float32) * unit, basis_KC)


def _best_order(values: Floats) -> int:
    """Order of the exponential Golomb code with the fewest bits for signed values."""
    folded = np.where(values >= 0, 2 * values, -2 * values - 1).astype(np.float64)
    orders = np.arange(25)
    lengths = 2 * np.floor(np.log2(folded[:, None] + 2.0**orders)) + 1 - orders
    return int(lengths.sum(axis=0).argmin())
