"""How fast are the codecs? `python bench/codecs.py [--json FILE] [--smoke]`."""

from hpcvfl.benchmarks.codecs import main
from hpcvfl.benchmarks.common import run_script

if __name__ == "__main__":
    run_script(main)
