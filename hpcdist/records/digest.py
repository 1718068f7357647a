"""The bytes of tensors, and a checksum that is equal for tensors that are equal to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they take time to load, and whoever looks at a run needs none
    import numpy as np
    from torch import Tensor


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return the elements' bytes in row-major order, as a flat uint8 array.

    A view of the tensor's memory where that is contiguous and on the CPU, else a copy. Any dense dtype, bfloat16 and
    complex included.
    """
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # With 0 or 1 elements any stride counts as contiguous, but only 1 allows another element size.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 (hexadecimal) of the tensors' dtypes, shapes and bytes, in the order given."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        sha.update(tensor_bytes(tensor).data)
    return sha.hexdigest()
