"""Where a round's time goes, how it grows, what our own part of it is, and how long a start takes.

It launches mpiexec itself: M + 1 ranks for each row. One axis at a time from M = 4, B = 1000, P =
64.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from hpcvfl.benchmarks.common import Report
from hpcvfl.benchmarks.launching import measured_by_ranks
from hpcvfl.clock import TRAINING_PHASES, WORKING_PHASES
from hpcvfl.codecs import table as codecs
from hpcvfl.codecs.frame import HEADER_NBYTES

CENTRE = {"M": 4, "B": 1000, "P": 64}
AXES = {"M": (2, 4, 8, 16), "B": (100, 1000, 10_000), "P": (16, 64, 256, 1024)}
CODEC = "scalar:bits=4"
ITEMSIZE = 4  # float32
OVERHEAD_MS = 0.5
START_S = 15.0
TIMEOUT_S = 300
START_WORKER = "hpcvfl.benchmarks.start_worker"


def worker(m: int, b: int, p: int, pattern: str, rounds: int, compare: bool) -> dict[str, Any]:
    """Result of one configuration."""
    words = [m, b, p, pattern, rounds, CODEC, int(compare)]
    return measured_by_ranks(m + 1, "hpcvfl.benchmarks.round_worker", words, TIMEOUT_S)


def start_seconds() -> float:
    """Seconds from mpiexec to the end of the first round of preset digits at five ranks.

    The ranks note the time right after the round, so that evaluating, writing files and leaving do
    not count; they share this host's clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun_s = time.time()
        ended_s: float = measured_by_ranks(5, START_WORKER, [folder], TIMEOUT_S)["first_round_s"]
        return ended_s - begun_s


def due_nbytes(
    m: int, b: int, p: int, pattern: str, head_codec: str, head_shapes: Sequence[Sequence[int]]
) -> int:
    """Bytes that all ranks together receive in a round, from the tables of the codecs.

    hub       : the server gets M embedding frames, each party the whole buffer
    allgather : each of the M + 1 ranks gets the M frames of the others
    """
    head = codecs.parse(head_codec)
    head_nbytes = HEADER_NBYTES + sum(head.nbytes(tuple(shape), ITEMSIZE) for shape in head_shapes)
    embeds_nbytes = m * (HEADER_NBYTES + codecs.parse(CODEC).nbytes((b, p), ITEMSIZE))
    downlink = m * (head_nbytes + embeds_nbytes)
    return downlink + (embeds_nbytes if pattern == "hub" else 0)


def off_nbytes(result: dict[str, Any], m: int, b: int, p: int, pattern: str) -> int:
    """By how many bytes of all rounds the books differ from the formula: received, plus sent."""
    due = due_nbytes(m, b, p, pattern, result["head_codec"], result["head_shapes"])
    return sum(abs(nbytes - due * result["booked_rounds"]) for nbytes in result["booked"])


def configurations(smoke: bool) -> list[tuple[int, int, int, str]]:
    """(M, B, P, pattern) of each row, without repeats."""
    if smoke:
        return [(2, 64, 8, "hub"), (2, 64, 8, "allgather")]
    rows = []
    for axis, values in AXES.items():
        for value in values:
            point = {**CENTRE, axis: value}
            rows += [(*point.values(), pattern) for pattern in ("hub", "allgather")]
    return list(dict.fromkeys(rows))  # type: ignore[arg-type]


def rounds_for(m: int, b: int, p: int) -> int:
    """Enough rounds for a median, within seconds."""
    return 20 if m * b * p > 1_000_000 else 60


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    report = Report("round", argv)
    for m, b, p, pattern in configurations(report.smoke):
        rounds = 5 if report.smoke else rounds_for(m, b, p)
        result = worker(m, b, p, pattern, rounds, compare=False)
        phases = {f"{phase} ms": round(result["party"][phase], 3) for phase in TRAINING_PHASES}
        row = {"M": m, "B": b, "P": p, "pattern": pattern, "round ms": result["round_ms"]}
        report.row(**row, **phases, **{"server busy ms": busy(result["server"])})
        off = off_nbytes(result, m, b, p, pattern)
        where = f"M{m} B{b} P{p} {pattern}"
        report.target(f"booked wrongly, {where}", off, 0, "bytes", at_most=True, any_size=True)
    if not report.smoke:
        repeats = [worker(4, 100, 16, "hub", 600, compare=True) for _ in range(3)]
        middle = sorted(repeats, key=lambda r: r["overhead_ms"])[1]
        report.row(M=4, B=100, P=16, pattern="hub", **{"round ms": middle["round_ms"]})
        report.row(M=4, B=100, P=16, pattern="bare script", **{"round ms": middle["bare_ms"]})
        value = middle["overhead_ms"]
        report.target("own overhead M4 B100 P16", value, OVERHEAD_MS, "ms", at_most=True)
        starts = [start_seconds() for _ in range(3)]
        value = statistics.median(starts)
        report.target("mpiexec to first round, 5 ranks", value, START_S, "s", at_most=True)
    return report.finish()


def busy(phases: dict[str, float]) -> float:
    """Milliseconds of own work."""
    return round(sum(phases[phase] for phase in WORKING_PHASES), 3)
