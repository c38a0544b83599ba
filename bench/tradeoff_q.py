"""How soon is a target reached, against Q, latency, bits: by the papers' clock and the wall's.

python bench/tradeoff_q.py                count rounds, run the emulated network, table and plot
python bench/tradeoff_q.py --table        table and plot of the cells that are there
python bench/tradeoff_q.py --only PATTERN only cells whose name matches
python bench/tradeoff_q.py --smoke        the published table from its own rounds, and one tiny cell

Preset digits, one server and four parties, until the test accuracy is TARGET. One JSON file a cell
under bench/results/tradeoff-q/.
(a) Rounds to the target are counted in one process, with an evaluation after every round, for every
    Q, codec and seed; the rate is tuned for each Q on held-out rows, with float32. Virtual time is
    rounds * (latency + Q * STEP_MS): one round trip a round, all blocks in parallel.
(b) The same runs over the emulated network (bench/wan, needs root), for as many rounds, in wall
    time. Due is rounds * latency + the measured compute of the slowest block of each round.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, format_table, kept, machine
from hpcvfl.cli import load_config
from hpcvfl.config import Config, build, merge, nest
from hpcvfl.engine.evaluations import evaluate_now, target_reached
from hpcvfl.engine.prepare import Run
from hpcvfl.engine.round import RoundResult
from hpcvfl.engine.run import train
from hpcvfl.errors import NonFiniteError
from hpcvfl.transport.threads import ThreadsWorld

from wan import cells as emulated
from wan.spaces import missing

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "tradeoff-q"
QS, LATENCIES_MS, STEP_MS = (1, 5, 10, 25), (1, 10, 50, 200), 10.0
SEEDS, TUNING_SEEDS = (0, 1, 2), (100, 101)
TARGET, WITHIN = 0.95, 0.15
MOST_ROUNDS = {1: 400, 5: 200, 10: 150, 25: 100}
RATES = {
    1: (0.05, 0.1, 0.2, 0.3, 0.5, 0.8),
    5: (0.02, 0.05, 0.1, 0.2, 0.3),
    10: (0.02, 0.05, 0.1, 0.2),
    25: (0.005, 0.01, 0.02, 0.05, 0.1),
}
PHASES = ("forward", "encode", "wait", "wire", "decode", "local steps")
CODECS = {
    "2bit": ("scalar:bits=2,range=gauss,scope=column", "scalar:bits=8"),
    "4bit": ("scalar:bits=4,range=gauss,scope=column", "scalar:bits=8"),
    "float32": ("none", "none"),
}

PAPER_ROUNDS = {1: 63138.75, 10: 4662.0, 25: 1773.75}
"""C-VFL's rounds to test F1 0.45 on MIMIC-III: 4209.25, 310.8 and 118.25 epochs of 15 rounds, from
a least-squares fit of its latency table.
"""
PAPER_SECONDS = {
    1: {1: 694.53, 10: 470.86, 25: 445.21},
    10: {1: 1262.78, 10: 512.82, 25: 461.17},
    50: {1: 3788.32, 10: 699.30, 25: 532.12},
    200: {1: 13259.14, 10: 1398.60, 25: 798.19},
}
"""Latency in ms -> Q -> seconds, as published (C-VFL, time to reach a target)."""


def virtual_seconds(rounds: float, latency_ms: float, q: int, step_ms: float = STEP_MS) -> float:
    """The papers' time: a round costs one round trip and Q steps, nothing else."""
    return rounds * (latency_ms + q * step_ms) / 1e3


@dataclass(frozen=True)
class Cell:
    """A run until the target, its rounds counted."""

    codec: str
    q: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Also the name of its file."""
        return f"rounds-{self.codec}-Q{self.q}-lr{self.rate:g}-s{self.seed}"

    @property
    def changes(self) -> dict[str, Any]:
        """What this cell changes in the preset, by dotted names."""
        codec, head_codec = CODECS[self.codec]
        return {
            "seed": self.seed,
            "codec": codec,
            "head_codec": head_codec,
            "algorithm.local_steps": self.q,
            "algorithm.evaluate_every": 10**6,
            "algorithm.rounds": MOST_ROUNDS[self.q],
            "algorithm.epochs": MOST_ROUNDS[self.q],
            "optimizer.lr": self.rate,
            "optimizer.schedule": "constant",
            "data.validation_rows": 300 if self.seed in TUNING_SEEDS else 0,
        }


def configure(changes: dict[str, Any]) -> Config:
    """The preset digits with these changes."""
    return build(merge(load_config(["digits"]).model_dump(), nest(changes)))


def count_rounds(cell: Cell) -> dict[str, Any]:
    """Train in one process until the target; what is worth keeping as plain values."""

    def look(run: Run, last: RoundResult) -> None:
        """An evaluation after every round, where a run has one at the ends of epochs."""
        evaluate_now(run)
        if target_reached(run):
            run.total_rounds = run.rounds  # this was the last: the run evaluates and ends

    with tempfile.TemporaryDirectory() as scratch:
        own = {"algorithm.target_accuracy": TARGET, "run.folder": scratch, "run.plots": False}
        config = configure(cell.changes | own)
        try:
            world = ThreadsWorld(config.num_parties + 1)
            summary = world.run(lambda t: train(config, t, after_round=look))[0]
        except NonFiniteError as error:  # the rate is too large
            return {"cell": asdict(cell), "reached": False, "failed": str(error)}
    return {
        "cell": asdict(cell),
        "reached": summary["metrics"]["accuracy"] >= TARGET,
        "target": TARGET,
        "accuracy": summary["metrics"]["accuracy"],
        "rounds": summary["rounds"],
        "wire_bytes": summary["wire_bytes"],
        "machine": machine(),
    }


class Store:
    """Results by name, one JSON file each; `only`: a pattern of what may be run, None: nothing."""

    def __init__(self, folder: Path, only: str | None) -> None:
        self.folder, self.only = folder, only

    def get(self, name: str, make: Any) -> dict[str, Any] | None:
        """The result that is there, or the one that `make()` returns if it may be run."""
        path = self.folder / f"{name}.json"
        if not path.exists() and (self.only is None or not re.search(self.only, name)):
            return None
        return kept(path, make)


def tuned_rate(store: Store, q: int) -> float | None:
    """The rate of least rounds on held-out rows, a run that missed the target counted as the most
    rounds; None: not all were tried.
    """
    means: dict[float, float] = {}
    for rate in RATES[q]:
        cells = [Cell("float32", q, rate, seed) for seed in TUNING_SEEDS]
        results = [store.get(cell.name, lambda c=cell: count_rounds(c)) for cell in cells]
        if None in results:
            return None
        rounds = [r["rounds"] if r["reached"] else MOST_ROUNDS[q] for r in results if r]
        means[rate] = statistics.mean(rounds)
    return min(means, key=lambda rate: means[rate])


def counted(store: Store, codec: str, q: int) -> list[dict[str, Any]]:
    """Results of all seeds at the tuned rate; empty: not there yet."""
    rate = tuned_rate(store, q)
    if rate is None:
        return []
    cells = [Cell(codec, q, rate, seed) for seed in SEEDS]
    results = [store.get(cell.name, lambda c=cell: count_rounds(c)) for cell in cells]
    return [result for result in results if result]


def check_paper(report: Report) -> None:
    """The published table from its own rounds: it checks the formula and nothing else."""
    off = [
        abs(virtual_seconds(PAPER_ROUNDS[q], latency_ms, q) - due)
        for latency_ms, line in PAPER_SECONDS.items()
        for q, due in line.items()
    ]
    report.target(
        f"formula only: published time from published rounds, worst of {len(off)}",
        *(max(off), 0.01, "s"),
        at_most=True,
        any_size=True,
    )


def virtual_rows(report: Report, store: Store) -> None:
    """(a): a row a codec and Q."""
    for codec in CODECS:
        for q in QS:
            results = counted(store, codec, q)
            reached = [r for r in results if r["reached"]]
            if not reached:
                continue
            rounds = [r["rounds"] for r in reached]
            spread = statistics.stdev(rounds) if len(rounds) > 1 else 0.0
            times = {
                f"{latency_ms} ms": round(
                    virtual_seconds(statistics.mean(rounds), latency_ms, q), 2
                )
                for latency_ms in LATENCIES_MS
            }
            report.row(
                codec=codec,
                Q=q,
                rate=results[0]["cell"]["rate"],
                rounds=f"{statistics.mean(rounds):.1f} +- {spread:.1f}",
                reached=f"{len(reached)}/{len(results)}",
                kB=round(statistics.mean(r["wire_bytes"] for r in reached) / 1e3),
                **times,
            )


def emulated_results(store: Store) -> dict[emulated.WanCell, dict[str, Any]]:
    """(b): the cells of the emulated network that are there or can be run."""
    out = {}
    for wan_cell in emulated.CELLS:
        found = [r for r in counted(store, wan_cell.codec, wan_cell.q) if r["cell"]["seed"] == 0]
        if not found or not found[0]["reached"]:
            continue
        changes = Cell(**found[0]["cell"]).changes | {"algorithm.rounds": found[0]["rounds"]}

        def make(cell: emulated.WanCell = wan_cell, words: Any = changes) -> dict[str, Any]:
            return emulated.run_cell(cell, words)

        result = store.get(wan_cell.name, make)
        if result:
            out[wan_cell] = result | {"due_accuracy": found[0]["accuracy"]}
    return out


def emulated_rows(report: Report, results: dict[emulated.WanCell, dict[str, Any]]) -> None:
    """(b): a row a cell, and the verdicts."""
    good = 0
    for cell, result in results.items():
        model_s, rounds = emulated.model_s(result), result["rounds"]
        ratio = result["wall_s"] / model_s
        good += abs(ratio - 1) <= WITHIN
        report.row(
            codec=cell.codec,
            Q=cell.q,
            **{"latency ms": cell.latency_ms},
            rounds=rounds,
            **{
                "virtual s": round(virtual_seconds(rounds, cell.latency_ms, cell.q), 2),
                "compute ms a round": round(1e3 * result["compute_s"] / rounds, 1),
                "model s": round(model_s, 2),
                "wall s": round(result["wall_s"], 2),
                "wall / model": round(ratio, 3),
                "rest ms a round": round(1e3 * (result["wall_s"] - model_s) / rounds, 2),
            },
        )
    report.target(f"cells within {WITHIN:.0%} of the model", good, 10, f"of {len(results)}")
    differ = sum(r["accuracy"] != r["due_accuracy"] for r in results.values())
    report.target("accuracy not that of the run in one process", differ, 0, "cells", at_most=True)


def misses(results: dict[emulated.WanCell, dict[str, Any]]) -> list[str]:
    """Of cells outside, the phases of the server a round: what was waited beyond the model."""
    lines = []
    for cell, result in results.items():
        model_s, rounds = emulated.model_s(result), result["rounds"]
        if abs(result["wall_s"] / model_s - 1) <= WITHIN:
            continue
        phases = {
            name: {p: round(1e3 * result[name][p] / rounds, 2) for p in PHASES}
            for name in ("server_s", "party_s")
        }
        lines.append(
            f"{cell.name}: {1e3 * (result['wall_s'] - model_s) / rounds:+.2f} ms a round;"
            f" ms a round, server {phases['server_s']}, slowest party {phases['party_s']}"
        )
    return lines


def draw(path: Path, store: Store, results: dict[emulated.WanCell, dict[str, Any]]) -> None:
    """Time to the target against Q, a panel a latency: lines virtual (mean of seeds), disks the
    wall (seed 0), crosses round trips and measured compute of the same run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(LATENCIES_MS), sharey=True)
    for axes, latency_ms in zip(panels, LATENCIES_MS, strict=True):
        for color, codec in zip(("C1", "C2", "C0"), CODECS, strict=True):
            line = [
                (q, virtual_seconds(statistics.mean(rounds), latency_ms, q))
                for q in QS
                if (rounds := [r["rounds"] for r in counted(store, codec, q) if r["reached"]])
            ]
            axes.plot(*zip(*line, strict=True), color=color, lw=1)
            for cell, result in results.items():
                if (cell.codec, cell.latency_ms) == (codec, latency_ms):
                    axes.plot(cell.q, result["wall_s"], "o", color=color, ms=5)
                    axes.plot(cell.q, emulated.model_s(result), "x", color="black", ms=5)
        axes.set(xscale="log", yscale="log", xlabel="Q", ylim=(1, 50))
        axes.set_xticks(QS, [str(q) for q in QS])
        axes.set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
        axes.minorticks_off()
        axes.set_title(f"round trip {latency_ms} ms", fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"seconds to {TARGET:.0%}")
    figure.suptitle(
        "orange 2 bits, green 4 bits, blue float32; line: virtual clock, 10 ms a step; disk: wall,"
        " emulated network; cross: round trips + measured compute",
        fontsize="medium",
    )
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""

    def options(parser: ArgumentParser) -> None:
        parser.add_argument("--table", action="store_true", help="run nothing")
        parser.add_argument("--only", default="", metavar="PATTERN", help="cells that match")

    report = Report("tradeoff-q", argv, options)
    report.command = " ".join(["python bench/tradeoff_q.py", *argv])
    check_paper(report)
    if report.smoke:
        smoke(report)
        return report.finish()
    store = Store(CELLS, None if report.args.table else report.args.only)
    lack = missing()
    virtual_rows(report, store)
    virtual_table = format_table(report.rows)
    report.rows.clear()
    if lack:
        print(f"(b) only cells that are there: {lack}", file=sys.stderr)
    results = emulated_results(Store(CELLS, None) if lack else store)
    emulated_rows(report, results)
    draw(RESULTS / "tradeoff_q.png", store, results)
    print(f"(a) seconds by the virtual clock, {STEP_MS:g} ms a step\n\n{virtual_table}\n")
    code = report.finish()
    print("\n".join(["", *(f"outside: {line}" for line in misses(results))]))
    return code


def smoke(report: Report) -> None:
    """A run counted in one process."""
    result = count_rounds(Cell("2bit", 5, 0.2, 0))
    report.row(**{k: result[k] for k in ("rounds", "accuracy", "wire_bytes")})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
