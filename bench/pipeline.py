"""What does exchanging one round ahead buy on a slow network, and what does it cost in accuracy?

python bench/pipeline.py           run what is missing, then table and verdicts
python bench/pipeline.py --smoke   a few rounds of digits, no speed is judged

B = 1000, Q = 1, 4 bits under mpiexec, a round trip of 50 ms that is really slept
(transport.latency_ms): the plain loop against algorithm.pipeline = 1, in turn, REPEATS times, for
the models of CASES. Rounds are timed between two evaluations in the middle of a run: one ahead, the
first round has an exchange more and the last has none. Of the plain run c is what the slowest party
computes in a round (median of these rounds) and L the rest; (L + c) / max(L, c) is the most that an
overlap could give if it cost nothing. It costs a forward more a round. Accuracy: the schedule of
bench/fashion_mnist.py in one process, three seeds, against its plain 4-bit cells.

One JSON file a run under bench/results/pipeline/; time it on an idle machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, kept, machine
from hpcvfl.benchmarks.training import Cell, run_config
from hpcvfl.config import build, merge, nest
from hpcvfl.engine.folder import read_metrics
from hpcvfl.transport.launcher import mpiexec_path

RESULTS = Path(__file__).parent / "results"
CELLS, PLAIN = RESULTS / "pipeline", RESULTS / "fashion-mnist"
REPEATS, ROUNDS, WARM_ROUNDS, LATENCY_MS = 5, 80, 20, 50
SEEDS = (0, 1, 2)
CASES = {
    "synthetic": (3, ["synthetic", "--num-parties", "2", "--model.hidden-dim", "2048"]),
    "fashion-mnist": (5, ["fashion-mnist"]),
}
"""Ranks and model. Two parties have a core each on a machine with two cores, and c is below L; four
share them, and c is above L.
"""
CODECS = {"4bit": ("scalar:bits=4", "scalar:bits=8")}


def timed(ranks: int, model: list[str], ahead: int, rounds: int, warm: int) -> dict[str, Any]:
    """Of the rounds of one run under mpiexec, the first and the last `warm` of them left out:
    seconds a round, and what the slowest party computes of it.
    """
    words = [mpiexec_path() or "mpiexec", "-n", str(ranks), sys.executable, "-m", "mpi4py"]
    words += ["-m", "hpcvfl", "train", *model, "--algorithm.pipeline", str(ahead)]
    words += ["--algorithm.epochs", "100"]
    words += ["--algorithm.rounds", str(rounds), "--algorithm.evaluate-rounds", str(warm)]
    words += ["--data.batch-size", "1000", "--algorithm.local-steps", "1"]
    words += ["--codec", "scalar:bits=4", "--transport.latency-ms", str(LATENCY_MS)]
    words += ["--run.no-plots", "--run.no-progress"]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [*words, "--run.folder", scratch], capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
        (run,) = Path(scratch).iterdir()
        lines, steps = read_metrics(run), (run / "steps.jsonl").read_text().splitlines()
    first, last = lines[0], lines[-2]
    a_round = (last["seconds"] - first["seconds"]) / (last["round"] - first["round"])
    timed_steps = map(json.loads, steps[first["round"] : last["round"]])
    slowest_s = [max(line["seconds"][1:]) for line in timed_steps]
    computed_s = statistics.median(slowest_s)
    return {"seconds_a_round": a_round, "computed_s": computed_s, "machine": machine()}


def accuracy(seed: int) -> dict[str, Any]:
    """Of a whole run one round ahead, in one process."""
    over = {"algorithm.pipeline": 1}
    config = Cell("4bit", 1000, 1, seed).config(CODECS)
    summary, _ = run_config(build(merge(config.model_dump(), nest(over))))
    return {"accuracy": summary["metrics"]["accuracy"], "machine": machine()}


def speed(report: Report, case: str) -> None:
    """One case: a row and two verdicts."""
    ranks, model = CASES[case]
    runs: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for repeat in range(REPEATS):
        for ahead, found in runs.items():
            run = partial(timed, ranks, model, ahead, ROUNDS, WARM_ROUNDS)
            name = f"{case}-{'ahead' if ahead else 'plain'}-{repeat}.json"
            found.append(kept(CELLS / name, run))
    plain, ahead = (statistics.median(r["seconds_a_round"] for r in runs[k]) for k in (0, 1))
    computed = statistics.median(r["computed_s"] for r in runs[0])
    delay = plain - computed
    most = (delay + computed) / max(delay, computed)
    report.row(
        case=case,
        ms_plain=1e3 * plain,
        ms_ahead=1e3 * ahead,
        c_ms=1e3 * computed,
        c_ms_ahead=1e3 * statistics.median(r["computed_s"] for r in runs[1]),
        L_ms=1e3 * delay,
        most=most,
        faster=plain / ahead,
    )
    report.target(f"rounds a second, ahead / plain: {case}", plain / ahead, 1.4, "x")
    report.target(f"of what an overlap could give: {case}", plain / ahead / most, 0.85, "x")


def measure(report: Report) -> None:
    """Speed first, then accuracy."""
    for case in CASES:
        speed(report, case)
    lost = []
    for seed in SEEDS:
        mine = kept(CELLS / f"accuracy-ahead-s{seed}.json", partial(accuracy, seed))["accuracy"]
        path = PLAIN / f"{Cell('4bit', 1000, 1, seed).name}.json"
        beside = json.loads(path.read_text())["accuracy"]
        lost.append(100 * (beside - mine))
        report.row(case=f"accuracy, seed {seed}", plain=100 * beside, ahead=100 * mine)
    report.row(case="points lost", plain=statistics.mean(lost), ahead=f"+- {error_of(lost):.2f}")


def error_of(values: list[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def smoke(report: Report) -> None:
    """Both loops run and are timed."""
    for ahead in (0, 1):
        found = timed(5, ["digits"], ahead, 8, 2)
        report.row(ahead=ahead, ms_a_round=1e3 * found["seconds_a_round"])
        slept_ms = 1e3 * found["seconds_a_round"]
        name = f"delay that was slept, pipeline = {ahead}"
        report.target(name, slept_ms, LATENCY_MS, "ms", any_size=True)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""
    report = Report("pipeline", argv)
    report.command = " ".join(["python bench/pipeline.py", *argv])
    (smoke if report.smoke else measure)(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
