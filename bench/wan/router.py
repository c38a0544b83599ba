"""The loop between the devices: take packets in, count them, let them out when their time comes.

One thread, asleep in `select` whenever nothing is due. Packets come one a system call; what a
packet costs and what the loop can take is measured by bench/wan_checks.py (bench/results/wan.md).
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from wan.packets import Traffic, parse
from wan.shaping import Hub
from wan.spaces import Space

BURST = 64
"""Packets taken from one device before the others and the heap have their turn."""
REALTIME_PRIORITY = 5


@dataclass
class Late:
    """How long the first packet of each turn of the loop lay here beyond its time."""

    turns: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0


class Router:
    """Moves packets between `spaces` through `hub`; the counts are in `traffic` and `late`."""

    def __init__(self, spaces: Sequence[Space], hub: Hub) -> None:
        self.hub, self.traffic, self.late = hub, Traffic(len(spaces)), Late()
        self._begun_s, self._begun_cpu_s = time.monotonic(), time.process_time()
        self._tuns = [space.tun_fd for space in spaces]
        self._rank_of = {tun: rank for rank, tun in enumerate(self._tuns)}

    def run(self, until_fd: int, timeout_s: float | None = None) -> None:
        """Route until `until_fd` is readable, or for `timeout_s`."""
        clock, hub = time.monotonic, self.hub
        watched = [*self._tuns, until_fd]
        end_s = math.inf if timeout_s is None else clock() + timeout_s
        while True:
            next_s, now_s = hub.next_s(), clock()
            if now_s >= end_s:
                return
            wake_s = min(end_s, math.inf if next_s is None else next_s)
            patience_s = None if wake_s == math.inf else max(0.0, wake_s - now_s)
            ready, _, _ = select.select(watched, [], [], patience_s)
            for fd in ready:
                if fd == until_fd:
                    return
                self._take(fd)
            now_s = clock()
            next_s = hub.next_s()
            if next_s is not None and next_s <= now_s:
                self._note(now_s - next_s)
                for dest, packet in hub.due(now_s):
                    # A rank that has left its namespace, or a full device: lost, as on a real line.
                    with suppress(OSError):
                        os.write(self._tuns[dest], packet)

    def seen(self) -> dict[str, Any]:
        """Counts of every line and pair, and how late packets were, as plain values."""
        late = self.late
        return {
            "lines": self.traffic.lines(),
            "pairs": self.traffic.rows(),
            "ignored": self.traffic.ignored,
            "dropped": self.hub.dropped,
            "cpu_s": time.process_time() - self._begun_cpu_s,
            "wall_s": time.monotonic() - self._begun_s,
            "late_mean_ms": 1e3 * late.total_s / max(1, late.turns),
            "late_worst_ms": 1e3 * late.worst_s,
        }

    def _take(self, fd: int) -> None:
        rank, traffic, hub = self._rank_of[fd], self.traffic, self.hub
        line, num_ranks = traffic.between[rank], len(self._tuns)
        for _ in range(BURST):
            try:
                packet = os.read(fd, 65536)
            except BlockingIOError:
                return
            parsed = parse(packet, num_ranks)
            if parsed is None:
                traffic.ignored += 1
                continue
            line[parsed.dest].add(len(packet), parsed.payload)
            hub.accept(time.monotonic(), rank, parsed.dest, packet)

    def _note(self, late_s: float) -> None:
        self.late.turns += 1
        self.late.total_s += late_s
        self.late.worst_s = max(self.late.worst_s, late_s)


@contextmanager
def hurrying() -> Iterator[bool]:
    """Run this process before ordinary ones as soon as a packet is due; yields whether it may.

    Ranks that wait yield in a loop, and there may be more of them than cores: without this a packet
    lies here until the scheduler gets round to it. Children do not inherit it.
    """
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        priority = os.sched_param(REALTIME_PRIORITY)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, priority)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, parameters)
