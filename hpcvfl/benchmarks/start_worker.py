"""One rank of the start that bench round times; arguments: OUT FOLDER.

What `hpcvfl train digits` does for one round, without a progress bar. Rank 0 writes to the JSON
file OUT when the last rank had finished the first round: seconds since the epoch of this host.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcvfl.cli import load_config
from hpcvfl.engine.agree import exchange
from hpcvfl.engine.run import train
from hpcvfl.transport.mpi import MpiTransport


def main(argv: Sequence[str]) -> None:
    """Train one round with the run folder in FOLDER; evaluation and plots come after the time."""
    out, folder = argv
    config = load_config(["digits", "--run.folder", folder, "--algorithm.rounds", "1"])
    transport = MpiTransport()
    ended_s: list[float] = []
    train(config, transport, after_round=lambda *_: ended_s.append(time.time()))
    told = exchange(transport, ended_s[0])
    if transport.rank == 0:
        Path(out).write_text(json.dumps({"first_round_s": max(told)}), encoding="utf-8")
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
