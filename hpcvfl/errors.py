"""Every error a user can meet: where it happened, what came, what was due, what to do."""

from __future__ import annotations

import errno
import platform
import resource
from collections.abc import Mapping, Sequence


class HpcvflError(Exception):
    """Base of all errors meant for the user; `cli.py` prints its text as one line, without a
    traceback.

    exit_code  : int    the status of the process that reports it
    everywhere : bool   every rank raises the same error, so rank 0 alone prints it and nobody need
                        abort
    """

    exit_code = 1
    everywhere = False


class ConfigError(HpcvflError, ValueError):
    """A field of the configuration, a codec string or a launch that cannot be right.

    The text names the field, the value that came and the values that are possible.
    """

    exit_code = 2


class DataError(HpcvflError, ValueError):
    """Data that cannot be trained on: a NaN, a label out of range, rows or ids that differ between
    parties.
    """

    exit_code = 3


class WireError(HpcvflError):
    """Bytes from a peer that do not parse: names the sender, the round, what came and what was
    due.
    """

    exit_code = 4


class TransportError(HpcvflError):
    """A communicator that cannot do what was asked, or a peer that is gone."""

    exit_code = 5


class TransportTimeout(TransportError):
    """A wait that ran out: names who did not post, the message kind, the round and the seconds
    waited.

    missing : ranks that did not post, as far as is known
    due     : rank -> (kind, bytes) of what was awaited from it, where that is known
    """

    exit_code = 6

    def __init__(
        self,
        text: str,
        missing: Sequence[int] = (),
        due: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        """One line of text, and what it says as values."""
        super().__init__(text)
        self.missing, self.due = tuple(missing), dict(due or {})


class Preempted(HpcvflError):
    """A run that was asked to stop and has written a checkpoint: names it, the round, who was asked
    and by what. Not a failure: the same command with --resume goes on.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class NonFiniteError(HpcvflError):
    """NaN or Inf in an embedding, a parameter or a loss: names the block and the round; nothing is
    replaced.
    """

    exit_code = 7


class OutOfMemory(HpcvflError):
    """An allocation that this rank was refused: names the rank, the round and how much was asked
    for.
    """

    exit_code = 8


def out_of_memory(error: Exception, rank: int, round_index: int) -> OutOfMemory | None:
    """The error of one line for memory that ran out on this host; None for any other error."""
    if not is_out_of_memory(error):
        return None
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # it is in KiB
    return OutOfMemory(
        f"rank {rank}, round {round_index}: out of memory on {platform.node()}"
        f" ({str(error).splitlines()[0] if str(error) else 'no words'}); had {peak_mb:.0f} MB at"
        " most; ask for more a rank, put fewer ranks on a host or take a smaller data.batch_size,"
        " then go on with --resume"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy, torch or the system ran out of memory; torch says so in words only."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)
