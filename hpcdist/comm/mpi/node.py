"""The ranks of each node, and the test whether they can read each other's memory there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcdist.comm.mpi import cross_memory
from hpcdist.errors import CommunicationError


def find_nodes(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Collective. Number the node of each rank: ranks that can share memory are on one; nodes in order of rank."""
    node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([mpi.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    node.Free()
    firsts = np.empty(mpi.Get_size(), np.int64)
    mpi.Allgather(first, firsts)
    index = {leader: i for i, leader in enumerate(sorted(set(firsts.tolist())))}
    return tuple(index[leader] for leader in firsts.tolist())


def try_attach(comm, nodes: Sequence[int]) -> bool:
    """Collective. Tell whether every rank could read a secret in the memory of every other rank of its node."""
    secret = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()
    secrets_of = comm.gather(secret.ctypes.data.to_bytes(8, "little") + secret.tobytes())
    works = True
    for peer, (pid, data) in enumerate(zip(comm.pids, secrets_of, strict=True)):
        if nodes[peer] == nodes[comm.rank] and peer != comm.rank:
            works = works and _reads(pid, int.from_bytes(data[:8], "little"), data[8:])
    return all(answer == b"y" for answer in comm.gather(b"y" if works else b"n"))


def _reads(pid: int, address: int, secret: bytes) -> bool:
    seen = np.zeros(len(secret), np.uint8)
    try:
        cross_memory.PeerMemory(pid).read(seen.ctypes.data, address, len(secret))
    except CommunicationError:
        return False
    return seen.tobytes() == secret
