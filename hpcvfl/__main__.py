"""`python -m hpcvfl`, and `mpiexec -n N python -m mpi4py -m hpcvfl`."""

import sys

from hpcvfl.cli import main

if __name__ == "__main__":
    sys.exit(main())
