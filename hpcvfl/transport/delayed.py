"""An emulated slow network: every verb really sleeps before it starts."""

from __future__ import annotations

import time

from hpcvfl.transport.base import Bytes, Slots, Transport, Wrapper


class Delayed(Wrapper):
    """Sleep latency_ms / 2 + bytes * 8 / bandwidth on every rank, then do the verb.

    `bytes` is what crosses this rank's own full-duplex link, so the busiest rank sets the pace:
    root receives all frames of a gather and sends the buffer to each peer in a broadcast. A gather
    and a broadcast together cost one round trip, latency_ms, and so does an allgather alone: one
    round of either exchange pattern costs the same latency. A receive does not sleep, its sender
    did. On the threads transport, where one rank runs at a time, the sleeps of the ranks add up.

    latency_ms     : float            one round trip, in milliseconds
    bandwidth_gbps : float or None    link speed in 1e9 bits per second; None: no limit
    """

    def __init__(
        self, inner: Transport, latency_ms: float = 0.0, bandwidth_gbps: float | None = None
    ) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self.latency_ms, self.bandwidth_gbps = latency_ms, bandwidth_gbps

    def gather(self, slots: Slots, root: int = 0) -> None:
        """Gather, after half a round trip and the frames that this rank sends or receives."""
        self.check(slots, root)
        self._sleep(0.5, self._hub_nbytes(slots, root))
        self.inner.gather(slots, root)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """Broadcast, after half a round trip and the buffer, at root once per peer."""
        self.check(slots, root)
        copies = self.size - 1 if self.rank == root else 1
        self._sleep(0.5, copies * slots.buffer_B.nbytes)
        self.inner.broadcast(slots, root)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """Scatter, after half a round trip and the frames that this rank sends or receives."""
        self.check(slots, root)
        self._sleep(0.5, self._hub_nbytes(slots, root))
        self.inner.scatter(slots, root)

    def allgather(self, slots: Slots) -> None:
        """Allgather, after a whole round trip and the larger of what is sent and received."""
        self.check(slots)
        own = slots.sizes_R[self.rank]
        sent, received = own * (self.size - 1), slots.buffer_B.nbytes - own
        self._sleep(1.0, max(sent, received))
        self.inner.allgather(slots)

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """Send, after half a round trip and the bytes."""
        self._sleep(0.5, data_B.nbytes)
        self.inner.send(data_B, dest, kind)

    def barrier(self) -> None:
        """Barrier, after half a round trip."""
        self._sleep(0.5, 0)
        self.inner.barrier()

    def _hub_nbytes(self, slots: Slots, root: int) -> int:
        own = slots.sizes_R[self.rank]
        return slots.buffer_B.nbytes - own if self.rank == root else own

    def _sleep(self, round_trips: float, nbytes: int) -> None:
        seconds = round_trips * self.latency_ms * 1e-3
        if self.bandwidth_gbps is not None:
            seconds += nbytes * 8 / (self.bandwidth_gbps * 1e9)
        time.sleep(seconds)
