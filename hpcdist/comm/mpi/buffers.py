"""Torch tensors as MPI messages: no copy on the host, pinned staging for device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mpi4py import MPI
from torch import Tensor

# Transfers move bits, so any MPI type of the right width carries them; counting elements rather than bytes keeps
# messages of up to 8 GiB of float32 within MPI's 32-bit counts.
CARRIERS = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}

# The types that MPI can add up. It has none for float16 and bfloat16: those are summed in float32.
NUMBERS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

memory_at = MPI.memory.fromaddress


def message(tensor: Tensor) -> list:
    """Describe a flat tensor to MPI for a transfer: elements of its width, of any type."""
    return [memory_at(tensor.data_ptr(), tensor.nbytes), tensor.numel(), CARRIERS[tensor.itemsize]]


def numbers(tensor: Tensor) -> list:
    """Describe a flat tensor to MPI for arithmetic; raise KeyError for dtypes that MPI can't add."""
    return [memory_at(tensor.data_ptr(), tensor.nbytes), tensor.numel(), NUMBERS[tensor.dtype]]


class Staging:
    """Pinned host copies of device tensors, reused by size and dtype.

    Args:
        device_aware: True when MPI itself reads and writes device memory; then nothing is staged. Off unless the
            user asks: sites warn that device-aware MPI beside NCCL can deadlock.
    """

    def __init__(self, device_aware: bool = False):
        self.device_aware = device_aware
        self._pinned: dict[tuple[int, torch.dtype, str], Tensor] = {}

    def direct(self, tensor: Tensor) -> bool:
        """Tell whether MPI may use the tensor's own memory; wait until the device has finished with it."""
        if tensor.is_cpu:
            return True
        if self.device_aware:
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows nothing of torch's streams
        return self.device_aware

    @contextmanager
    def host(self, tensor: Tensor, *, read: bool = True, write: bool = True, slot: str = "") -> Iterator[Tensor]:
        """Yield the tensor's contents on the host: copied there before (`read`) and back after (`write`)."""
        if self.direct(tensor):
            yield tensor
            return
        key = (tensor.numel(), tensor.dtype, slot)
        if key not in self._pinned:
            self._pinned[key] = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        staged = self._pinned[key]
        if read:
            staged.copy_(tensor)  # synchronises with the device's current stream
        yield staged
        if write:
            tensor.copy_(staged)
