"""Messages of real ranks: torch tensors as MPI buffers, requests in flight, and exchanges with neighbours.

On the host nothing is copied; device memory goes through pinned host memory, unless MPI reads it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.messages import check_graph
from hpcdist.comm.mpi.calls import ALL_RANKS, Calls
from hpcdist.comm.transfer import Neighbourhood, Request

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
LONGEST = 2**30  # largest count (elements or bytes): MPI's counts have 32 bits


def message(tensor: Tensor, count: int | None = None, longest: int = LONGEST) -> list:
    """Return a flat tensor as an MPI buffer for a transfer, with an MPI type of the same element width.

    Args:
        count: number of elements to or from one rank, if not all.
        longest: larger counts are sent as a single element of a derived MPI type.
    """
    count = tensor.numel() if count is None else count
    counted = [count, CARRIERS[tensor.itemsize]] if count <= longest else [1, _long(tensor.itemsize, count, longest)]
    return [memory_at(tensor.data_ptr(), tensor.nbytes), *counted]


@cache
def _long(itemsize: int, count: int, longest: int) -> MPI.Datatype:
    """Create an MPI type of `count` consecutive elements.

    Reference: Jeff R. Hammond et al., "To INT_MAX... and beyond! Exploring large-count support in MPI", 2014.
    """
    carrier, (blocks, rest) = CARRIERS[itemsize], divmod(count, longest)
    block_type = carrier.Create_contiguous(longest)
    return MPI.Datatype.Create_struct([blocks, rest], [0, (count - rest) * itemsize], [block_type, carrier]).Commit()


def numbers(tensor: Tensor) -> list:
    """Return a flat tensor as an MPI buffer for a reduction; raise KeyError for dtypes that are not in SUMMED."""
    return [memory_at(tensor.data_ptr(), tensor.nbytes), tensor.numel(), SUMMED[tensor.dtype]]


SENDING, EXCHANGE = "isend", "neighbour exchange"


class Staging:
    """Copies device tensors to pinned host memory for MPI, and back.

    Args:
        device_aware: True if MPI itself reads and writes device memory; then nothing is staged. Off unless the
            user asks for it: sites warn that device-aware MPI with NCCL can deadlock.
        longest: as for `message`.
    """

    def __init__(self, device_aware: bool = False, longest: int = LONGEST):
        self.device_aware, self.longest = device_aware, longest

    def message(self, tensor: Tensor, count: int | None = None) -> list:
        """Return a flat tensor as an MPI buffer; see the function `message`."""
        return message(tensor, count, self.longest)

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
        peer: the other rank, or ALL_RANKS or ANY_RANK.
        host: the buffer.
        device: if the buffer is a staged copy, the tensor to which it is copied at the end.
        kept: further memory that MPI uses.
    """

    def __init__(
        self, calls: Calls, request: MPI.Request, what: str, peer: int, host: Tensor, device: Tensor | None = None,
        kept: Tensor | None = None,
    ):  # fmt: skip
        self._calls, self._request, self._what, self._peer = calls, request, what, peer
        self._host, self._device, self._kept = host, device, kept
        self._sends = what == SENDING
        calls.sending += self._sends

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


class MpiLibraryCalls:
    """MPI's all-gather and all-to-all on MpiCommunicator `comm`. Bytes are counted as the minimum that ranks must send.

    Tensors are flat, contiguous, of the same length and element width on all ranks, and do not overlap.
    """

    def __init__(self, comm: Any):
        self._comm, self._others = comm, comm.size - 1

    def all_gather(self, out: Tensor, local: Tensor) -> None:
        """Collective. Gather all ranks' `local`, shape (n,), in `out`, shape (ranks * n,), in rank order."""
        self._call("all-gather", self._comm.mpi.Allgather, local, out, local.numel())
        self._comm.traffic.sent(self._others * local.nbytes, self._others)

    def all_to_all(self, out: Tensor, inputs: Tensor) -> None:
        """Collective. Send each rank its n elements of `inputs`, and gather in `out` all ranks' elements for this one.

        Both tensors have the shape (ranks * n,).
        """
        count = inputs.numel() // self._comm.size
        self._call("all-to-all", self._comm.mpi.Alltoall, inputs, out, count)
        self._comm.traffic.sent(self._others * count * inputs.itemsize, self._others)

    def _call(self, what: str, function: Callable, send: Tensor, out: Tensor, count: int) -> None:
        """Collective. Call MPI's `function`, by way of the host if necessary; `count` elements go to each rank."""
        comm = self._comm
        comm.calls.count += 1
        if send.is_cpu and out.is_cpu:
            self._communicate(what, function, send, out, count)
            return
        with comm.staging.host(send, write=False) as outgoing, comm.staging.host(out, read=False) as into:
            self._communicate(what, function, outgoing, into, count)

    def _communicate(self, what: str, function: Callable, send: Tensor, out: Tensor, count: int) -> None:
        describe = self._comm.staging.message
        self._comm.calls.communicate(what, ALL_RANKS, function, describe(send, count), describe(out, count))


class MpiNeighbourhood(Neighbourhood):
    """Collective. Exchange tensors by MPI's neighbourhood collectives; see Communicator.neighbourhood.

    MPI knows the graph before the first message; ranks are not renumbered (`reorder` is off).

    Reference: Torsten Hoefler et al., "The scalable process topology interface of MPI 2.2", 2011.
    """

    def __init__(self, comm: Any, sources: Sequence[int], destinations: Sequence[int]):
        check_graph(comm, sources, destinations)
        self._sources, self._n_sent, self._comm = tuple(sources), len(destinations), comm
        # The graph's communicator numbers only the surviving ranks.
        origins, targets = ([comm.failures.alive.index(rank) for rank in ranks] for ranks in (sources, destinations))
        self._graph = comm.failures.surviving.Create_dist_graph_adjacent(origins, targets, reorder=False)

    def _start(self, send: Tensor, received: Tensor) -> Request:
        comm = self._comm
        sent = send if comm.staging.direct(send) else send.cpu()
        skips_copy = comm.staging.direct(received)
        host = received if skips_copy else torch.empty_like(received, device="cpu", pin_memory=True)
        comm.calls.count += 1
        into = comm.staging.message(host, send.numel() if self._sources else 0)
        outgoing = comm.staging.message(sent)
        request = comm.calls.attempt(EXCHANGE, ALL_RANKS, self._graph.Ineighbor_allgather, outgoing, into)
        comm.traffic.sent(self._n_sent * send.nbytes, self._n_sent)
        return MpiRequest(comm.calls, request, EXCHANGE, ALL_RANKS, host, None if skips_copy else received, sent)

    def close(self) -> None:
        """Freeing is collective; if the job tolerates deaths, a rank may be dead, and the job's end frees the graph."""
        if not self._comm.failures.tolerant:
            self._graph.Free()
