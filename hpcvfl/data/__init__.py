"""What a rank trains on: its own columns of the samples, and which rows make a round.

Read `datasets.load` first; `shard.py` says what a shard is and which data is refused.
"""

from hpcvfl.data.batches import Batches
from hpcvfl.data.datasets import load
from hpcvfl.data.shard import Samples, Shard, check

__all__ = ["Batches", "Samples", "Shard", "check", "load"]
