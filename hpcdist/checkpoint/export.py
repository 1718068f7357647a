"""Write a state dict to one file that plain torch, or the safetensors library, reads."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hpcdist.checkpoint.tensors import STORED, write_tensors
from hpcdist.errors import CheckpointError
from hpcdist.records import sync

SUFFIXES = (".pt", ".pth", ".safetensors")


def export(state: Mapping[str, Tensor], file: str | Path) -> None:
    """Write tensors by name, for `torch.load(file, weights_only=True)` or `safetensors.torch.load_file(file)`.

    The file is there whole or not at all; one of that name is replaced.

    Args:
        file: its name ends in .pt or .pth for torch, or in .safetensors.

    Raises:
        CheckpointError: the name has another end; or a tensor's type is none of safetensors'.
    """
    check_name(file)
    file = Path(file)
    temporary = file.with_name(f"{file.name}.tmp-{secrets.token_hex(4)}")
    try:
        if file.suffix == ".safetensors":
            _check_types(state)
            write_tensors(temporary, state, {"format": "pt"})  # as Hugging Face demands it
        else:
            torch.save(dict(state), temporary)
            sync(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync(file.parent)


def check_name(file: str | Path) -> None:
    """Raise CheckpointError where a file's name does not say in which format it is to be."""
    if Path(file).suffix not in SUFFIXES:
        raise CheckpointError(f"the file's name must end in one of {', '.join(SUFFIXES)}; got {file}.")


def _check_types(state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.dtype not in STORED:
            raise CheckpointError(
                f"tensors must be of a type that safetensors has; got {name!r} of {tensor.dtype}. Write a .pt file."
            )
