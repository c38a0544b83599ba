"""Files of tensors: what the safetensors library reads of ours, and what stays after a failure."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hpcvfl.engine.start import check_state
from hpcvfl.engine.tensors import DTYPES, KEY, write_tensors
from hpcvfl.errors import ConfigError


def values():
    """Of every dtype; scalars, empty ones, slices that are not contiguous, shared memory."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
    out = {f"a {d}": (raw % 2 if d == torch.bool else raw).view(d) for d in DTYPES}
    out["weight.µ"] = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)
    out["tied"] = out["weight.µ"]
    out["parameter"] = torch.nn.Parameter(torch.ones(3, 2))
    return out | {"scalar": torch.tensor(7), "empty": torch.empty(0, 5)}


def test_the_library_reads_what_we_write(tmp_path):
    path, due = tmp_path / "x.safetensors", values()
    nbytes = write_tensors(path, due, 'said "so", ä')
    assert nbytes == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {KEY: 'said "so", ä'}
    came = load_file(path)
    assert came.keys() == due.keys()
    for name, value in due.items():
        assert came[name].dtype == value.dtype
        assert came[name].shape == value.shape
        same = came[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, value.detach().contiguous().view(-1).view(torch.uint8)), name


def test_a_file_has_the_bytes_that_the_library_would_write(tmp_path):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    state = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).state_dict()
    write_tensors(ours, state, "x")
    save_file(state, theirs, {KEY: "x"})
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "x.safetensors"
    plain.touch()
    write_tensors(path, {"x": torch.zeros(2)}, "")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_module_with_state_of_such_a_dtype_is_refused_before_the_first_round():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"model\.tower: state 'wide' is of torch\.complex128 "):
        check_state(module, "model.tower")


def test_a_dtype_that_the_format_lacks_is_refused_and_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.zeros(2)}, "")
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"y is of torch\.complex128, which"):
        write_tensors(path, {"y": torch.zeros(2, dtype=torch.complex128)}, "")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
