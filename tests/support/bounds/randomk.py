"""Any value may be dropped; a kept one errs as the codec of the values does, on up to all of them
(whose range holds that of any part), times n/K.
"""

import numpy as np
from support import naive_sparse
from support.bounds import bound as bound_of


def bound(codec, x):
    if not x.size:
        return 0.0
    n = x.size if codec.per == "tensor" or x.ndim < 2 else x.shape[-1]
    factor = n / naive_sparse.share(codec.amount, n, up=True) if codec.scale else 1.0
    stretched = x * x.dtype.type(factor)
    return np.abs(x).max() * max(1, factor - 1) + bound_of(codec.values, stretched)
