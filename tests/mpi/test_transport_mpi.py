"""The mpi transport on any number of ranks >= 2: contract, bytes handed to MPI, who is missing."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from support.faulty import Fault, Faulty
from support.transport_contract import (
    PATTERNS,
    WRAPPERS,
    Records,
    TransportContract,
    content,
    ring,
    slots_of,
)

from hpcvfl.errors import TransportError, TransportTimeout
from hpcvfl.transport import Metered, Transport
from hpcvfl.transport import mpi as mpi_module
from hpcvfl.transport.delayed import Delayed
from hpcvfl.transport.mpi import MpiTransport

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
WORLD = MPI.COMM_WORLD


class MpiGroup:
    """The contract's `world` over the processes of this launch."""

    size = WORLD.Get_size()

    def __init__(self, wrap: Callable[[Transport], Transport], comm: Any = None) -> None:
        self.wrap, self.comm = wrap, comm

    def run(self, fn: Callable[[Transport], Any]) -> list[Any]:
        transport = MpiTransport(timeout_s=20.0, comm=self.comm)
        try:
            mine, failed = fn(self.wrap(transport)), ""
        except BaseException:
            mine, failed = None, traceback.format_exc()
        outcomes = WORLD.allgather((mine, failed))
        for rank, (_, text) in enumerate(outcomes):
            assert not text, f"on rank {rank}:\n{text}"
        transport.close()
        return [result for result, _ in outcomes]


class TestMpi(TransportContract):
    @pytest.fixture(params=WRAPPERS)
    def world(self, request: pytest.FixtureRequest) -> MpiGroup:
        return MpiGroup(WRAPPERS[request.param])


class TestMpiBefore4(TransportContract):
    """The same on an MPI without large counts, where a long transfer goes in pieces."""

    PIECE = 50_000

    @pytest.fixture
    def world(self, monkeypatch: pytest.MonkeyPatch) -> MpiGroup:
        monkeypatch.setattr(mpi_module, "LARGE_COUNTS", False)
        monkeypatch.setattr(mpi_module, "INT_MAX", 20)
        monkeypatch.setattr(mpi_module, "PIECE_NBYTES", self.PIECE)
        return MpiGroup(WRAPPERS["plain"])

    @pytest.mark.parametrize("source", ["named", "any"])
    @pytest.mark.parametrize(
        ("nbytes", "pieces"),
        [(0, 1), (PIECE - 1, 1), (PIECE, 2), (PIECE + 1, 2), (2 * PIECE, 3), (123_457, 3)],
    )
    def test_a_long_message_goes_in_pieces_and_arrives_whole(
        self, world: MpiGroup, nbytes: int, pieces: int, source: str
    ) -> None:
        world.comm = RecordingComm(WORLD)

        def fn(t: Transport) -> None:
            if t.rank == 1:
                t.send(content(1, nbytes), 0, "LONG")
                t.send(content(1, 3, 5), 0, "LONG")
                assert world.comm.posted_sends == pieces + 1
            elif t.rank == 0:
                out_B, peer = np.full(nbytes + 3, 255, np.uint8), 1 if source == "named" else None
                assert t.receive(out_B, peer, "LONG") == (1, nbytes)
                np.testing.assert_array_equal(out_B[:nbytes], content(1, nbytes))
                assert (out_B[nbytes:] == 255).all()
                assert t.receive(out_B, peer, "LONG") == (1, 3)
            t.barrier()

        world.run(fn)

    @pytest.mark.parametrize(("room", "due"), [(49, "50 bytes or more"), (51, "52 bytes")])
    def test_pieces_that_do_not_fit_are_an_error(
        self, world: MpiGroup, monkeypatch: pytest.MonkeyPatch, room: int, due: str
    ) -> None:
        monkeypatch.setattr(mpi_module, "PIECE_NBYTES", 50)  # short: nobody waits for the receiver

        def fn(t: Transport) -> None:
            if t.rank == 1:
                t.send(content(1, 52), 0, "LONG")
            elif t.rank == 0:
                out_B = np.full(60, 255, np.uint8)
                with pytest.raises(TransportError, match=f"has {due}, the buffer {room}"):
                    t.receive(out_B[:room], 1, "LONG")
                assert (out_B[room:] == 255).all()
                if room < 50:  # the end of the message is still on its way
                    assert t.receive(out_B, 1, "LONG") == (1, 2)
            t.barrier()

        world.run(fn)


class RecordingComm:
    """Stands in place of a communicator and notes the size of every buffer handed to it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.sent = self.received = self.posted_sends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Idup(self) -> tuple[RecordingComm, MPI.Request]:  # noqa: N802
        # The test looks at the one that the transport uses; the roll call stays silent.
        return self, MPI.REQUEST_NULL

    def Free(self) -> None:  # noqa: N802
        pass

    def _note(self, sends: Any, receives: Any) -> None:
        rank = self._comm.Get_rank()
        if isinstance(sends, tuple):
            self.sent += self._others(sends, rank)
        if isinstance(receives, tuple):
            self.received += self._others(receives, rank)

    def _others(self, message: tuple[Any, ...], rank: int) -> int:
        """Bytes of a buffer, less this rank's own frame if it holds one frame a rank."""
        if len(message) == 2:
            return message[0].nbytes
        sizes, offsets = message[1]
        assert message[0].nbytes >= max(o + n for n, o in zip(sizes, offsets, strict=True))
        return sum(sizes) - sizes[rank]

    def Igatherv(self, sends: Any, receives: Any, root: int) -> Any:  # noqa: N802
        self._note(sends, receives)
        return self._comm.Igatherv(sends, receives, root)

    def Iscatterv(self, sends: Any, receives: Any, root: int) -> Any:  # noqa: N802
        self._note(sends, receives)
        return self._comm.Iscatterv(sends, receives, root)

    def Iallgatherv(self, sends: Any, receives: Any) -> Any:  # noqa: N802
        self._note(sends, receives)
        sizes = receives[1][0]
        self.sent += sizes[self._comm.Get_rank()] * (len(sizes) - 1)
        return self._comm.Iallgatherv(sends, receives)

    def Ibcast(self, message: Any, root: int) -> Any:  # noqa: N802
        if self._comm.Get_rank() == root:
            self.sent += message[0].nbytes * (self._comm.Get_size() - 1)
        else:
            self.received += message[0].nbytes
        return self._comm.Ibcast(message, root)

    def Isend(self, message: Any, dest: int, tag: int) -> Any:  # noqa: N802
        self.sent += message[0].nbytes
        self.posted_sends += 1
        return self._comm.Isend(message, dest, tag)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:  # noqa: N802
        message = self._comm.Improbe(source, tag, status)
        if message is not None:
            self.received += status.Get_count(MPI.BYTE)
        return message


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_meter_agrees_with_the_buffers_at_the_communicator(pattern: str) -> None:
    sizes = PATTERNS[pattern](WORLD.Get_size())
    comm = RecordingComm(WORLD)

    def fn(t: Transport) -> None:
        records = Records()
        metered, slots = Metered(t, records), slots_of(sizes)
        verbs: list[Callable[[], Any]] = [
            lambda: metered.gather(slots),
            lambda: metered.broadcast(slots),
            lambda: metered.gather(slots, t.size - 1),
            lambda: metered.broadcast(slots, t.size - 1),
            lambda: metered.scatter(slots, t.size - 1),
            lambda: metered.scatter(slots),
            lambda: metered.allgather(slots),
            lambda: ring(metered, slots[t.rank], np.empty(max(sizes), np.uint8)),
            metered.barrier,
        ]
        for _ in range(2):  # the second time everything comes from what was kept of the first
            for number, verb in enumerate(verbs):
                verb()
                assert records.total("out") == comm.sent, number
                assert records.total("in") == comm.received, number
        assert comm.received > 0 or sum(sizes) == 0

    MpiGroup(WRAPPERS["plain"], comm).run(fn)


def test_a_length_that_mpi_cannot_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beyond(MPI.Status):
        """What MPI_Get_count says of more than 2 GiB before MPI 4."""

        def Get_count(self, datatype: MPI.Datatype = MPI.BYTE) -> int:  # noqa: N802
            return MPI.UNDEFINED

    monkeypatch.setattr(mpi_module.MPI, "Status", Beyond)

    def fn(t: Transport) -> None:
        if t.rank == 1:
            t.send(content(1, 8), 0, "LONG")
        elif t.rank == 0:
            with pytest.raises(TransportError, match="LONG from rank 1 is longer than this MPI"):
                t.receive(np.empty(8, np.uint8), 1, "LONG")
        t.barrier()

    MpiGroup(WRAPPERS["plain"]).run(fn)


def test_a_stalled_rank_is_named_in_time() -> None:
    last = WORLD.Get_size() - 1

    def fn(t: Transport) -> tuple[str, float]:
        t.round_index, slots = 9, slots_of([8] * t.size)
        fault = Fault("stall", "broadcast", call=1, seconds=3.0)
        faulty = Faulty(t, *([fault] if t.rank == last else []))
        faulty.broadcast(slots, last)
        if t.rank == last:
            faulty.broadcast(slots, last)
            return "", 0.0
        t.timeout_s, start = 0.5, time.monotonic()
        with pytest.raises(TransportTimeout) as caught:
            faulty.broadcast(slots, last)
        return str(caught.value), time.monotonic() - start

    for text, seconds in MpiGroup(WRAPPERS["plain"]).run(fn)[:-1]:
        due = f"round 9: broadcast of .*: rank {last} did not post .no answer to the roll call"
        assert re.search(due, text), text
        assert 0.5 <= seconds < 0.5 + 3.0


def meet() -> None:
    """Return when all ranks have called it, without a word to those that wait in a verb."""
    met = WORLD.Ibarrier()
    while not met.Test():
        time.sleep(0.01)


def test_a_rank_whose_wait_ran_out_earlier_is_not_named_as_missing() -> None:
    """All wait for the last rank; rank 0 gives up first and is no longer there to answer."""
    last = WORLD.Get_size() - 1

    def fn(t: Transport) -> str:
        slots = slots_of([8] * t.size)
        t.barrier()
        if t.rank == last:
            meet()
            t.broadcast(slots, last)
            return ""
        t.timeout_s = 0.4 if t.rank == 0 else 2.0
        try:
            with pytest.raises(TransportTimeout) as caught:
                t.broadcast(slots, last)
        finally:
            meet()
        return str(caught.value)

    for text in MpiGroup(WRAPPERS["plain"]).run(fn)[:-1]:
        assert f"rank {last} did not post" in text
        assert text.count("did not post") == 1, text


def test_a_delayed_round_costs_one_round_trip_in_either_pattern() -> None:
    def fn(t: Transport) -> tuple[float, float]:
        delayed, slots = Delayed(t, latency_ms=60.0), slots_of([8] * t.size)

        def hub() -> None:
            delayed.gather(slots)
            delayed.broadcast(slots)

        return shortest_s(t, hub), shortest_s(t, lambda: delayed.allgather(slots))

    for hub_s, allgather_s in MpiGroup(WRAPPERS["plain"]).run(fn):
        assert 0.060 <= hub_s < 0.085
        assert 0.060 <= allgather_s < 0.085


def test_bandwidth_is_charged_to_the_busiest_link() -> None:
    """125 kB at 0.1 Gbit/s are 10 ms; root sends the buffer once per peer."""

    def fn(t: Transport) -> float:
        delayed = Delayed(t, bandwidth_gbps=0.1)
        slots = slots_of([125_000] + [0] * (t.size - 1))
        return shortest_s(t, lambda: delayed.broadcast(slots))

    peers = WORLD.Get_size() - 1
    assert 0.010 * peers <= MpiGroup(WRAPPERS["plain"]).run(fn)[0] < 0.010 * peers + 0.025


def shortest_s(t: Transport, verbs: Callable[[], None]) -> float:
    """The best of five: on a busy machine a rank may wake late, but never early."""
    times = []
    for _ in range(5):
        t.barrier()
        start = time.monotonic()
        verbs()
        t.barrier()
        times.append(time.monotonic() - start)
    return min(times)
