"""What do private labels cost? fashion-mnist, labels at the server only against labels everywhere.

python bench/private_labels.py           run the missing cells, then table and verdicts
python bench/private_labels.py --table   table and verdicts of the cells that are there
python bench/private_labels.py --smoke   one step a round on digits: the same bits without a codec

B = 1000, the schedules of bench/fashion_mnist.py, last epoch, test set, paired by seed. Q = 1 with
4 bits both ways, against the 4-bit cells of that bench; Q = 5 with 2 bits and error feedback both
ways, against its float32 cells and the cell of bench/accuracy_bytes.py with that codec. One JSON
file a run under bench/results/private-labels/.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, machine
from hpcvfl.benchmarks.training import Cell, run_config
from hpcvfl.cli import load_config
from hpcvfl.config import build, merge, nest

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "private-labels"
SHARED = {"ef-scalar2": RESULTS / "accuracy-bytes"}
"""Where the cells of a codec with shared labels lie, if not with bench/fashion_mnist.py."""
FED_BACK = "ef(scalar:bits=2,range=gauss,scope=column)"
CODECS = {"4bit": ("scalar:bits=4", "scalar:bits=4"), "ef2bit": (FED_BACK, FED_BACK)}
"""Name -> codec of the embeddings, codec of the gradients."""

PLAN = (
    *((Cell("4bit", 1000, 1, seed), "4bit") for seed in (0, 1, 2)),
    (Cell("ef2bit", 1000, 5, 0), "float32"),
    (Cell("ef2bit", 1000, 5, 0), "ef-scalar2"),
)
"""(cell with private labels, codec of the shared-label cell beside it)."""


def run_once(cell: Cell) -> dict[str, Any]:
    """The result of a cell, run if it is not there."""
    path = CELLS / f"{cell.name}.json"
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    print(f"{time.strftime('%H:%M:%S')} {cell.name}", file=sys.stderr, flush=True)
    embeddings, gradients = CODECS[cell.codec]
    over = {"labels.holder": "server", "labels.gradient_codec": gradients}
    config = cell.config({cell.codec: (embeddings, "scalar:bits=8")})
    summary, lines = run_config(build(merge(config.model_dump(), nest(over))))
    kept = ("round", "test_accuracy", "test_loss", "wire_bytes", "squared_error")
    result = {
        "cell": cell.name,
        "accuracy": summary["metrics"]["accuracy"],
        "wire_bytes": summary["wire_bytes"],
        "wire_bytes_by": summary["wire_bytes_by"]["train"],
        "curve": [{field: line[field] for field in kept} for line in lines],
        "machine": machine(),
    }
    CELLS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def shared(cell: Cell, codec: str) -> dict[str, Any]:
    """The cell with shared labels."""
    name = Cell(codec, cell.batch_size, cell.local_steps, cell.seed).name
    return json.loads((SHARED.get(codec, RESULTS / "fashion-mnist") / f"{name}.json").read_text())  # type: ignore[no-any-return]


def tabulate(report: Report, run: bool) -> None:
    """A row a cell, and the verdict on Q = 1."""
    losses = []
    for cell, codec in PLAN:
        if not run and not (CELLS / f"{cell.name}.json").exists():
            continue
        private, beside = run_once(cell), shared(cell, codec)
        lost = 100 * (beside["accuracy"] - private["accuracy"])
        report.row(
            codec=cell.codec,
            Q=cell.local_steps,
            seed=cell.seed,
            private=f"{100 * private['accuracy']:.2f}",
            shared=f"{100 * beside['accuracy']:.2f} ({codec})",
            points_lost=f"{lost:.2f}",
            MB=f"{private['wire_bytes'] / 1e6:.1f}",
            shared_MB=f"{beside['wire_bytes'] / 1e6:.1f}",
        )
        if cell.local_steps == 1:
            losses.append(lost)
    if losses:
        name = f"points lost at Q = 1, 4 bits both ways, {len(losses)} seeds"
        report.target(name, statistics.mean(losses), 0.5, "points", at_most=True)


def smoke(report: Report) -> None:
    """Without a codec, one step a round: the same accuracy and loss to the last bit."""
    preset = load_config(["digits"]).model_dump()
    none = {"codec": "none", "head_codec": "none", "labels.gradient_codec": "none"}
    base = none | {"algorithm.local_steps": 1, "algorithm.epochs": 2}
    ends = [
        run_config(build(merge(preset, nest(base | {"labels.holder": holder}))))[0]["metrics"]
        for holder in ("all", "server")
    ]
    report.row(shared=ends[0]["loss"], private=ends[1]["loss"])
    off = float(ends[0] != ends[1])
    report.target("metrics differ", off, 0, "", at_most=True, any_size=True)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""
    report = Report(
        "private-labels",
        argv,
        lambda parser: parser.add_argument("--table", action="store_true", help="run nothing"),
    )
    report.command = " ".join(["python bench/private_labels.py", *argv])
    if report.smoke:
        smoke(report)
    else:
        tabulate(report, run=not report.args.table)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
