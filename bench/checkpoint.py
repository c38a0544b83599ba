"""What does a checkpoint cost? `python bench/checkpoint.py [--json FILE] [--smoke]`.

Starts mpiexec itself: real ranks write their files at the same time, to the folder of temporary
files (TMPDIR). Seconds are those of rank 0 from the end of a round to the moment when all ranks
have written and agreed, median over the checkpoints of a run; the share is that of a run at the
defaults, one checkpoint every 300 s.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from hpcvfl.benchmarks.common import Report, run_script
from hpcvfl.benchmarks.launching import run_ranks
from hpcvfl.sections import RunConfig

FED = "ef(scalar:bits=2,range=gauss)"
SYNTHETIC = ["synthetic", "--codec", FED, "--data.num-samples"]
WIDE = ["--data.batch-size", "1000", "--model.embedding-dim", "64"]
CASES = {
    "digits, 4 bits": ["digits"],
    "48,000 rows, P = 16, ef": ["synthetic", "--data.num-samples", "60000", "--codec", FED],
    "160,000 rows, P = 64, ef": [
        "synthetic",
        "--data.num-samples",
        "200000",
        "--codec",
        FED,
        *WIDE,
    ],
}
"""Name -> preset and fields; with error feedback each rank saves its own N x P memory."""
EVERY, ROUNDS = 3, 40  # 13 checkpoints; all phases of 40 rounds stand in the trace
TIMEOUT_S = 300
SHARE = 0.01
"""Of a run's seconds, at most."""


def measure(words: list[str], rounds: int, report: Report, name: str) -> float:
    """Run one case, add its row; the median seconds of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "--run.folder": folder,
            "--run.checkpoint-rounds": str(EVERY),
            "--algorithm.rounds": str(rounds),
            "--algorithm.evaluate-every": "1000",
        }
        options = [word for pair in fields.items() for word in pair]
        run_ranks(5, "hpcvfl", ["train", *words, *options, "--run.no-plots"], TIMEOUT_S)
        (path,) = Path(folder).iterdir()
        events = json.loads((path / "trace.rank0.json").read_text())["traceEvents"]
        took_s = [e["dur"] / 1e6 for e in events if e["name"] == "checkpoint"]
        sizes = [p.stat().st_size for p in max(path.glob("checkpoints/round-*")).iterdir()]
        summary = json.loads((path / "summary.json").read_text())
    median_s = statistics.median(took_s)
    round_s = summary["seconds"]["training"] / summary["rounds"]
    report.row(
        case=name,
        checkpoints=len(took_s),
        MB_of_all_ranks=sum(sizes) / 1e6,
        ms=1e3 * median_s,
        slowest_ms=1e3 * max(took_s),
        round_ms=1e3 * round_s,
        rounds=median_s / round_s,
        percent_of_a_run=100 * median_s / (default_s() + median_s),
    )
    return median_s


def default_s() -> float:
    """Seconds between two checkpoints at the defaults."""
    return float(RunConfig().checkpoint_s)


def main(argv: list[str]) -> int:
    """All cases; under --smoke the first, for three checkpoints."""
    report = Report("checkpoint", argv)
    report.command = " ".join(["python bench/checkpoint.py", *argv])
    cases = dict(list(CASES.items())[:1]) if report.smoke else CASES
    for name, words in cases.items():
        median_s = measure(words, 10 if report.smoke else ROUNDS, report, name)
        share = median_s / (default_s() + median_s)
        report.target(f"share of a run: {name}", share, SHARE, at_most=True)
    return report.finish()


if __name__ == "__main__":
    run_script(main)
