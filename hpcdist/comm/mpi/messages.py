"""Messages of real ranks: torch tensors as MPI buffers, and requests in flight.

On the host nothing is copied; device memory goes through pinned host memory, unless MPI reads it itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.mpi.calls import Calls
from hpcdist.comm.transfer import Request

# Transfers move bits, so any MPI type of the right width carries them.
CARRIERS = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}

# The types that MPI can add. It has none for float16 and bfloat16, which are summed in float32.
NUMBERS = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T, torch.uint8: MPI.UINT8_T, torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX,
}  # fmt: skip

# Types that MPI sums consistently. For shorter integers Open MPI's vector code saturates and its scalar code wraps
# around, both within one tensor. hpcdist sums these in int32 and wraps around when converting back.
SUMMED = {dtype: kind for dtype, kind in NUMBERS.items() if dtype.itemsize > 2}

memory_at = MPI.memory.fromaddress


@cache
def _long(itemsize: int, count: int, longest: int) -> MPI.Datatype:
    """Create an MPI type of `count` consecutive elements.

    Reference: Jeff R. Hammond et al., "To INT_MAX... and beyond! Exploring large-count support in MPI", 2014.
    """
    carrier, (blocks, rest) = CARRIERS[itemsize], divmod(count, longest)
    block_type = carrier.Create_contiguous(longest)
    return MPI.Datatype.Create_struct([blocks, rest], [0, (count - rest) * itemsize], [block_type, carrier]).Commit()


SENDING = "isend"


class Staging:
    """Copies device tensors to pinned host memory for MPI, and back.

    Args:
        device_aware: True if MPI itself reads and writes device memory; then nothing is staged. Off unless the
            user asks for it: sites warn that device-aware MPI with NCCL can deadlock.
    """

    longest = 2**30  # largest count (elements or bytes): MPI's counts have 32 bits

    def __init__(self, device_aware: bool = False):
        self.device_aware = device_aware

    def message(self, tensor: Tensor, count: int | None = None) -> list:
        """Return a flat tensor as an MPI buffer for a transfer, with an MPI type of the same element width.

        Args:
            count: number of elements to or from one rank, if not all.
        """
        count, width = tensor.numel() if count is None else count, tensor.itemsize
        counted = [count, CARRIERS[width]] if count <= self.longest else [1, _long(width, count, self.longest)]
        return [memory_at(tensor.data_ptr(), tensor.nbytes), *counted]

    def direct(self, tensor: Tensor) -> bool:
        """Return whether MPI may use the tensor's memory directly; wait until the device has finished writing it."""
        if tensor.is_cpu:
            return True
        if self.device_aware:
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI does not know torch's streams
        return self.device_aware

    @contextmanager
    def host(self, tensor: Tensor, *, read: bool = True, write: bool = True) -> Iterator[Tensor]:
        """Yield the tensor if MPI may use it, else a copy on the host: filled first (`read`), copied back (`write`)."""
        if self.direct(tensor):
            yield tensor
            return
        staged = torch.empty_like(tensor, device="cpu", pin_memory=True)
        if read:
            staged.copy_(tensor)  # synchronizes with the device's current stream
        yield staged
        if write:
            tensor.copy_(staged)


class MpiRequest(Request):
    """An MPI request, which keeps its buffers alive.

    Args:
        what: name of the call, for messages.
        peer: the other rank, or ANY_RANK.
        host: the buffer.
        device: if the buffer is a staged copy, the tensor to which it is copied at the end.
    """

    def __init__(
        self, calls: Calls, request: MPI.Request, what: str, peer: int, host: Tensor, device: Tensor | None = None
    ):
        self._calls, self._request, self._what, self._peer = calls, request, what, peer
        self._host, self._device = host, device
        self._sends = what == SENDING
        calls.sending += self._sends
        calls.abandoned = [each for each in calls.abandoned if not each.done()]

    def __del__(self) -> None:
        """Keep an abandoned transfer, whose memory MPI still uses; later transfers drop it once it is complete."""
        if self._request:
            self._calls.abandoned.append(self)

    def done(self) -> bool:
        if self._calls.attempt(self._what, self._peer, self._request.Test):
            self._finish()
            return True
        return False

    def wait(self) -> None:
        self._calls.communicate(self._what, self._peer, self._request.Wait)
        self._finish()

    def _finish(self) -> None:
        """Copy a staged message to the device, and count a send as complete."""
        if self._sends:
            self._sends = False
            self._calls.sending -= 1
        if self._device is not None:
            self._device.copy_(self._host)
            self._device = None
