"""One piece of work on every rank, whatever started them; the one place where ranks are ended."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hpcvfl.errors import ConfigError, HpcvflError, out_of_memory

if TYPE_CHECKING:
    from hpcvfl.transport.base import ProcessTransport, Transport

MOST_S = 1e8  # three years: the clock behind it does not count much further
T = TypeVar("T")


def on_every_rank(
    configure: Callable[[], T],
    work: Callable[[T, Transport], dict[str, Any]],
    refuse: bool = True,
) -> dict[str, Any] | None:
    """Run `work(configure(), transport)` on every rank; the result on rank 0, None on the others.

    One process: ranks are threads of it. Under a launcher this process is one rank, and an error
    on any rank ends all of them: shared ones after rank 0 has printed them, others by an abort.

    refuse : whether a launcher that disagrees with the communicator is an error before any work
    """
    from hpcvfl.transport import launcher

    failure: HpcvflError | None = None
    config: Any = None
    try:
        config = configure()
    except HpcvflError as error:
        failure = error
    except Exception as error:  # a fault of the program; the other ranks must hear of it too
        traceback.print_exc()
        failure = HpcvflError(f"{type(error).__name__}: {error}")
    name = config.transport.name if hasattr(config, "transport") else "auto"
    if name == "auto":
        name = _transport_of_launcher()
    if name != "threads":
        return _under_launcher(name, config, failure, work, refuse)
    if failure:
        raise failure
    if (launcher.expected_size() or 1) > 1:
        raise ConfigError(
            f"transport.name = 'threads', but the launcher started {launcher.expected_size()}"
            " processes; start one, or leave transport.name at auto"
        )
    from hpcvfl.transport.threads import ThreadsWorld

    size = len(config.block_of_rank) if hasattr(config, "block_of_rank") else 1
    try:
        return ThreadsWorld(size).run(lambda transport: _do(work, config, transport))[0]
    except SystemExit as error:  # whatever its status says, the run has not ended
        raise HpcvflError(f"a module of the model ended the program ({error!r})") from None


def _transport_of_launcher() -> str:
    """The transport for what started this process."""
    from hpcvfl.transport import launcher

    launch = launcher.detect()
    if launch is None:
        return "threads"
    return "torchdist" if launch.name == launcher.TORCHRUN else "mpi"


def _processes(
    name: str, first_timeout_s: float
) -> tuple[Callable[[float], ProcessTransport], Callable[[int], None]]:
    """(what makes a transport, given a timeout in seconds; what aborts all before there is one)."""
    if name == "torchdist":
        from hpcvfl.transport import torchdist

        return torchdist.TorchTransport, torchdist.abort_all
    from hpcvfl.engine.watch import STDERR

    # MPI_Init waits for all ranks, without a limit of its own, and holds the interpreter's lock:
    # no thread of ours could say so. The stacks tell where it hangs; the status is 1.
    limit_s = min(max(first_timeout_s, 1.0), MOST_S)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)
    try:
        from hpcvfl.transport import mpi
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library behind it
        raise ConfigError(
            f"transport mpi: {error}; install it with: pip install 'hpcvfl[mpich]', or on a cluster"
            " with its own MPI: pip install 'hpcvfl[mpi]'"
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    return mpi.MpiTransport, mpi.abort_all


def _under_launcher(
    name: str,
    config: Any,
    failure: HpcvflError | None,
    work: Callable[[Any, Transport], dict[str, Any]],
    refuse: bool,
) -> dict[str, Any] | None:
    first_timeout_s = config.transport.first_timeout_s if hasattr(config, "transport") else 900.0
    make, abort_all = _processes(name, first_timeout_s)
    from hpcvfl.engine.agree import together
    from hpcvfl.transport import launcher

    try:
        transport = make(first_timeout_s)
    except HpcvflError as error:
        complain(str(error), rank=0)
        abort_all(error.exit_code)
        raise
    try:
        if refuse:
            launcher.check(transport.size, transport.rank, library=transport.library)

        def same_start() -> None:
            if failure:
                raise failure

        together(transport, same_start)
        result = _do(work, config, transport)
        transport.barrier()  # has a timeout and names who is missing; leaving MPI has neither
        transport.close()
        return result if transport.rank == 0 else None
    except HpcvflError as error:
        if error.everywhere:
            if transport.rank == 0:
                complain(str(error), rank=0)
            transport.leave(error.exit_code)
        if transport.size == 1:  # nobody else is there; one of N such processes speaks
            raise
        text = str(error)
        prefix = "" if text.startswith("rank ") else f"rank {transport.rank}: "
        complain(prefix + text, rank=0)
        transport.abort(error.exit_code)
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 130 if interrupted else 1
        text = "interrupted" if interrupted else traceback.format_exc()
        complain(f"rank {transport.rank}: {text}", rank=0)
        transport.abort(code)
        raise


def _do(work: Callable[[Any, Transport], T], config: Any, transport: Transport) -> T:
    """`work(config, transport)`, with memory that ran out as an OutOfMemory of one line."""
    try:
        return work(config, transport)
    except (MemoryError, OSError, RuntimeError) as error:
        told = out_of_memory(error, transport.rank, transport.round_index)
        if told is None:
            raise
        raise told from None


def tell_all(error: HpcvflError) -> int:
    """Raise `error`, under a launcher on every rank: others may wait for this one to start."""
    from hpcvfl.transport import launcher

    name = _transport_of_launcher()
    # Where its module is loaded, the others have been told.
    told = f"hpcvfl.transport.{name}" in sys.modules
    if name == "threads" or launcher.expected_size() == 1 or told:
        raise error
    _under_launcher(name, None, error, lambda config, transport: {}, refuse=True)
    raise error


def alone(verb: str) -> None:
    """Refuse to run a verb of one process once for every rank."""
    from hpcvfl.transport import launcher

    if launcher.is_launched() and launcher.expected_size() != 1:
        raise ConfigError(
            f"{verb}: runs in one process, the launcher started"
            f" {launcher.expected_size() or 'several'}; start it without mpiexec"
        )


def complain(text: str, rank: int | None = None) -> None:
    """One line on stderr; of processes that all hit the same wall, the first alone speaks."""
    from hpcvfl.transport import launcher

    if (launcher.expected_rank() if rank is None else rank) in (None, 0):
        print(f"hpcvfl: {text}", file=sys.stderr, flush=True)
