"""All ranks in one process: one thread each, exactly one running at a time.

The turn is passed on only when a rank has to wait, so a run is as deterministic as a single program
and needs no locks in anything that a rank calls. Clocks measure nothing useful here: wall-clock
policies and wall-time benchmarks are refused on this transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcvfl.errors import ConfigError, HpcvflError, TransportError, TransportTimeout
from hpcvfl.transport.base import Bytes, Slots, Transport

T = TypeVar("T")


class _Ended(BaseException):
    """Unwinds a rank after another one failed; no Exception, so no handler stops it."""


@dataclass
class _Wait:
    """Why a rank cannot go on: what it does, when it may, and for whom it waits: all or any."""

    what: str
    ready: Callable[[], bool]
    missing: Callable[[], Iterable[int]]
    any_will_do: bool = False

    def hopeless(self, left: set[int]) -> bool:
        """Whether it cannot come true with the ranks that have not ended."""
        gone = [k not in left for k in self.missing()]
        return all(gone) if self.any_will_do else any(gone)


@dataclass
class _Meeting:
    """One collective call: the last rank to come moves the bytes of all."""

    verb: str
    root: int
    sizes: tuple[int, ...]
    first: int
    slots: dict[int, Slots | None] = field(default_factory=dict)
    done: bool = False

    @property
    def text(self) -> str:
        return f"{self.verb}(root {self.root}) of {list(self.sizes)} bytes"


class ThreadsWorld:
    """A group of ranks in this process.

    size      : int               number of ranks
    order     : ranks or None     who gets the turn first, second, ..; None: 0, 1, 2, ..
    timeout_s : float             longest that one rank may keep the turn, in seconds. A wait itself
    needs no
                                  clock: when all ranks wait, that is seen at once.
    """

    def __init__(
        self, size: int, order: Sequence[int] | None = None, timeout_s: float = 300.0
    ) -> None:
        """Check the order; nothing is started before `run`."""
        self.size = size
        self.order = list(range(size) if order is None else order)
        if size < 1 or sorted(self.order) != list(range(size)):
            raise ConfigError(f"threads: order = {self.order}: not an order of ranks 0..{size - 1}")
        self.timeout_s = timeout_s

    def run(self, fn: Callable[[Transport], T]) -> list[T]:
        """Call fn(transport) once per rank, each in its own thread; the results in rank order.

        The first exception of any rank ends all the others and is raised here with its traceback.
        Each rank starts with the present state of torch's CPU generator and has its own from then
        on; the state found at the call is put back at the end.
        """
        return _Run(self).all(fn)


class _Run:
    """One call of ThreadsWorld.run. `lock` guards who has the turn; the rest is the holder's."""

    def __init__(self, world: ThreadsWorld) -> None:
        self.size, self.order = world.size, world.order
        self.lock = threading.Lock()
        self.turns = [threading.Semaphore(0) for _ in range(self.size)]
        self.waits: list[_Wait | None] = [None] * self.size
        self.errors: list[TransportTimeout | None] = [None] * self.size
        self.left = set(range(self.size))  # ranks that have not returned
        self.abandoned: set[int] = (
            set()
        )  # ranks that kept the turn too long; their threads may still run
        self.holder = self.order[0]
        self.since_s = time.monotonic()
        self.over = threading.Event()
        self.failure: BaseException | None = None
        self.meetings: dict[int, _Meeting] = {}
        self.mail: list[list[tuple[int, str, Bytes]]] = [[] for _ in range(self.size)]
        self.generators = _Generators(self.size)
        self.transports = [ThreadsTransport(self, k, world.timeout_s) for k in range(self.size)]

    def all(self, fn: Callable[[Transport], T]) -> list[T]:
        """Run every rank to its end, watching how long each keeps the turn."""
        results: list[Any] = [None] * self.size
        for rank in range(self.size):
            name = f"rank {rank}"
            threading.Thread(
                target=self._rank, args=(rank, fn, results), name=name, daemon=True
            ).start()
        try:
            self.turns[self.holder].release()
            while not self.over.wait(0.05):
                self._watch()
        except (
            BaseException
        ) as error:  # e.g. KeyboardInterrupt: the ranks must not run on without us
            self.failure = self.failure or error
            raise
        finally:
            self.generators.put_back()
        if self.failure is not None:
            raise self.failure
        return results

    def wait(self, rank: int, wait: _Wait) -> None:
        """Return when wait.ready(), giving the turn to others until then."""
        self.go_on(rank)
        if wait.ready():
            return
        self.waits[rank] = wait
        self.generators.save(rank)
        since_s = time.monotonic()
        self._pass_on(rank)
        self.turns[rank].acquire()
        self.transports[rank].waited_s += time.monotonic() - since_s
        self.generators.restore(rank)
        self.waits[rank] = None
        self.go_on(rank, wait.ready())

    def go_on(self, rank: int, ready: bool = True) -> None:
        """Raise what this rank has to know before it goes on.

        An error that all ranks raise alike ends nobody who need not wait for more: whoever is ready
        comes to it too, and does before what the others did.
        """
        error, self.errors[rank] = self.errors[rank], None
        if error is not None:
            raise error
        if self.failure is not None and not (ready and self._is_shared()):
            raise _Ended

    def _is_shared(self) -> bool:
        return isinstance(self.failure, HpcvflError) and self.failure.everywhere

    def _rank(self, rank: int, fn: Callable[[Transport], T], results: list[Any]) -> None:
        self.turns[rank].acquire()
        try:
            self.generators.restore(rank)
            self.go_on(rank)
            results[rank] = fn(self.transports[rank])
        except _Ended:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        if rank not in self.abandoned:
            self.left.discard(rank)
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on, or tell one of them that none can."""
        with self.lock:
            if rank in self.abandoned:
                return
            self._grant(rank)

    def _grant(self, rank: int) -> None:
        at = self.order.index(rank)
        ahead = [k for k in self.order[at + 1 :] + self.order[: at + 1] if k in self.left]
        if not ahead:
            self.over.set()
            return
        chosen = next((k for k in ahead if self._can_go_on(k)), None)
        if chosen is None and self.failure is not None:
            chosen = ahead[0]  # it will find that it is not ready, and end
        elif chosen is None:
            chosen = self._victim()
            self.errors[chosen] = TransportTimeout(self._deadlock(chosen))
        self.holder, self.since_s = chosen, time.monotonic()
        self.turns[chosen].release()

    def _can_go_on(self, rank: int) -> bool:
        wait = self.waits[rank]
        failed = self.failure is not None and not self._is_shared()
        return wait is None or failed or wait.ready()

    def _victim(self) -> int:
        """The rank that reports a deadlock: the lowest that waits for one that is not coming."""
        for rank in sorted(self.left):
            wait = self.waits[rank]
            if wait is not None and wait.hopeless(self.left):
                return rank
        return min(self.left)

    def _deadlock(self, rank: int) -> str:
        wait = self.waits[rank]
        assert wait is not None
        missing = "; ".join(f"rank {k} did not post ({self._where(k)})" for k in wait.missing())
        return (
            f"rank {rank}, round {self.transports[rank].round_index}: {wait.what}: {missing};"
            f" noticed after {time.monotonic() - self.since_s:.1f} s: all wait, nothing can come"
        )

    def _where(self, rank: int) -> str:
        wait = self.waits[rank]
        if rank not in self.left or wait is None:
            return "it has ended"
        return f"it waits in round {self.transports[rank].round_index}, {wait.what}"

    def _watch(self) -> None:
        """End the run if a rank kept the turn too long; its thread is left behind."""
        with self.lock:
            rank, held_s = self.holder, time.monotonic() - self.since_s
            transport = self.transports[rank]
            if held_s <= transport.timeout_s or self.over.is_set():
                return
            waiting = [f"rank {k} in {w.what}" for k, w in enumerate(self.waits) if w and k != rank]
            self.failure = self.failure or TransportTimeout(
                f"round {transport.round_index}: rank {rank} did not post within {held_s:.1f} s"
                f" (timeout_s = {transport.timeout_s:g}); waiting: {', '.join(waiting) or 'nobody'}"
            )
            self.abandoned.add(rank)
            self.left.discard(rank)
            self._grant(rank)


class ThreadsTransport(Transport):
    """The verbs of one rank of a ThreadsWorld; made by it, one per rank."""

    name = "threads"

    def __init__(self, run: _Run, rank: int, timeout_s: float) -> None:
        """One rank of a run."""
        self.rank, self.size = rank, run.size
        self.timeout_s, self.round_index, self.waited_s = timeout_s, -1, 0.0
        self._run = run
        self._calls = 0  # collectives so far; the n-th of one rank meets the n-th of all others

    def gather(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self._meet("gather", slots, root)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self._meet("broadcast", slots, root)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self._meet("scatter", slots, root)

    def allgather(self, slots: Slots) -> None:
        """See Transport."""
        self._meet("allgather", slots, 0)

    def barrier(self) -> None:
        """See Transport."""
        self._meet("barrier", None, 0)

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """See Transport; the bytes are copied, so it never waits."""
        self.check_peer(dest, "dest")
        self._run.go_on(self.rank)
        self._run.mail[dest].append((self.rank, kind, data_B.copy()))

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """See Transport."""
        if source is not None:
            self.check_peer(source, "source")
        box = self._run.mail[self.rank]

        def found() -> int | None:
            fits = (source, kind)
            return next((i for i, (s, k, _) in enumerate(box) if fits in ((s, k), (None, k))), None)

        others = [k for k in range(self.size) if k != self.rank] if source is None else [source]
        origin = "any rank" if source is None else f"rank {source}"
        what = f"receive of {kind} from {origin}"
        wait = _Wait(what, lambda: found() is not None, lambda: others, any_will_do=source is None)
        self._run.wait(self.rank, wait)
        index = found()
        assert index is not None
        peer, _, data_B = box.pop(index)
        if data_B.nbytes > out_B.nbytes:
            raise TransportError(
                f"rank {self.rank}, round {self.round_index}: {kind} from rank {peer} has"
                f" {data_B.nbytes} bytes, the buffer {out_B.nbytes}"
            )
        out_B[: data_B.nbytes] = data_B
        return peer, data_B.nbytes

    def abort(self, code: int) -> None:
        """Raise TransportError, which ends every rank and comes out of ThreadsWorld.run."""
        raise TransportError(
            f"rank {self.rank}, round {self.round_index}: aborts the run with exit status {code}"
        )

    def close(self) -> None:
        """Nothing to give back."""

    def _meet(self, verb: str, slots: Slots | None, root: int) -> None:
        if slots is not None:
            self.check(slots, root)
        run, number = self._run, self._calls
        run.go_on(self.rank)
        sizes_R = slots.sizes_R if slots is not None else ()
        meeting = run.meetings.setdefault(number, _Meeting(verb, root, sizes_R, self.rank))
        mine = _Meeting(verb, root, sizes_R, self.rank)
        if mine.text != meeting.text:
            raise TransportError(
                f"rank {self.rank}, round {self.round_index}: calls {mine.text} where"
                f" rank {meeting.first} calls {meeting.text}"
            )
        self._calls += 1
        meeting.slots[self.rank] = slots
        if len(meeting.slots) == self.size:
            _move(meeting)
            del run.meetings[number]
            return
        kinds = f" of {slots.kinds_text}" if slots is not None else ""

        def missing() -> list[int]:
            return sorted(set(range(self.size)) - set(meeting.slots))

        run.wait(self.rank, _Wait(f"{verb}{kinds}", lambda: meeting.done, missing))


def _move(meeting: _Meeting) -> None:
    """Copy the bytes of a collective between the buffers of all ranks."""
    meeting.done = True
    root, all_slots = meeting.root, {k: s for k, s in meeting.slots.items() if s is not None}
    for k, slots in all_slots.items():
        if meeting.verb == "broadcast" and k != root:
            slots.buffer_B[:] = all_slots[root].buffer_B
        elif meeting.verb == "scatter" and k != root:
            slots[k][:] = all_slots[root][k]
        elif meeting.verb == "allgather" or (meeting.verb == "gather" and k == root):
            for peer, theirs in all_slots.items():
                if peer != k:
                    slots[peer][:] = theirs[peer]


class _Generators:
    """torch's CPU generator, one state per rank; without torch there is nothing to keep."""

    def __init__(self, size: int) -> None:
        self.torch: Any = None
        try:
            import torch
        except ImportError:
            return
        self.torch = torch
        self.before = torch.get_rng_state()
        self.states = [self.before] * size

    def save(self, rank: int) -> None:
        if self.torch is not None:
            self.states[rank] = self.torch.get_rng_state()

    def restore(self, rank: int) -> None:
        if self.torch is not None:
            self.torch.set_rng_state(self.states[rank])

    def put_back(self) -> None:
        if self.torch is not None:
            self.torch.set_rng_state(self.before)
