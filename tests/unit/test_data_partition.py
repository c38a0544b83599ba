"""The vertical cut: every pixel and column belongs to exactly one party."""

import numpy as np
import pytest

from hpcvfl.data.partition import bounds, image_patch
from hpcvfl.errors import ConfigError


def numbered_images(num_images, height, width):
    """Images in which every pixel value occurs once, so a misplaced pixel cannot hide."""
    return np.arange(num_images * height * width).reshape(num_images, height, width)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (8, 8), (5, 7), (2, 2)])
def test_four_quadrants_put_together_are_the_original_image(height, width):
    images = numbered_images(3, height, width)
    q = [image_patch(images, 4, party)[:, 0] for party in (1, 2, 3, 4)]
    top = np.concatenate([q[0], q[1]], axis=2)
    bottom = np.concatenate([q[2], q[3]], axis=2)
    assert np.array_equal(np.concatenate([top, bottom], axis=1), images)


def test_party_two_of_four_holds_the_upper_right_quadrant():
    image = np.zeros((1, 28, 28))
    image[0, 3, 20] = 1
    patch = image_patch(image, 4, 2)
    assert patch.shape == (1, 1, 14, 14)
    assert np.argwhere(patch).tolist() == [[0, 0, 3, 6]]


@pytest.mark.parametrize("width", [28, 7])
def test_two_parties_hold_the_left_and_the_right_half(width):
    images = numbered_images(2, 6, width)
    left, right = (image_patch(images, 2, party) for party in (1, 2))
    assert left.shape == (2, 1, 6, (width + 1) // 2)
    assert np.array_equal(np.concatenate([left, right], axis=3)[:, 0], images)


@pytest.mark.parametrize("num_parties", [1, 3, 5, 7, 8])
def test_other_numbers_of_parties_hold_blocks_of_pixel_rows(num_parties):
    images = numbered_images(2, 8, 8)
    patches = [image_patch(images, num_parties, k + 1) for k in range(num_parties)]
    assert np.array_equal(np.concatenate(patches, axis=2)[:, 0], images)
    heights = [patch.shape[2] for patch in patches]
    assert max(heights) - min(heights) <= 1
    assert heights == sorted(heights, reverse=True)


def test_more_parties_than_pixel_rows_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"num_parties = 9: images of 8 rows .* choose 1 to 8"):
        image_patch(numbered_images(1, 8, 8), 9, 1)


def test_a_patch_shares_no_memory_with_the_images():
    images = numbered_images(2, 8, 8)
    for num_parties in (1, 2, 3, 4):
        patch = image_patch(images, num_parties, 1)
        assert not np.shares_memory(patch, images)
        assert patch.base is None


@pytest.mark.parametrize(("length", "num_parts"), [(64, 4), (10, 4), (3, 3), (7, 1), (2, 5)])
def test_bounds_cut_evenly_without_gap_or_overlap(length, num_parts):
    parts = [range(*bounds(length, num_parts, part)) for part in range(num_parts)]
    assert [i for part in parts for i in part] == list(range(length))
    assert [len(p) for p in parts] == [len(p) for p in np.array_split(range(length), num_parts)]
