"""Largest error of one value, by codec, written without the codec's own code.

One module a codec, named like it; `bound(codec, x)` gives the largest |decoded - x| of any value.
"""

import importlib


def bound(codec, x):
    """The bound of `codec` for the tensor `x`."""
    module = importlib.import_module(f"support.bounds.{codec.name.replace('-', '_')}")
    return module.bound(codec, x)
