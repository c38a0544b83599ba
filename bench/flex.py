"""How soon is a target reached, in the papers' virtual time? Flex-VFL against its baselines.

python bench/flex.py                  tune rates, run the missing cells, then table and plot
python bench/flex.py --table          table and plot of the cells that are there
python bench/flex.py --only google    only cells whose name matches this pattern
python bench/flex.py --smoke          one tiny cell, seconds

A cell is one training run until its target; one JSON file under bench/results/flex/. Time is
rounds * communication + units, 1 unit = a step of a block of full speed, for three costs of
communication out of one run. The rate of each algorithm and speed set is tuned on held-out training
rows with a seed of its own: the one of RATES with the least time at cost 10, with float32. A run
that does not reach the target is counted as missed, never dropped.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, kept, machine
from hpcvfl.benchmarks.training import run_config
from hpcvfl.cli import load_config
from hpcvfl.config import Config, build, merge, nest
from hpcvfl.errors import NonFiniteError

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "flex"
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 100
RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
RATES_OF = {
    "adaptive": (0.5, 1.0, 2.0, 4.0, 8.0),
    "p-bcd": (*RATES, 2.0, 4.0),
    "sync-min": (*RATES, 2.0, 4.0),
}
"""Of an adaptive schedule the rate is A, which is divided by the steps of a round; who takes few
steps a round can take larger ones.
"""
COSTS = (1, 10, 50)
TRAINING_ROWS = 1437  # of digits

SETS: dict[str, dict[str, Any]] = {
    "imagenet": {"num_parties": 4, "steps.speeds": [10, 2, 4, 6, 8], "steps.timeout_units": 10},
    "google": {
        "num_parties": 12,
        "steps.speeds": [13, 12, 16, 17, 13, 16, 18, 17, 14, 15, 17, 14, 17],
        "steps.timeout_units": 20,
    },
    "stepped": {
        "num_parties": 12,
        "steps.speeds": [20, *[5] * 3, *[10] * 3, *[15] * 3, *[20] * 3],
        "steps.timeout_units": 20,
    },
    "trace": {"num_parties": 4, "steps.trace": "ar1", "steps.trace_rule": "int10"},
}
"""Speeds of the published experiments, the server's first; the trace is a synthetic one."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "flex": {},
    "sync-min": {"steps.sync": "min"},
    "sync-max": {"steps.sync": "max"},
    "p-bcd": {"steps.sync": "one"},
    "adaptive": {"optimizer.schedule": "adaptive"},
    "vafl": {
        "algorithm.driver": "vafl",
        "labels.holder": "server",
    },
}
CODECS = {
    "float32": {"codec": "none", "head_codec": "none", "labels.gradient_codec": "none"},
    "2bit": {
        "codec": "scalar:bits=2,range=gauss,scope=column",
        "head_codec": "scalar:bits=8",
        "labels.gradient_codec": "scalar:bits=2,range=gauss,scope=column",
    },
}
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {
        "model.tower": "mlp",
        "algorithm.target_accuracy": 0.95,
        "algorithm.epochs": 60,
        "data.batch_size": 100,
    },
    "fashion-mnist": {
        "model.tower": "mlp",  # the cnn takes ten minutes a cell on one core
        "algorithm.target_accuracy": 0.80,
        "algorithm.epochs": 6,
        "data.batch_size": 1000,
    },
}
"""What all cells of a dataset have in common; the schedule is constant but for `adaptive`."""


@dataclass(frozen=True)
class Cell:
    """One run until its target."""

    dataset: str
    speeds: str
    algorithm: str
    codec: str
    seed: int
    rate: float = 0.0  # 0: the tuned one
    cost: float = 0.0  # of communication, where it changes what is done (vafl)

    @property
    def group(self) -> str:
        """All but the seed."""
        cost = f"-c{self.cost:g}" if self.cost else ""
        return f"{self.dataset}-{self.speeds}-{self.algorithm}{cost}-{self.codec}"

    @property
    def name(self) -> str:
        """Also the name of its file."""
        rate = f"-lr{self.rate:g}" if self.rate else ""
        return f"{self.group}{rate}-s{self.seed}"

    def config(self) -> Config:
        """The preset with everything that this cell changes."""
        over: dict[str, Any] = {
            "seed": self.seed,
            "steps.policy": "virtual",
            "algorithm.local_steps": 1,
            "algorithm.evaluate_every": 1,
            "optimizer.schedule": "constant",
            "optimizer.lr": self.rate,
        }
        over |= DATASETS[self.dataset] | SETS[self.speeds] | CODECS[self.codec]
        over |= ALGORITHMS[self.algorithm]
        if self.cost:
            over["algorithm.comm_units"] = self.cost
        if self.seed == TUNING_SEED:
            over["data.validation_rows"] = 300 if self.dataset == "digits" else 5000
        preset = load_config([self.dataset]).model_dump()
        return build(merge(preset, nest(over)))


def cells() -> list[Cell]:
    """All cells but those of tuning."""
    plans = [
        ("imagenet", ("flex", "sync-min", "sync-max", "p-bcd", "vafl")),
        ("google", ("flex", "sync-min", "sync-max", "p-bcd", "vafl")),
        ("stepped", ("flex", "sync-min", "sync-max", "p-bcd", "vafl")),
        ("trace", ("flex", "adaptive", "sync-max")),
    ]
    out = [
        Cell("digits", speeds, algorithm, codec, seed, cost=cost)
        for speeds, algorithms in plans
        for algorithm in algorithms
        for cost in (COSTS if algorithm == "vafl" else (0,))
        for codec in CODECS
        for seed in SEEDS
    ]
    out += [
        Cell("fashion-mnist", speeds, algorithm, codec, seed)
        for speeds, algorithm in (
            ("imagenet", "flex"),
            ("imagenet", "sync-max"),
            ("trace", "flex"),
            ("trace", "adaptive"),
        )
        for codec in CODECS
        for seed in SEEDS
    ]
    return out


def at_target(result: dict[str, Any]) -> dict[str, Any] | None:
    """The evaluation that first reached the target of its dataset; None: there is none."""
    target = DATASETS[result["cell"]["dataset"]]["algorithm.target_accuracy"]
    return next((line for line in result["curve"] if line["test_accuracy"] >= target), None)


def times_to_target(result: dict[str, Any]) -> dict[int, float | None]:
    """Virtual time at each cost of communication; None where the target was missed."""
    last = at_target(result)
    if last is None:
        return dict.fromkeys(COSTS)
    if result["cell"]["algorithm"] == "vafl":  # its clock has the cost of communication in it
        units = last["units"] + units_to_fill(result["cell"])
        return {c: units if c == result["cell"]["cost"] else None for c in COSTS}
    return {c: last["round"] * c + last["units"] for c in COSTS}


def units_to_fill(cell: dict[str, Any]) -> float:
    """Virtual time until vafl's table has every party's embeddings, which its clock leaves out: a
    step of the slowest party for each batch of an epoch, and one message.
    """
    speeds = SETS[cell["speeds"]]
    slowest = speeds["steps.timeout_units"] / min(speeds["steps.speeds"][1:])
    held_out = 300 if cell["seed"] == TUNING_SEED else 0
    batches = math.ceil((TRAINING_ROWS - held_out) / DATASETS["digits"]["data.batch_size"])
    return float(batches * slowest + cell["cost"])


def run_cell(cell: Cell, most_rounds: int | None) -> dict[str, Any]:
    """Train one cell; what is worth keeping as plain values."""
    started_s = time.perf_counter()
    limit = {"algorithm": {"rounds": most_rounds}} if most_rounds else {}
    config = build(merge(cell.config().model_dump(), limit))
    try:
        summary, lines = run_config(config)
    except NonFiniteError as error:  # the rate is too large
        return {"cell": asdict(cell), "reached": False, "curve": [], "failed": str(error)}
    fields = ("round", "units", "test_accuracy", "wire_bytes", "train_loss")
    target = config.algorithm.target_accuracy
    return {
        "cell": asdict(cell),
        "reached": lines[-1]["test_accuracy"] >= target,
        "target": target,
        "rate": cell.rate,
        "rounds": summary["rounds"],
        "most_rounds": most_rounds,
        "wire_bytes": summary["wire_bytes"],
        "curve": [{field: line[field] for field in fields} for line in lines],
        "seconds": time.perf_counter() - started_s,
        "machine": machine(),
    }


def load(cell: Cell) -> dict[str, Any] | None:
    """The result of a cell, if it is there."""
    path = CELLS / f"{cell.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def run_once(cell: Cell, most_rounds: int | None = None) -> dict[str, Any]:
    """The result of a cell, run if it is not there, for `most_rounds` at most; a file is there in
    whole or not at all.
    """
    return kept(CELLS / f"{cell.name}.json", lambda: run_cell(cell, most_rounds))


def tried(cell: Cell, run: bool) -> dict[float, float] | None:
    """{rate: time at cost 10} of the rates that reach the target; None if a trial has not been run
    and is not to be.

    Middling rates come first, then one beyond the edge of the grid for as long as the best is
    there. None is tried for more rounds than the best so far has taken: time is proportional to
    rounds, so that it could only be slower.
    """
    grid = RATES_OF.get(cell.algorithm, RATES)
    waiting = sorted(grid, key=lambda r: abs(math.log(r / grid[len(grid) // 2])))
    found: dict[float, float] = {}
    seen: set[float] = set()
    most_rounds = None
    while waiting:
        rate = waiting.pop(0)
        seen.add(rate)
        cost = 10 if cell.cost else 0
        trial = replace(cell, seed=TUNING_SEED, rate=rate, codec="float32", cost=cost)
        result = run_once(trial, most_rounds) if run else load(trial)
        if result is None:
            return None
        time_10 = times_to_target(result)[10]
        if time_10 is not None:
            found[rate] = time_10
            if best_of(found) == rate:
                # Of vafl a round of the config is an update of every party.
                per_round = SETS[cell.speeds]["num_parties"] if cell.algorithm == "vafl" else 1
                reached = at_target(result)
                most_rounds = reached["round"] // per_round if reached else None
        if not waiting and found:
            best = best_of(found)
            beyond = {min(seen): best / 2, max(seen): best * 2}.get(best)
            waiting = [beyond] if beyond else []
    return found


def best_of(found: dict[float, float]) -> float:
    """The rate of least time, the smallest of several."""
    return min(found, key=lambda rate: (found[rate], rate))


def tuned(cell: Cell, run: bool) -> Cell | None:
    """The cell with its tuned rate; None if there is none, or it is not known and not to be."""
    found = tried(cell, run)
    return replace(cell, rate=best_of(found)) if found else None


def run_missing(pattern: str) -> None:
    """Tune and run every cell whose name matches."""
    for cell in cells():
        if re.search(pattern, cell.name):
            with_rate = tuned(cell, run=True)
            if with_rate:
                run_once(with_rate)


def groups() -> dict[str, tuple[float | None, list[dict[str, Any]]]]:
    """Group -> (tuned rate or None, results by seed) of what is there."""
    out: dict[str, tuple[float | None, list[dict[str, Any]]]] = {}
    for cell in cells():
        with_rate = tuned(cell, run=False)
        result = load(with_rate) if with_rate else None
        rate, found = out.get(cell.group, (with_rate.rate if with_rate else None, []))
        out[cell.group] = rate, [*found, *([result] if result else [])]
    return out


def mean_time(results: Iterable[dict[str, Any]], cost: int) -> tuple[float, float, int]:
    """(mean, standard deviation, number of runs) of those that reached the target."""
    times = [t for r in results if (t := times_to_target(r)[cost]) is not None]
    if not times:
        return float("nan"), float("nan"), 0
    spread = statistics.stdev(times) if len(times) > 1 else 0.0
    return statistics.mean(times), spread, len(times)


def tabulate(report: Report) -> None:
    """A row a group."""
    found = groups()
    for group, (rate, results) in found.items():
        if not results:
            first = next(cell for cell in cells() if cell.group == group)
            if tried(first, run=False) == {}:
                report.row(group=group, **{f"time_{c}": "no rate reaches it" for c in COSTS})
            continue  # else not run yet
        row: dict[str, Any] = {"group": group, "rate": rate}
        for cost in COSTS:
            mean, spread, reached = mean_time(results, cost)
            same = results[0]["cell"]["cost"] in (0, cost)
            text = f"{mean:.0f} +- {spread:.0f}" if reached else "never"
            ran = "" if len(results) == len(SEEDS) else f", {len(results)} run"
            row[f"time_{cost}"] = f"{text} ({reached}/{len(SEEDS)}{ran})" if same else ""
        # Up to the target; of a miss, of the whole run.
        ends = [at_target(r) or (r["curve"] or [None])[-1] for r in results]
        received = [line["wire_bytes"] / 1e6 for line in ends if line]
        row["MB"] = f"{statistics.mean(received):.2f}" if received else "diverged"
        report.row(**row)


def draw(path: Path) -> None:
    """Time to target by algorithm and cost, one panel a speed set, digits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = groups()
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, speeds in enumerate(SETS):
        axes = figure.add_subplot(2, 2, panel + 1)
        for codec, color in zip(CODECS, ("C0", "C1"), strict=True):
            for at, algorithm in enumerate(ALGORITHMS):
                for cost, mark in zip(COSTS, "osd", strict=True):
                    part = f"-c{cost}" if algorithm == "vafl" else ""
                    group = f"digits-{speeds}-{algorithm}{part}-{codec}"
                    mean, spread, reached = mean_time(found.get(group, (None, []))[1], cost)
                    if reached:
                        x = at + (0.12 if codec == "2bit" else -0.12)
                        axes.errorbar(x, mean, spread, fmt=mark, color=color, ms=5, capsize=2)
        axes.set_xticks(range(len(ALGORITHMS)), list(ALGORITHMS), rotation=20)
        axes.set_yscale("log")
        axes.set_title(f"{speeds}: {SETS[speeds]['num_parties']} parties", fontsize="medium")
        axes.set_ylabel("virtual units to 95 %")
        axes.grid(alpha=0.3)
    figure.suptitle("blue float32, orange 2 bits; circle, square, diamond: communication 1, 10, 50")
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""

    def options(parser: Any) -> None:
        parser.add_argument("--table", action="store_true", help="run nothing")
        parser.add_argument("--only", default="", metavar="PATTERN", help="cells that match")

    report = Report("flex", argv, options)
    report.command = " ".join(["python bench/flex.py", *argv])
    if report.smoke:
        smoke(report)
        return report.finish()
    if not report.args.table:
        run_missing(report.args.only)
    tabulate(report)
    draw(RESULTS / "flex.png")
    return report.finish()


def smoke(report: Report) -> None:
    """Two epochs of one cell: units are those of the plan."""
    cell = Cell("digits", "imagenet", "sync-max", "2bit", 0, rate=0.1)
    table = merge(cell.config().model_dump(), {"algorithm": {"epochs": 2, "target_accuracy": None}})
    summary, lines = run_config(build(table))
    due = summary["rounds"] * 10 * 10 / 2  # ten steps of the slowest block, five units each
    report.row(rounds=summary["rounds"], units=lines[-1]["units"], due=due)
    off = abs(lines[-1]["units"] - due)
    report.target("units off", off, 0, "units", at_most=True, any_size=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
