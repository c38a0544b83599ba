"""What must never change unnoticed: frames byte for byte, the losses of a tiny run.

A change here is a change for users: a line in the CHANGELOG with the reason, then
`python tests/golden/test_golden.py` writes the files anew.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from hpcvfl.codecs import table
from hpcvfl.engine.exchange import Agreement, Exchange

HERE = Path(__file__).parent
SPECS = (
    "none",
    "float16",
    "bfloat16",
    *(f"scalar:bits={b}" for b in range(1, 9)),
    "scalar:bits=2,dither=off",
    "scalar:bits=2,range=gauss,scope=column",
    "scalar:bits=3,scope=column",
    "scalar:bits=4,range=fixed:-2.0:2.0",
    "lattice:dim=2,bits=2",
    "lattice:dim=4,bits=3",
    "lattice:dim=8,bits=2,range=minmax,scope=column",
    "lattice-paper:bits=2",
    "topk:k=2",
    "topk:k=2,per=row,values=(scalar:bits=2,range=gauss)",
    "topk:ratio=0.3,per=tensor",
    "randomk:k=9",
    "qsgd:bits=4",
    "best:bits=2",
    "ef(scalar:bits=2)",
    "auto:error=0.1",
)


class Rank1:
    """As much of a transport as encoding needs."""

    rank, size = 1, 2


def frame(spec):
    """The frame of party 1 in round 17: 11 rows of 4 values that every machine computes alike."""
    x = ((np.arange(44) * 37 % 101) / 25 - 2).astype(np.float32).reshape(11, 4)
    codecs = [table.parse("none"), table.parse(spec)]
    dtype = np.dtype(np.float32)
    agreement = Agreement(codecs, [(3, 4)], 4, dtype, 5, 11, num_blocks=2, block_of_rank=[0, 1])
    exchange = Exchange(Rank1, agreement, "hub")
    exchange.encode(17, np.arange(11), [x], tau=3, w_bar=1.5, seconds=0.25)
    return exchange.frame(11, 1).tobytes().hex()


def losses(folder):
    """Training losses of a float64 run on one thread, round by round, at the server."""
    from support.runs import run_threads, tiny

    seen = []

    def keep(run, result):
        if run.transport.rank == 0:
            seen.append(result.loss)

    config = tiny(folder, dtype="float64", algorithm__local_steps=3, algorithm__epochs=2)
    run_threads(config, after_round=keep)
    return seen


@pytest.mark.parametrize("spec", SPECS)
def test_frames_are_what_they_were_byte_for_byte(spec):
    assert frame(spec) == json.loads((HERE / "frames.json").read_text())[spec]


def test_losses_of_a_tiny_run_are_what_they_were(tmp_path):
    assert losses(tmp_path) == pytest.approx(
        json.loads((HERE / "losses.json").read_text()), rel=1e-9
    )


if __name__ == "__main__":
    import sys
    import tempfile

    sys.path.insert(0, str(HERE.parent))
    (HERE / "frames.json").write_text(json.dumps({s: frame(s) for s in SPECS}, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        (HERE / "losses.json").write_text(json.dumps(losses(scratch), indent=1) + "\n")
