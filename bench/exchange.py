"""What our transport adds to raw MPI: python bench/exchange.py [--smoke] [--json FILE]."""

import sys

from hpcvfl.benchmarks.exchange import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
