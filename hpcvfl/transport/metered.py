"""Count what the verbs move: the only source of the byte counts in a ledger."""

from __future__ import annotations

from typing import Literal, Protocol

from hpcvfl.transport.base import Bytes, Slots, Transport, Wrapper

Direction = Literal["in", "out"]


class Recorder(Protocol):
    """Takes the records; the ledger's Meter is one."""

    def record(
        self, peer: int, kind: str, direction: Direction, nbytes: int, raw_bytes: int
    ) -> None:
        """One frame that moved between this rank and `peer`."""


class Metered(Wrapper):
    """Report every frame of every verb, after the verb succeeded, as (peer, kind, direction, bytes,
    raw bytes).

    A broadcast books each frame of the buffer at each receiver, with the root as peer, however the
    library's tree moves it; a rank's own frame that comes back in a broadcast counts, as it does
    come back. Frames of zero bytes are no messages and are not booked. What travels by send/receive
    has no other form than the bytes sent: raw bytes = bytes.
    """

    def __init__(self, inner: Transport, meter: Recorder) -> None:
        """Wrap `inner`; `meter` takes the records of this rank."""
        super().__init__(inner)
        self.meter = meter

    def gather(self, slots: Slots, root: int = 0) -> None:
        """Gather; books root's `in` from each peer, or the own frame `out` to root."""
        self.inner.gather(slots, root)
        if self.rank != root:
            self._book(slots, self.rank, root, "out")
            return
        for peer in self._peers():
            self._book(slots, peer, peer, "in")

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """Broadcast; books every frame `in` from root, or `out` once per peer."""
        self.inner.broadcast(slots, root)
        direction: Direction = "out" if self.rank == root else "in"
        for peer in self._peers() if self.rank == root else [root]:
            for frame in range(self.size):
                self._book(slots, frame, peer, direction)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """Scatter; books root's frame for each peer `out`, or the own frame `in` from root."""
        self.inner.scatter(slots, root)
        if self.rank != root:
            self._book(slots, self.rank, root, "in")
            return
        for peer in self._peers():
            self._book(slots, peer, peer, "out")

    def allgather(self, slots: Slots) -> None:
        """Allgather; books each other frame `in`, and the own frame `out` once per peer."""
        self.inner.allgather(slots)
        for peer in self._peers():
            self._book(slots, peer, peer, "in")
            self._book(slots, self.rank, peer, "out")

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """Send; booked `out`."""
        self.inner.send(data_B, dest, kind)
        if data_B.nbytes:
            self.meter.record(dest, kind, "out", data_B.nbytes, data_B.nbytes)

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """Receive; the bytes that came are booked `in`, not the size of the buffer."""
        peer, nbytes = self.inner.receive(out_B, source, kind)
        if nbytes:
            self.meter.record(peer, kind, "in", nbytes, nbytes)
        return peer, nbytes

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _book(self, slots: Slots, frame: int, peer: int, direction: Direction) -> None:
        if slots.sizes_R[frame]:
            self.meter.record(
                peer, slots.kinds_R[frame], direction, slots.sizes_R[frame], slots.raw_R[frame]
            )
