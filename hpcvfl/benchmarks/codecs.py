"""How fast the codecs are on one core, range scan and packing included, and a step of feedback.

GB/s of float32 (1e9 bytes of input of an encoder, of output of a decoder), 128 columns unless a
row says otherwise, payload buffer given, NaN and Inf checked. memcpy (np.copyto of the same
input) alternates with every codec. A step of error feedback is a sender's whole encode: gather,
subtract, encode, decode, add, error; it is compared with encode + decode of the codec inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from hpcvfl import seeds
from hpcvfl.benchmarks.common import Report, median_seconds
from hpcvfl.benchmarks.kernels import LARGE, SMALL, TINY, Size, gigabytes_per_second
from hpcvfl.codecs import table
from hpcvfl.codecs.stream import Stream
from hpcvfl.kernels import lattice

COLUMNS = 128
REFERENCE_GBPS = 0.03
"""C-VFL's published lattice quantiser, without packing: 0.027 to 0.032 GB/s measured on a 2-core
EPYC guest whose memcpy is 22 to 26 GB/s; `published_maths` stands in on this machine."""

CODECS = (
    ("scalar:bits=2,range=gauss", 128),
    ("lattice:dim=2,bits=2", 128),
    ("lattice:dim=2,bits=4", 128),
    ("lattice:dim=4,bits=2", 128),
    ("lattice:dim=8,bits=2", 128),
    ("lattice-paper:bits=2", 128),
    ("topk:k=8,per=row,values=(scalar:bits=1,range=gauss)", 128),
    ("topk:k=2,per=row,values=(scalar:bits=1,range=gauss)", 16),
    ("topk:k=8", 128),
    ("topk:ratio=0.05,per=tensor", 128),
    ("randomk:ratio=0.05", 128),
    ("qsgd:bits=4,norm=max,bucket=64", 128),
    ("best:bits=0.5", 128),
    ("best:bits=2", 128),
    ("best:bits=2", 16),
)
IN_USE = (
    ("best:bits=0.5", 16),
    ("best:bits=2", 16),
    ("scalar:bits=2,range=gauss,scope=column", 16),
)
"""Codecs also timed at the size of a message in training, 1000 rows: nothing is judged there."""

MESSAGE = Size("1000 x 16", 1000 * 16 * 4, 51, 1, 1)

"""(codec, columns of the message)."""

FEEDBACK = "scalar:bits=2,range=gauss"
ROWS, SMALL_MEMORY, LARGE_MEMORY = 1024, 10_000, 1_000_000


def measure(report: Report, size: Size, codecs: Sequence[tuple[str, int]] = CODECS) -> None:
    """A row per codec; the aims at that size."""
    for spec, columns in codecs:
        x_RC = torch.randn(size.nbytes // 4 // columns, columns, generator=seeded()).numpy()
        y_RC = torch.zeros(x_RC.shape).numpy()
        codec = table.parse(spec)
        payload_B = np.zeros(codec.nbytes(x_RC.shape, 4), np.uint8)
        calls: dict[str, Callable[[], object]] = {
            "memcpy": partial(np.copyto, y_RC, x_RC),
            "encode": partial(codec.encode, x_RC, 1, payload_B),
            "decode": partial(codec.decode, payload_B, 1, y_RC),
        }
        slow = gigabytes_per_second(calls, Size(size.name, size.nbytes, 1, 0, 1))["encode"] < 2
        repeats = min(size.repeats, 9) if slow else size.repeats
        got = gigabytes_per_second(
            calls, Size(size.name, size.nbytes, repeats, size.prime, 1 if slow else size.inner)
        )
        report.row(size=size.name, codec=spec, columns=columns, **got)
        judge(report, size, spec, columns, got)


def judge(report: Report, size: Size, spec: str, columns: int, got: dict[str, float]) -> None:
    """The aims: near memcpy for A2, GB/s for the others, at both sizes."""
    if size is MESSAGE:
        return
    where = f"{spec}, {columns} columns, {size.name}:"
    if spec.startswith("lattice:dim=2"):
        if size is LARGE:
            report.target(f"{where} encode", got["encode"] / got["memcpy"], 0.4, "x memcpy")
        report.target(f"{where} encode", got["encode"] / REFERENCE_GBPS, 200, "x the reference")
    for name, due in (("lattice:dim=8", 2.0), ("topk:", 1.0), ("best:", 0.2)):
        if spec.startswith(name):
            report.target(f"{where} encode", got["encode"], due, "GB/s")
            if name == "best:":
                report.target(f"{where} decode", got["decode"], due, "GB/s")


def published_maths(x_RC: np.ndarray) -> np.ndarray:
    """C-VFL's published 2-bit lattice quantiser as numpy spells it, without packing.

    Pairs of values to integer triples that sum to zero, rounded, the worst coordinate mended
    (Conway & Sloane 1982), and back; scale 1/4 of the largest value, no dither.
    """
    plane_23 = np.array([[1, -1, 0], [1, 1, -2]], np.float32)
    plane_23 /= np.linalg.norm(plane_23, axis=1, keepdims=True)
    scale = float(x_RC.max()) / 4
    y_G3 = (x_RC.reshape(-1, 2) / scale) @ plane_23
    near_G3 = np.rint(y_G3)
    miss_G3, excess_G = y_G3 - near_G3, near_G3.sum(axis=1)
    order_G3, every_G = miss_G3.argsort(axis=1), np.arange(len(y_G3))
    near_G3[every_G, order_G3[:, 0]] -= excess_G > 0
    near_G3[every_G, order_G3[:, 2]] += excess_G < 0
    return ((near_G3 @ plane_23.T) * scale).reshape(x_RC.shape)


def measure_published(report: Report) -> None:
    """The published maths against A2 with everything, in turns, at 1 MiB."""
    x_RC = torch.randn(SMALL.nbytes // 4 // COLUMNS, COLUMNS, generator=seeded()).numpy()
    codec = table.parse("lattice:dim=2,bits=2")
    payload_B = np.zeros(codec.nbytes(x_RC.shape, 4), np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "published": partial(published_maths, x_RC),
        "encode": partial(codec.encode, x_RC, 1, payload_B),
    }
    got = gigabytes_per_second(calls, Size(SMALL.name, SMALL.nbytes, 9, 1, 1))
    report.row(
        size=SMALL.name, codec="published lattice in numpy", columns=128, encode=got["published"]
    )
    name = "lattice:dim=2,bits=2, 1 MiB: encode"
    report.target(name, got["encode"] / got["published"], 200, "x the published maths in numpy")


def measure_nearest(report: Report, size: Size) -> None:
    """The lattices' nearest points alone, unbounded, nothing packed."""
    for name, dim in (("a2", 2), ("d4", 4), ("e8", 8)):
        x_GD = torch.randn(size.nbytes // 4 // dim, dim, generator=seeded()).numpy()
        out_GD = np.empty_like(x_GD)
        nearest = getattr(lattice, f"nearest_{name}")
        got = gigabytes_per_second({"encode": partial(nearest, x_GD, out_GD)}, size)
        report.row(size=size.name, codec=f"nearest_{name}", columns=dim, **got)


def measure_feedback(report: Report, repeats: int, large: int = LARGE_MEMORY) -> None:
    """A sender's step at two sizes of memory, against encode + decode without feedback."""
    x_NP = torch.randn(ROWS, COLUMNS, generator=seeded()).numpy()
    steps: dict[str, Callable[[], object]] = {}
    plain = Stream(table.parse(FEEDBACK), [(COLUMNS,)], np.dtype(np.float32), ROWS)
    message = plain.message(ROWS)
    payload_B, back = np.zeros(message.nbytes, np.uint8), [np.empty_like(x_NP)]

    def both_ways() -> None:
        message.encode([x_NP], 1, payload_B)
        message.decode(payload_B, 1, back)

    steps["plain"] = both_ways
    for num_rows in (SMALL_MEMORY, large):
        stream = Stream(
            table.parse(f"ef({FEEDBACK})"), [(COLUMNS,)], np.dtype(np.float32), num_rows
        )
        stream.memories[0].state_SP[...] = 0.0  # pages that exist, as after an epoch
        steps[f"ef, {num_rows} rows"] = feedback_step(stream, num_rows, x_NP, payload_B)
    seconds = median_seconds(steps, repeats, 3)
    for name, value in seconds.items():
        report.row(size="1024 x 128", codec=f"{FEEDBACK}: {name}", us=1e6 * value)
    small, far = (seconds[f"ef, {n} rows"] for n in (SMALL_MEMORY, large))
    limits = {"at_most": True}
    report.target("ef step, 1M rows", far / seconds["plain"], 5, "x encode + decode", **limits)
    report.target("ef step, 1M rows", far / small, 2.5, "x itself at 10k rows", **limits)


def feedback_step(
    stream: Stream, num_rows: int, x_NP: np.ndarray, payload_B: np.ndarray
) -> Callable[[], object]:
    """Encode one batch after another of an epoch, rows at random."""
    order = seeds.generator(0, "rows", num_rows).permutation(num_rows)
    batches = [order[at : at + ROWS] for at in range(0, num_rows - ROWS + 1, ROWS)]
    turn = iter(range(1 << 62))

    def step() -> None:
        stream.encode([x_NP], 1, payload_B, batches[next(turn) % len(batches)])

    return step


def seeded() -> torch.Generator:
    """The same input everywhere."""
    return torch.Generator().manual_seed(0)


def check(report: Report) -> None:
    """What holds at any speed: what decodes is near what was encoded, in the bytes announced."""
    for spec, columns in CODECS:
        x_RC = torch.randn(TINY.nbytes // 4 // columns, columns, generator=seeded()).numpy()
        codec = table.parse(spec)
        payload_B, y_RC = np.zeros(codec.nbytes(x_RC.shape, 4), np.uint8), np.empty_like(x_RC)
        codec.encode(x_RC, 1, payload_B)
        codec.decode(payload_B, 1, y_RC)
        error = float(np.square(y_RC - x_RC).mean() / np.square(x_RC).mean())
        report.target(
            f"{spec}: share of the energy lost", error, 1.0, "", at_most=True, any_size=True
        )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; the exit code is 0 if every judged target passed.

    argv : --json FILE, --smoke (64 KiB, no speed is judged)
    """
    report = Report("codecs", argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(report)
        if report.smoke:
            measure(report, TINY)
            measure_feedback(report, 3, 20_000)
        else:
            for size in (SMALL, LARGE):
                measure(report, size)
                measure_nearest(report, size)
            measure_published(report)
            measure(report, MESSAGE, IN_USE)
            measure_feedback(report, 201)
    finally:
        torch.set_num_threads(before)
    return report.finish()
