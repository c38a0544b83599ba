"""In seconds: one party is really four times slower. Flex-VFL against Sync-Max, under mpiexec.

python bench/flex_wall.py           tune rates, run the missing cells, then table and verdicts
python bench/flex_wall.py --smoke   one short run of each and its replay, no speed is judged

Three ranks on digits, codec float32: a server and two parties, of which the second sleeps three
times as long as each of its steps took. Sync-Max: every block takes STEPS steps. Flex-VFL: every
block takes the steps that fit into TIMEOUT_S, which is what STEPS steps of a party that is not
slowed take on this machine, measured first. Time counts rounds only (no start, no evaluation) up to
the first evaluation whose test loss is at most TARGET_LOSS. Rates are tuned for each on held-out
rows; then five seeds. The first Flex run is replayed from its log and must have the same bits.

One JSON file a run under bench/results/flex-wall/; time it on an idle machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from hpcvfl.benchmarks.common import Report, machine
from hpcvfl.engine.folder import read_metrics

RESULTS = Path(__file__).parent / "results" / "flex-wall"
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 100
RATES = (0.02, 0.03, 0.05, 0.1, 0.2, 0.4)
STEPS, SLOW, TARGET_LOSS, EPOCHS = 10, 4, 0.25, 25
COMMON = [
    *(
        "--num-parties",
        "2",
        "--codec",
        "none",
        "--head-codec",
        "none",
        "--slow",
        "party=2,factor=4",
    ),
    *("--optimizer.schedule", "constant", "--algorithm.evaluate-every", "1"),
    *("--run.no-plots", "--run.no-progress"),
]


def launch(folder: Path, options: list[str]) -> Path:
    """Train under mpiexec with three ranks; the run folder."""
    command = ["mpiexec", "-n", "3", sys.executable, "-m", "mpi4py", "-m", "hpcvfl", "train"]
    command += ["digits", *COMMON, "--run.folder", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def options_of(algorithm: str, rate: float, seed: int, timeout_s: float, epochs: int) -> list[str]:
    """What differs between runs."""
    words = ["--seed", str(seed), "--optimizer.lr", str(rate), "--algorithm.epochs", str(epochs)]
    if seed == TUNING_SEED:
        words += ["--data.validation-rows", "300"]
    if algorithm == "flex":
        return [*words, "--steps.policy", "wall-clock", "--steps.timeout-s", str(timeout_s)]
    return [*words, "--algorithm.local-steps", str(STEPS)]


def seconds_to_target(lines: list[dict[str, Any]]) -> float | None:
    """Seconds in rounds until the test loss was low enough; None if it never was."""
    return next((line["seconds"] for line in lines if line["test_loss"] <= TARGET_LOSS), None)


def step_seconds() -> float:
    """Median time of a step of party 1 in rounds of STEPS steps."""
    with tempfile.TemporaryDirectory() as scratch:
        run = launch(Path(scratch), options_of("sync-max", 0.1, TUNING_SEED, 0, 3))
        trace = json.loads((run / "trace.rank1.json").read_text())["traceEvents"]
    phases = [e["dur"] / 1e6 for e in trace if e["name"] == "local steps"]
    return statistics.median(phases) / STEPS


def run_once(name: str, words: list[str]) -> dict[str, Any]:
    """The result of a run, made if it is not there."""
    path = RESULTS / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        run = launch(Path(scratch), words)
        lines = read_metrics(run)
        steps = [json.loads(text) for text in (run / "steps.jsonl").read_text().splitlines()]
    kept = ("round", "seconds", "test_loss", "test_accuracy", "train_loss")
    result = {
        "options": words,
        "seconds_to_target": seconds_to_target(lines),
        "curve": [{field: line[field] for field in kept} for line in lines],
        "tau": [line["tau"] for line in steps],
        "machine": machine(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    return result


def best_rate(algorithm: str, timeout_s: float) -> float:
    """The rate with the least time to the target on held-out rows."""
    found = {}
    for rate in RATES:
        words = options_of(algorithm, rate, TUNING_SEED, timeout_s, EPOCHS)
        came = run_once(f"{algorithm}-lr{rate:g}-tune", words)["seconds_to_target"]
        if came is not None:
            found[rate] = came
    if not found:
        raise SystemExit(f"{algorithm}: no rate of {RATES} reaches a test loss of {TARGET_LOSS}")
    return min(found, key=lambda rate: found[rate])


def replays(timeout_s: float, rate: float, epochs: int) -> bool:
    """Whether a run under the wall clock and its replay from the log end with the same bits."""
    with tempfile.TemporaryDirectory() as scratch:
        first = launch(Path(scratch) / "a", options_of("flex", rate, 0, timeout_s, epochs))
        words = ["--seed", "0", "--optimizer.lr", str(rate), "--algorithm.epochs", str(epochs)]
        words += ["--steps.policy", "script", "--steps.replay", str(first)]
        again = launch(Path(scratch) / "b", words)
        ends = [{p.name for p in run.rglob("rank*.safetensors")} for run in (first, again)]
        return ends[0] == ends[1] == {
            "rank0.safetensors",
            "rank1.safetensors",
            "rank2.safetensors",
        } and all(
            value.tobytes()
            == load_file(again / "checkpoints" / "final" / file.name)[name].tobytes()
            for file in sorted((first / "checkpoints" / "final").glob("rank*.safetensors"))
            for name, value in load_file(file).items()
        )


def measure(report: Report) -> None:
    """All runs, their table and the verdicts."""
    settings = RESULTS / "settings.json"
    if not settings.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"timeout_s": round(STEPS * step_seconds(), 4)}) + "\n")
    timeout_s = json.loads(settings.read_text())["timeout_s"]
    times: dict[str, list[float | None]] = {}
    for algorithm in ("flex", "sync-max"):
        rate = best_rate(algorithm, timeout_s)
        results = [
            run_once(
                f"{algorithm}-lr{rate:g}-s{seed}",
                options_of(algorithm, rate, seed, timeout_s, EPOCHS),
            )
            for seed in SEEDS
        ]
        times[algorithm] = [r["seconds_to_target"] for r in results]
        reached = [t for t in times[algorithm] if t is not None]
        taus = [statistics.mean(column) for column in zip(*results[0]["tau"], strict=True)]
        report.row(
            algorithm=algorithm,
            rate=rate,
            timeout_s=timeout_s if algorithm == "flex" else "",
            seconds=f"{statistics.mean(reached):.2f} +- {statistics.stdev(reached):.2f}"
            if len(reached) > 1
            else "never",
            reached=f"{len(reached)}/{len(SEEDS)}",
            mean_tau=" ".join(f"{tau:.1f}" for tau in taus),
            ms_a_round=f"{1e3 * results[0]['curve'][-1]['seconds'] / len(results[0]['tau']):.1f}",
        )
    pairs = [(f, s) for f, s in zip(*times.values(), strict=True) if f and s]
    missed = 2 * len(SEEDS) - 2 * len(pairs)
    report.target("runs that missed the target", missed, 0, "runs", at_most=True)
    ratios = [s / f for f, s in pairs]
    report.target(
        "Sync-Max seconds / Flex seconds, mean of pairs", statistics.mean(ratios), 1.5, "x"
    )
    same = replays(timeout_s, best_rate("flex", timeout_s), 2)
    report.target("replay differs", float(not same), 0, "", at_most=True, any_size=True)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""
    report = Report("flex-wall", argv)
    report.command = " ".join(["python bench/flex_wall.py", *argv])
    if report.smoke:
        same = replays(0.02, 0.1, 1)
        report.target("replay differs", float(not same), 0, "", at_most=True, any_size=True)
    else:
        measure(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
