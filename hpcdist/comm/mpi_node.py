"""Which ranks share a node, and whether they can read each other's memory there."""

from __future__ import annotations

import secrets

import numpy as np
from mpi4py import MPI

from hpcdist.comm import cross_memory
from hpcdist.errors import CommunicationError


def find_nodes(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Collective. Node index of each rank: ranks that can share memory are on one node; nodes in order of rank."""
    node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([mpi.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    node.Free()
    firsts = np.empty(mpi.Get_size(), np.int64)
    mpi.Allgather(first, firsts)
    index = {leader: i for i, leader in enumerate(sorted(set(firsts.tolist())))}
    return tuple(index[leader] for leader in firsts.tolist())


def world_ranks(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """What the ranks of a communicator are called in MPI's world."""
    group, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    return tuple(ranks)


def try_attach(comm) -> bool:
    """Collective. True if every rank could read a secret in the memory of every other rank of its node."""
    secret = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()
    found = comm.exchange(secret.ctypes.data.to_bytes(8, "little") + secret.tobytes())
    works = True
    for peer, (pid, told) in enumerate(zip(comm.pids, found, strict=True)):
        if comm.nodes[peer] == comm.nodes[comm.rank] and peer != comm.rank:
            works = works and _reads(pid, int.from_bytes(told[:8], "little"), told[8:])
    return all(answer == b"y" for answer in comm.exchange(b"y" if works else b"n"))


def _reads(pid: int, address: int, secret: bytes) -> bool:
    seen = np.zeros(len(secret), np.uint8)
    try:
        cross_memory.PeerMemory(pid).read(seen.ctypes.data, address, len(secret))
    except CommunicationError:
        return False
    return seen.tobytes() == secret
