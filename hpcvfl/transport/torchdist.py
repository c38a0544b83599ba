"""Ranks that are processes under torchrun: torch.distributed over gloo, between CPUs.

What gloo does shapes this file (torch 2.14; tests/ranks/test_torchdist.py looks if it holds):

- A send or a receive cannot be asked whether it is over: `is_completed` stays false until `wait`
  has returned. So a thread of its own waits, and the rank sleeps on a lock, which burns no core,
  and looks around about every 0.1 s.
- When gloo's own timeout runs out it closes the connections to all ranks. So it is set to days, and
  ours is the only one.
- A send is over when the other side has posted the receive. So a short message is copied.
- A message that is longer than its receive ends the process. So the tag of a collective holds its
  sizes, and a message goes behind its length, which the receiver checks.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from hpcvfl.errors import ConfigError, TransportError, TransportTimeout
from hpcvfl.transport.base import Bytes, ProcessTransport, Slots, transfers
from hpcvfl.transport.rollcall import look_around
from hpcvfl.transport.store import Ending, StoreRoll, flush
from hpcvfl.transport.waiting import ANSWER_AFTER_S, ANSWER_EVERY_S, Pace, wait_until

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONG = timedelta(days=30)
COPIED_NBYTES = 1 << 16  # messages up to so long are copied, so that their sender need not wait
UNDER_WAY = 128  # so many sends of copies may be unfinished; then a sender waits for the oldest
TAGS = 2**31 - 1
ANY = -1  # in place of a peer
LEAVE_S = 5.0  # ranks that have agreed to end come within milliseconds
# Interpreters start seconds apart, and each look is a round trip to the store.
START_PACE = Pace(yield_s=0.0, share=0.1, shortest_s=1e-3, longest_s=0.1)

Post = tuple[int, Callable[[], Any]]
"""The other rank, and what posts a send or a receive and returns its Work."""


class TorchTransport(ProcessTransport):
    """The verbs over gloo, each frame a send and a receive in place; all of a verb posted at once.

    timeout_s : float                    longest wait of one verb, in seconds; also for all to start
    meeting   : (store, rank, size)      a torch Store of these ranks; None: what torchrun says
    """

    name = "torchdist"

    def __init__(
        self, timeout_s: float = 300.0, meeting: tuple[Any, int, int] | None = None
    ) -> None:
        """Meet the other ranks at the store, and connect to each.

        Raises TransportTimeout that names the ranks which did not come, on every rank;
        ConfigError without torchrun.
        """
        self.timeout_s, self.round_index, self.waited_s = timeout_s, -1, 0.0
        self._calls = 0  # collectives posted so far
        self._pending: list[Any] = []  # what gloo may still write to after a timeout
        self._under_way: deque[_Moves] = deque()  # sends of copies
        store, self.rank, self.size = meeting or meet(timeout_s)
        try:
            self._ending = Ending(store, self.rank, self.size)
            self._roll = StoreRoll(store, self.rank, self.size)
            self._wait_for_all()
            self._ending.watch()
            self._group: Any = ProcessGroupGloo(
                PrefixStore("gloo", store), self.rank, self.size, timedelta(seconds=timeout_s)
            )
            self._group._set_default_timeout(LONG)
        except RuntimeError as error:
            raise self._broken(f"start-up of {self.size} ranks", error) from error
        self._waiter = _Waiter()
        tokens = Slots([1] * self.size, ["TOKEN"] * self.size, [0] * self.size)
        self._tokens = self._plan("barrier", tokens, 0)

    @property
    def library(self) -> str:
        """See ProcessTransport."""
        return f"gloo of torch {torch.__version__}, no MPI"

    def gather(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self._collective("gather", slots, root)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """See Transport; root sends the buffer once to each rank."""
        self._collective("broadcast", slots, root)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """See Transport."""
        self._collective("scatter", slots, root)

    def allgather(self, slots: Slots) -> None:
        """See Transport; each rank sends its frame once to each other."""
        self._collective("allgather", slots, 0)

    def barrier(self) -> None:
        """See Transport; a byte from each rank to each other."""
        self._calls += 1
        if self._tokens:
            self._wait(self._start("barrier", self._tokens), "barrier")

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """See Transport; waits for the receiver if the message is longer than 64 KiB."""
        self._check_other(dest, "dest")
        what, nbytes = f"send of {kind} to rank {dest}", data_B.nbytes
        copied = nbytes <= COPIED_NBYTES
        # torch makes no tensor of memory that may not be written to.
        kept_B = data_B.copy() if copied or not data_B.flags.writeable else data_B
        parts = [torch.tensor([nbytes]), *([torch.from_numpy(kept_B)] if nbytes else [])]
        post = self._group.send
        moves = self._start(what, [(dest, partial(post, [p], dest, tag_of(kind))) for p in parts])
        if not copied:
            self._wait(moves, what, [dest])
            return
        self._under_way.append(moves)
        if len(self._under_way) > UNDER_WAY:
            oldest = self._under_way.popleft()
            peer = oldest.peers[0]
            self._wait(oldest, f"earlier send to rank {peer}", [peer])

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """See Transport; the length comes first and is checked before bytes are taken."""
        if source is not None:
            self._check_other(source, "source")
        what = f"receive of {kind} from {'any rank' if source is None else f'rank {source}'}"
        came, nbytes = self._receive_length(what, source, tag_of(kind))
        if 0 <= nbytes <= out_B.nbytes:
            self._receive_bytes(what, out_B[:nbytes], came, tag_of(kind))
            return came, nbytes
        if 0 < nbytes <= COPIED_NBYTES:  # its sender has gone on; take it, the next one is behind
            self._receive_bytes(what, np.empty(nbytes, np.uint8), came, tag_of(kind))
        raise TransportError(
            f"rank {self.rank}, round {self.round_index}: {kind} from rank {came} has {nbytes}"
            f" bytes, the buffer {out_B.nbytes}"
        )

    def abort(self, code: int) -> None:
        """See Transport; stopped ranks of this host are killed. torchrun then returns 1."""
        self._ending.end_all(code)

    def leave(self, code: int) -> NoReturn:
        """See ProcessTransport; torchrun returns 1, whatever the code."""
        self.timeout_s = LEAVE_S
        try:
            self.barrier()
        except TransportError as error:
            sys.stderr.write(f"hpcvfl: {error}\n")
            self._ending.end_all(code)
        self._ending.stop()
        flush()
        os._exit(code)

    def close(self) -> None:
        """See Transport; messages that nobody has received are lost."""
        self._ending.stop()
        self._waiter.stop()
        self._waiter.join()  # as `Ending.stop` does, and for the same reason
        self._under_way.clear()
        self._tokens.clear()
        self._group = None

    def _wait_for_all(self) -> None:
        """Return when every rank has said that it is here."""

        def tick(seconds: float) -> None:
            if seconds > self.timeout_s:
                missing = self._ending.absent()
                names = "; ".join(f"rank {k} did not post (it has not come)" for k in missing)
                raise TransportTimeout(
                    f"rank {self.rank}, start-up of {self.size} ranks: {names};"
                    f" waited {seconds:.1f} s (timeout_s = {self.timeout_s:g})",
                    missing,
                )

        self.waited_s += wait_until(self._ending.all_here, START_PACE, tick)

    def _collective(self, verb: str, slots: Slots, root: int) -> None:
        key = (self, verb, root)
        posts = slots.plans.get(key)
        if posts is None:
            self.check(slots, root)
            posts = slots.plans[key] = self._plan(verb, slots, root)
        self._calls += 1
        if posts:
            self._wait(self._start(f"{verb} of {slots.kinds_text}", posts), verb, None, slots, root)

    def _plan(self, verb: str, slots: Slots, root: int) -> list[Post]:
        """What this rank posts of a verb, receives first; made once per Slots.

        The tag holds verb, root and sizes: what was posted for another verb is not taken for this.
        """
        what = f"{verb} {root} {slots.sizes_R}"
        tag = zlib.crc32(what.encode()) % TAGS
        receives: list[Post] = []
        sends: list[Post] = []
        moved = "allgather" if verb == "barrier" else verb
        for source, dest, data_B in transfers(moved, slots, root):
            if data_B.nbytes and self.rank == dest:
                tensors = [torch.from_numpy(data_B)]
                receives.append((source, partial(self._group.recv, tensors, source, tag)))
            elif data_B.nbytes and self.rank == source:
                tensors = [torch.from_numpy(data_B)]
                sends.append((dest, partial(self._group.send, tensors, dest, tag)))
        return receives + sends

    def _receive_length(self, what: str, source: int | None, tag: int) -> tuple[int, int]:
        """(source, bytes) of the next message."""
        length = torch.zeros(1, dtype=torch.int64)
        if source is None:
            posts = [(ANY, partial(self._group.recv_anysource, [length], tag))]
        else:
            posts = [(source, partial(self._group.recv, [length], source, tag))]
        moves = self._start(what, posts)
        self._wait(moves, what, self.others if source is None else [source])
        came = moves.works[0]._source_rank() if source is None else source
        return came, int(length)

    def _receive_bytes(self, what: str, out_B: Bytes, source: int, tag: int) -> None:
        """Receive what follows a length."""
        if out_B.nbytes:
            post = partial(self._group.recv, [torch.from_numpy(out_B)], source, tag)
            self._wait(self._start(what, [(source, post)]), what, [source])

    def _start(self, what: str, posts: Sequence[Post]) -> _Moves:
        """Post sends and receives."""
        try:
            return _Moves([post() for _, post in posts], [peer for peer, _ in posts])
        except RuntimeError as error:
            raise self._broken(what, error) from error

    def _wait(
        self,
        moves: _Moves,
        what: str,
        awaited: list[int] | None = None,
        slots: Slots | None = None,
        root: int = 0,
    ) -> None:
        """Wait for moves; see look_around for the rest."""
        self._waiter.take(moves)
        begun_s = time.perf_counter()
        over = moves.over.acquire(timeout=ANSWER_AFTER_S)
        try:
            while not over:
                seconds = time.perf_counter() - begun_s
                look_around(self, self._roll, self._calls, what, awaited, slots, root, seconds)
                over = moves.over.acquire(timeout=ANSWER_EVERY_S)
        except TransportTimeout:
            # Its thread waits for what may still come; what is waited for next needs another.
            self._pending.append((moves, slots))
            self._waiter.stop()
            self._waiter = _Waiter()
            raise
        except RuntimeError as error:
            raise self._broken(f"{what}: the store of torchrun", error) from error
        self.waited_s += time.perf_counter() - begun_s
        if moves.error is not None:
            self._pending.append((moves, slots))
            peer = f" to rank {moves.failed}" if moves.failed != ANY else ""
            raise self._broken(f"{what}: the connection{peer} is lost", moves.error)

    def _check_other(self, peer: int, word: str) -> None:
        """Refuse a rank that is not in the group, and this one: there is no connection to it."""
        self.check_peer(peer, word)
        if peer == self.rank:
            raise TransportError(
                f"rank {self.rank}, round {self.round_index}: {word} {peer} is this rank itself"
            )

    def _broken(self, what: str, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank}, round {self.round_index}: {what}: {in_short(error)}"
        )


class _Moves:
    """Sends and receives that are waited for together.

    over   : lock                    free when all are over, or one has failed
    error  : RuntimeError or None    of the first that failed, and `failed` its peer
    """

    def __init__(self, works: list[Any], peers: list[int]) -> None:
        self.works, self.peers = works, peers
        self.over = threading.Lock()
        self.over.acquire()
        self.error: RuntimeError | None = None
        self.failed = ANY

    def wait(self) -> None:
        """Wait, without a limit, and free the lock."""
        try:
            for work, peer in zip(self.works, self.peers, strict=True):
                self.failed = peer
                work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            self.over.release()


class _Waiter(threading.Thread):
    """A thread that waits for moves, one after the other."""

    def __init__(self) -> None:
        # A daemon: where nothing comes any more it must not keep the process from ending.
        super().__init__(name="gloo", daemon=True)
        self._moves: queue.SimpleQueue[_Moves | None] = queue.SimpleQueue()
        self.start()

    def take(self, moves: _Moves) -> None:
        """Wait for these after those taken before."""
        self._moves.put(moves)

    def stop(self) -> None:
        """End the thread after those taken before."""
        self._moves.put(None)

    def run(self) -> None:
        """Until `stop`."""
        while (moves := self._moves.get()) is not None:
            moves.wait()


def meet(timeout_s: float) -> tuple[Any, int, int]:
    """(store, rank, number of ranks) as the variables of torchrun say.

    Raises ConfigError if it has not started this process, TransportError if there is no store.
    """
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"transport torchdist: {', '.join(missing)} not set; start with torchrun"
            " (launch/torchrun.sh N ..), or leave transport.name at auto"
        )
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        text = f"start-up: no store of torchrun can be reached: {in_short(error)}"
        raise TransportError(text) from error
    # Ranks that torchrun has started anew find the same store, with the end of those before them.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hpcvfl {restarts}", store), rank, size


def in_short(error: Exception) -> str:
    """What torch or gloo says, without its source lines and its advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"\[\S+\.\w+:\d+\] ", "", first).split(". ")[0]


def abort_all(code: int) -> NoReturn:
    """End this process before there is a transport; torchrun's agent ends the others."""
    flush()
    os._exit(code)


def tag_of(kind: str) -> int:
    """The tag that carries messages of this kind; the same on every rank."""
    return zlib.crc32(b"message " + kind.encode()) % TAGS
