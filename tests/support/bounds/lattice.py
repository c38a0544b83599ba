"""No codeword is nearer than the one sent, so the error is at most the distance to one we know.

That one is, in the better of the two boxes, every coordinate rounded (half a spacing off at most)
or clipped, and with a parity one coordinate moved by one more.
"""

import numpy as np


def bound(codec, x):
    if not x.size:
        return 0.0
    wide = x.reshape(-1, x.shape[-1] if codec.scope == "column" and x.ndim > 1 else 1)
    wide = wide.astype(np.float64)
    book = codec.book
    if codec.fixed:
        centre, step = sum(codec.fixed) / 2, book.step * (codec.fixed[1] - codec.fixed[0])
    elif codec.kind == "gauss":
        centre, step = wide.mean(axis=0), book.step * wide.std(axis=0)
    else:
        low, high = wide.min(axis=0), wide.max(axis=0)
        centre, step = (low + high) / 2, book.step * (high - low)
    steps = np.broadcast_to(step, wide.shape).ravel()
    y = np.divide((wide - centre).ravel(), steps, out=np.zeros(x.size), where=steps > 1e-37)
    groups = np.pad(y, (0, -y.size % book.dim)).reshape(-1, book.dim)
    per_group = [_distance(groups, book, k) for k in (0, 1)]
    far = np.repeat(np.minimum(*per_group), book.dim)[: x.size]
    return float((far * steps + 1e-6 * np.abs(wide).ravel()).max()) * 1.001 + 1e-5


def _distance(groups, book, k):
    gap = np.array(book.spacing)
    low = np.array(book.first[k]) * gap
    high = low + (np.array(book.sides[k]) - 1) * gap
    outside = np.maximum(np.maximum(low - groups, groups - high), 0)
    off = outside + gap / 2
    squares = (off**2).sum(axis=1)
    if book.parity:  # moving coordinate i costs (off + 1)^2 - off^2; the cheapest one will do
        squares = squares + (2 * off + 1).min(axis=1)
    return np.sqrt(squares)
