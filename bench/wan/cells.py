"""Training runs over the emulated network, and what their wall time should have been."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import machine
from hpcvfl.errors import TransportError

from wan.run import Wan, emulate, own_command

TIMEOUT_S = 400.0


@dataclass(frozen=True)
class WanCell:
    """A run of so many local steps a round over a network of this round trip."""

    codec: str
    q: int
    latency_ms: int

    @property
    def name(self) -> str:
        """Also the name of its file."""
        return f"wan-{self.codec}-Q{self.q}-L{self.latency_ms}"


CELLS = (
    *(WanCell("2bit", q, latency) for latency in (10, 50, 200) for q in (1, 5, 10, 25)),
    *(WanCell("2bit", q, 1) for q in (1, 10)),
    *(WanCell("float32", 5, latency) for latency in (10, 50, 200)),
    WanCell("4bit", 5, 50),
)
"""Those that are run: every Q at three latencies with 2 bits, the other codecs at Q = 5."""


def options(changes: Mapping[str, Any]) -> list[str]:
    """Dotted names and values as words of the command line."""
    words = []
    for name, value in changes.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def train_over(wan: Wan, num_ranks: int, preset: str, words: list[str]) -> dict[str, Any]:
    """Train over the network; {"summary", "steps", "ledgers", "router"}: the run's own files, lines
    of steps.jsonl and of every rank's ledger, and what the router saw.

    Raises TransportError with what the ranks said, if they fail.
    """
    quiet = ["--run.no-plots", "--run.no-progress"]
    with tempfile.TemporaryDirectory() as scratch:
        runs, log = Path(scratch) / "runs", Path(scratch) / "log"
        command = own_command(["train", preset, *words, *quiet, "--run.folder", str(runs)])
        with log.open("w+") as output:
            router = emulate(wan, num_ranks, command, output, TIMEOUT_S)
            output.seek(0)
            if router["returncode"]:
                raise TransportError(f"wan: {' '.join(command)} failed:\n{output.read()[-2000:]}")
        (run,) = runs.iterdir()
        ranks = range(num_ranks)
        return {
            "summary": json.loads((run / "summary.json").read_text()),
            "steps": _lines(run / "steps.jsonl"),
            "ledgers": [_lines(run / f"ledger.rank{k}.jsonl") for k in ranks],
            "router": router,
        }


def run_cell(cell: WanCell, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One cell; what is worth keeping as plain values."""
    run = train_over(Wan(cell.latency_ms), 5, "digits", options(changes))
    summary, router = run["summary"], run["router"]
    compute_s = sum(max(line["seconds"]) for line in run["steps"])
    return {
        "cell": asdict(cell),
        "rounds": summary["rounds"],
        "accuracy": summary["metrics"]["accuracy"],
        "wire_bytes": summary["wire_bytes"],
        "wall_s": summary["seconds"]["training"],
        "compute_s": compute_s,
        "first_round_s": max(run["steps"][0]["seconds"]),
        "server_s": summary["seconds"]["server"],
        "party_s": summary["seconds"]["slowest_party"],
        "load": os.getloadavg()[0],
        "router": {k: v for k, v in router.items() if k != "pairs"},
        "machine": machine(),
    }


def model_s(result: Mapping[str, Any]) -> float:
    """What the wall time should have been: a round trip a round, and the slowest block's work."""
    network_s: float = result["rounds"] * result["cell"]["latency_ms"] / 1e3
    return network_s + float(result["compute_s"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]
