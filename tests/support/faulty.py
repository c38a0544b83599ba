"""A transport that misbehaves on command, for failure tests."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpcvfl.transport.base import Bytes, Slots, Transport, Wrapper


@dataclass
class Fault:
    """One misdeed, done once.

    action : "drop"   the verb is not posted; this rank goes on as if it had been
             "cut"    all bytes of the frame from byte `at` on are lost: they leave as zeros
             "flip"   bit `at` of the frame leaves inverted
             "lie"    byte `at` of the header leaves as `value`, with a checksum that fits
             "stall"  this rank sleeps `seconds` first
    verb   : the verb it happens in
    call   : in which call of that verb, counted from 0
    frame  : whose frame cut and flip are about; None: this rank's own
    """

    action: str
    verb: str
    call: int = 0
    at: int = 0
    seconds: float = 0.0
    frame: int | None = None
    value: int = 0


class Faulty(Wrapper):
    """Does every verb as the wrapped transport does, but for the given faults.

    Damage travels and does not stay: the caller's own buffer is as before when the verb returns.
    """

    def __init__(self, inner: Transport, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.calls: dict[str, int] = {}

    def gather(self, slots: Slots, root: int = 0) -> None:
        self._do("gather", slots, lambda: self.inner.gather(slots, root))

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        self._do("broadcast", slots, lambda: self.inner.broadcast(slots, root))

    def scatter(self, slots: Slots, root: int = 0) -> None:
        self._do("scatter", slots, lambda: self.inner.scatter(slots, root))

    def allgather(self, slots: Slots) -> None:
        self._do("allgather", slots, lambda: self.inner.allgather(slots))

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        self._do("send", data_B, lambda: self.inner.send(data_B, dest, kind))

    def barrier(self) -> None:
        self._do("barrier", None, self.inner.barrier)

    def _do(self, verb: str, data: Slots | Bytes | None, act: Callable[[], None]) -> None:
        call = self.calls.get(verb, 0)
        self.calls[verb] = call + 1
        fault = next((f for f in self.faults if (f.verb, f.call) == (verb, call)), None)
        if fault is None:
            act()
        elif fault.action == "stall":
            time.sleep(fault.seconds)
            act()
        elif fault.action != "drop":
            self._damage(fault, data, act)

    def _damage(self, fault: Fault, data: Slots | Bytes | None, act: Callable[[], None]) -> None:
        assert data is not None, f"nothing to {fault.action} in {fault.verb}"
        frame = self.rank if fault.frame is None else fault.frame
        frame_B = data[frame] if isinstance(data, Slots) else data
        before_B = frame_B.copy()
        if fault.action == "cut":
            frame_B[fault.at :] = 0
        elif fault.action == "lie":
            frame_B[fault.at] = fault.value
            frame_B[60:64] = np.frombuffer(zlib.crc32(frame_B[:60]).to_bytes(4, "little"), np.uint8)
        else:
            assert fault.action == "flip", fault.action
            frame_B[fault.at // 8] ^= 1 << (fault.at % 8)
        act()
        frame_B[:] = before_B
