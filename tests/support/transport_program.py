"""Ranks of a run that goes wrong: `mpiexec -n N python -m mpi4py transport_program.py HOW`.

Exchanges rounds for ever; in round 3 the last rank does HOW: raise | library | stop | kill. Or it
does not come: absent (it never makes a transport, and the others just exit), late (all others
leave, it does not), last (it stops after all have agreed to leave). Each rank prints `pid RANK
PID`, the last one `now SECONDS` (monotonic) right before. Errors in a round are handled as cli.py
does: one line with the rank, then all ranks are aborted.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from hpcvfl.errors import HpcvflError, TransportError
from hpcvfl.transport import Slots
from hpcvfl.transport.mpi import MPI, MpiTransport

TIMEOUT_S = 1.5
LEAVE_CODE = 7


def say(line: str) -> None:
    """Print a line in one piece, so that the lines of several ranks do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def go_wrong(how: str) -> None:
    say(f"now {time.monotonic()}")
    if how == "raise":
        raise TransportError("this rank has had enough")
    if how == "library":
        raise ZeroDivisionError("not one of ours")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def main(how: str) -> None:
    world = MPI.COMM_WORLD
    is_last = world.rank == world.size - 1
    say(f"pid {world.rank} {os.getpid()}")
    if how == "absent" and is_last:
        go_wrong(how)
    try:
        transport = MpiTransport(timeout_s=TIMEOUT_S)
    except HpcvflError as error:
        say(f"said {time.monotonic()} {error}")
        sys.exit(error.exit_code)
    if how in ("late", "last"):
        if is_last:
            if how == "last":
                transport.barrier()  # meets the one in leave
            go_wrong(how)
        transport.leave(LEAVE_CODE)
    exchange_for_ever(transport, how)


def exchange_for_ever(transport: MpiTransport, how: str) -> None:
    slots = Slots([16] * transport.size, ["EMBED"] * transport.size, [16] * transport.size)
    slots.buffer_B[:] = 0
    try:
        for r in range(10**9):
            transport.round_index = r
            if r == 3 and transport.rank == transport.size - 1:
                go_wrong(how)
            transport.gather(slots)
            transport.broadcast(slots)
    except HpcvflError as error:
        say(f"said {time.monotonic()} {error}")
        transport.abort(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
