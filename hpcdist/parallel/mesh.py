"""Make torch's device mesh of the ranks that hold one model together."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.external.process_group import LONGEST_S
from hpcdist.comm.external.rendezvous import start_default_group
from hpcdist.errors import ConfigError

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_started: dict[Communicator, object] = {}  # torch's default process group, where it is of these ranks


def make_mesh(
    comm: Communicator, sizes: Sequence[int], names: Sequence[str] | None = None, device_type: str = "cpu"
) -> DeviceMesh:
    """Collective. Make a mesh of the ranks of `comm`.

    To torch they are all ranks that there are: its default process group is of them alone, on Gloo, and on NCCL for
    GPUs. It lasts until the process ends, or until `torch.distributed.destroy_process_group()`.

    Args:
        comm: real ranks, those of one replica.
        sizes: of the dimensions; their product is the number of ranks.
        names: of the dimensions.
        device_type: cpu, or cuda, for which each rank has a GPU of its own and has chosen it.

    Raises:
        ConfigError: the ranks are virtual, or the program has started a default process group itself.
    """
    if comm.trace.virtual is not None:
        raise ConfigError(
            "a device mesh must be of real ranks, for torch has one default process group per process; got virtual "
            "ones. Start the script with mpirun or srun."
        )
    if device_type not in _BACKENDS:
        raise ConfigError(f"device_type must be one of {', '.join(_BACKENDS)}; got {device_type!r}.")
    _start_group(comm, device_type)
    return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=None if names is None else tuple(names))


def _start_group(comm: Communicator, device_type: str) -> None:
    """Collective. Start torch's default process group of these ranks, unless they have it."""
    if dist.is_initialized():
        if dist.group.WORLD not in _started.values():
            raise ConfigError(
                "torch.distributed must be started by hpcdist.device_mesh, among the ranks of a replica; got a default "
                "process group that this program has started. Leave out init_process_group, and torchrun."
            )
        if comm in _started:
            return
        dist.destroy_process_group()
    start_default_group(comm, _BACKENDS[device_type], min(comm.failures.deadline_s, LONGEST_S))
    if not _started:
        atexit.register(_end_group)
    _started.clear()
    _started[comm] = dist.group.WORLD


def _end_group() -> None:
    if dist.is_initialized() and dist.group.WORLD in _started.values():
        dist.destroy_process_group()
