"""Other libraries' collectives on the same ranks, to be measured beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.rendezvous import meet

Peers = dict[str, Callable[[Tensor], None]]


@contextmanager
def gloo(comm: Communicator) -> Iterator[dist.ProcessGroup]:
    """Collective. torch.distributed's default process group on gloo, met at an address that rank 0 tells the others."""
    dist.init_process_group("gloo", store=meet(comm).store, rank=comm.rank, world_size=comm.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gloo_allreduce(tensor: Tensor) -> None:
    """Collective. gloo's all-reduce of a tensor, in place."""
    dist.all_reduce(tensor)


@contextmanager
def horovod(comm: Communicator) -> Iterator[Peers]:
    """Collective. Horovod's all-reduce in place, by its name; nothing where it is not installed.

    Its thread communicates all the time while the context lasts: what else is measured meanwhile is slower for it.
    """
    if not has_horovod():
        yield {}
        return
    from hpcdist.comm.hvd import Horovod

    reduce = Horovod(comm)
    yield {"horovod": reduce}
    reduce.close()


def has_horovod() -> bool:
    """Whether Horovod can be used here."""
    from hpcdist.comm import hvd  # starts MPI: not at import

    return not hvd.obstacle()
