"""Other libraries' collectives on the same ranks, to be measured beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from hpcdist.comm.communicator import Communicator

Peers = dict[str, Callable[[Tensor], None]]


@contextmanager
def horovod(comm: Communicator) -> Iterator[Peers]:
    """Collective. Give Horovod's all-reduce in place, by its name; nothing where it is not installed.

    Its thread communicates all the time while the context lasts: what else is measured meanwhile is slower for it.
    """
    if not has_horovod():
        yield {}
        return
    from hpcdist.comm.external.horovod import Horovod

    reduce = Horovod(comm)
    yield {"horovod": reduce}
    reduce.close()


def has_horovod() -> bool:
    """Tell whether Horovod can be used here."""
    from hpcdist.comm.external import horovod as hvd  # starts MPI: not at import

    return not hvd.obstacle()
