"""The vertical cut: which columns of a sample belong to which party.

N images of H rows and W columns of pixels; party k = 1..M.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.errors import ConfigError


def bounds(length: int, num_parts: int, part: int) -> tuple[int, int]:
    """[start, stop) of part 0..num_parts-1 of an even cut; the first parts are one longer."""
    small, longer = divmod(length, num_parts)
    start = part * small + min(part, longer)
    return start, start + small + (part < longer)


def image_patch(images_NHW: np.ndarray, num_parties: int, party: int) -> np.ndarray:
    """Party's patch of every image, shape (N, 1, h, w), in memory of its own.

    M = 4: quadrants, row-major (1 2 over 3 4); M = 2: left and right halves; M = 12: three rows of
    four; any other M: blocks of pixel rows from top to bottom. Raises ConfigError if M is larger
    than H.
    """
    height, width = images_NHW.shape[1:]
    grid_rows, grid_columns = {4: (2, 2), 2: (1, 2), 12: (3, 4)}.get(num_parties, (num_parties, 1))
    if grid_rows > height:
        raise ConfigError(
            f"num_parties = {num_parties}: images of {height} rows of pixels cannot be cut into"
            f" more than {height} parts; choose 1 to {height}"
        )
    row, column = divmod(party - 1, grid_columns)
    top, bottom = bounds(height, grid_rows, row)
    left, right = bounds(width, grid_columns, column)
    return images_NHW[:, None, top:bottom, left:right].copy()
