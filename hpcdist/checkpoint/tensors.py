"""Stream tensors to and from a safetensors file, one at a time; export a state dict.

Files are read by the safetensors library, but written here, because the library needs all tensors on the host and can't
hash what it writes. The format: the header's length (8 bytes, little-endian), the header (JSON), the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors import __version__ as LIBRARY
from torch import Tensor

from hpcdist.checkpoint.slices import SlicePosition
from hpcdist.errors import CheckpointError
from hpcdist.records import replacing, sync, tensor_bytes, write_durably, writing

_NAMES = {  # in the format; some only in later versions of the library and of torch
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


def _is_read(name: str) -> bool:
    """Return whether the installed library reads tensors of this type."""
    header = json.dumps({"x": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        return bool(deserialize(len(header).to_bytes(8, "little") + header))
    except SafetensorError:
        return False


STORED = {getattr(torch, kind): name for kind, name in _NAMES.items() if hasattr(torch, kind) and _is_read(name)}

OWNERS = "owners"  # in a header: by name, the ranks in whose files this rank's other tensors are
SUFFIXES = (".pt", ".pth", ".safetensors")  # of exported files


def file_content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | np.ndarray]:
    """Yield the bytes of a safetensors file: the header, with `metadata` as its `__metadata__`; then the tensors.

    Tensors are copied one at a time, if they are not contiguous and on the CPU.
    """
    # The widest elements first, so that each tensor starts at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    if metadata:
        header["__metadata__"] = dict(metadata)
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        if shape and STORED[tensor.dtype] == "F4":  # torch's elements are pairs
            shape[-1] *= 2
        header[name] = {"dtype": STORED[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])


class TensorFile:
    """Reads tensors of a file by name, one at a time, to the CPU.

    The tensors are copies: the library maps its tensors from the file, and an access after another host has deleted the
    file would end the process.
    """

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        metadata = self._file.metadata() or {}
        self.owners: dict[str, int] = dict(json.loads(metadata.pop(OWNERS, "{}")))  # see OWNERS
        self.positions = {name: SlicePosition.from_description(json.loads(text)) for name, text in metadata.items()}

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name).clone()


# --- for plain torch, or the safetensors library ----------------------------------------------------------------------
def export(state: Mapping[str, Tensor], file: str | Path) -> None:
    """Write a state dict for `torch.load(file, weights_only=True)` or `safetensors.torch.load_file(file)`.

    The file is written atomically; an existing one is replaced.

    Example:
        >>> from hpcdist import checkpoint
        >>> checkpoint.export(model.state_dict(), "model.safetensors")

    Args:
        file: its name ends in .pt or .pth for torch, or in .safetensors.

    Raises:
        CheckpointError: the name has another ending; or safetensors lacks a tensor's type.
        OutputError: the file can't be written, as its folder does not exist.
    """
    check_name(file)
    file = Path(file)
    with writing(file), replacing(file) as temporary:
        if file.suffix == ".safetensors":
            if odd := next((name for name, tensor in state.items() if tensor.dtype not in STORED), None):
                raise CheckpointError(
                    f"tensors must be of a type that safetensors {LIBRARY} has; got {odd!r} of {state[odd].dtype}. "
                    "Write a .pt file."
                )
            write_durably(temporary, file_content(state, {"format": "pt"}))  # Hugging Face demands the format
        else:
            with open(temporary, "wb") as opened:  # torch raises another error for a path
                torch.save(dict(state), opened)
            sync(temporary)


def check_name(file: str | Path) -> None:
    """Raise CheckpointError unless the ending of an export file's name is a known format."""
    if Path(file).suffix not in SUFFIXES:
        raise CheckpointError(f"the file's name must end in one of {', '.join(SUFFIXES)}; got {file}.")
