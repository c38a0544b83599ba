"""Codecs without a quantiser: the tensor's own bytes, or its 16-bit rounding."""

from __future__ import annotations

import math

import numpy as np
import torch

from hpcvfl.codecs.base import Array, Bytes, Codec, require_finite
from hpcvfl.errors import NonFiniteError, WireError


class NoneCodec(Codec):
    """The tensor's own dtype, byte for byte."""

    name = "none"
    examples = ("none",)
    spec = "none"
    exact = True

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Elements times their size."""
        return math.prod(shape) * itemsize

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Copy the bytes; NaN and Inf are refused as in every codec."""
        require_finite(x)
        out_B[:] = x.reshape(-1).view(np.uint8)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Copy the bytes back."""
        out.reshape(-1).view(np.uint8)[:] = payload_B
        if not np.isfinite(out).all():
            raise WireError("a value in the payload is not a finite number; the payload is corrupt")


class _HalfCodec(Codec):
    """16 bits a value, rounded to nearest even by torch."""

    torch_dtype: torch.dtype

    @property
    def spec(self) -> str:
        return self.name

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Two bytes a value."""
        return 2 * math.prod(shape)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Round; a finite value that would become Inf is refused."""
        require_finite(x)
        # A copy, since torch warns about read-only memory.
        half = torch.from_numpy(x.reshape(-1).copy()).to(self.torch_dtype)
        if not bool(torch.isfinite(half).all()):
            raise NonFiniteError(f"a value is beyond the range of {self.name}")
        out_B[:] = half.view(torch.int16).numpy().view(np.uint8)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Widen; exact."""
        half = torch.from_numpy(payload_B.copy().view(np.int16)).view(self.torch_dtype)
        torch.from_numpy(out.reshape(-1)).copy_(half)
        if not np.isfinite(out).all():
            raise WireError("a value in the payload is not a finite number; the payload is corrupt")


class Float16Codec(_HalfCodec):
    """IEEE binary16: 11 significant bits, up to 65504."""

    name = "float16"
    examples = ("float16",)
    torch_dtype = torch.float16


class BFloat16Codec(_HalfCodec):
    """bfloat16: 8 significant bits, the range of float32."""

    name = "bfloat16"
    examples = ("bfloat16",)
    torch_dtype = torch.bfloat16
