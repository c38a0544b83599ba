"""Where does a round's time go? `python bench/round.py [--json FILE] [--smoke]`."""

from hpcvfl.benchmarks.common import run_script
from hpcvfl.benchmarks.round import main

if __name__ == "__main__":
    run_script(main)
