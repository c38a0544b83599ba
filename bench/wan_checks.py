"""Is the emulated network (bench/wan) what it says, and do its bytes agree with the ledger's?

python bench/wan_checks.py           a few minutes, needs root and /dev/net/tun
python bench/wan_checks.py --smoke   seconds; on a machine that cannot make the network it says so

1 exchange: gather and broadcast on five ranks, against the round trip that was asked for
2 line    : TCP between two ranks, against the rate that was asked for; without one, the router's
            own limit
3 ledger  : IP bytes of the router against the bytes that hpcvfl books, per message. Two trainings
            of different length are subtracted, so that starts, evaluations and ends cancel.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, format_table
from hpcvfl.errors import TransportError

from wan.cells import options, train_over
from wan.run import Wan, emulate
from wan.spaces import missing

RANKS, PARTIES = 5, (1, 2, 3, 4)
FRAMES = {"2 bits": 592, "float32": 6464}
"""Bytes of a frame of 100 x 16 values: a header of 64, and 2 bits each with ranges, or 4 bytes."""
LATE, LATE_MS = 1.1, 3.0
"""Of an idle machine; a router that delayed twice would be far beyond."""
LEAST_MPI_NBYTES, MOST_MPI_NBYTES = 8, 30
"""Bytes that MPI may add to a message: its header, once for each piece."""
TRAININGS = {
    "2 bits": {"codec": "scalar:bits=2,range=gauss,scope=column", "head_codec": "scalar:bits=8"},
    "float32": {"codec": "none", "head_codec": "none"},
}


def worker(wan: Wan, num_ranks: int, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a worker module wrote to its first argument, and what the router saw."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        module, *rest = words
        command = [sys.executable, "-m", "mpi4py", "-m", module, str(out), *rest]
        if module == "wan.flood":
            command[1:3] = []  # no MPI in it
        with log.open("w") as output:
            seen = emulate(wan, num_ranks, command, output, 120)
        if seen["returncode"]:
            raise TransportError(f"wan: {' '.join(command)} failed:\n{log.read_text()[-2000:]}")
        return json.loads(out.read_text()), seen


def exchange(report: Report, latencies_ms: tuple[int, ...], rounds: int) -> None:
    """A row a round trip and frame size; the first exchanges open TCP's window."""
    for latency_ms in latencies_ms:
        for name, nbytes in FRAMES.items():
            words = ["wan.exchanges", str(rounds), str(nbytes)]
            came, seen = worker(Wan(latency_ms), RANKS, words)
            each_ms = [1e3 * s for s in came["each_s"][rounds // 4 :]]
            median_ms = statistics.median(each_ms)
            report.row(
                **{"round trip ms": latency_ms, "frame": f"{name}, {nbytes} B"},
                **{"exchange ms": round(median_ms, 2), "worst ms": round(max(each_ms), 1)},
                **{"beyond ms": round(median_ms - latency_ms, 2)},
                **{"late in router ms": round(seen["late_mean_ms"], 3)},
            )
            report.target(
                f"exchange at {latency_ms} ms, {name}, not sooner than light",
                *(median_ms, 0.99 * latency_ms, "ms"),
                any_size=True,
            )
            report.target(
                f"exchange at {latency_ms} ms, {name}, little later",
                *(median_ms, LATE * latency_ms + LATE_MS, "ms"),
                at_most=True,
            )


def line(report: Report, rates: tuple[float | None, ...], seconds: float) -> None:
    """A row a rate; `due` is what Ethernet's 1500 bytes leave to TCP's payload."""
    for mbit_s in rates:
        for mtu in (1500,) if mbit_s else (1500, 576):
            came, seen = worker(Wan(2, mbit_s, mtu), 2, ["wan.flood", str(seconds)])
            packets = sum(row["packets"] for row in seen["pairs"])
            due = mbit_s and mbit_s * (mtu - 52) / mtu
            report.row(
                **{"rate Mbit/s": mbit_s or "no limit", "MTU": mtu},
                **{"TCP payload Mbit/s": round(came["mbit_s"], 1)},
                **{"due": due and round(due, 1), "packets/s": round(packets / seen["wall_s"])},
                **{"router us a packet": round(1e6 * seen["cpu_s"] / packets, 1)},
                **{"router share of a core": f"{seen['cpu_s'] / seen['wall_s']:.0%}"},
                dropped=seen["dropped"],
            )
            if due:
                name = f"line of {mbit_s:g} Mbit/s, share of what is due"
                report.target(name, came["mbit_s"] / due, 0.9)
                report.target(f"{name}, not above", came["mbit_s"] / due, 1.03, at_most=True)


def grown(runs: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> dict[str, int]:
    """Counts of these pairs of ranks in the second run less those in the first."""
    out = dict.fromkeys(("packets", "ip_bytes", "payload_bytes", "bare"), 0)
    for sign, run in zip((-1, 1), runs, strict=True):
        for row in run["router"]["pairs"]:
            if (row["source"], row["dest"]) in pairs:
                for field in out:
                    out[field] += sign * row[field]
    return out


def booked(runs: list[dict[str, Any]], ranks: tuple[int, ...]) -> int:
    """Bytes that these ranks booked as received in the rounds that only the second run has."""
    first = runs[0]["summary"]["rounds"]
    return sum(
        nbytes
        for rank in ranks
        for round_line in runs[1]["ledgers"][rank][first:]
        for name, nbytes in round_line.items()
        if name.startswith("in.")
    )


def ledger_row(name: str, messages: int, nbytes: int, seen: Mapping[str, int]) -> dict[str, Any]:
    """What was booked and what the router saw, per message."""
    mpi_bytes = seen["payload_bytes"] - nbytes
    headers = seen["ip_bytes"] - seen["payload_bytes"]
    full = seen["packets"] - seen["bare"]
    return {
        "way": name,
        "messages": messages,
        "ledger B": nbytes,
        "TCP payload B": seen["payload_bytes"],
        "IP B": seen["ip_bytes"],
        "IP / ledger": round(seen["ip_bytes"] / nbytes, 3),
        "ledger B a message": round(nbytes / messages, 1),
        "MPI B a message": round(mpi_bytes / messages, 1),
        "TCP/IP B a message": round(headers / messages, 1),
        "packets a message": round(full / messages, 2),
        "acks a message": round(seen["bare"] / messages, 2),
        "TCP/IP B a packet": round(headers / seen["packets"], 1),
    }


def ledger(report: Report, lengths: tuple[int, int]) -> None:
    """A row a codec and way."""
    for name, codecs in TRAININGS.items():
        runs = []
        for rounds in lengths:
            changes = {"algorithm.rounds": rounds, "algorithm.local_steps": 1} | codecs
            changes |= {"algorithm.evaluate_every": 10**6}
            runs.append(train_over(Wan(20), RANKS, "digits", options(changes)))
        messages = (lengths[1] - lengths[0]) * len(PARTIES)
        ways = {
            "up": ([(k, 0) for k in PARTIES], (0,)),
            "down": ([(0, k) for k in PARTIES], PARTIES),
        }
        for way, (pairs, receivers) in ways.items():
            seen, nbytes = grown(runs, pairs), booked(runs, receivers)
            row = ledger_row(f"{name}, {way}", messages, nbytes, seen)
            report.row(**row)
            judged = f"{name}, {way}: MPI bytes a message", row["MPI B a message"]
            report.target(*judged, LEAST_MPI_NBYTES)
            report.target(*judged, MOST_MPI_NBYTES, at_most=True)
        between = [(a, b) for a in PARTIES for b in PARTIES]
        report.target(
            f"{name}: IP bytes between parties a message",
            *(grown(runs, between)["ip_bytes"] / messages, 1),
            at_most=True,
        )


def main(argv: list[str]) -> int:
    """All three parts, each with its table."""
    report = Report("wan", argv)
    report.command = " ".join(["python bench/wan_checks.py", *argv])
    lack = missing()
    if lack:
        print(f"hpcvfl: wan: {lack}; nothing was measured", file=sys.stderr)
        return 0 if report.smoke else 2
    if report.smoke:
        exchange(report, (5,), 8)
        return report.finish()
    parts = {
        "exchange": lambda: exchange(report, (1, 10, 50, 200), 24),
        "line": lambda: line(report, (10.0, 100.0, None), 5.0),
        "ledger": lambda: ledger(report, (15, 75)),
    }
    for name, part in parts.items():
        begin = len(report.rows)
        print(f"{name} ..", file=sys.stderr, flush=True)
        part()
        print(f"## {name}\n\n{format_table(report.rows[begin:])}\n", flush=True)
    report.rows.clear()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
