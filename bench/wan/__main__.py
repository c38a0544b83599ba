"""python bench/wan -n 5 --latency-ms 20 -- train digits"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # a folder that is run is not a package by itself

from wan.run import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
