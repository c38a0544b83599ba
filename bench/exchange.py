"""What does our transport add to raw MPI? `python bench/exchange.py [--json FILE] [--smoke]`."""

from hpcvfl.benchmarks.common import run_script
from hpcvfl.benchmarks.exchange import main

if __name__ == "__main__":
    run_script(main)
