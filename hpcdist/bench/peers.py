"""Other libraries' collectives on the same ranks, to be measured beside ours."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from hpcdist.comm.communicator import Communicator


@contextmanager
def gloo(comm: Communicator) -> Iterator[dist.ProcessGroup]:
    """Collective. torch.distributed's default process group on gloo, met at an address that rank 0 tells the others."""
    port = 0
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    host, port = comm.exchange(f"{socket.gethostname()} {port}".encode())[0].decode().split()
    host = "127.0.0.1" if len(set(comm.nodes)) == 1 else host
    store = dist.TCPStore(host, int(port), comm.size, is_master=comm.rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gloo_allreduce(tensor: Tensor) -> None:
    """Collective. gloo's all-reduce of a tensor, in place."""
    dist.all_reduce(tensor)


Peers = dict[str, Callable[[Tensor], None]]
