"""How fast the kernels are on one core, against memcpy, FBGEMM (in every torch) and numpy.

All speeds are GB/s of float32 (1e9 bytes of input of an encoder, of output of a decoder), 128
columns, buffers given and 64-byte aligned, NaN and Inf checked. min/max encode = scan + encode.
A kernel and its yardstick alternate within one loop; figures are medians. At 1 MiB each turn makes
one untimed and five timed calls, so that all find their data in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcvfl.benchmarks.common import Report, median_seconds
from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import scalar, scan

COLUMNS = 128
KEY = 0x9E3779B97F4A7C15
MIB = 1 << 20
FBGEMM = {8: "byte", 4: "4bit", 2: "2bit"}
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Size:
    """Bytes of float32 and how often to time a call."""

    name: str
    nbytes: int
    repeats: int
    prime: int
    inner: int


SMALL = Size("1 MiB", MIB, 101, 1, 5)
LARGE = Size("64 MiB", 64 * MIB, 31, 0, 1)
TINY = Size("64 KiB", MIB // 16, 5, 1, 5)


class Buffers:
    """Input, output and payload of one size, and the ranges of the input."""

    def __init__(self, size: Size) -> None:
        rows = size.nbytes // 4 // COLUMNS
        generator = torch.Generator().manual_seed(0)
        self.x_tensor = torch.randn(rows, COLUMNS, generator=generator)
        self.x_RC = self.x_tensor.numpy()
        self.x_N = self.x_RC.reshape(-1)
        self.y_RC = torch.zeros(rows, COLUMNS).numpy()
        self.y_N = self.y_RC.reshape(-1)
        self.room_B = torch.zeros(size.nbytes // 2, dtype=torch.uint8).numpy()
        self.codes_N = torch.zeros(self.x_N.size, dtype=torch.int16).numpy().view(np.uint16)
        self.range_2 = np.empty(2, np.float32)
        self.range_C2 = np.empty((COLUMNS, 2), np.float32)

    def payload(self, bits: int) -> np.ndarray:
        """Room for the payload at that width."""
        return self.room_B[: bit_kernels.packed_nbytes(self.x_N.size, bits)]


def message_calls(b: Buffers, bits: int, dither: bool) -> Calls:
    """Fixed-range encode, min/max encode and decode of a message with one range."""
    out_B, lo = b.payload(bits), -4.5
    step = 9.0 / (2**bits - 1)

    def fixed() -> None:
        assert scalar.encode_uniform(b.x_N, lo, 1 / step, bits, dither, KEY, out_B) == 0

    def minmax() -> None:
        assert scan.minmax(b.x_N, b.range_2) == 0
        low, high = b.range_2.tolist()
        inv = (2**bits - 1) / (high - low)
        assert scalar.encode_uniform(b.x_N, low, inv, bits, dither, KEY, out_B) == 0

    def decode() -> None:
        scalar.decode_uniform(out_B, lo, step, bits, dither, KEY, b.y_N)

    return {"minmax encode": minmax, "fixed encode": fixed, "decode": decode}


def column_calls(b: Buffers, bits: int, dither: bool) -> Calls:
    """The same with a range per column."""
    out_B, levels = b.payload(bits), np.float32(2**bits - 1)
    lo_C = np.full(COLUMNS, -4.5, np.float32)
    step_C = np.full(COLUMNS, 9, np.float32) / levels
    inv_C = 1 / step_C

    def fixed() -> None:
        assert scalar.encode_uniform_columns(b.x_RC, lo_C, inv_C, bits, dither, KEY, out_B) == 0

    def minmax() -> None:
        assert scan.minmax_columns(b.x_RC, b.range_C2) == 0
        low_C = b.range_C2[:, 0].copy()
        inverse_C = levels / (b.range_C2[:, 1] - low_C)
        got = scalar.encode_uniform_columns(b.x_RC, low_C, inverse_C, bits, dither, KEY, out_B)
        assert got == 0

    def decode() -> None:
        scalar.decode_uniform_columns(out_B, lo_C, step_C, bits, dither, KEY, b.y_RC)

    return {"minmax encode": minmax, "fixed encode": fixed, "decode": decode}


def yardsticks(b: Buffers, bits: int) -> Calls:
    """Memcpy of the input, and FBGEMM at the widths it has."""
    calls: Calls = {"memcpy": lambda: np.copyto(b.y_N, b.x_N)}
    if bits in FBGEMM:
        prefix = f"embedding_bag_{FBGEMM[bits]}_"
        pack = getattr(torch.ops.quantized, prefix + "prepack")
        unpack = getattr(torch.ops.quantized, prefix + "unpack")
        packed = pack(b.x_tensor)
        calls["fbgemm encode"] = lambda: pack(b.x_tensor)
        calls["fbgemm decode"] = lambda: unpack(packed)
    return calls


def numpy_encode(b: Buffers) -> None:
    """8 bits per value as one writes it in numpy: min, max, normalise, round, cast."""
    low, high = b.x_N.min(), b.x_N.max()
    np.rint((b.x_N - low) * (255 / (high - low))).astype(np.uint8)


def gigabytes_per_second(calls: Calls, size: Size) -> dict[str, float]:
    """GB/s of float32 of each call, alternating."""
    seconds = median_seconds(calls, size.repeats, 2, size.inner, size.prime)
    return {name: size.nbytes / 1e9 / s for name, s in seconds.items()}


def measure(report: Report, size: Size, widths: Sequence[int]) -> None:
    """One row per width, scope and dither; the targets of that size."""
    b = Buffers(size)
    for bits in widths:
        for dither in (False, True):
            calls = message_calls(b, bits, dither)
            got = gigabytes_per_second({**yardsticks(b, bits), **calls}, size)
            word = "on" if dither else "off"
            report.row(size=size.name, bits=bits, scope="message", dither=word, **got)
            judge(report, size, bits, dither, got)
            if size is not LARGE:
                got = gigabytes_per_second(column_calls(b, bits, dither), size)
                report.row(size=size.name, bits=bits, scope="column", dither=word, **got)
    got = gigabytes_per_second({"numpy": lambda: numpy_encode(b)}, size)
    report.row(size=size.name, bits=8, scope="numpy", **{"minmax encode": got["numpy"]})


def judge(report: Report, size: Size, bits: int, dither: bool, got: dict[str, float]) -> None:
    """Targets: at 1 MiB against FBGEMM of the same width, at 64 MiB against memcpy."""
    if bits not in FBGEMM:
        return
    name = f"{size.name}, {bits} bits{', dither' if dither else ''}:"
    if size is SMALL:
        bound = 1.5 if not dither else 0.7 if bits == 8 else 1.2
        ratio = got["minmax encode"] / got["fbgemm encode"]
        report.target(f"{name} min/max encode", ratio, bound, "x FBGEMM")
        ratio = got["decode"] / got["fbgemm decode"]
        report.target(f"{name} decode", ratio, 0.45 if dither else 1.0, "x FBGEMM")
    elif size is LARGE:
        bounds = {"fixed encode": (1.2, 0.95), "minmax encode": (0.65, 0.55), "decode": (1.1, 1.0)}
        for what, bound_pair in bounds.items():
            ratio = got[what] / got["memcpy"]
            report.target(f"{name} {what}", ratio, bound_pair[dither], "x memcpy")


def measure_packing(report: Report, size: Size) -> None:
    """Packing alone: GB/s of uint16 codes read or written."""
    b = Buffers(size)
    for bits in bit_kernels.BITS:
        out_B = b.payload(bits)
        b.codes_N[:] = np.arange(b.codes_N.size) % 2**bits
        calls: Calls = {
            "pack": partial(bit_kernels.pack_bits, b.codes_N, bits, out_B),
            "unpack": partial(bit_kernels.unpack_bits, out_B, bits, b.codes_N),
        }
        got = gigabytes_per_second(calls, size)
        halved = {name: speed / 2 for name, speed in got.items()}  # a code has 2 bytes, not 4
        report.row(size=size.name, bits=bits, scope="codes", **halved)


def check(report: Report, widths: Sequence[int]) -> None:
    """What holds at any size: payloads of the exact size, errors within half a step, same bytes."""
    b = Buffers(TINY)
    size_off, worst, scope_off = 0, 0.0, 0
    for bits in widths:
        size_off += abs(8 * b.payload(bits).size - b.x_N.size * bits)
        step = 9.0 / (2**bits - 1)
        for dither in (False, True):
            message, column = message_calls(b, bits, dither), column_calls(b, bits, dither)
            message["fixed encode"]()
            payload_B = b.payload(bits).copy()
            column["fixed encode"]()
            scope_off += int((payload_B != b.payload(bits)).sum())
            message["decode"]()
            worst = max(worst, float(np.abs(b.y_N - b.x_N).max() / step))
    report.target("payload size", size_off, 0, "bits off", at_most=True, any_size=True)
    report.target("one range per column, all equal", scope_off, 0, "bytes off", **_exact())
    report.target("error of a decoded value", worst, 0.52, "steps", **_exact())


def _exact() -> dict[str, Any]:
    return {"at_most": True, "any_size": True}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit code is 0 if every judged target passed.

    argv : --json FILE, --smoke (64 KiB, 4 bits only, no speed is judged)
    """
    report = Report("kernels", argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        widths = (4,) if report.smoke else bit_kernels.BITS
        check(report, widths)
        if report.smoke:
            measure(report, TINY, widths)
        else:
            measure(report, SMALL, bit_kernels.BITS)
            measure(report, LARGE, bit_kernels.BITS)
            measure_packing(report, SMALL)
    finally:
        torch.set_num_threads(before)
    return report.finish()
