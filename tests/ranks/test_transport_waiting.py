"""The wait loop and the words of the roll call, without any process but this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.transport_contract import Records, slots_of

from hpcvfl.transport import Metered, Slots, ThreadsWorld, Transport
from hpcvfl.transport.rollcall import NOTE_NBYTES, Whereabouts, verdict
from hpcvfl.transport.waiting import PACE, Pace, wait_until


class Clock:
    """Stands in for time: each look takes 1 us, a sleep what was asked for, a yield 1 us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.sleeps, self.yields = 0.0, [], 0
        monkeypatch.setattr("time.perf_counter", self.perf_counter)
        monkeypatch.setattr("time.sleep", self.sleep)
        monkeypatch.setattr("os.sched_yield", self.sched_yield)

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps.append(seconds)

    def sched_yield(self) -> None:
        self.now_s += 1e-6
        self.yields += 1

    def comes_at(self, seconds: float) -> Callable[[], bool]:
        return lambda: self.now_s >= seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_is_there_already_costs_no_wait(clock: Clock) -> None:
    assert wait_until(lambda: True) == 0.0
    assert (clock.sleeps, clock.yields) == ([], 0)


def test_a_short_wait_yields_and_does_not_sleep(clock: Clock) -> None:
    waited_s = wait_until(clock.comes_at(0.8 * PACE.yield_s))
    assert clock.sleeps == []
    assert waited_s == pytest.approx(0.8 * PACE.yield_s, rel=0.05)


def test_a_wait_of_10_ms_ends_at_most_0_3_ms_late(clock: Clock) -> None:
    for due_s in np.linspace(1e-3, 10e-3, 50):
        clock.now_s = 0.0
        wait_until(clock.comes_at(due_s))
        assert clock.now_s - due_s <= 0.3e-3 + 20e-6


def test_a_long_wait_sleeps_longer_and_longer_up_to_the_limit(clock: Clock) -> None:
    waited_s = wait_until(clock.comes_at(2.0))
    assert clock.sleeps == sorted(clock.sleeps)
    first_s = max(PACE.share * PACE.yield_s, PACE.shortest_s)
    assert clock.sleeps[0] == pytest.approx(first_s, rel=0.01)
    assert clock.sleeps[-1] == PACE.longest_s
    assert waited_s == pytest.approx(2.0, rel=0.05)


def test_a_test_that_moves_bytes_is_not_counted_as_waiting(clock: Clock) -> None:
    looks = iter([False, False, False, True])

    def test() -> bool:
        clock.now_s += 5e-3  # copies for 5 ms each time
        return next(looks)

    assert wait_until(test, Pace(yield_s=1.0)) < 1e-4


def test_ticks_come_every_tenth_of_a_second_and_may_end_the_wait(clock: Clock) -> None:
    ticks: list[float] = []

    def tick(seconds: float) -> None:
        ticks.append(seconds)
        if seconds > 1.0:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        wait_until(lambda: False, tick=tick)
    assert ticks[0] == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(np.diff(ticks), 0.1, atol=0.02)


def test_whereabouts_travel_as_a_note_of_fixed_size() -> None:
    here = Whereabouts(2**40 + 3, "round 17, gather of HEAD+EMBED — é")
    assert here.note().nbytes == NOTE_NBYTES
    assert Whereabouts.of(here.note()) == here


def test_a_text_too_long_for_a_note_is_cut() -> None:
    there = Whereabouts.of(Whereabouts(1, "é" * 500).note())
    assert there.calls == 1
    assert len(there.text.encode()) <= NOTE_NBYTES
    assert there.text.startswith("éé")


def test_the_verdict_names_the_silent_and_those_behind_and_no_other() -> None:
    mine = Whereabouts(5, "round 2, broadcast")
    said = {1: Whereabouts(5, "round 2, broadcast"), 2: Whereabouts(4, "round 2, gather")}
    missing, words = verdict(mine, said, [1, 2, 3], collective=True)
    assert missing == [3]
    assert "rank 1 " not in words
    assert "rank 3 did not post (no answer" in words
    assert "rank 2 waits in round 2, gather" in words
    missing, words = verdict(mine, said, [1, 2], collective=True)
    assert missing == [2]
    assert words == "rank 2 did not post (it waits in round 2, gather)"


def test_the_verdict_on_a_message_names_its_other_end() -> None:
    mine = Whereabouts(5, "round 2, receive of X from rank 1")
    said = {1: Whereabouts(9, "round 3, barrier")}
    missing, words = verdict(mine, said, [1], collective=False)
    assert missing == [1]
    assert words == "rank 1 did not post (it waits in round 3, barrier)"


def test_when_all_have_posted_the_verdict_says_so() -> None:
    mine = Whereabouts(5, "round 2, broadcast")
    missing, words = verdict(mine, {1: mine}, [1], collective=True)
    assert missing == []
    assert words.startswith("all have posted")
    assert "rank 1 in round 2, broadcast" in words


def test_slots_are_aligned_contiguous_views_of_one_buffer() -> None:
    for sizes in ([0], [3, 0, 5], [64, 1, 100_000]):
        slots = Slots(sizes, ["X"] * len(sizes), sizes)
        assert slots.buffer_B.ctypes.data % 64 == 0 or not sum(sizes)
        assert slots.buffer_B.nbytes == sum(sizes)
        assert len(slots) == len(sizes)
        for k, nbytes in enumerate(sizes):
            slots[k][:] = k + 1
            assert slots[k].nbytes == nbytes
            assert slots.offsets_R[k] == sum(sizes[:k])
        due = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        np.testing.assert_array_equal(slots.buffer_B, due)


def test_slots_refuse_lists_of_different_lengths_and_negative_sizes() -> None:
    with pytest.raises(ValueError, match="2 sizes, 1 kinds, 2 raw"):
        Slots([1, 2], ["X"], [1, 2])
    with pytest.raises(ValueError, match="negative size"):
        Slots([1, -2], ["X", "X"], [1, 2])


def test_importing_the_transports_does_not_start_mpi() -> None:
    modules = "sys, hpcvfl.transport, hpcvfl.transport.launcher"
    code = f"import {modules}; print('mpi4py.MPI' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_repeated_call_hands_the_meter_the_same_list_even_an_empty_one() -> None:
    """The meter counts lists; a new one each round would make it grow without end."""
    lists: list[list[tuple[int, str, str, int, int]]] = []

    class Lists(Records):
        def record_all(self, records: list[tuple[int, str, str, int, int]]) -> None:
            lists.append(records)

    def fn(t: Transport) -> None:
        metered = Metered(t, Lists())
        for nbytes in (0, 5):
            slots = slots_of([nbytes] * t.size)
            for _ in range(3):
                metered.gather(slots)

    ThreadsWorld(2).run(fn)
    assert len(lists) == 12
    assert len({id(records) for records in lists}) == 4
