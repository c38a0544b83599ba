"""Grids of training runs: one cell, one JSON file; an interrupted grid goes on where it was.

Ranks take turns in one process, which gives the same bits and bytes as MPI does.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report, kept, machine
from hpcvfl.cli import load_config
from hpcvfl.codecs import table as codec_table
from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.config import Config, build, merge, nest
from hpcvfl.engine.run import train
from hpcvfl.transport.threads import ThreadsWorld

CodecTable = Mapping[str, tuple[str, str]]
"""Name -> spec of the embeddings' codec, spec of the head's."""

SCHEDULES = {
    (100, 1): (0.2, 5),
    (1000, 1): (0.4, 20),
    (100, 5): (0.1, 3),
    (1000, 5): (0.2, 6),
}
"""(batch size, Q) -> (rate at round 0, decayed by a cosine to 0; epochs), tuned for float32 on
5,000 held-out training images: bench/LOG.md. At Q = 5 an epoch costs five times the work, so there
are fewer.
"""


@dataclass(frozen=True)
class Cell:
    """One training run of a grid on fashion-mnist; `codec` is a name of the grid's table."""

    codec: str
    batch_size: int
    local_steps: int
    seed: int

    @property
    def name(self) -> str:
        """Also the name of its file."""
        return f"{self.codec}-B{self.batch_size}-Q{self.local_steps}-s{self.seed}"

    def config(
        self,
        codecs: CodecTable,
        schedule: tuple[float, int] | None = None,
        held_out: int = 0,
    ) -> Config:
        """The preset with the schedule and the codecs of this cell."""
        lr, epochs = schedule or SCHEDULES[self.batch_size, self.local_steps]
        embeddings, head = codecs[self.codec]
        over = {
            "seed": self.seed,
            "codec": embeddings,
            "head_codec": head,
            "data.batch_size": self.batch_size,
            "data.validation_rows": held_out,
            "algorithm.local_steps": self.local_steps,
            "algorithm.epochs": epochs,
            "optimizer.lr": lr,
            "optimizer.schedule": "cosine",
        }
        return build(merge(load_config(["fashion-mnist"]).model_dump(), nest(over)))


def run_config(config: Config) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train without leaving a run folder; (summary, lines of metrics.jsonl)."""
    with tempfile.TemporaryDirectory() as scratch:
        table = merge(config.model_dump(), {"run": {"folder": scratch, "plots": False}})
        here = build(table)
        summary = ThreadsWorld(here.num_parties + 1).run(lambda t: train(here, t))[0]
        metrics = Path(summary["folder"]) / "metrics.jsonl"
        return summary, [json.loads(line) for line in metrics.read_text().splitlines()]


def run_cell(cell: Cell, codecs: CodecTable) -> dict[str, Any]:
    """Train one cell; everything worth keeping as plain values."""
    started_s = time.perf_counter()
    config = cell.config(codecs)
    summary, lines = run_config(config)
    fields = (
        *("epoch", "round", "train_loss", "test_accuracy", "wire_bytes", "raw_bytes"),
        *("squared_error", "bits_per_value"),
    )
    return {
        "cell": asdict(cell),
        "codecs": summary["codec"],
        "schedule": {
            "lr": config.optimizer.lr,
            "epochs": config.algorithm.epochs,
            "decay": "cosine",
        },
        "config_digest": summary["config_digest"],
        "accuracy": summary["metrics"]["accuracy"],
        "rounds": summary["rounds"],
        "wire_bytes": summary["wire_bytes"],
        "raw_bytes": summary["raw_bytes"],
        "wire_bytes_by": summary["wire_bytes_by"]["train"],
        "seconds": time.perf_counter() - started_s,
        "curve": [{field: line[field] for field in fields} for line in lines],
        "machine": machine(),
    }


def run_missing(cells: Iterable[Cell], codecs: CodecTable, folder: Path, only: str = "") -> None:
    """Run the cells that have no file yet and whose name matches the pattern `only`.

    A file is there in whole or not at all.
    """
    for cell in cells:
        if re.search(only, cell.name):
            kept(folder / f"{cell.name}.json", partial(run_cell, cell, codecs))


def check_bytes(report: Report, embeddings: str, head: str) -> None:
    """A tiny run of the two codecs: bytes measured = header + codec.nbytes of every frame."""
    over = {"codec": embeddings, "head_codec": head, "algorithm.rounds": 3}
    config = build(merge(load_config(["digits"]).model_dump(), nest(over)))
    summary, _ = run_config(config)
    m, shape = config.num_parties, (config.data.batch_size, config.model.embedding_dim)
    embed = HEADER_NBYTES + codec_table.parse(embeddings).nbytes(shape, 4)
    head_shapes = [(10, m * config.model.embedding_dim), (10,)]
    head_bytes = HEADER_NBYTES + sum(codec_table.parse(head).nbytes(s, 4) for s in head_shapes)
    due = 3 * (m * embed + m * (head_bytes + m * embed))
    report.row(rounds=summary["rounds"], wire_bytes=summary["wire_bytes"], due_bytes=due)
    off = abs(summary["wire_bytes"] - due)
    report.target("measured bytes off", off, 0, "bytes", at_most=True, any_size=True)


def results(cells: Iterable[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    """The results that are there, in the order of `cells`."""
    paths = {cell: folder / f"{cell.name}.json" for cell in cells}
    return {cell: json.loads(path.read_text()) for cell, path in paths.items() if path.exists()}
