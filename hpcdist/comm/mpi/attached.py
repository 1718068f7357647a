"""Find the ranks of each node, and read and write their memory in one copy, without their taking part.

By Linux's cross-memory attach (`process_vm_readv`, `process_vm_writev`), which MPI libraries use for large messages
inside a node. It needs permission to trace the other process: same user, and either no Yama restriction or the
target's consent, which `allow_peers` gives.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.capabilities import number_nodes
from hpcdist.comm.mpi.calls import clock
from hpcdist.comm.window import Memory
from hpcdist.errors import CommunicationError

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("n_bytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock during calls
_signature = [ctypes.c_int, *(ctypes.POINTER(_Range), ctypes.c_ulong) * 2, ctypes.c_ulong]
for _name in ("process_vm_readv", "process_vm_writev"):
    if hasattr(_libc, _name):
        getattr(_libc, _name).argtypes = _signature
        getattr(_libc, _name).restype = ctypes.c_ssize_t
_read = getattr(_libc, "process_vm_readv", None)
_write = getattr(_libc, "process_vm_writev", None)


def allow_peers() -> None:
    """Permit processes of this user to attach to this process (Yama's `ptrace_scope` 1 forbids it by default)."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # fails harmlessly without Yama


class PeerMemory:
    """Reads and writes the memory of process `pid` on this node."""

    def __init__(self, pid: int):
        self.pid = pid
        self._here, self._there = _Range(), _Range()

    def _transfer(self, call: Any, verb: str, local_address: int, address: int, n_bytes: int) -> None:
        """Copy between `local_address` of this process and `address` of the peer, by `call`: `_read` or `_write`."""
        if call is None:
            raise CommunicationError("cross-memory attach must be offered by the C library; this system has none.")
        done = 0
        while done < n_bytes:  # the kernel moves at most 2 GiB a call
            self._here.address, self._here.n_bytes = local_address + done, n_bytes - done
            self._there.address, self._there.n_bytes = address + done, n_bytes - done
            moved = call(self.pid, self._here, 1, self._there, 1, 0)
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise CommunicationError(f"{verb} {n_bytes} bytes of process {self.pid} failed: {reason}.")
            done += moved

    def read(self, into_address: int, address: int, n_bytes: int) -> None:
        """Copy `n_bytes` from the peer's `address` to `into_address` here; raise CommunicationError if refused."""
        self._transfer(_read, "reading", into_address, address, n_bytes)

    def write(self, from_address: int, address: int, n_bytes: int) -> None:
        """Copy `n_bytes` from `from_address` here to the peer's `address`; raise CommunicationError if refused."""
        self._transfer(_write, "writing", from_address, address, n_bytes)


class AttachedMemory(Memory):
    """Existing tensors of the ranks of one node: mapped by all of them, or read and written through the kernel.

    Args:
        comm: the MpiCommunicator.
        addresses: addresses of all ranks' tensors, each in its rank's process.
        mapped: views of all ranks' tensors in this process; empty if they are not mapped.
    """

    def __init__(self, comm: Any, tensor: Tensor, addresses: list[int], mapped: list[Tensor]):
        super().__init__(tensor, [tensor.numel()] * comm.size, comm.rank, comm.traffic)
        self._addresses, self._parts = addresses, mapped
        self._peers = [] if mapped else [PeerMemory(pid) for pid in comm.pids]

    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        start = clock()
        if self._parts:
            out.copy_(self._parts[rank][offset : offset + out.numel()])
        else:
            self._peers[rank].read(out.data_ptr(), self._addresses[rank] + offset * out.itemsize, out.nbytes)
        self._traffic.communicating_s += clock() - start

    def _mapped(self, rank: int) -> Tensor | None:
        return self._parts[rank] if 0 <= rank < len(self._parts) else None

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        start = clock()
        if self._parts:
            self._parts[rank][offset : offset + values.numel()].copy_(values)
        else:
            address = self._addresses[rank] + offset * values.itemsize
            self._peers[rank].write(values.data_ptr(), address, values.nbytes)
        self._traffic.communicating_s += clock() - start

    def close(self) -> None:
        self._peers.clear()
        self._parts = []


def find_nodes(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Collective. Return each rank's node index: ranks that can share memory are on the same node."""
    node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = np.array([mpi.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    node.Free()
    lowest_of = np.empty(mpi.Get_size(), np.int64)
    mpi.Allgather(lowest, lowest_of)
    return number_nodes(lowest_of.tolist())


def try_attach(comm: Any) -> bool:
    """Collective. Return whether each rank can read the memory of all other ranks of its node; tested by a secret."""
    secret = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()  # at its address in no other process
    addresses_and_secrets = comm.gather(secret.ctypes.data.to_bytes(8, "little") + secret.tobytes())
    works = True
    for peer, (pid, data) in enumerate(zip(comm.pids, addresses_and_secrets, strict=True)):
        if comm.nodes[peer] == comm.nodes[comm.rank] and peer != comm.rank:
            works = works and _reads(pid, int.from_bytes(data[:8], "little"), data[8:])
    return all(reply == b"y" for reply in comm.gather(b"y" if works else b"n"))


def _reads(pid: int, address: int, secret: bytes) -> bool:
    """Return whether process `pid` has `secret` at `address`."""
    seen = np.zeros(len(secret), np.uint8)
    try:
        PeerMemory(pid).read(seen.ctypes.data, address, len(secret))
    except CommunicationError:
        return False
    return seen.tobytes() == secret
