"""MPI as a backend of torch.distributed: `torch.distributed.init_process_group("hpcdist")` under mpirun or srun.

Importing this module registers the backend; torch does so automatically if hpcdist is installed. MPI starts, and the
modules of the groups are imported, only when the first group is created.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlparse

NAME = "hpcdist"
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")  # variables with the address of the rendezvous


def register() -> None:
    """Register the backend, and a rendezvous by MPI for ranks under an MPI launcher without MASTER_ADDR."""
    # Imported here: torch calls this function while it is imported, which this module may have caused.
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    # torch offers backends no other hook to define ranks. Without it, scripts must pass rank and world_size.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _rendezvous_by_mpi(handlers["env"])


def _group(options: Any, comm: Any = None) -> Any:
    """Collective among the ranks of a group. Create the group from torch's `DistributedBackendOptions`.

    `comm`: the default group's ranks, if the caller of init_process_group passes them; else found here.
    """
    import torch.distributed as dist

    from hpcdist.torch_backend.default_group import started_for
    from hpcdist.torch_backend.group import MpiGroup

    default: Any = dist.group.WORLD  # None while the default group itself is created
    return MpiGroup.create(
        options, comm or (default.comm if isinstance(default, MpiGroup) else started_for() or _world())
    )


def _world() -> Any:
    """Collective at the first call. Return the communicator of all of MPI's ranks, initialized if necessary."""
    # By name, like a script: `init` is in a higher layer, and uses this package.
    return import_module("hpcdist").init(torch_distributed=False)


def _rendezvous_by_mpi(fallback: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a rendezvous handler that gets rank and size from MPI if the environment has no address."""

    def rendezvous_over_mpi(url: str, timeout: timedelta | None = None, **more: Any) -> Iterator[Any]:
        from hpcdist.comm.launch import launched_size

        if all(name in os.environ for name in RENDEZVOUS) or launched_size(os.environ) is None:
            yield from fallback(url, **({} if timeout is None else {"timeout": timeout}), **more)
            return
        from hpcdist.torch_backend.default_group import rendezvous_if_possible
        from hpcdist.torch_backend.group import gather_ranks

        comm = _world()
        options = dict(parse_qsl(urlparse(url).query))
        rank, size = int(options.get("rank", comm.rank)), int(options.get("world_size", comm.size))
        if size == comm.size:
            gather_ranks(comm, rank)  # raises WorldError if ranks repeat
        yield rendezvous_if_possible(comm).store, rank, size

    return rendezvous_over_mpi


register()
