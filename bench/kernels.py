"""How fast are the kernels? `python bench/kernels.py [--json FILE] [--smoke]`."""

from hpcvfl.benchmarks.common import run_script
from hpcvfl.benchmarks.kernels import main

if __name__ == "__main__":
    run_script(main)
