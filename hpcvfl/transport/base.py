"""What every transport does: move opaque bytes between ranks, one frame a rank, in place.

Legend: B = bytes, R = ranks. Nothing here knows what a frame means; codecs and transport meet in
the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hpcvfl.errors import TransportError

Bytes = NDArray[np.uint8]
ALIGNMENT = 64  # bytes: a cache line, and what the widest vector load asks for


class Slots:
    """One contiguous buffer cut into one frame per rank: gather and broadcast need no copy.

    The buffer starts at a multiple of 64 bytes and belongs to the caller, who may reuse it for as
    many rounds as it likes; a verb reads or writes it only until it returns. The total may be more
    than 2 GiB.

    buffer_B  : uint8, shape (sum(sizes_R),)   all frames, rank 0 first, without gaps
    sizes_R   : tuple of int                   bytes of each rank's frame, zero allowed
    offsets_R : tuple of int                   where each frame starts in buffer_B
    kinds_R   : tuple of str                   what each frame is, for ledgers and messages
    raw_R     : tuple of int                   bytes before encoding: 4 x elements, no header
    plans     : dict                           what transports work out once per Slots
    """

    def __init__(
        self, sizes_R: Sequence[int], kinds_R: Sequence[str], raw_R: Sequence[int]
    ) -> None:
        """Allocate an uninitialised buffer; the three sequences have one entry per rank."""
        if not len(sizes_R) == len(kinds_R) == len(raw_R):
            raise ValueError(
                f"Slots: {len(sizes_R)} sizes, {len(kinds_R)} kinds, {len(raw_R)} raw sizes;"
                " need one of each per rank"
            )
        if min((*sizes_R, *raw_R), default=0) < 0:
            raise ValueError(
                f"Slots: negative size in sizes {list(sizes_R)}, raw sizes {list(raw_R)}"
            )
        self.sizes_R = tuple(int(n) for n in sizes_R)
        self.kinds_R = tuple(kinds_R)
        self.raw_R = tuple(int(n) for n in raw_R)
        self.offsets_R = tuple(sum(self.sizes_R[:k]) for k in range(len(self.sizes_R)))
        self.plans: dict[Any, Any] = {}
        self.buffer_B = aligned_bytes(sum(self.sizes_R))
        self._views = [
            self.buffer_B[o : o + n] for o, n in zip(self.offsets_R, self.sizes_R, strict=True)
        ]

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self.sizes_R)

    def __getitem__(self, rank: int) -> Bytes:
        """The frame of `rank`: a writable view of buffer_B."""
        return self._views[rank]

    @property
    def kinds_text(self) -> str:
        """The distinct kinds in rank order, for messages: "HEAD+EMBED"."""
        return "+".join(dict.fromkeys(self.kinds_R))


class Transport(ABC):
    """The verbs of a group of ranks. Collectives are called by every rank in the same order.

    Each waits at most `timeout_s` for its peers, then raises TransportTimeout that says who did not
    post. After a timeout or error the group is of no more use: call `abort` (or `close`).
    Buffers are handed over until the verb returns; nothing is kept after that.

    rank, size  : int     number of this process, number of processes
    name        : str     "threads", "mpi", ..
    timeout_s   : float   longest wait of one verb, in seconds; may be set between verbs
    round_index : int     round that messages name; the engine sets it, -1 is start-up
    threaded    : bool    whether a verb may be called by another thread than the one before
    waited_s    : float   seconds spent yielding, sleeping or giving turns to others so far; the
                          rest of a verb's time is spent in the calls that move bytes
    """

    rank: int
    size: int
    name: str
    timeout_s: float
    round_index: int
    threaded: bool = True
    waited_s: float

    @abstractmethod
    def gather(self, slots: Slots, root: int = 0) -> None:
        """Bring every rank's own frame into root's slots; others only read their own frame.

        Root's own frame must already be in its place. Sizes are the same on all ranks.
        """

    @abstractmethod
    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """Copy root's whole buffer over everybody's."""

    @abstractmethod
    def scatter(self, slots: Slots, root: int = 0) -> None:
        """Copy root's frame k into the frame k of rank k; no other frame is written."""

    @abstractmethod
    def allgather(self, slots: Slots) -> None:
        """Bring every rank's own frame into everybody's slots."""

    @abstractmethod
    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """Send bytes to one rank; returns when data_B may be reused.

        May return before the other side receives, and may wait until it does: rely on neither.
        """

    @abstractmethod
    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """Receive one message of this kind from `source` (None: from any) into the start of out_B.

        Returns (source, number of bytes). Messages of one kind from one rank arrive in the order
        sent. Raises TransportError if the message is longer than out_B.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End all ranks with this exit status. mpi never returns; threads raise TransportError."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; called by every rank, no verb after it."""

    def check(self, slots: Slots, root: int = 0) -> None:
        """Refuse slots or a root that do not fit this group, before any byte moves."""
        if len(slots) != self.size:
            raise TransportError(
                f"rank {self.rank}, round {self.round_index}: {len(slots)} frames for"
                f" {self.size} ranks"
            )
        self.check_peer(root, "root")

    def check_peer(self, peer: int, word: str) -> None:
        """Refuse a rank that is not in the group; `word` is its role, e.g. "dest"."""
        if not 0 <= peer < self.size:
            raise TransportError(
                f"rank {self.rank}, round {self.round_index}: {word} {peer} of {self.size} ranks"
            )


class ProcessTransport(Transport):
    """A transport whose ranks are processes that a launcher started."""

    @property
    @abstractmethod
    def library(self) -> str:
        """What moves the bytes, as it names itself, in one line."""

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [k for k in range(self.size) if k != self.rank]

    @abstractmethod
    def leave(self, code: int) -> NoReturn:
        """End this process with an exit status, after all ranks have agreed to end.

        Where a rank does not come within seconds, it is named and all are aborted after all.
        """


class Wrapper(Transport):
    """A transport that hands every verb to another one; subclasses change what they are about."""

    def __init__(self, inner: Transport) -> None:
        """Wrap `inner`, which stays the owner of rank, size, timeout and round."""
        self.inner = inner
        self.rank, self.size, self.name = inner.rank, inner.size, inner.name
        self.threaded = inner.threaded

    @property
    def timeout_s(self) -> float:
        """Longest wait of one verb, of the wrapped transport."""
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.inner.timeout_s = value

    @property
    def round_index(self) -> int:
        """Round that messages name, of the wrapped transport."""
        return self.inner.round_index

    @round_index.setter
    def round_index(self, value: int) -> None:
        self.inner.round_index = value

    @property
    def waited_s(self) -> float:
        """Seconds waited so far, of the wrapped transport."""
        return self.inner.waited_s

    @waited_s.setter
    def waited_s(self, value: float) -> None:
        self.inner.waited_s = value

    def gather(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self.inner.gather(slots, root)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self.inner.broadcast(slots, root)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self.inner.scatter(slots, root)

    def allgather(self, slots: Slots) -> None:
        """See Transport."""
        self.inner.allgather(slots)

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """See Transport."""
        self.inner.send(data_B, dest, kind)

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """See Transport."""
        return self.inner.receive(out_B, source, kind)

    def barrier(self) -> None:
        """See Transport."""
        self.inner.barrier()

    def abort(self, code: int) -> None:
        """See Transport."""
        self.inner.abort(code)

    def close(self) -> None:
        """See Transport."""
        self.inner.close()


def transfers(verb: str, slots: Slots, root: int) -> Iterator[tuple[int, int, Bytes]]:
    """What a verb moves: (source, dest, where the bytes are on both)."""
    ranks = range(len(slots))
    for k in ranks:
        if verb == "allgather":
            yield from ((k, peer, slots[k]) for peer in ranks if peer != k)
        elif k != root and verb == "gather":
            yield k, root, slots[k]
        elif k != root:
            yield root, k, slots.buffer_B if verb == "broadcast" else slots[k]


def aligned_bytes(nbytes: int) -> Bytes:
    """An uninitialised uint8 array of `nbytes` bytes that starts at a multiple of 64 bytes."""
    room_B = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room_B.ctypes.data % ALIGNMENT
    return room_B[start : start + nbytes]
