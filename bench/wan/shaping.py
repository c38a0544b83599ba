"""What the router does to a packet, without a clock or a device of its own: rate, queue, delay.

A packet from rank s to rank d first leaves over the line of s (at `bytes_per_s`, behind what s sent
before it), is under way for `delay_s`, then leaves over the line of d. The hub in the middle costs
nothing. All times are seconds of whatever clock the caller has.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

QUEUE_BYTES = 4 << 20
"""Room of a line for what waits to leave; more is dropped, as a real router does."""


class Line:
    """One direction of a rank's line: one packet after another, at a rate."""

    def __init__(self, bytes_per_s: float | None = None, queue_bytes: int = QUEUE_BYTES) -> None:
        """`bytes_per_s` None: no limit, and no queue."""
        self.bytes_per_s, self.queue_bytes = bytes_per_s, queue_bytes
        self._free_s = float("-inf")  # when the last packet taken so far is out

    def leaves_s(self, now_s: float, nbytes: int) -> float | None:
        """When the last bit of a packet that comes now is out; None: no room, it is dropped."""
        if self.bytes_per_s is None:
            return now_s
        begin_s = max(now_s, self._free_s)
        if (begin_s - now_s) * self.bytes_per_s + nbytes > self.queue_bytes:
            return None
        self._free_s = begin_s + nbytes / self.bytes_per_s
        return self._free_s


class Hub:
    """All packets under way. `accept` takes one, `due` gives those whose time has come.

    delay_s     : one way, from rank to rank
    bytes_per_s : of every line, each direction by itself; None: no limit
    dropped     : packets for which a line had no room
    """

    def __init__(
        self,
        num_ranks: int,
        delay_s: float,
        bytes_per_s: float | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.delay_s, self.dropped = delay_s, 0
        self._up_R = [Line(bytes_per_s, queue_bytes) for _ in range(num_ranks)]
        self._down_R = [Line(bytes_per_s, queue_bytes) for _ in range(num_ranks)]
        # (when, number, has it left the line of its destination, destination, packet); the number
        # keeps packets of one moment in the order in which they came.
        self._way: list[tuple[float, int, bool, int, bytes]] = []
        self._numbers = count()

    def accept(self, now_s: float, source: int, dest: int, packet: bytes) -> None:
        """Take a packet that `source` sends now."""
        out_s = self._up_R[source].leaves_s(now_s, len(packet))
        if out_s is None:
            self.dropped += 1
            return
        item = (out_s + self.delay_s, next(self._numbers), False, dest, packet)
        heapq.heappush(self._way, item)

    def next_s(self) -> float | None:
        """When something is due next; None: nothing is under way."""
        return self._way[0][0] if self._way else None

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """(destination, packet) of what has arrived by now, in order of arrival."""
        while self._way and self._way[0][0] <= now_s:
            when_s, _, has_left, dest, packet = heapq.heappop(self._way)
            if not has_left:
                out_s = self._down_R[dest].leaves_s(when_s, len(packet))
                if out_s is None:
                    self.dropped += 1
                    continue
                if out_s > now_s:
                    item = (out_s, next(self._numbers), True, dest, packet)
                    heapq.heappush(self._way, item)
                    continue
            yield dest, packet
