"""What every transport must do, for any number of ranks >= 2. A transport's test class inherits it.

A subclass has a fixture `world`: an object with

- size     : int                number of ranks
- run(fn)  : [result per rank]  calls fn(transport) on every rank; fails on all if it fails on one
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.faulty import Fault, Faulty

from hpcvfl.errors import TransportError, TransportTimeout
from hpcvfl.transport import Metered, Slots, Transport
from hpcvfl.transport.delayed import Delayed

PATTERNS: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda n: [64] * n,
    "uneven": lambda n: [1 + 37 * k for k in range(n)],
    "root empty": lambda n: [0] + [100 + k for k in range(1, n)],
    "some empty": lambda n: [0 if k % 2 else 7 for k in range(n)],
    "all empty": lambda n: [0] * n,
    "large": lambda n: [300_000 + 11 * k for k in range(n)],
}


class Records:
    """A meter that keeps every record."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, int, int]] = []

    def record(self, peer: int, kind: str, direction: str, nbytes: int, raw_bytes: int) -> None:
        self.rows.append((peer, kind, direction, nbytes, raw_bytes))

    def total(self, direction: str, peer: int | None = None) -> int:
        return sum(r[3] for r in self.rows if r[2] == direction and peer in (None, r[0]))


WRAPPERS: dict[str, Callable[[Transport], Transport]] = {
    "plain": lambda transport: transport,
    "metered": lambda transport: Metered(transport, Records()),
    "delayed": lambda transport: Delayed(transport, latency_ms=0.2, bandwidth_gbps=100.0),
    "faulty": Faulty,
}


def slots_of(sizes: list[int]) -> Slots:
    """Slots filled with 255; frame k is of kind K<k>, its raw size four times its bytes."""
    slots = Slots(sizes, [f"K{k}" for k in range(len(sizes))], [4 * n for n in sizes])
    slots.buffer_B[:] = 255
    return slots


def content(rank: int, nbytes: int, salt: int = 0) -> np.ndarray:
    """What rank `rank` sends: bytes that differ by rank, position and salt, never 255."""
    return ((np.arange(nbytes) * 7 + 31 * rank + 13 * salt) % 251).astype(np.uint8)


def ring(t: Transport, data_B: np.ndarray, out_B: np.ndarray) -> None:
    """Send to the next rank, receive from the one before; sends may wait: rank 0 receives first."""
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    if t.rank == 0:
        t.receive(out_B, before, "RING")
    t.send(data_B, after, "RING")
    if t.rank != 0:
        t.receive(out_B, before, "RING")


@pytest.mark.timeout(120)
class TransportContract:
    @pytest.fixture(params=PATTERNS)
    def pattern(self, request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
        return PATTERNS[request.param]

    def test_ranks_are_numbered_and_counted(self, world: Any) -> None:
        seen = world.run(lambda t: (t.rank, t.size, t.round_index))
        assert seen == [(k, world.size, -1) for k in range(world.size)]

    def test_gather_fills_the_slots_of_every_root_and_no_other(
        self, world: Any, pattern: Any
    ) -> None:
        sizes = pattern(world.size)

        def fn(t: Transport) -> None:
            for root in range(t.size):
                slots = slots_of(sizes)
                slots[t.rank][:] = content(t.rank, sizes[t.rank], root)
                t.gather(slots, root)
                for k in range(t.size):
                    ours = t.rank in (root, k)
                    due = content(k, sizes[k], root) if ours else np.full(sizes[k], 255)
                    np.testing.assert_array_equal(slots[k], due)

        world.run(fn)

    def test_broadcast_copies_the_whole_buffer_of_every_root(
        self, world: Any, pattern: Any
    ) -> None:
        sizes = pattern(world.size)

        def fn(t: Transport) -> None:
            for root in range(t.size):
                slots = slots_of(sizes)
                if t.rank == root:
                    slots.buffer_B[:] = content(root, sum(sizes))
                t.broadcast(slots, root)
                np.testing.assert_array_equal(slots.buffer_B, content(root, sum(sizes)))

        world.run(fn)

    def test_scatter_writes_the_own_frame_and_no_other(self, world: Any, pattern: Any) -> None:
        sizes = pattern(world.size)

        def fn(t: Transport) -> None:
            for root in range(t.size):
                slots = slots_of(sizes)
                if t.rank == root:
                    for k in range(t.size):
                        slots[k][:] = content(k, sizes[k], root)
                t.scatter(slots, root)
                for k in range(t.size):
                    ours = t.rank in (root, k)
                    due = content(k, sizes[k], root) if ours else np.full(sizes[k], 255)
                    np.testing.assert_array_equal(slots[k], due)

        world.run(fn)

    def test_allgather_fills_the_slots_of_all(self, world: Any, pattern: Any) -> None:
        sizes = pattern(world.size)

        def fn(t: Transport) -> None:
            slots = slots_of(sizes)
            slots[t.rank][:] = content(t.rank, sizes[t.rank])
            t.allgather(slots)
            for k in range(t.size):
                np.testing.assert_array_equal(slots[k], content(k, sizes[k]))

        world.run(fn)

    def test_rounds_in_reused_buffers_do_not_mix(self, world: Any) -> None:
        sizes = [5 + 200 * k for k in range(world.size)]

        def fn(t: Transport) -> None:
            up, down = slots_of(sizes), slots_of(sizes)
            for r in range(30):
                t.round_index = r
                up[t.rank][:] = content(t.rank, sizes[t.rank], r)
                t.gather(up)
                if t.rank == 0:
                    down.buffer_B[:] = up.buffer_B
                up[t.rank][:] = 254  # the frame is ours again as soon as the verb has returned
                t.broadcast(down)
                for k in range(t.size):
                    np.testing.assert_array_equal(down[k], content(k, sizes[k], r))

        world.run(fn)

    def test_messages_go_round_a_ring_in_the_order_sent(self, world: Any) -> None:
        def fn(t: Transport) -> None:
            after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
            for i, nbytes in enumerate((0, 1, 1000)):
                t.send(content(t.rank, nbytes, i), after, "RING")
            out_B = np.empty(2000, np.uint8)
            for i, nbytes in enumerate((0, 1, 1000)):
                out_B[:] = 255
                assert t.receive(out_B, before, "RING") == (before, nbytes)
                np.testing.assert_array_equal(out_B[:nbytes], content(before, nbytes, i))
                assert (out_B[nbytes:] == 255).all()

        world.run(fn)

    def test_receive_from_any_takes_one_message_of_each(self, world: Any) -> None:
        def fn(t: Transport) -> list[int]:
            if t.rank != 0:
                t.send(content(t.rank, 10 * t.rank), 0, "REPORT")
                return []
            out_B, came = np.empty(10 * t.size, np.uint8), []
            for _ in range(1, t.size):
                source, nbytes = t.receive(out_B, None, "REPORT")
                np.testing.assert_array_equal(out_B[:nbytes], content(source, 10 * source))
                came.append(source)
            return came

        assert sorted(world.run(fn)[0]) == list(range(1, world.size))

    def test_receive_takes_only_the_kind_it_asks_for(self, world: Any) -> None:
        def fn(t: Transport) -> None:
            out_B = np.empty(8, np.uint8)
            if t.rank == 1:
                t.send(content(1, 3), 0, "FIRST")
                t.send(content(1, 8), 0, "SECOND")
            elif t.rank == 0:
                assert t.receive(out_B, 1, "SECOND") == (1, 8)
                assert t.receive(out_B, None, "FIRST") == (1, 3)
            t.barrier()

        world.run(fn)

    def test_a_message_longer_than_the_buffer_is_an_error(self, world: Any) -> None:
        def fn(t: Transport) -> None:
            if t.rank == 1:
                t.send(content(1, 9), 0, "LONG")
            elif t.rank == 0:
                with pytest.raises(TransportError, match=r"LONG from rank 1 has 9 bytes.*buffer 8"):
                    t.receive(np.empty(8, np.uint8), 1, "LONG")
            t.barrier()

        world.run(fn)

    def test_nobody_leaves_a_barrier_before_all_have_come(self, world: Any) -> None:
        def fn(t: Transport) -> tuple[float, float]:
            came = time.monotonic()
            t.barrier()
            return came, time.monotonic()

        times = world.run(fn)
        assert max(came for came, _ in times) <= min(left for _, left in times)

    def test_slots_or_ranks_that_do_not_fit_are_refused(self, world: Any) -> None:
        def fn(t: Transport) -> None:
            with pytest.raises(TransportError, match=f"1 frames for {t.size} ranks"):
                t.gather(slots_of([4]))
            with pytest.raises(TransportError, match=f"root {t.size} of {t.size}"):
                t.broadcast(slots_of([4] * t.size), t.size)
            with pytest.raises(TransportError, match="dest -1"):
                t.send(np.zeros(1, np.uint8), -1, "X")
            with pytest.raises(TransportError, match=f"source {t.size}"):
                t.receive(np.zeros(1, np.uint8), t.size, "X")

        world.run(fn)

    def test_waiting_is_counted_and_settings_reach_the_transport(self, world: Any) -> None:
        def fn(t: Transport) -> float:
            t.timeout_s, t.round_index, t.waited_s = 33.0, 7, 0.0
            if t.rank == t.size - 1:
                time.sleep(0.05)  # what the others wait for
            t.barrier()
            assert (t.timeout_s, t.round_index) == (33.0, 7)
            return t.waited_s

        waited = world.run(fn)
        assert all(seconds >= 0.02 for seconds in waited[:-1]), waited

    def test_who_did_not_post_is_named_with_round_kind_and_seconds(self, world: Any) -> None:
        """The last rank drops a broadcast and waits elsewhere until the others have complained."""
        last, sizes = world.size - 1, [8] * world.size

        def fn(t: Transport) -> str:
            t.round_index, slots, note_B = 17, slots_of(sizes), np.zeros(1, np.uint8)
            faulty = Faulty(t, Fault("drop", "broadcast"))
            if t.rank == last:
                faulty.broadcast(slots, last)
                for _ in range(last):
                    t.receive(note_B, None, "DONE")
                faulty.broadcast(slots, last)  # late, so that nothing is left pending
                return ""
            t.timeout_s = 0.6
            with pytest.raises(TransportTimeout) as caught:
                t.broadcast(slots, last)
            t.send(note_B, last, "DONE")
            return str(caught.value)

        for rank, text in enumerate(world.run(fn)[:-1]):
            assert text.startswith(f"rank {rank}, round 17: broadcast of K0+K1"), text
            assert f"rank {last} did not post (it waits in round 17, receive of DONE" in text
            assert text.count("did not post") == 1, text
            assert " s" in text

    @pytest.mark.parametrize("action", ["cut", "flip"])
    def test_damage_on_the_way_arrives_and_does_not_stay(self, world: Any, action: str) -> None:
        sizes = [16] * world.size

        def fn(t: Transport) -> np.ndarray:
            slots, sent = slots_of(sizes), content(t.rank, 16, 5)
            faults = [Fault(action, "gather", call=1, at=13)] if t.rank == 1 else []
            faulty = Faulty(t, *faults)
            for _ in range(2):  # the first call is sound
                slots[t.rank][:] = sent
                faulty.gather(slots)
                np.testing.assert_array_equal(slots[t.rank], sent)
                t.barrier()
            return slots[1].copy()

        arrived, due = world.run(fn)[0], content(1, 16, 5)
        if action == "cut":
            due[13:] = 0
        else:
            due[1] ^= 1 << 5
        np.testing.assert_array_equal(arrived, due)

    def test_both_ends_book_the_same_bytes(self, world: Any, pattern: Any) -> None:
        sizes = pattern(world.size)

        def fn(t: Transport) -> list[tuple[int, str, str, int, int]]:
            records = Records()
            metered = Metered(t, records)
            slots = slots_of(sizes)
            for root in (0, t.size - 1):
                metered.gather(slots, root)
                metered.broadcast(slots, root)
                metered.scatter(slots, root)
            metered.allgather(slots)
            ring(metered, slots[t.rank], np.empty(max(sizes) + 1, np.uint8))
            return records.rows

        books = world.run(fn)
        n, total = world.size, sum(sizes)
        for a, rows in enumerate(books):
            for b, others in enumerate(books):
                out = sorted((k, s, w) for p, k, d, s, w in rows if (p, d) == (b, "out"))
                came = sorted((k, s, w) for p, k, d, s, w in others if (p, d) == (a, "in"))
                assert out == came, (a, b)
        received = sum(r[3] for rows in books for r in rows if r[2] == "in")
        ends = sum(total - sizes[root] for root in (0, n - 1))
        assert received == 2 * ends + 2 * (n - 1) * total + (n - 1) * total + total
