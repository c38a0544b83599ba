"""The threads transport: the contract, and what only a transport in one process promises."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.faulty import Fault, Faulty
from support.transport_contract import WRAPPERS, TransportContract, slots_of

from hpcvfl.errors import ConfigError, TransportError, TransportTimeout
from hpcvfl.transport import ThreadsWorld, Transport


class ThreadsGroup:
    """The contract's `world` over threads."""

    def __init__(self, size: int, wrap: Callable[[Transport], Transport]) -> None:
        self.size, self.wrap = size, wrap

    def run(self, fn: Callable[[Transport], Any]) -> list[Any]:
        return ThreadsWorld(self.size, timeout_s=20.0).run(lambda t: fn(self.wrap(t)))


class TestThreads(TransportContract):
    @pytest.fixture(params=[(n, w) for n in (2, 3, 5) for w in WRAPPERS])
    def world(self, request: pytest.FixtureRequest) -> ThreadsGroup:
        size, wrapper = request.param
        return ThreadsGroup(size, WRAPPERS[wrapper])


def test_one_rank_runs_at_a_time_and_turns_change_only_at_a_wait() -> None:
    trace: list[int] = []

    def fn(t: Transport) -> None:
        for _ in range(3):
            trace.append(t.rank)
            time.sleep(0.002)  # room for another thread, which must not take it
            trace.append(t.rank)
            t.barrier()

    ThreadsWorld(3).run(fn)
    assert trace[::2] == trace[1::2]
    assert sorted(trace[0:6:2]) == sorted(trace[6:12:2]) == [0, 1, 2]


def test_the_order_of_turns_is_the_one_given() -> None:
    trace: list[int] = []

    def fn(t: Transport) -> None:
        trace.append(t.rank)
        t.barrier()

    ThreadsWorld(3, order=[2, 0, 1]).run(fn)
    assert trace == [2, 0, 1]


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [1, 2, 3]])
def test_an_order_that_is_not_one_of_all_ranks_is_refused(order: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"not an order of ranks 0\.\.2"):
        ThreadsWorld(3, order=order)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_each_rank_draws_from_torch_as_if_it_were_alone(order: list[int]) -> None:
    def alone(rank: int) -> list[float]:
        torch.manual_seed(rank)
        return [float(torch.rand(())) for _ in range(6)]

    def fn(t: Transport) -> list[float]:
        torch.manual_seed(t.rank)
        drawn = []
        for _ in range(6):
            drawn.append(float(torch.rand(())))
            t.barrier()
        return drawn

    due = [alone(rank) for rank in range(3)]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert ThreadsWorld(3, order=order).run(fn) == due
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_start_with_the_state_of_the_caller() -> None:
    torch.manual_seed(5)
    due = float(torch.rand(()))
    torch.manual_seed(5)
    assert ThreadsWorld(3).run(lambda t: float(torch.rand(()))) == [due] * 3


def test_the_first_exception_ends_all_and_comes_out_with_its_traceback() -> None:
    ended: list[int] = []

    def breaks_here(t: Transport) -> None:
        raise ValueError(f"rank {t.rank} breaks")

    def fn(t: Transport) -> None:
        try:
            if t.rank == 1:
                breaks_here(t)
            t.barrier()
        finally:
            ended.append(t.rank)

    with pytest.raises(ValueError, match="rank 1 breaks") as caught:
        ThreadsWorld(3, order=[0, 2, 1]).run(fn)
    assert "breaks_here" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert sorted(ended) == [0, 1, 2]


def test_a_handler_of_exceptions_in_a_rank_does_not_stop_the_end() -> None:
    def fn(t: Transport) -> str:
        if t.rank == 1:
            raise KeyError("gone")
        try:
            t.barrier()
        except Exception:
            return "swallowed"
        return "passed"

    with pytest.raises(KeyError):
        ThreadsWorld(2).run(fn)


def test_a_deadlock_is_seen_at_once_and_names_the_rank_that_has_ended() -> None:
    def fn(t: Transport) -> None:
        t.round_index = 4
        if t.rank != 2:
            t.gather(slots_of([1, 2, 3]))

    start = time.monotonic()
    with pytest.raises(TransportTimeout, match=r"round 4: gather of .*rank 2 did not post.*ended"):
        ThreadsWorld(3, timeout_s=60.0).run(fn)
    assert time.monotonic() - start < 5.0


def test_receives_that_wait_for_each_other_are_a_deadlock() -> None:
    def fn(t: Transport) -> None:
        t.receive(np.empty(1, np.uint8), 1 - t.rank, "TOKEN")

    with pytest.raises(TransportTimeout, match="receive of TOKEN from rank 1: rank 1 did not post"):
        ThreadsWorld(2).run(fn)


def test_different_verbs_or_sizes_at_the_same_time_are_an_error() -> None:
    def verbs(t: Transport) -> None:
        slots = slots_of([1, 1])
        t.gather(slots) if t.rank == 0 else t.broadcast(slots)

    def sizes(t: Transport) -> None:
        t.gather(slots_of([1, 1 + t.rank]))

    with pytest.raises(TransportError, match=r"rank 1.*calls broadcast.* where rank 0 calls gath"):
        ThreadsWorld(2).run(verbs)
    with pytest.raises(TransportError, match=r"\[1, 2\] bytes where rank 0 .*\[1, 1\] bytes"):
        ThreadsWorld(2).run(sizes)


def test_a_rank_that_keeps_the_turn_too_long_is_named() -> None:
    def fn(t: Transport) -> None:
        t.round_index = 3
        fault = Fault("stall", "gather", call=1, seconds=3.0)
        faulty = Faulty(t, *([fault] if t.rank == 1 else []))
        for _ in range(2):
            faulty.gather(slots_of([4, 4, 4]))

    start = time.monotonic()
    with pytest.raises(TransportTimeout, match="round 3: rank 1 did not post within 0"):
        ThreadsWorld(3, timeout_s=0.4).run(fn)
    assert time.monotonic() - start < 2.5


def test_a_dropped_frame_ends_the_run_with_the_sender_named() -> None:
    def fn(t: Transport) -> None:
        faulty = Faulty(t, *([Fault("drop", "gather")] if t.rank == 2 else []))
        faulty.gather(slots_of([4, 4, 4]))

    with pytest.raises(TransportTimeout, match="rank 2 did not post"):
        ThreadsWorld(3).run(fn)


def test_abort_ends_the_run() -> None:
    def fn(t: Transport) -> None:
        t.abort(3) if t.rank == 1 else t.barrier()

    with pytest.raises(TransportError, match=r"rank 1.*exit status 3"):
        ThreadsWorld(3).run(fn)


def test_a_thousand_rounds_of_five_ranks_take_seconds() -> None:
    def fn(t: Transport) -> None:
        slots = slots_of([8] * t.size)
        for _ in range(1000):
            t.gather(slots)
            t.broadcast(slots)

    start = time.monotonic()
    ThreadsWorld(5).run(fn)
    assert time.monotonic() - start < 30.0
