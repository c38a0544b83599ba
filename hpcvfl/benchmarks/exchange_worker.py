"""What each rank of bench exchange does; arguments: OUT SECONDS SIZE SIZE ..

raw  = mpi4py's Igatherv and Ibcast on buffers of its own, waiting with waiting.wait_until
ours = gather and broadcast of Metered(MpiTransport) with the same pace, booked in a real Meter
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcvfl.ledger import Meter
from hpcvfl.transport.base import Slots, aligned_bytes
from hpcvfl.transport.metered import Metered
from hpcvfl.transport.mpi import MPI, MpiTransport
from hpcvfl.transport.waiting import wait_until

WORLD = MPI.COMM_WORLD
TURN_S = 4e-3  # a timed turn is as many exchanges as take about this long
COMPUTE_S = 10e-3
now = time.perf_counter


def main(argv: Sequence[str]) -> None:
    """Measure and, on rank 0, write the result as JSON."""
    out, seconds, sizes = Path(argv[0]), float(argv[1]), [int(word) for word in argv[2:]]
    transport = MpiTransport(timeout_s=120.0)
    result: dict[str, Any] = {"exchange": [exchange(transport, n, seconds) for n in sizes]}
    if transport.size > 2:
        result["wait"] = wait(transport, 3 if seconds == 0 else 150)
    if transport.rank == 0:
        out.write_text(json.dumps(result))


def exchange(transport: MpiTransport, nbytes: int, seconds: float) -> dict[str, float]:
    """One frame size: medians of alternating turns, the median of their ratios, and two checks."""
    rank, size = transport.rank, transport.size
    meter = Meter()
    meter.phase = "train"
    metered = Metered(transport, meter)
    slots = Slots([nbytes] * size, ["HEAD"] + ["EMBED"] * (size - 1), [4 * nbytes] * size)
    slots.buffer_B[:] = 0
    slots[rank][:] = rank + 1

    def ours() -> None:
        metered.gather(slots)
        metered.broadcast(slots)

    raw = raw_exchange(nbytes)

    def both() -> None:
        raw()
        ours()

    once = timed(transport, both, 3) / 3
    inner = max(1, int(WORLD.bcast(TURN_S / once)))
    turns = max(3, min(200, int(WORLD.bcast(seconds / (once * inner)))))
    pairs = [(timed(transport, raw, inner), timed(transport, ours, inner)) for _ in range(turns)]
    wrong = int((slots.buffer_B != np.repeat(np.arange(1, size + 1), nbytes)).sum())
    calls = 3 + inner * turns
    due = calls * nbytes * (size - 1 if rank == 0 else size)
    wrong, off = WORLD.allreduce(wrong), WORLD.allreduce(abs(meter.received()[0] - due))
    return {
        "nbytes": nbytes,
        "raw_us": 1e6 * statistics.median(a for a, _ in pairs) / inner,
        "ours_us": 1e6 * statistics.median(b for _, b in pairs) / inner,
        "ratio": statistics.median(b / a for a, b in pairs),
        "turns": turns,
        "wrong_bytes": wrong,
        "off_bytes": off,
    }


def raw_exchange(nbytes: int) -> Callable[[], None]:
    """The same exchange as a script would write it with mpi4py alone."""
    comm = WORLD.Dup()
    rank, size = comm.Get_rank(), comm.Get_size()
    buffer_B = aligned_bytes(nbytes * size)
    buffer_B[:] = rank
    own_B = buffer_B[rank * nbytes : (rank + 1) * nbytes]
    counts, offsets = [nbytes] * size, [nbytes * k for k in range(size)]

    def call() -> None:
        if rank == 0:
            every = [buffer_B, counts, offsets, MPI.BYTE]
            request = comm.Igatherv(MPI.IN_PLACE, every, 0)
        else:
            request = comm.Igatherv([own_B, MPI.BYTE], None, 0)
        wait_until(request.Test)
        wait_until(comm.Ibcast([buffer_B, MPI.BYTE], 0).Test)

    return call


def timed(transport: MpiTransport, call: Callable[[], object], inner: int) -> float:
    """Seconds of `inner` calls on this rank, after all ranks have met."""
    transport.barrier()
    start = now()
    for _ in range(inner):
        call()
    return now() - start


def wait(transport: MpiTransport, turns: int) -> dict[str, float]:
    """The last rank computes 10 ms, alone or while all others wait for it; then all exchange.

    Alone: the others sleep meanwhile. Late: from the end of the computation to the moment when the
    last rank leaves the exchange.
    """
    slots = Slots([888] * transport.size, ["EMBED"] * transport.size, [0] * transport.size)
    slots.buffer_B[:] = 0
    loops, last = calibrate(transport), transport.size - 1
    alone: list[float] = []
    beside: list[float] = []
    posts: list[float] = []
    leaves: list[float] = []
    for turn in range(2 * turns):
        others_wait = turn % 2 == 1
        transport.barrier()
        start = now()
        if transport.rank == last:
            burn(loops)
        elif not others_wait:
            time.sleep(2 * COMPUTE_S)
        posted = now()
        transport.gather(slots)
        transport.broadcast(slots)
        leaves.append(now())
        posts.append(posted)
        (beside if others_wait else alone).append(posted - start)
    # One clock for all ranks: they share this host.
    late = np.max(WORLD.allgather(leaves), axis=0)[1::2] - np.array(posts)[1::2]
    mine = {
        "alone_ms": 1e3 * statistics.median(alone),
        "beside_ms": 1e3 * statistics.median(beside),
        "loss_percent": 100 * float(np.median(np.divide(beside, alone))) - 100,
        "late_us": 1e6 * float(np.median(late)),
        "turns": turns,
    }
    result: dict[str, float] = WORLD.bcast(mine, root=last)
    return result


def calibrate(transport: MpiTransport) -> int:
    """How many loops of `burn` take 10 ms on the last rank with nothing else running."""
    loops, last, times = 100_000, transport.size - 1, []
    transport.barrier()
    if transport.rank != last:
        time.sleep(0.2)
    for _ in range(5):
        start = now()
        burn(loops)
        times.append(now() - start)
    return int(WORLD.bcast(loops * COMPUTE_S / min(times), root=last))


def burn(loops: int) -> int:
    """Keep the CPU busy, without memory or system calls."""
    total = 0
    for i in range(loops):
        total += i
    return total


if __name__ == "__main__":
    main(sys.argv[1:])
