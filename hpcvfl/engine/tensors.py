"""Tensors by name in a safetensors file, there in whole or not at all.

Reading is the library's; writing is here (the format: github.com/huggingface/safetensors, README).
Its `save_file` writes under a name of its own first, which a kill leaves behind, asks for the
tensors' memory once more, and where that is refused it aborts the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from hpcvfl.engine.folder import put_in_place

KEY = "hpcvfl"
"""The one key of a file's metadata: the order of several is not fixed."""
ALIGNMENT = 8  # bytes: where the tensors begin
# Those that every version of the library that we take can read.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], said: str) -> int:
    """Write `tensors` and the text `said` to `path`, by way of a file beside it that ends in .tmp;
    bytes of the file. Raises OSError, also for a dtype that is not in DTYPES.
    """
    # The widest first, so that each lies at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, object] = {"__metadata__": {KEY: said}}
    end = 0
    for name in order:
        value = tensors[name]
        if value.dtype not in DTYPES:
            raise OSError(f"{name} is of {value.dtype}, which is not saved")
        begin, end = end, end + value.numel() * value.element_size()
        table[name] = {
            "dtype": DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in order:
            file.write(as_bytes(tensors[name]))
    return put_in_place(aside, path)


def as_bytes(value: torch.Tensor) -> memoryview:
    """The values of a tensor in memory order, little-endian as all machines that we run on."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
