"""In seconds: one party is really four times slower. Flex-VFL against Sync-Max, under mpiexec.

python bench/flex_wall.py           tune rates, run the missing cells, then table and verdicts
python bench/flex_wall.py --smoke   a short run by each policy and a replay; no speed is judged

Five ranks on digits, codec float32: a server and four parties, of which the second sleeps three
times as long as each of its steps took. Sync-Max: every block takes STEPS steps. Flex-VFL: every
block takes the steps that fit into a timeout, which is what STEPS steps of a party that is not
slowed take here, measured first; at one rate for all blocks, or at A / steps of each block
(adaptive). Time counts rounds only (no start, no evaluation) up to the first evaluation whose test
loss is at most TARGET_LOSS; evaluations are 0.2 to 0.3 s of rounds apart. Rates are tuned for each
on held-out rows; then five seeds, the algorithms in turn. One recorded run is replayed from its
numbers of steps and must end with the same bits.

One JSON file a run under bench/results/flex-wall/; time it on an idle machine.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, kept, machine
from hpcvfl.engine.folder import read_metrics
from hpcvfl.transport.launcher import mpiexec_path

RESULTS = Path(__file__).parent / "results" / "flex-wall"
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 100
RATES = {
    "flex": (0.025, 0.05, 0.1),
    "adaptive": (0.25, 0.5, 1.0),
    "sync-max": (0.05, 0.1, 0.2),
}
"""Of `adaptive` they are A."""
STEPS, TARGET_LOSS = 10, 0.25
ROUNDS = {"flex": (160, 4), "adaptive": (160, 4), "sync-max": (60, 1)}
"""Rounds at most, rounds between two evaluations."""
COMMON = [
    *("--codec", "none", "--head-codec", "none", "--slow", "party=2,factor=4"),
    *("--run.no-plots", "--run.no-progress"),
]


def launch(folder: Path, words: list[str]) -> Path:
    """Train under mpiexec with five ranks; the run folder."""
    command = [mpiexec_path() or "mpiexec", "-n", "5", sys.executable, "-m", "mpi4py", "-m"]
    command += ["hpcvfl", "train", "digits", *COMMON, "--run.folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def words_of(algorithm: str, rate: float, seed: int, rounds: tuple[int, int]) -> list[str]:
    """What a run has on its command line, but for its policy."""
    schedule = "adaptive" if algorithm == "adaptive" else "constant"
    words = ["--seed", str(seed), "--optimizer.lr", str(rate), "--optimizer.schedule", schedule]
    words += ["--algorithm.epochs", "100", "--algorithm.rounds", str(rounds[0])]
    words += ["--algorithm.evaluate-rounds", str(rounds[1])]
    return words + ["--data.validation-rows", "300"] * (seed == TUNING_SEED)


def policy_of(algorithm: str, timeout_s: float) -> list[str]:
    """The step policy of an algorithm on the command line."""
    if algorithm == "sync-max":
        return ["--algorithm.local-steps", str(STEPS)]
    return ["--steps.policy", "wall-clock", "--steps.timeout-s", str(timeout_s)]


def digest_of(run: Path) -> str:
    """Of the final weights of all blocks of a run."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted((run / "checkpoints" / "final").glob("rank*.safetensors"))
    for file in files:
        digest.update(file.name.encode() + _tensors(file))
    return f"{len(files)} blocks {digest.hexdigest()}"


def _tensors(file: Path) -> bytes:
    """The tensors of a safetensors file, without its metadata, which names the config."""
    from safetensors.numpy import load_file

    return b"".join(name.encode() + value.tobytes() for name, value in load_file(file).items())


def run_cell(
    algorithm: str, rate: float, seed: int, timeout_s: float, rounds: tuple[int, int]
) -> dict[str, Any]:
    """Train once under the clock, for so many rounds with so many between evaluations."""
    words = words_of(algorithm, rate, seed, rounds)
    with tempfile.TemporaryDirectory() as scratch:
        run = launch(Path(scratch), words + policy_of(algorithm, timeout_s))
        lines = read_metrics(run)
        steps = [json.loads(text) for text in (run / "steps.jsonl").read_text().splitlines()]
        weights = digest_of(run)
    reached = [line["seconds"] for line in lines if line["test_loss"] <= TARGET_LOSS]
    fields = ("round", "seconds", "test_loss", "test_accuracy", "train_loss")
    return {
        "words": words,
        "timeout_s": timeout_s,
        "seconds_to_target": reached[0] if reached else None,
        "seconds_a_round": lines[-1]["seconds"] / lines[-1]["round"],
        "curve": [{field: line[field] for field in fields} for line in lines],
        "steps": [{f: line[f] for f in ("tau", "expected") if f in line} for line in steps],
        "weights": weights,
        "machine": machine(),
    }


def replay(result: dict[str, Any]) -> dict[str, Any]:
    """Train again with the numbers of steps on record; whether the weights are those on record."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "steps.jsonl"
        lines = [{"round": r, **line} for r, line in enumerate(result["steps"])]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["--steps.policy", "script", "--steps.replay", str(log)]
        run = launch(Path(scratch) / "runs", result["words"] + words)
        return {"weights": digest_of(run), "same": digest_of(run) == result["weights"]}


def measured_timeout_s() -> dict[str, Any]:
    """What STEPS steps of a party that is not slowed take while all compute."""
    words = words_of("sync-max", 0.1, TUNING_SEED, (40, 40)) + policy_of("sync-max", 0)
    with tempfile.TemporaryDirectory() as scratch:
        run = launch(Path(scratch), words)
        trace = json.loads((run / "trace.rank1.json").read_text())["traceEvents"]
    phases = [e["dur"] / 1e6 for e in trace if e["name"] == "local steps"]
    return {"timeout_s": round(statistics.median(phases), 4), "machine": machine()}


def result_of(algorithm: str, rate: float, seed: int) -> dict[str, Any]:
    """The result of a run, made if it is not there."""
    timeout_s = kept(RESULTS / "settings.json", measured_timeout_s)["timeout_s"]
    name = f"{algorithm}-lr{rate:g}-{'tune' if seed == TUNING_SEED else f's{seed}'}"
    train = partial(run_cell, algorithm, rate, seed, timeout_s, ROUNDS[algorithm])
    return kept(RESULTS / f"{name}.json", train)


def best_rate(algorithm: str) -> float:
    """The rate with the least time to the target on held-out rows."""
    found = {}
    for rate in RATES[algorithm]:
        came = result_of(algorithm, rate, TUNING_SEED)["seconds_to_target"]
        if came is not None:
            found[rate] = came
    if not found:
        raise SystemExit(f"{algorithm}: none of {RATES[algorithm]} reaches {TARGET_LOSS}")
    return min(found, key=lambda rate: found[rate])


def measure(report: Report) -> None:
    """All runs, their table and the verdicts."""
    rates = {algorithm: best_rate(algorithm) for algorithm in RATES}
    results: dict[str, list[dict[str, Any]]] = {algorithm: [] for algorithm in RATES}
    for seed in SEEDS:
        for algorithm, rate in rates.items():
            results[algorithm].append(result_of(algorithm, rate, seed))
    sync_S = [r["seconds_to_target"] for r in results["sync-max"]]
    for algorithm, of_seeds in results.items():
        seconds_S = [r["seconds_to_target"] for r in of_seeds]
        reached = [s for s in seconds_S if s is not None]
        ratios = [a / b for a, b in zip(sync_S, seconds_S, strict=True) if a and b]
        taus = [[statistics.mean(c) for c in zip(*taus_of(r), strict=True)] for r in of_seeds]
        report.row(
            algorithm=algorithm,
            rate=rates[algorithm],
            seconds=mean_and_error(reached),
            reached=f"{len(reached)}/{len(SEEDS)}",
            sync_max_by_it=mean_and_error(ratios),
            median=statistics.median(ratios) if ratios else "",
            mean_tau=" ".join(f"{statistics.mean(c):.1f}" for c in zip(*taus, strict=True)),
            ms_a_round=1e3 * statistics.mean(r["seconds_a_round"] for r in of_seeds),
        )
        if algorithm != "sync-max":
            name = f"Sync-Max seconds / {algorithm} seconds, mean of pairs"
            report.target(name, statistics.mean(ratios) if ratios else 0.0, 1.5, "x")
    missed = sum(r["seconds_to_target"] is None for of in results.values() for r in of)
    report.target("runs that missed the target", missed, 0, "runs", at_most=True)
    again = kept(RESULTS / "replay-flex-s0.json", partial(replay, results["flex"][0]))
    report.target("replay differs", float(not again["same"]), 0, "", at_most=True, any_size=True)


def taus_of(result: dict[str, Any]) -> list[list[int]]:
    """Steps by round and block."""
    return [line["tau"] for line in result["steps"]]


def mean_and_error(values: list[float]) -> str:
    """Mean +- standard error."""
    if len(values) < 2:
        return "never" if not values else f"{values[0]:.2f}"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} +- {error:.2f}"


def smoke(report: Report) -> None:
    """A few rounds of both policies, and a replay."""
    results = {a: run_cell(a, 0.1, 0, 0.02, (6, 3)) for a in ("adaptive", "sync-max")}
    for algorithm, result in results.items():
        report.row(algorithm=algorithm, rounds=len(result["steps"]))
    again = replay(results["adaptive"])
    report.target("replay differs", float(not again["same"]), 0, "", at_most=True, any_size=True)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""
    report = Report("flex-wall", argv)
    report.command = " ".join(["python bench/flex_wall.py", *argv])
    (smoke if report.smoke else measure)(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
