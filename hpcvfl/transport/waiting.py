"""How a rank waits: neither taking the core that a computing rank needs, nor waking up late.

More ranks than cores is normal on laptops and CI. Tried on two cores with five ranks (bench/LOG.md,
"transport"): spinning takes the computing rank's core; sleeping from the start makes a small
exchange slow; so yield for as long as a round's work, then sleep a small share of the time waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

ANSWER_AFTER_S = 0.25  # a shorter wait needs no roll call
ANSWER_EVERY_S = 0.1
MOVES_BYTES_S = 10e-6  # a test that takes longer than this has copied data, it did not only look


@dataclass(frozen=True)
class Pace:
    """When to yield and how long to sleep, in seconds.

    yield_s    : give the core to others, without sleeping, for so long
    share      : then sleep this share of the time waited so far: it bounds how late a rank wakes
    shortest_s : at least so long
    longest_s  : at most so long
    """

    yield_s: float = 12e-3
    share: float = 0.01
    shortest_s: float = 1e-6
    longest_s: float = 5e-3


PACE = Pace()
BESIDE = Pace(yield_s=0.0, share=0.02, shortest_s=100e-6)
"""Of a thread beside one that computes: it takes no turn of its rank's core to look."""


def wait_until(
    test: Callable[[], bool], pace: Pace = PACE, tick: Callable[[float], None] | None = None
) -> float:
    """Call `test` until it is true; return the seconds spent waiting.

    The first call comes at once. A test that moves bytes counts as work and not as waiting. From
    0.25 s on, `tick(seconds so far)` is called about every 0.1 s; what it raises ends the wait.
    """
    return 0.0 if test() else wait_on(test, pace, tick)


def wait_on(
    test: Callable[[], bool], pace: Pace = PACE, tick: Callable[[float], None] | None = None
) -> float:
    """As `wait_until` for a test that has just been false: the first call comes after a pause."""
    now, sleep, sched_yield = time.perf_counter, time.sleep, os.sched_yield
    waited_s, next_tick_s = 0.0, ANSWER_AFTER_S
    start = looked = now()
    while True:
        so_far_s = looked - start
        if so_far_s < pace.yield_s:
            sched_yield()
        else:
            sleep(min(max(pace.share * so_far_s, pace.shortest_s), pace.longest_s))
        woke = now()
        if test():
            return waited_s + woke - looked
        tested = now()
        waited_s += (tested if tested - woke < MOVES_BYTES_S else woke) - looked
        looked = tested
        if tick is not None and looked - start > next_tick_s:
            next_tick_s = looked - start + ANSWER_EVERY_S
            tick(looked - start)
