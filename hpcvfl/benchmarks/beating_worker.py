"""A training whose heart beats more or less often; what bench/watch.py times.

python -m mpi4py -m hpcvfl.benchmarks.beating_worker OUT BEAT_S WORDS..., on every rank
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hpcvfl import cli
from hpcvfl.engine import watch
from hpcvfl.transport.launcher import expected_rank


def main(argv: list[str]) -> int:
    """Run `hpcvfl WORDS` with a heartbeat every BEAT_S seconds; rank 0 writes to the JSON file OUT
    how long each of its heartbeats took, in seconds.
    """
    out, beat_s, *words = argv
    watch.BEAT_S = float(beat_s)
    took_s: list[float] = []
    beat = watch.Heart.beat

    def timed_beat(heart: watch.Heart) -> None:
        begin = time.perf_counter()
        beat(heart)
        took_s.append(time.perf_counter() - begin)

    watch.Heart.beat = timed_beat  # type: ignore[method-assign, assignment]
    status = cli.main(words)
    if expected_rank() == 0:
        Path(out).write_text(json.dumps({"beats_s": took_s}), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
