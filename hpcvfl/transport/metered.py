"""Count what the verbs move: the only source of the byte counts in a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from hpcvfl.transport.base import Bytes, Slots, Transport, Wrapper

Direction = Literal["in", "out"]
Record = tuple[int, str, Direction, int, int]
"""The arguments of Recorder.record."""
IN: Direction = "in"
OUT: Direction = "out"


class Recorder(Protocol):
    """Takes the records; the ledger's Meter is one.

    One that also has `record_all(records)` gets those of a call together: the same list object each
    time the call is repeated, never changed, so that what is looked up for it can be kept.
    """

    def record(self, peer: int, kind: str, direction: str, nbytes: int, raw_bytes: int) -> None:
        """What one call moved of one kind between this rank and `peer`."""


class Metered(Wrapper):
    """Report what every verb moved, after it succeeded, as (peer, kind, direction, bytes,
    raw bytes).

    Frames of one kind that one call moves between this rank and one peer are one record: a record
    costs 0.7 us, and root's broadcast to four parties would make twenty. A broadcast books each
    frame of the buffer at each receiver, with the root as peer, however the library's tree moves
    it; a rank's own frame that comes back in a broadcast counts, as it does come back. Frames of
    zero bytes are no messages and are not booked.

    raw_nbytes : (peer, kind, bytes) -> raw bytes of what travels by send/receive; what nobody says
                 has no other form than the bytes sent
    """

    def __init__(self, inner: Transport, meter: Recorder) -> None:
        """Wrap `inner`; `meter` takes the records of this rank."""
        super().__init__(inner)
        self.meter = meter
        self.raw_nbytes: Callable[[int, str, int], int] = lambda peer, kind, nbytes: nbytes
        self._record_all = getattr(meter, "record_all", self._one_by_one)

    def gather(self, slots: Slots, root: int = 0) -> None:
        """Gather; books root's `in` from each peer, or the own frame `out` to root."""
        self.inner.gather(slots, root)
        records = slots.plans.get((self, "gather", root))
        self._record_all(self._records("gather", slots, root) if records is None else records)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """Broadcast; books every frame `in` from root, or `out` once per peer."""
        self.inner.broadcast(slots, root)
        records = slots.plans.get((self, "broadcast", root))
        self._record_all(self._records("broadcast", slots, root) if records is None else records)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """Scatter; books root's frame for each peer `out`, or the own frame `in` from root."""
        self.inner.scatter(slots, root)
        records = slots.plans.get((self, "scatter", root))
        self._record_all(self._records("scatter", slots, root) if records is None else records)

    def allgather(self, slots: Slots) -> None:
        """Allgather; books each other frame `in`, and the own frame `out` once per peer."""
        self.inner.allgather(slots)
        records = slots.plans.get((self, "allgather", 0))
        self._record_all(self._records("allgather", slots, 0) if records is None else records)

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """Send; booked `out`."""
        self.inner.send(data_B, dest, kind)
        if data_B.nbytes:
            raw_nbytes = self.raw_nbytes(dest, kind, data_B.nbytes)
            self.meter.record(dest, kind, OUT, data_B.nbytes, raw_nbytes)

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """Receive; the bytes that came are booked `in`, not the size of the buffer."""
        peer, nbytes = self.inner.receive(out_B, source, kind)
        if nbytes:
            self.meter.record(peer, kind, IN, nbytes, self.raw_nbytes(peer, kind, nbytes))
        return peer, nbytes

    def _one_by_one(self, records: list[Record]) -> None:
        for args in records:
            self.meter.record(*args)

    def _records(self, verb: str, slots: Slots, root: int) -> list[Record]:
        """The records of a verb; worked out once per Slots and kept there."""
        sums: dict[tuple[int, str, Direction], tuple[int, int]] = {}
        for peer, frame, direction in self._frames(verb, root):
            if slots.sizes_R[frame]:
                key = (peer, slots.kinds_R[frame], direction)
                nbytes, raw_bytes = sums.get(key, (0, 0))
                sums[key] = (nbytes + slots.sizes_R[frame], raw_bytes + slots.raw_R[frame])
        records: list[Record] = [(*key, *both) for key, both in sums.items()]
        slots.plans[self, verb, root] = records
        return records

    def _frames(self, verb: str, root: int) -> Iterator[tuple[int, int, Direction]]:
        """(peer, frame, direction) of every frame that a verb moves at this rank."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        if verb == "allgather":
            yield from ((peer, peer, IN) for peer in peers)
            yield from ((peer, self.rank, OUT) for peer in peers)
        elif verb == "broadcast":
            to, direction = (peers, OUT) if self.rank == root else ([root], IN)
            yield from ((peer, frame, direction) for peer in to for frame in range(self.size))
        elif self.rank == root:
            yield from ((peer, peer, IN if verb == "gather" else OUT) for peer in peers)
        else:
            yield root, self.rank, OUT if verb == "gather" else IN
