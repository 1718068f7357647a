"""Stream tensors to and from a safetensors file, one at a time.

Reading is the safetensors library's. Writing is done here, because the library needs all tensors on the host at once
and can't hash what it writes. The format: the header's length (8 bytes, little-endian), the header (JSON), the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from hpcdist.records import Stamp, tensor_bytes, write_durably

STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Stamp:
    """Write and fsync a new file. One tensor at a time is copied, where it is not contiguous and on the CPU."""
    return write_durably(path, _pieces(tensors))


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | np.ndarray]:
    # The widest elements first, so that each tensor begins at a multiple of its element's width.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of the file, by name, to the CPU.

    They are copies: the library's own tensors are mapped from the file, and reading one after the file was deleted
    by another host would end the process.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
