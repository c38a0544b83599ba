"""A run over MPI equals the run in one process, bit for bit, at whatever number of ranks this
is.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support.over_mpi import everywhere_equal, over_mpi
from support.runs import run_threads, same_bits, tiny, weights
from test_transport_mpi import RecordingComm

from hpcvfl.codecs import table
from hpcvfl.codecs.base import split_spec
from hpcvfl.engine.folder import read_config
from hpcvfl.engine.run import evaluate_run, train
from hpcvfl.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
GAUSS = "scalar:bits=2,range=gauss,scope=column"
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.mark.parametrize("tower", ["mlp", "support.modules:DropoutTower"])
@pytest.mark.parametrize("codec", ["none", GAUSS])
def test_threads_hub_and_allgather_give_the_same_bits(folder, tower, codec):
    def config(pattern):
        return tiny(
            folder,
            num_parties=WORLD.size - 1,
            codec=codec,
            model__tower=tower,
            algorithm__local_steps=3,
            transport__pattern=pattern,
        )

    hub, spread = over_mpi(config("hub")), over_mpi(config("allgather"))
    ok = True
    if WORLD.rank == 0:
        alone = run_threads(config("hub"))
        ok = same_bits(weights(alone), weights(hub)) and same_bits(weights(alone), weights(spread))
        ok = ok and alone["metrics"] == hub["metrics"] == spread["metrics"]
        ok = ok and alone["wire_bytes"] == hub["wire_bytes"]
        ok = ok and alone["wire_bytes_by"]["train"] == hub["wire_bytes_by"]["train"]
    assert everywhere_equal(ok)


FAMILY = [
    "float16",
    "bfloat16",
    "topk:k=1,values=scalar:bits=2",
    "topk:ratio=0.3,per=row",
    "randomk:ratio=0.3",
    "qsgd:bits=3",
    f"ef({GAUSS})",
    "ef16(scalar:bits=2)",
    "ef(auto:error=0.05,codec=scalar)",
]
"""A codec of every name, `none` and `scalar` aside, each for the embeddings and the head."""

if WORLD.size == 3:  # a minute of compiling on two cores, minutes with five ranks: once will do
    FAMILY += ["lattice:dim=8,bits=2,scope=column", "lattice-paper:bits=2", "best:bits=1"]


def test_the_family_is_whole():
    names = {split_spec(spec)[0] for spec in FAMILY} | {"none", "scalar", "auto"}
    left_out = {"lattice", "lattice-paper", "best"} if WORLD.size != 3 else set()
    assert names | left_out == set(table.CODECS)


@pytest.mark.parametrize("spec", FAMILY)
def test_every_codec_gives_over_mpi_what_it_gives_in_one_process(folder, spec):
    # Five rounds of three batches: the last two meet samples that a memory knows already. Batches
    # of 80 rows are coded column by column in `best`.
    config = tiny(
        folder,
        num_parties=WORLD.size - 1,
        codec=spec,
        head_codec=spec,
        data__num_samples=300,
        data__batch_size=80,
        algorithm__rounds=5,
        algorithm__local_steps=2,
    )
    summary = over_mpi(config)
    ok = True
    if WORLD.rank == 0:
        alone = run_threads(config)
        ok = same_bits(weights(alone), weights(summary))
        ok = ok and alone["wire_bytes"] == summary["wire_bytes"]
        ok = ok and messages(alone) == messages(summary)
    assert everywhere_equal(ok)


def messages(summary):
    """Errors and bits of every message of a run."""
    return (Path(summary["folder"]) / "messages.jsonl").read_text()


def test_float64_is_the_same_over_mpi(folder):
    config = tiny(folder, num_parties=WORLD.size - 1, dtype="float64", head_codec="none")
    summary = over_mpi(config)
    ok = True
    if WORLD.rank == 0:
        ok = same_bits(weights(run_threads(config)), weights(summary))
    assert everywhere_equal(ok)


def test_evaluate_reproduces_the_closing_accuracy(folder):
    summary = over_mpi(tiny(folder, num_parties=WORLD.size - 1))
    transport = MpiTransport()
    config = read_config(Path(summary["folder"]))
    again = evaluate_run(Path(summary["folder"]), config, transport)
    transport.close()
    assert again["accuracy"] == summary["metrics"]["accuracy"]
    assert again["loss"] == summary["metrics"]["loss"]


def test_every_rank_leaves_its_files(folder):
    summary = over_mpi(tiny(folder, num_parties=WORLD.size - 1))
    path = Path(summary["folder"])
    WORLD.Barrier()
    for rank in range(WORLD.size):
        assert (path / f"ledger.rank{rank}.jsonl").read_text().count("\n") == summary["rounds"]
        assert json.loads((path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert (path / "checkpoints" / "final" / f"rank{rank}.safetensors").stat().st_size > 0
    assert json.loads((path / "summary.json").read_text()) == summary


@pytest.mark.parametrize("pattern", ["hub", "allgather"])
def test_c1_the_ledger_of_a_run_equals_the_buffers_handed_to_the_communicator(folder, pattern):
    recorder, meters = RecordingComm(WORLD), []
    config = tiny(folder, num_parties=WORLD.size - 1, transport__pattern=pattern)
    train(config, MpiTransport(comm=recorder), after_round=lambda run, _: meters.append(run.meter))
    booked = {"in": 0, "out": 0}
    for row in meters[0].table():
        booked[row["direction"]] += row["wire_bytes"]
    totals = WORLD.allreduce(np.array([recorder.sent, recorder.received]))
    assert (recorder.sent, recorder.received) == (booked["out"], booked["in"])
    assert totals[0] == totals[1]
