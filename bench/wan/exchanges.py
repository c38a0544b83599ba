"""Gather and broadcast of frames of one size, nothing else: what an exchange costs on a network.

python -m mpi4py -m wan.exchanges OUT ROUNDS NBYTES
Rank 0 writes {"total_s", "each_s"} to OUT; every rank checks every byte.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from hpcvfl.transport.base import Slots
from hpcvfl.transport.mpi import MpiTransport


def main(out: Path, rounds: int, nbytes: int) -> None:
    """Exchange so often; frame k of round r is full of k + r."""
    transport = MpiTransport()
    size = transport.size
    slots = Slots([nbytes] * size, ["embed"] * size, [nbytes] * size)
    each_s = []
    begun_s = time.perf_counter()
    for round_index in range(rounds):
        transport.round_index = round_index
        slots[transport.rank][:] = transport.rank + round_index
        round_s = time.perf_counter()
        transport.gather(slots)
        transport.broadcast(slots)
        each_s.append(time.perf_counter() - round_s)
        due = np.repeat(np.arange(size) + round_index, nbytes).astype(np.uint8)
        if not np.array_equal(slots.buffer_B, due):
            raise SystemExit(f"rank {transport.rank}, round {round_index}: other bytes than sent")
    total_s = time.perf_counter() - begun_s
    if transport.rank == 0:
        out.write_text(json.dumps({"total_s": total_s, "each_s": each_s}))
    transport.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
