"""Ranks of several runs, one after the other: `torchrun .. torch_program.py "WORDS" "WORDS" ..`.

WORDS are what follows `hpcvfl train`. Rank 0 prints `folder PATH` for each when all
ranks have written their part.
"""

from __future__ import annotations

import shlex
import sys

from hpcvfl.cli import load_config
from hpcvfl.engine.run import train
from hpcvfl.transport.torchdist import TorchTransport


def main(runs: list[str]) -> None:
    transport = TorchTransport(timeout_s=60.0)
    for words in runs:
        transport.round_index = -1
        summary = train(load_config(shlex.split(words)), transport)
        transport.barrier()
        if transport.rank == 0:
            print(f"folder {summary['folder']}", flush=True)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
