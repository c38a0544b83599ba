"""One job at a time in a run folder: a lock that the kernel gives back when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from datetime import datetime
from pathlib import Path

from hpcvfl.errors import ConfigError

NOT_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks answers (Lustre without -o flock): the run goes on without."""


class RunLock:
    """Holds `run.lock` of a run folder from its making until `release` or the end of the process.

    fcntl's lock and not flock's: it is the one that NFS passes on to other hosts. The file itself
    stays; what it says is for people.

    held : bool   False where the file system has no locks: nobody is kept out
    """

    def __init__(self, path: Path) -> None:
        """Take the lock of run folder `path`.

        Raises ConfigError that names the holder's pid, host and start if another process has it;
        OSError if the file cannot be made.
        """
        self._file = (path / "run.lock").open("a+", encoding="utf-8")
        self.held = True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NOT_HERE:
                self.held = False
                return
            holder = self._holder()
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise ConfigError(
                f"run folder {path}: another job is in it ({holder}); let it end, or start afresh"
                " with --resume never"
            ) from None
        self._file.truncate(0)
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._file.write(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}))
        self._file.flush()

    def _holder(self) -> str:
        self._file.seek(0)
        try:
            said = json.loads(self._file.read())
            return f"pid {said['pid']} on {said['host']} since {said['since']}"
        except (ValueError, LookupError, TypeError):
            return "it does not say which"

    def release(self) -> None:
        """Give the lock back; again does no harm."""
        self._file.close()
