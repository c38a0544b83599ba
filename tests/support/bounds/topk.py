"""The largest value that was dropped, or the bound of the codec of the kept ones."""

import numpy as np
from support import naive_sparse
from support.bounds import bound as bound_of


def bound(codec, x):
    if not x.size:
        return 0.0
    rows = x.reshape(1, -1) if codec.per == "tensor" or x.ndim < 2 else x.reshape(-1, x.shape[-1])
    count = naive_sparse.share(codec.amount, rows.shape[1], up=codec.per != "tensor")
    if codec.per == "column":
        kept = [naive_sparse.columns_by_sum(rows, count)] * len(rows)
    else:
        kept = [naive_sparse.largest(abs(row.astype(np.float32)), count) for row in rows]
    values = np.array([row[places] for row, places in zip(rows, kept, strict=True)], x.dtype)
    dropped = rows.copy()
    for row, places in zip(dropped, kept, strict=True):
        row[places] = 0
    values = values[0] if codec.per == "tensor" or x.ndim < 2 else values
    return max(np.abs(dropped).max(), bound_of(codec.values, values))
