"""`qsgd`: levels of a norm, rounded up or down at random so that the expectation is the value.

Alistarh et al. 2017, QSGD (NeurIPS 30), with codes of a fixed width. EF-VFL (arXiv 2406.14420)
counts bits without the sign and has 2**b - 1 levels: its b is b + 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hpcvfl.codecs.base import Array, Bytes, Codec, as_float32, check_status, choice, known_options
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import qsgd

# legend: N values, G buckets, B bytes

_SMALLEST_NORM = 2.0**-90
"""A bucket with a smaller norm decodes to zeros: the inverse must be finite in float32."""
_LARGEST_NORM = 3.4e38
"""A little below the largest float32, so that s levels of it are finite however they round."""


@dataclass(frozen=True, eq=False)
class QsgdCodec(Codec):
    """Levels -s .. s of the norm of a bucket, s = 2**(bits - 1) - 1.

    bits     : 2..8, sign included
    norm     : l2 or max (largest |x|; less error for the same bits, not in the paper)
    bucket   : consecutive values that share a norm, one after the other in memory; None: all
    contract : what is decoded is divided by tau = 1 + min(n / s**2, sqrt(n) / s), n values in a
               bucket: no longer unbiased, but a contraction in expectation for any input, as error
               feedback needs one (EF-VFL)
    Payload: norms (float32), then the codes, level + s, `bits` bits each, lowest bits first.
    """

    bits: int
    norm: str = "l2"
    bucket: int | None = None
    contract: bool = False

    name = "qsgd"
    examples = (
        *(f"qsgd:bits={b}" for b in range(2, 9)),
        "qsgd:bits=3,norm=max",
        "qsgd:bits=4,bucket=16",
        "qsgd:bits=2,norm=max,bucket=5",
        "qsgd:bits=3,contract=on",
        "qsgd:bits=2,bucket=64,contract=on",
    )

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> QsgdCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits", "norm", "bucket", "contract"))
        if "bits" not in options:
            raise ConfigError("codec qsgd: bits is missing; possible: 2 to 8, e.g. qsgd:bits=4")
        if options["bits"] == "1":
            raise ConfigError(
                "codec qsgd: bits = '1' is the sign alone and leaves no level; possible: 2 to 8"
            )
        bits = choice(cls.name, "bits", options["bits"], [str(b) for b in range(2, 9)])
        norm = choice(cls.name, "norm", options.get("norm", "l2"), ("l2", "max"))
        contract = choice(cls.name, "contract", options.get("contract", "off"), ("on", "off"))
        text = options.get("bucket")
        if text is not None and not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
            raise ConfigError(f"codec qsgd: bucket = {text!r}; possible: 1, 2, 3 ...")
        return cls(int(bits), norm, None if text is None else int(text), contract == "on")

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"qsgd:bits={self.bits}"
        if self.norm != "l2":
            text += f",norm={self.norm}"
        if self.bucket is not None:
            text += f",bucket={self.bucket}"
        if self.contract:
            text += ",contract=on"
        return text

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """A float32 a bucket, and the codes."""
        n = math.prod(shape)
        return 4 * self._num_buckets(n) + bit_kernels.packed_nbytes(n, self.bits)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Two passes over the tensor: norms, then rounding and packing."""
        if x.size == 0:
            return
        x_N = as_float32(x).reshape(-1)
        norm_G = np.empty(self._num_buckets(x.size), np.float32)
        check_status(qsgd.norms(x_N, self._bucket(x.size), self.norm, norm_G))
        if norm_G.max() > _LARGEST_NORM:
            raise NonFiniteError("the norm of a message overflows float32")
        norm_G[norm_G < _SMALLEST_NORM] = 0
        scale_G = np.zeros_like(norm_G)
        np.divide(self._levels, norm_G, out=scale_G, where=norm_G > 0)
        out_B[: norm_G.nbytes] = norm_G.view(np.uint8)
        codes_B = out_B[norm_G.nbytes :]
        qsgd.encode_levels(x_N, self._bucket(x.size), scale_G, self.bits, key, codes_B)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """One pass: unpack and scale; the key is not needed."""
        if out.size == 0:
            return
        side = 4 * self._num_buckets(out.size)
        norm_G = payload_B[:side].copy().view(np.float32)
        if not (norm_G.min() >= 0 and norm_G.max() <= _LARGEST_NORM):  # NaN fails too
            raise WireError("a norm in the payload is negative or not finite; it is corrupt")
        to = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        factor_G = self._factors(norm_G, out.size)
        bucket = self._bucket(out.size)
        qsgd.decode_levels(payload_B[side:], bucket, factor_G, self.bits, to.reshape(-1))
        if to is not out:
            out[...] = to

    @property
    def _levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _bucket(self, n: int) -> int:
        """Values of a bucket in a tensor of n > 0."""
        return n if self.bucket is None else min(n, self.bucket)

    def _num_buckets(self, n: int) -> int:
        return -(-n // self._bucket(n)) if n else 0

    def _factors(self, norm_G: Array, n: int) -> Array:
        """Value of level 1 in each bucket: float32, shape (G,)."""
        factor_G = norm_G.astype(np.float64) / self._levels
        if self.contract:
            bucket = self._bucket(n)
            factor_G[:-1] /= _tau(bucket, self._levels)
            factor_G[-1:] /= _tau(n - bucket * (len(norm_G) - 1), self._levels)
        return factor_G.astype(np.float32)


def _tau(n: int, levels: int) -> float:
    """1 + bound of the relative squared error of QSGD for n values (Alistarh et al., lemma 3.1)."""
    return 1 + min(n / levels**2, math.sqrt(n) / levels)
