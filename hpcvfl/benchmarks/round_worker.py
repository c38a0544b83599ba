"""One rank of bench/round.py: rounds of the real loop, and of a bare script with the same work.

    mpiexec -n M+1 python -m mpi4py -m hpcvfl.benchmarks.round_worker OUT M B P PATTERN ROUNDS
    CODEC 1

Rank 0 writes to the JSON file OUT: milliseconds a round, by phase at the server and at the mean
party, and with a last argument of 1 those of the bare script, which alternates with the real loop;
also the bytes that all ranks together booked as received and as sent, and in how many rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hpcvfl.config import Config, build
from hpcvfl.engine.agree import exchange
from hpcvfl.engine.prepare import Run, prepare
from hpcvfl.engine.run import one_round
from hpcvfl.engine.start import build_block
from hpcvfl.ledger import Meter
from hpcvfl.transport.mpi import MPI, MpiTransport
from hpcvfl.transport.waiting import wait_until

WARM_UP_ROUNDS = 10
BLOCK_ROUNDS = 20
"""Rounds in a row of one kind before the other kind has its turn."""


def make_config(m: int, b: int, p: int, pattern: str, codec: str, folder: str) -> Config:
    """Synthetic columns, small mlp towers: the towers' work does not hide the round's own."""
    return build(
        {
            "num_parties": m,
            "codec": codec,
            "data": {
                "dataset": "synthetic",
                "num_samples": 5 * b,
                "num_features": 8 * m,
                "batch_size": b,
            },
            "model": {"embedding_dim": p, "hidden_dim": 32},
            "algorithm": {"epochs": 10**6},
            "transport": {"pattern": pattern},
            "run": {"folder": folder},
        }
    )


class BareRound:
    """The same torch operations and collectives of equal bytes, without anything of ours around
    them.

    Buffers hold what they hold: nothing is encoded, checked or decoded.
    """

    def __init__(self, run: Run) -> None:
        """Modules of the same shapes as the run's, and its frame sizes."""
        self.comm = MPI.COMM_WORLD.Dup()
        config, rank = run.block.config, self.comm.rank
        block = build_block(config, rank)
        self.block, self.batches, self.rank = block, run.batches, rank
        size = config.data.batch_size
        _, slots = run.exchange.layout(size)
        self.counts, self.displacements = slots.sizes_R, slots.offsets_R
        self.buffer_B = np.zeros(sum(slots.sizes_R), np.uint8)
        shape = (size, config.model.embedding_dim)
        self.embeddings = [torch.zeros(shape, dtype=block.dtype) for _ in range(config.num_parties)]
        self.head: nn.Module = getattr(block, "head_copy", block.module)
        self.parameters = list(block.module.parameters())

    def round(self, round_index: int) -> None:
        """Forward, gather, broadcast, one step."""
        block = self.block
        rows = torch.from_numpy(self.batches.rows(round_index))
        assert block.shard.train_y is not None
        labels_N = block.shard.train_y[rows]
        parts = list(self.embeddings)
        if self.rank:
            assert block.shard.train_x is not None
            parts[self.rank - 1] = block.module(block.shard.train_x[rows])
        self.swap()
        head = block.module if self.rank == 0 else self.head
        loss = F.cross_entropy(head(torch.cat(parts, dim=1)), labels_N)
        float(loss.detach())
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-1e-4)

    def swap(self) -> None:
        """Raw collectives, waited for as the transport waits."""
        at, n = self.displacements[self.rank], self.counts[self.rank]
        if self.rank == 0:
            whole = [self.buffer_B, (self.counts, self.displacements), MPI.BYTE]
            gathered = self.comm.Igatherv(MPI.IN_PLACE, whole, 0)
        else:
            gathered = self.comm.Igatherv([self.buffer_B[at : at + n], MPI.BYTE], None, 0)
        wait_until(gathered.Test)
        wait_until(self.comm.Ibcast([self.buffer_B, MPI.BYTE], 0).Test)


def measure(run: Run, rounds: int, bare: BareRound | None) -> dict[str, Any]:
    """Medians over blocks of rounds, in ms a round."""
    number = 0
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    before: dict[str, float] = {}

    def ours(count: int) -> None:
        nonlocal number
        for _ in range(count):
            one_round(run, number)
            number += 1

    def timed(name: str, count: int) -> None:
        run.transport.barrier()
        begun_s = time.perf_counter()
        if name == "ours":
            ours(count)
        else:
            for i in range(count):
                assert bare is not None
                bare.round(i)
        times[name].append(1e3 * (time.perf_counter() - begun_s) / count)

    ours(WARM_UP_ROUNDS)
    if bare is not None:
        for i in range(WARM_UP_ROUNDS):
            bare.round(i)
    before = dict(run.clock.seconds)
    measured_from = number
    while number - measured_from < rounds:
        timed("ours", min(BLOCK_ROUNDS, rounds))
        if bare is not None:
            timed("bare", min(BLOCK_ROUNDS, rounds))
    done = number - measured_from
    phases = {k: 1e3 * (v - before[k]) / done for k, v in run.clock.seconds.items()}
    told = exchange(run.transport, {"phases": phases, "booked": booked(run.meter)})
    mean_party = {k: statistics.mean(t["phases"][k] for t in told[1:]) for k in phases}
    paired = [a - b for a, b in zip(times["ours"], times["bare"], strict=False)]
    return {
        "round_ms": statistics.median(times["ours"]),
        "bare_ms": statistics.median(times["bare"]) if bare else None,
        "overhead_ms": statistics.median(paired) if paired else None,
        "server": told[0]["phases"],
        "party": mean_party,
        "booked": [sum(t["booked"][i] for t in told) for i in (0, 1)],
        "booked_rounds": number,
        "head_codec": run.exchange.agreement.codecs_R[0].spec,
        "head_shapes": run.exchange.agreement.head_shapes,
    }


def booked(meter: Meter) -> list[int]:
    """Bytes that this rank received and sent in rounds so far."""
    rows = [row for row in meter.table() if row["phase"] == "train"]
    return [
        sum(int(row["wire_bytes"]) for row in rows if row["direction"] == direction)
        for direction in ("in", "out")
    ]


def main(argv: list[str]) -> int:
    """Run one configuration on this rank."""
    out, *argv = argv
    m, b, p, rounds = int(argv[0]), int(argv[1]), int(argv[2]), int(argv[4])
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(m, b, p, argv[3], argv[5], folder)
        run = prepare(config, MpiTransport())
        compare = BareRound(run) if argv[6:] == ["1"] else None
        result = measure(run, rounds, compare)
        run.meter.close()
        run.transport.barrier()
    if run.transport.rank == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
