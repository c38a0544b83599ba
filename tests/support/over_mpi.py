"""Runs under mpiexec; every rank calls these."""

from mpi4py import MPI

from hpcvfl.engine.run import train
from hpcvfl.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD


def over_mpi(config, after_round=None):
    """Summary of a run of all ranks, whose files are then complete."""
    transport = MpiTransport()
    summary = train(config, transport, after_round=after_round)
    transport.close()
    WORLD.Barrier()  # rank 0 writes last
    return summary


def everywhere_equal(ok):
    """The verdict of rank 0 on all ranks, so that all pass or fail together."""
    return WORLD.bcast(ok)
