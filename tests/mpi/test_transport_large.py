"""Messages of more than 2 GiB, on exactly two ranks (conftest.py: elsewhere not collected)."""

from __future__ import annotations

import numpy as np
import pytest

from hpcvfl.transport import Slots
from hpcvfl.transport.mpi import MpiTransport

NBYTES = 2**31 + 4099


@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
def test_a_frame_of_more_than_2_gib_arrives_whole() -> None:
    """Gathered from rank 1, broadcast with a byte changed beyond 2**31, then sent back."""
    transport = MpiTransport(timeout_s=240.0)
    rank = transport.rank
    slots = Slots([64, NBYTES], ["HEAD", "EMBED"], [64, NBYTES])
    slots[rank][:] = 7 + rank
    if rank == 1:
        slots[1][::4097] = 99
    transport.gather(slots)
    if rank == 0:
        check(slots[1], 8)
        slots[1][-1] = 55
    transport.broadcast(slots)
    assert slots[0].tolist() == [7] * 64
    assert slots[1][-1] == 55
    slots[1][-1] = 8 if (NBYTES - 1) % 4097 else 99
    check(slots[1], 8)
    if rank == 1:
        transport.send(slots[1], 0, "BACK")
    else:
        slots[1][:] = 0
        assert transport.receive(slots[1], 1, "BACK") == (1, NBYTES)
        check(slots[1], 8)
    transport.close()


def check(frame_B: np.ndarray, fill: int) -> None:
    """All `fill`, but 99 at every 4097th byte; compared in blocks, for the memory's sake."""
    assert frame_B.nbytes == NBYTES
    due_B = np.full(4097 * 4096, fill, np.uint8)
    due_B[::4097] = 99
    for at in range(0, NBYTES, len(due_B)):
        block_B = frame_B[at : at + len(due_B)]
        assert np.array_equal(block_B, due_B[: len(block_B)]), f"block at byte {at}"
