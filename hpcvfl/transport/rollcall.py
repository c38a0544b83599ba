"""Who is missing? Asked on a communicator of its own, only after a wait ran out.

A pending collective tells nobody which rank did not post. So:

1. The rank whose wait ran out sends ASK to all others, with its own whereabouts.
2. A rank that waits looks for ASK about every 0.1 s and answers with its whereabouts.
3. After a second, a rank that has not answered is stopped, gone, or busy outside a verb: it did not
   post. One that answered from an earlier call did not post either, and it is known where it waits.

A rank that asked and gave up answers no more, but what it said when asking still counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpcvfl.errors import TransportTimeout
from hpcvfl.transport.base import Bytes, ProcessTransport, Slots

ASK, ANSWER = 1, 2  # tags
NOTE_NBYTES = 256
SECONDS = 1.0


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is: how many collectives it has posted, and in words what it waits for."""

    calls: int
    text: str

    def note(self) -> Bytes:
        """As NOTE_NBYTES bytes: the count in the first eight, then the text, padded with zeros."""
        note_B = np.zeros(NOTE_NBYTES, np.uint8)
        note_B[:8] = np.frombuffer(self.calls.to_bytes(8, "little"), np.uint8)
        text_B = np.frombuffer(self.text.encode()[: NOTE_NBYTES - 8], np.uint8)
        note_B[8 : 8 + len(text_B)] = text_B
        return note_B

    @staticmethod
    def of(note_B: Bytes) -> Whereabouts:
        """Inverse of `note`."""
        text = note_B[8:].tobytes().rstrip(b"\0").decode(errors="replace")
        return Whereabouts(int.from_bytes(note_B[:8].tobytes(), "little"), text)


class Roll(Protocol):
    """One rank's end of a roll call, whatever carries it."""

    def answer(self, mine: Whereabouts) -> None:
        """Tell every rank that asked since the last time where this one is."""

    def call(self, mine: Whereabouts) -> dict[int, Whereabouts]:
        """Ask all others; what those said who answered within a second, by rank."""


def look_around(
    transport: ProcessTransport,
    roll: Roll,
    calls: int,
    what: str,
    awaited: list[int] | None,
    slots: Slots | None,
    root: int,
    seconds: float,
) -> None:
    """What a rank does about every 0.1 s while it waits: answer, and ask when time has run out.

    calls   : int                   collectives that it has posted
    what    : str                   what it waits for: a verb, or the kind and peer of a message
    awaited : list of int or None   ranks it waits for; None: all others, in a collective
    slots   : Slots or None         the frames of the collective
    root    : int                   of the collective
    seconds : float                 that it has waited so far
    Raises TransportTimeout that names who is missing if timeout_s have passed.
    """
    text = f"{what} of {slots.kinds_text}" if slots is not None else what
    mine = Whereabouts(calls, f"round {transport.round_index}, {text}")
    if seconds <= transport.timeout_s:
        roll.answer(mine)
        return
    said = roll.call(mine)
    peers = transport.others if awaited is None else awaited
    missing, names = verdict(mine, said, peers, collective=awaited is None)
    due = {}
    if slots is not None and what in ("gather", "allgather"):
        due = {k: (slots.kinds_R[k], slots.sizes_R[k]) for k in missing}
    elif slots is not None and root in missing:
        mine_of = slots.kinds_R[transport.rank], slots.sizes_R[transport.rank]
        due = {root: mine_of if what == "scatter" else (slots.kinds_text, slots.buffer_B.nbytes)}
    raise TransportTimeout(
        f"rank {transport.rank}, round {transport.round_index}: {text}: {names};"
        f" waited {seconds:.1f} s (timeout_s = {transport.timeout_s:g})",
        missing,
        due,
    )


class RollCall:
    """The roll call of ranks under MPI.

    comm : an mpi4py communicator that carries nothing else
    """

    def __init__(self, comm: Any) -> None:
        """Nothing is sent before `call` or `answer`."""
        self._comm = comm
        self._peers = [k for k in range(comm.Get_size()) if k != comm.Get_rank()]
        self._asked: dict[int, Whereabouts] = {}
        # (request, note): never waited for, a stopped rank takes nothing
        self._sent: list[Any] = []

    def answer(self, mine: Whereabouts) -> None:
        """Tell every rank that asked since the last time where this one is."""
        for peer in self._peers:
            said = self._read(peer, ASK)
            if said is not None:
                self._asked[peer] = said
                self._send(mine, peer, ANSWER)

    def call(self, mine: Whereabouts, seconds: float = SECONDS) -> dict[int, Whereabouts]:
        """Ask all others; return what those said who answered within `seconds`, by rank."""
        said: dict[int, Whereabouts] = dict(self._asked)
        for peer in self._peers:
            self._send(mine, peer, ASK)
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(said) < len(self._peers):
            self.answer(mine)
            said.update(self._asked)
            for peer in self._peers:
                answer = self._read(peer, ANSWER)
                if answer is not None:
                    said[peer] = answer
            time.sleep(0.01)
        return said

    def _send(self, mine: Whereabouts, peer: int, tag: int) -> None:
        note_B = mine.note()
        self._sent.append((self._comm.Isend(note_B, peer, tag), note_B))

    def _read(self, peer: int, tag: int) -> Whereabouts | None:
        if not self._comm.Iprobe(peer, tag):
            return None
        note_B = np.zeros(NOTE_NBYTES, np.uint8)
        self._comm.Recv(note_B, peer, tag)
        return Whereabouts.of(note_B)


def verdict(
    mine: Whereabouts, said: dict[int, Whereabouts], awaited: list[int], collective: bool
) -> tuple[list[int], str]:
    """Which of the awaited ranks did not post; in words, with where the others are.

    A rank that waits in this collective or in a later one has posted. A send or receive that still
    waits has an other end that did not. Where a rank is silent, those that are behind wait for it
    themselves, so only the silent one is blamed.
    """
    silent = [k for k in awaited if k not in said]
    behind = [k for k in awaited if k in said and not (collective and said[k].calls >= mine.calls)]
    return silent or behind, _in_words(said, awaited, silent, behind)


def _in_words(
    said: dict[int, Whereabouts], awaited: list[int], silent: list[int], behind: list[int]
) -> str:
    if silent:
        why = "did not post (no answer to the roll call: stopped, gone or computing)"
        parts = [f"rank {k} {why}" for k in silent]
        parts += [f"rank {k} waits in {said[k].text}" for k in behind]
        return "; ".join(parts)
    if behind:
        return "; ".join(f"rank {k} did not post (it waits in {said[k].text})" for k in behind)
    where = ", ".join(f"rank {k} in {said[k].text}" for k in awaited)
    return f"all have posted: bytes were lost, or the verbs differ ({where})"
