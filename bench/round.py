"""Where a round's time goes: python bench/round.py [--smoke] [--json FILE]."""

import sys

from hpcvfl.benchmarks.round import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
