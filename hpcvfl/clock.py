"""Where the wall time of a rank goes: one phase at a time, nothing counted twice."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

PHASES = (
    "start",
    "load",
    "forward",
    "encode",
    "wait",
    "wire",
    "decode",
    "local steps",
    "eval",
    "checkpoint",
    "other",
)
TRAINING_PHASES = ("forward", "encode", "wait", "wire", "decode", "local steps")
WORKING_PHASES = ("forward", "encode", "decode", "local steps")

TRACED_EVENTS = 4096
"""Events kept for the chrome trace (about 500 rounds); totals go on for ever."""


class PhaseClock:
    """`to(phase)` ends the running phase and starts the next; monotonic, in seconds."""

    def __init__(self, begun_s: float | None = None) -> None:
        """Phase "start" runs since `begun_s` (of time.perf_counter; None: since now)."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "start"
        self._origin = self._since = time.perf_counter() if begun_s is None else begun_s
        self._events: list[tuple[str, float, float]] = []
        self._before_s = 0.0

    def to(self, phase: str, waited_s: float = 0.0) -> None:
        """Start `phase`; of the phase that ends, `waited_s` seconds are booked as "wait"
        instead.
        """
        now = time.perf_counter()
        spent = now - self._since
        waited_s = min(waited_s, spent)
        self.seconds[self._phase] += spent - waited_s
        self.seconds["wait"] += waited_s
        if len(self._events) < TRACED_EVENTS:
            self._events.append((self._phase, self._since - self._origin, spent))
        self._phase, self._since = phase, now

    def now(self) -> tuple[str, float]:
        """(running phase, seconds since it began); of another thread, perhaps a moment old."""
        return self._phase, time.perf_counter() - self._since

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._origin

    def total_s(self) -> float:
        """Seconds of the run, those of the parts before it was resumed included."""
        return self._before_s + self.elapsed()

    def add(self, seconds: Mapping[str, float], total_s: float) -> None:
        """Count also the seconds by phase, and in total, of a run before it was resumed."""
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        self._before_s += total_s

    def training_s(self) -> float:
        """Seconds in rounds so far: no start-up, loading or evaluation."""
        return sum(self.seconds[phase] for phase in TRAINING_PHASES)

    def computing_s(self) -> float:
        """Seconds of own work in rounds so far: training time less waiting and moving bytes."""
        return sum(self.seconds[phase] for phase in WORKING_PHASES)

    def write_trace(self, path: Path, rank: int) -> None:
        """The first events as a chrome://tracing file."""
        events = [
            {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": begin * 1e6, "dur": spent * 1e6}
            for name, begin, spent in self._events
        ]
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
