"""One network namespace per rank with a TUN device in it, that are gone when this process is.

A namespace lives as long as something holds it: here an open file of the router. It has no name
under /run/netns and its device is not persistent, so that nothing is left behind by a crash, not
even by kill -9. A rank enters it through /proc/PID/fd/N (enter.sh).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from hpcvfl.errors import ConfigError

from wan.packets import MAX_RANKS, address

DEVICE = "wan0"
MTU = 1500
_SYSCTL = {
    # No neighbour discovery among what is counted.
    "ipv6/conf/default/disable_ipv6": "1",
    # Every kernel has it. BBR, the default of some, spaces packets out: 20 kB took 8 ms more here.
    "ipv4/tcp_congestion_control": "reno",
}
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Space:
    """space_fd holds the namespace; tun_fd is the far end of its wan0, non-blocking."""

    space_fd: int
    tun_fd: int

    def close(self) -> None:
        """Let go of both; the namespace ends with the last process in it."""
        os.close(self.tun_fd)
        os.close(self.space_fd)


def missing() -> str | None:
    """What this machine lacks, in a few words; None: the network can be made here."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun (the module tun, or in a container --device /dev/net/tun)"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"no program {program!r} (Debian: iproute2, util-linux)"
    return None


def make_spaces(num_ranks: int, mtu: int = MTU) -> list[Space]:
    """A namespace a rank. Raises ConfigError, one line, where that is not possible."""
    lack = missing()
    if lack:
        raise ConfigError(f"wan: {lack}; run it on a machine of your own, as root")
    if not 2 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"wan: {num_ranks} ranks; 2 to {MAX_RANKS} have an address")
    spaces: list[Space] = []
    try:
        for rank in range(num_ranks):
            spaces.append(_in_thread(rank, mtu))
    except BaseException:
        for space in spaces:
            space.close()
        raise
    return spaces


def _in_thread(rank: int, mtu: int) -> Space:
    """Unshare in a thread of its own: the namespace of a thread is that thread's alone."""
    out: list[Space | Exception] = []

    def make() -> None:
        try:
            out.append(_make(rank, mtu))
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(out[0], Space):
        return out[0]
    raise ConfigError(f"wan: namespace of rank {rank}: {out[0]}; run it as root") from out[0]


def _make(rank: int, mtu: int) -> Space:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    for name, value in _SYSCTL.items():
        path = Path("/proc/sys/net") / name  # of this thread's namespace
        if path.exists():
            path.write_text(value)
    space_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        tun_fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(tun_fd, _TUNSETIFF, request)
            _configure(rank, mtu)
        except BaseException:
            os.close(tun_fd)
            raise
    except BaseException:
        os.close(space_fd)
        raise
    return Space(space_fd, tun_fd)


def _configure(rank: int, mtu: int) -> None:
    """Address and state of the devices, by a child process: it is born into this thread's space."""
    commands = (
        "link set lo up",
        f"addr add {address(rank)}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {mtu} txqueuelen 4096 up",
    )
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip().splitlines()[0]}")
