"""Errors that are told from others by what a library says."""

import errno

import numpy as np
import pytest
import torch

from hpcvfl.errors import is_out_of_memory


def test_an_allocation_that_numpy_or_torch_is_refused_is_out_of_memory():
    with pytest.raises(MemoryError) as numpys:
        np.ones(2**50)
    with pytest.raises(RuntimeError) as torchs:
        torch.ones(2**50)
    assert is_out_of_memory(numpys.value)
    assert is_out_of_memory(torchs.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))


def test_other_errors_are_not():
    with pytest.raises(RuntimeError) as shapes:
        torch.ones(2, 3) @ torch.ones(2, 3)
    for error in (
        shapes.value,
        OSError(errno.ENOSPC, "No space left"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(error)
