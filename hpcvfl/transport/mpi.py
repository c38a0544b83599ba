"""Ranks that are processes under mpiexec or srun. The only file that imports mpi4py.MPI.

Importing it starts MPI. Every verb is a non-blocking call on a duplicated communicator plus our own
wait (waiting.py), so that a waiting rank burns no core and every wait ends.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import mpi4py

from hpcvfl.errors import TransportError, TransportTimeout
from hpcvfl.transport import launcher
from hpcvfl.transport.base import Bytes, ProcessTransport, Slots, transfers
from hpcvfl.transport.rollcall import RollCall, look_around
from hpcvfl.transport.waiting import BESIDE, PACE, Pace, wait_on

# MPI is started here as mpi4py would, but after a look at who started this process: MPICH under
# Open MPI's mpirun ends it in MPI_Init, and nobody could say why.
mpi4py.rc(initialize=False, finalize=True)
from mpi4py import MPI  # noqa: E402


def wait_in_mpi_init_for_all_ranks() -> None:
    """Start MPI; should a rank not come, the name stands in the stacks that say so."""
    MPI.Init_thread()


if not MPI.Is_initialized():
    launcher.warn(MPI.Get_library_version())
    wait_in_mpi_init_for_all_ranks()

LARGE_COUNTS = MPI.Get_version()[0] >= 4  # MPI-4 takes counts beyond 2**31 - 1
INT_MAX = 2**31 - 1
PIECE_NBYTES = 2**30  # of a transfer that is too long for an older MPI
PIECE_TAG = 0
MAX_TAGS = 32767  # MPI promises at least so many
LEAVE_S = 5.0  # ranks that have agreed to end come within milliseconds
SPEAK_S = 0.3  # between the last words and the abort: mpiexec drops what it has not yet read


class MpiTransport(ProcessTransport):
    """The verbs over MPI.

    timeout_s : float       longest wait of one verb, in seconds; also for all ranks to start
    comm      : MPI.Comm    what to duplicate; None: COMM_WORLD. While this waits for late ranks,
                            it takes messages with tags 1 and 2 for those of the roll call
    pace      : Pace        how it waits
    """

    name = "mpi"

    def __init__(self, timeout_s: float = 300.0, comm: Any = None, pace: Pace = PACE) -> None:
        """Duplicate the communicator twice, for frames and for the roll call, on every rank.

        Raises TransportTimeout that names the ranks which did not come. There is no transport then
        to abort with: all ranks are aborted when this process exits, or by `abort_all`.
        """
        world = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.timeout_s, self.round_index, self.waited_s = timeout_s, -1, 0.0
        self.threaded = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self._pace = pace
        self._calls = 0  # collectives posted so far
        self._pending: list[Any] = []  # what MPI may still write to after a timeout
        self._roll = RollCall(world)  # until it has a communicator of its own
        self._comm, self._roll_comm = self._duplicate(world), self._duplicate(world)
        self._roll = RollCall(self._roll_comm)

    def gather(self, slots: Slots, root: int = 0) -> None:
        """See Transport; MPI_Igatherv, in place at root."""
        self._collective("gather", slots, root)

    def broadcast(self, slots: Slots, root: int = 0) -> None:
        """See Transport; MPI_Ibcast of the whole buffer."""
        self._collective("broadcast", slots, root)

    def scatter(self, slots: Slots, root: int = 0) -> None:
        """See Transport; MPI_Iscatterv, in place at root."""
        self._collective("scatter", slots, root)

    def allgather(self, slots: Slots) -> None:
        """See Transport; MPI_Iallgatherv, in place."""
        self._collective("allgather", slots, 0)

    def barrier(self) -> None:
        """See Transport; MPI_Ibarrier."""
        self._calls += 1
        try:
            test = self._comm.Ibarrier().Test
            if not test():
                self._wait(test, "barrier")
        except MPI.Exception as error:
            raise self._broken("barrier", error) from error

    def send(self, data_B: Bytes, dest: int, kind: str) -> None:
        """See Transport; MPI_Isend, before MPI 4 one for each piece."""
        self.check_peer(dest, "dest")
        what, tag = f"send of {kind} to rank {dest}", tag_of(kind)
        request: Any
        try:
            if LARGE_COUNTS:
                request = self._comm.Isend([data_B, MPI.BYTE], dest, tag)
            else:
                post = self._comm.Isend
                request = Pieces([post([p, MPI.BYTE], dest, tag) for p in message_pieces(data_B)])
            if not request.Test():
                self._wait(request.Test, what, [dest])
        except MPI.Exception as error:
            raise self._broken(what, error) from error

    def receive(
        self, out_B: Bytes, source: int | None = None, kind: str = "MESSAGE"
    ) -> tuple[int, int]:
        """See Transport; MPI_Improbe first: the length is checked before bytes are taken."""
        if source is not None:
            self.check_peer(source, "source")
        came, nbytes = self._receive_piece(out_B, 0, source, kind)
        piece_nbytes = nbytes
        while not LARGE_COUNTS and piece_nbytes == PIECE_NBYTES:  # as message_pieces cuts them
            _, piece_nbytes = self._receive_piece(out_B, nbytes, came, kind)
            nbytes += piece_nbytes
        return came, nbytes

    def abort(self, code: int) -> None:
        """See Transport; MPI_Abort, which ends stopped ranks too; flushes what was printed.

        MPICH's mpiexec then returns `code`, or 9 if it counts a rank that it killed instead.
        """
        abort_all(code)

    @property
    def library(self) -> str:
        """The MPI library, as it names itself, in one line."""
        return MPI.Get_library_version().splitlines()[0].rstrip(" \0")

    def leave(self, code: int) -> NoReturn:
        """End this process after all ranks have agreed to end: MPI_Finalize, then exit at once.

        `python -m mpi4py` would turn any exit status but 0 into an MPI_Abort and its message.
        Where a rank does not come within 5 s, it is named and all are aborted after all.
        """
        self.timeout_s = LEAVE_S
        try:
            self.barrier()
        except TransportError as error:
            sys.stderr.write(f"hpcvfl: {error}\n")
            self.abort(code)
        # MPI_Finalize waits for all ranks, and mpi4py holds the interpreter's lock meanwhile: no
        # thread of ours could end the wait, the system's default action on SIGALRM does.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LEAVE_S)
        MPI.Finalize()
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(code)

    def close(self) -> None:
        """See Transport; frees both communicators."""
        self._comm.Free()
        self._roll_comm.Free()

    def _duplicate(self, world: Any) -> Any:
        """MPI_Idup: MPI_Comm_dup would wait for ever for a rank that does not come."""
        self._calls += 1
        what = f"start-up of {self.size} ranks"
        try:
            comm, request = world.Idup()
            if not request.Test():
                self._wait(request.Test, what)
        except TransportTimeout as error:
            # MPI_Finalize at exit would wait for the missing rank; what atexit calls comes before.
            atexit.register(abort_all, error.exit_code)
            raise
        except MPI.Exception as error:
            raise self._broken(what, error) from error
        return comm

    def _collective(self, verb: str, slots: Slots, root: int) -> None:
        key = (self, verb, root)
        post = slots.plans.get(key)
        if post is None:
            self.check(slots, root)
            post = slots.plans[key] = self._plan(verb, slots, root)
        self._calls += 1
        try:
            request = post()
            if not request.Test():
                self._wait(request.Test, verb, None, slots, root)
        except MPI.Exception as error:
            raise self._broken(f"{verb} of {slots.kinds_text}", error) from error

    def _plan(self, verb: str, slots: Slots, root: int) -> Callable[[], Any]:
        """A function that posts the verb and returns its request, of which only Test is used.

        Made once per Slots: building MPI's argument lists anew each round costs more than a small
        message does.
        """
        comm, mine = self._comm, (slots[self.rank], MPI.BYTE)
        if not LARGE_COUNTS and slots.buffer_B.nbytes > INT_MAX:
            return partial(self._post_pieces, verb, slots, root)
        every = (slots.buffer_B, (slots.sizes_R, slots.offsets_R), MPI.BYTE)
        at_root = self.rank == root
        sends: Any
        receives: Any
        if verb == "broadcast":
            return partial(comm.Ibcast, [slots.buffer_B, MPI.BYTE], root)
        if verb == "allgather":
            return partial(comm.Iallgatherv, MPI.IN_PLACE, every)
        if verb == "gather":
            sends, receives = (MPI.IN_PLACE, every) if at_root else (mine, None)
            return partial(comm.Igatherv, sends, receives, root)
        sends, receives = (every, MPI.IN_PLACE) if at_root else (None, mine)
        return partial(comm.Iscatterv, sends, receives, root)

    def _receive_piece(
        self, out_B: Bytes, at: int, source: int | None, kind: str
    ) -> tuple[int, int]:
        """Receive what one MPI_Isend sent into out_B[at:]; (source, its number of bytes)."""
        origin = "any rank" if source is None else f"rank {source}"
        what = f"receive of {kind} from {origin}"
        status, found = MPI.Status(), [MPI.MESSAGE_NULL]
        peer, tag = MPI.ANY_SOURCE if source is None else source, tag_of(kind)

        def probe() -> bool:
            message = self._comm.Improbe(peer, tag, status)
            found[0] = message or MPI.MESSAGE_NULL
            return message is not None

        try:
            if not probe():
                self._wait(probe, what, self.others if source is None else [source])
            came, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
            self._check_length(at, nbytes, out_B.nbytes, f"{kind} from rank {came}")
            request = found[0].Irecv([out_B[at : at + nbytes], MPI.BYTE])
            if not request.Test():
                self._wait(request.Test, what, [came])
        except MPI.Exception as error:
            raise self._broken(what, error) from error
        return came, nbytes

    def _check_length(self, at: int, nbytes: int, room: int, whose: str) -> None:
        """Refuse a piece of a message, before a byte of it is taken, that does not fit."""
        where = f"rank {self.rank}, round {self.round_index}: {whose}"
        if nbytes < 0:  # MPI_UNDEFINED
            raise TransportError(
                f"{where} is longer than this MPI can count ({INT_MAX} bytes);"
                " all ranks must use one MPI library"
            )
        if at + nbytes > room:
            more = " or more" if not LARGE_COUNTS and nbytes == PIECE_NBYTES else ""
            raise TransportError(f"{where} has {at + nbytes} bytes{more}, the buffer {room}")

    def _post_pieces(self, verb: str, slots: Slots, root: int) -> Pieces:
        """The same from point-to-point messages of at most 1 GiB, for an MPI before version 4."""
        requests = []
        for source, dest, data_B in transfers(verb, slots, root):
            if self.rank not in (source, dest):
                continue
            for at in range(0, data_B.nbytes, PIECE_NBYTES):
                piece = [data_B[at : at + PIECE_NBYTES], MPI.BYTE]
                if self.rank == source:
                    requests.append(self._comm.Isend(piece, dest, PIECE_TAG))
                else:
                    requests.append(self._comm.Irecv(piece, source, PIECE_TAG))
        return Pieces(requests)

    def _wait(
        self,
        test: Callable[[], bool],
        what: str,
        awaited: list[int] | None = None,
        slots: Slots | None = None,
        root: int = 0,
    ) -> None:
        """Wait for `test`, which has just been false.

        After timeout_s, find out who of `awaited` is missing; None: this is a collective, of all.
        """
        tick = partial(look_around, self, self._roll, self._calls, what, awaited, slots, root)
        try:
            self.waited_s += wait_on(test, self._own_pace(), tick)
        except TransportTimeout:
            self._pending.append((test, slots))
            raise

    def _own_pace(self) -> Pace:
        """The pace of this thread."""
        return self._pace if threading.current_thread() is threading.main_thread() else BESIDE

    def _broken(self, what: str, error: MPI.Exception) -> TransportError:
        return TransportError(
            f"rank {self.rank}, round {self.round_index}: {what}: MPI says"
            f" {error.Get_error_string()}"
        )


class Pieces:
    """Several requests that are tested as one."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        """Take over the requests."""
        self._requests = requests

    def Test(self) -> bool:  # noqa: N802 - as MPI.Request
        """Whether all of them are complete."""
        return MPI.Request.Testall(self._requests)


def message_pieces(data_B: Bytes) -> Iterator[Bytes]:
    """A message as PIECE_NBYTES after PIECE_NBYTES; the first shorter piece, perhaps empty, ends
    it, so that the receiver need not know the length.
    """
    for at in range(0, data_B.nbytes + 1, PIECE_NBYTES):
        yield data_B[at : at + PIECE_NBYTES]


def end_process(code: int) -> NoReturn:
    """End this process alone, as C's exit does: at once, but with its handlers.

    Not os._exit: in one of them MPICH takes its leave of mpiexec, which without that kills who is
    still there and returns 9.
    """
    ctypes.PyDLL(None).exit(code)  # PyDLL: the interpreter's lock stays with this thread
    raise SystemExit(code)  # not reached; for the type checker


def abort_all(code: int) -> NoReturn:
    """End all ranks of this launch with this exit status, after what was printed is out.

    For errors before there is a transport; MpiTransport.abort otherwise.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SPEAK_S)
    MPI.COMM_WORLD.Abort(code)
    time.sleep(SPEAK_S)  # MPICH's may return before mpiexec has ended this process
    end_process(code)


def tag_of(kind: str) -> int:
    """The MPI tag that carries messages of this kind; the same on every rank, never PIECE_TAG."""
    return 1 + zlib.crc32(kind.encode()) % (MAX_TAGS - 1)
