"""That of the codec inside."""

from support import bounds


def bound(codec, x):
    return bounds.bound(codec.inner, x)
