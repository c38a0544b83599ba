"""Moving frames between ranks: threads (one process), mpi, and wrappers that count, delay or break.

Importing this package imports no MPI: `hpcvfl.transport.mpi` does, since loading mpi4py.MPI starts
MPI.
"""

from hpcvfl.transport.base import Bytes, Slots, Transport, Wrapper
from hpcvfl.transport.metered import Metered
from hpcvfl.transport.threads import ThreadsWorld

__all__ = ["Bytes", "Metered", "Slots", "ThreadsWorld", "Transport", "Wrapper"]
