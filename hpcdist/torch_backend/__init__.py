"""MPI as a backend of torch.distributed: `torch.distributed.init_process_group("hpcdist")` under mpirun or srun.

Importing this module registers the backend; torch does so by itself where hpcdist is installed. Nothing here starts
MPI, or imports what the groups need: that happens when the first group is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlparse

NAME = "hpcdist"
PLACE = ("MASTER_ADDR", "MASTER_PORT")  # variables that say where ranks meet


def register() -> None:
    """Register the backend, and let ranks that a launcher of MPI's has started meet without those variables."""
    # Here, since torch calls this function while it is imported, which may be by this module.
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    # torch has no other place where a backend may say who its ranks are. Where it is not there, a script says it.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _met_by_mpi(handlers["env"])


def _group(options: Any, comm: Any = None) -> Any:
    """Collective among the ranks of a group. Make it; torch's function for backends that others provide.

    Args:
        comm: the ranks of a default group; by default all of MPI's.
    """
    import torch.distributed as dist

    from hpcdist.torch_backend.default_group import started_for
    from hpcdist.torch_backend.group import MpiGroup

    whole: Any = dist.group.WORLD  # none yet where this one is to be it
    return MpiGroup.made(options, comm or (whole.comm if isinstance(whole, MpiGroup) else started_for() or _world()))


def _world() -> Any:
    """Collective at the first call. Return all of MPI's ranks, which the script joins by this, unless it has."""
    # By name, as a script: `init` stands above this package, and starts groups by it.
    return import_module("hpcdist").init(torch_distributed=False)


def _met_by_mpi(otherwise: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a rendezvous that MPI tells its ranks, where their environment does not."""

    def rendezvous_over_mpi(url: str, timeout: timedelta | None = None, **more: Any) -> Iterator[Any]:
        from hpcdist.comm.launch import launched_size

        if all(name in os.environ for name in PLACE) or launched_size(os.environ) is None:
            yield from otherwise(url, **({} if timeout is None else {"timeout": timeout}), **more)
            return
        from hpcdist.torch_backend.default_group import rendezvous_if_possible
        from hpcdist.torch_backend.group import numbers_of

        comm = _world()
        given = dict(parse_qsl(urlparse(url).query))
        rank, size = int(given.get("rank", comm.rank)), int(given.get("world_size", comm.size))
        if size == comm.size:
            numbers_of(comm, rank)
        yield rendezvous_if_possible(comm).store, rank, size

    return rendezvous_over_mpi


register()
