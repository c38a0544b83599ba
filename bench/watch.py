"""What does the watchdog cost? `python bench/watch.py [--json FILE] [--smoke]`.

Starts mpiexec itself: five ranks train with a heartbeat every 5 s, as ever, and with one 100 times
as often, in turn. Two answers: what one heartbeat takes, as a share of the time between two; and by
how much rounds are slower with 100 times as many, over 100. A wait that goes on for longer than
0.25 s also looks every 0.1 s for a question of the roll call: time that a rank waits anyway.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from hpcvfl.benchmarks.common import Report, run_script
from hpcvfl.benchmarks.launching import measured_by_ranks
from hpcvfl.engine.watch import BEAT_S

RANKS, TIMES = 5, 100
PAIRS, ROUNDS, WARM_ROUNDS = 5, 2500, 500
SHARE_PERCENT = 1.0
"""Of a run's time, at most."""
TIMEOUT_S = 300


def rounds_at(beat_s: float, rounds: int, warm: int) -> tuple[float, list[float]]:
    """Milliseconds a round between the first evaluation and the last, and what each heartbeat took,
    in milliseconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "synthetic", "--algorithm.epochs", "1000", "--run.no-plots"]
        words += ["--algorithm.rounds", str(rounds), "--algorithm.evaluate-rounds", str(warm)]
        words += ["--run.folder", folder, "--run.no-progress"]
        module = "hpcvfl.benchmarks.beating_worker"
        told = measured_by_ranks(RANKS, module, [beat_s, *words], TIMEOUT_S)
        (run,) = Path(folder).iterdir()
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    a_round = (last["seconds"] - first["seconds"]) / (last["round"] - first["round"])
    return 1e3 * a_round, [1e3 * s for s in told["beats_s"]]


def main(argv: list[str]) -> int:
    """Pairs of runs; under --smoke one short pair."""
    report = Report("watch", argv)
    report.command = " ".join(["python bench/watch.py", *argv])
    pairs, rounds, warm = (1, 40, 10) if report.smoke else (PAIRS, ROUNDS, WARM_ROUNDS)
    slower, beats_ms = [], []
    for _ in range(pairs):
        plain_ms, _ = rounds_at(BEAT_S, rounds, warm)
        often_ms, often_beats_ms = rounds_at(BEAT_S / TIMES, rounds, warm)
        slower.append(100 * (often_ms / plain_ms - 1) / TIMES)
        beats_ms += often_beats_ms
        report.row(
            plain_ms=plain_ms,
            ms_at_100_times=often_ms,
            beats=len(often_beats_ms),
            beat_ms=statistics.median(often_beats_ms),
            longest_ms=max(often_beats_ms),
        )
    share = 100 * statistics.mean(beats_ms) / (1e3 * BEAT_S)
    report.target("time in heartbeats", share, SHARE_PERCENT, "% of a run", at_most=True)
    if pairs > 1:
        name = f"rounds slower, +- {statistics.stdev(slower) / pairs**0.5:.4f}"
        report.target(name, statistics.mean(slower), SHARE_PERCENT, "%", at_most=True)
    report.target("heartbeats that were timed", len(beats_ms), 1, any_size=True)
    return report.finish()


if __name__ == "__main__":
    run_script(main)
