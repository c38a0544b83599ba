"""Run a program's ranks, each in a network namespace of its own, with real delay between them."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import hpcvfl
from hpcvfl.errors import ConfigError, HpcvflError
from hpcvfl.transport.launcher import mpiexec_path

from wan.router import Router, hurrying
from wan.shaping import QUEUE_BYTES, Hub
from wan.spaces import DEVICE, MTU, Space, make_spaces

ENTER = Path(__file__).with_name("enter.sh")
END_S = 10.0
"""How long mpiexec may take to end its ranks when it is asked to, in seconds."""
_PR_SET_PDEATHSIG = 1

VARIABLES = {
    # Ranks of one machine are to talk as if each had its own: no shared memory, TCP over wan0.
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ucx",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": DEVICE,
    # A message goes at once; otherwise a long one first asks, which is one more round trip.
    "UCX_RNDV_THRESH": "inf",
    # The root sends to each party itself. MPICH's own choice is a binomial tree, in which parties
    # hand on what they got: more than one way, and bytes of others on a party's line.
    "MPIR_CVAR_IBCAST_INTRA_ALGORITHM": "tsp_tree",
    "MPIR_CVAR_IBCAST_TREE_TYPE": "kary",
    "MPIR_CVAR_IBCAST_TREE_KVAL": "1024",
}


@dataclass(frozen=True)
class Wan:
    """The network: `latency_ms` is one round trip between any two ranks, half of it each way;
    `mbit_s` the rate of every rank's line in each direction, None: no limit.
    """

    latency_ms: float
    mbit_s: float | None = None
    mtu: int = MTU
    queue_bytes: int = QUEUE_BYTES

    def hub(self, num_ranks: int) -> Hub:
        """The hub that delays and limits like this."""
        bytes_per_s = None if self.mbit_s is None else self.mbit_s * 1e6 / 8
        return Hub(num_ranks, self.latency_ms / 2e3, bytes_per_s, self.queue_bytes)


def emulate(
    wan: Wan,
    num_ranks: int,
    command: Sequence[str],
    output: IO[str] | None = None,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `command` on that many ranks under mpiexec, route until it ends; what the router saw.

    output    : takes stdout and stderr; None: they are this process's
    timeout_s : then the ranks are ended
    variables : for the ranks' environment, stronger than VARIABLES
    Returns {"returncode", "realtime", ..} with what Router.seen returns. Raises ConfigError, one
    line, if the network cannot be made here.
    """
    mpiexec = mpiexec_path()
    if mpiexec is None:
        raise ConfigError("wan: no mpiexec here; pip install 'hpcvfl[mpich]'")
    spaces = make_spaces(num_ranks, wan.mtu)
    try:
        router = Router(spaces, wan.hub(num_ranks))
        with hurrying() as realtime, doors(spaces) as folder:
            words = [mpiexec, "-n", str(num_ranks), str(ENTER), folder, *command]
            with running(words, output, environment(variables or {})) as (process, ended_fd):
                router.run(ended_fd, timeout_s)
    finally:
        for space in spaces:
            space.close()
    return {"returncode": process.returncode, "realtime": realtime, **router.seen()}


@contextmanager
def doors(spaces: Sequence[Space]) -> Iterator[str]:
    """A folder in which rankK leads to the namespace of rank K."""
    with tempfile.TemporaryDirectory(prefix="hpcvfl-wan-") as folder:
        for rank, space in enumerate(spaces):
            (Path(folder) / f"rank{rank}").symlink_to(f"/proc/{os.getpid()}/fd/{space.space_fd}")
        yield folder


@contextmanager
def running(
    words: Sequence[str], output: IO[str] | None, environ: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launcher, and a descriptor that is readable when it has ended; at the exit it is ended.

    It gets SIGTERM, too, if this process dies without a chance to end it; mpiexec ends its ranks.
    """
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=dict(environ),
        text=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    ended_fd = os.pidfd_open(process.pid)
    try:
        yield process, ended_fd
    finally:
        os.close(ended_fd)
        for ask in (process.terminate, process.kill):
            if process.poll() is None:
                ask()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of the ranks: this one with the package and this folder importable, one thread a rank, TCP
    over wan0.
    """
    folders = (Path(hpcvfl.__file__).parents[1], Path(__file__).parents[1])
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **VARIABLES, **variables}


def own_command(words: Sequence[str]) -> list[str]:
    """A rank's command line of `hpcvfl WORDS`."""
    return [sys.executable, "-m", "mpi4py", "-m", "hpcvfl", *words]


def say(seen: Mapping[str, Any]) -> str:
    """What the router saw, in a few lines."""
    lines = [
        f"rank {line['rank']}: up {line['up_packets']:,} packets, {line['up_ip_bytes']:,} IP bytes;"
        f" down {line['down_packets']:,} packets, {line['down_ip_bytes']:,} IP bytes"
        for line in seen["lines"]
    ]
    lines.append(
        f"late {seen['late_mean_ms']:.3f} ms on average, {seen['late_worst_ms']:.2f} ms at worst;"
        f" {seen['dropped']} dropped, {seen['ignored']} of other kinds ignored"
    )
    return "\n".join(f"wan: {line}" for line in lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; `command` is what a rank runs."""
    parser = argparse.ArgumentParser(
        prog="python bench/wan", description=__doc__, epilog="example: -n 5 -- train digits"
    )
    parser.add_argument("-n", type=int, required=True, help="ranks")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="one round trip (20)")
    parser.add_argument("--mbit-s", type=float, help="rate of each line; no limit by default")
    parser.add_argument("--mtu", type=int, default=MTU, help=f"of the devices, in bytes ({MTU})")
    parser.add_argument("--json", metavar="FILE", help="what the router counted")
    parser.add_argument("--exec", action="store_true", help="WORDS are a command line of their own")
    parser.add_argument("words", nargs="+", metavar="WORDS", help="of hpcvfl, e.g. train digits")
    args = parser.parse_args(list(argv))
    if args.latency_ms < 0 or (args.mbit_s is not None and args.mbit_s <= 0) or args.mtu < 576:
        parser.error("due is --latency-ms >= 0, --mbit-s > 0 and --mtu >= 576")
    args.command = args.words if args.exec else own_command(args.words)
    return args


def main(argv: Sequence[str]) -> int:
    """The command line; the exit status is that of mpiexec."""
    args = parse(argv)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        seen = emulate(Wan(args.latency_ms, args.mbit_s, args.mtu), args.n, args.command)
    except HpcvflError as error:
        print(f"hpcvfl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(say(seen), file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    return int(seen["returncode"])
