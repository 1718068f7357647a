"""torch.distributed's default process group, which `hpcdist.init` and `hpcdist.device_mesh` start among MPI's ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.external.torch_distributed import Rendezvous, rendezvous, timeout_of
from hpcdist.comm.network import interface_of
from hpcdist.errors import CommunicationError, ConfigError

OWN = "hpcdist"  # the name of this library's backend
_started: tuple[Communicator, object] | None = None  # the one that this library has started, and its ranks


@contextmanager
def default_group(comm: Communicator, backend: str) -> Iterator[None]:
    """Collective. Give torch.distributed's default process group inside the context; see `start_default_group`."""
    start_default_group(comm, backend)
    try:
        yield
    finally:
        end_default_group()


def start_default_group(comm: Communicator, backend: str, interface: str = "") -> Rendezvous:
    """Collective. Start torch.distributed's default process group, met at an address that rank 0 tells the others.

    It takes the place of an earlier one of this library's, and ends once all ranks have come to their scripts' ends.

    Args:
        comm: real ranks.
        backend: hpcdist, gloo, or nccl, for which each rank has a GPU of its own and has chosen it; or one per kind of
            device.
        interface: to meet on, as for `rendezvous`.

    Raises:
        CommunicationError: ranks don't reach each other over TCP, and no part of the group is on hpcdist.
    """
    global _started
    end_default_group()
    own = OWN in backend
    point = (rendezvous_if_possible if own else rendezvous)(comm, interface)
    hook = sys.excepthook  # ends all ranks; torch's would collect what it shows, and pass it on afterwards
    if point.address and (interface := interface_of(point.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # of groups that the script makes, too
    with _connecting_late():
        dist.init_process_group(
            backend, store=point.store, rank=comm.rank, world_size=comm.size,
            timeout=timeout_of(comm, 0.0) if own else timeout_of(comm), pg_options=comm if own else None,
        )  # fmt: skip
    sys.excepthook = hook
    _started = comm, dist.group.WORLD
    real: Any = comm
    if _END not in real.process.threads:
        real.process.threads.insert(0, _END)  # the watchdog tells of a call that others never make
    return point


def started_for() -> Communicator | None:
    """Return the ranks of the default process group if this library has started it; None otherwise."""
    return _started[0] if _started is not None and _started[1] is dist.group.WORLD else None


def end_default_group() -> None:
    """End the default process group if this library has started it."""
    global _started
    if started_for() is not None:
        dist.destroy_process_group()
    _started = None


def _end() -> None:
    try:
        end_default_group()
    except Exception:  # of a call that was begun, and that nobody has waited for
        sys.excepthook(*sys.exc_info())


_END = SimpleNamespace(stop=_end)  # what a process calls at its end, when all ranks have come there


def host_backend(comm: Communicator) -> str:
    """Return the backend of tensors on the host: Gloo where ranks may die, or MPI may be called by one thread only."""
    return OWN if comm.platform.concurrent and not comm.failures.tolerant else "gloo"


def introduce(comm: Communicator, backend: str | bool, interface: str = "") -> None:
    """Collective. Make the ranks known to torch.distributed, and to libraries that read torchrun's variables.

    Args:
        backend: gloo, nccl, or True: hpcdist, beside NCCL where each rank has a GPU of its own.

    Raises:
        CommunicationError: ranks don't reach each other over TCP, and no part of the group is on hpcdist.
        ConfigError: nccl, and a rank has no GPU of its own.
    """
    local_ranks = comm.memory.local_ranks
    local_rank = local_ranks.index(comm.rank)
    count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    gpus = comm.gather([local_ranks[0], visible[local_rank % count] if count else ""])
    poor = [rank for rank, gpu in enumerate(gpus) if not gpu[1] or gpu in gpus[:rank]]
    if backend == "nccl" and poor:
        raise ConfigError(
            "torch_distributed = 'nccl' must have NCCL and a GPU of its own on every rank; rank "
            f"{poor[0]} has none. Leave it out: tensors then go through the host's memory."
        )
    if backend not in ("gloo", "nccl"):
        backend = host_backend(comm)
        backend = f"cpu:{OWN},cuda:nccl" if backend == OWN and not poor else backend
    point = start_default_group(comm, str(backend), interface)
    os.environ.update({"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)})
    more: dict[str, Any] = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": len(local_ranks)}
    if point.host:
        more |= {"MASTER_ADDR": point.host, "MASTER_PORT": point.store.port}
    if torch.cuda.device_count() == 0 and not torch.xpu.is_available():
        more["ACCELERATE_USE_CPU"] = "true"  # or Accelerate counts one process where there is no GPU
    for name, value in more.items():
        os.environ.setdefault(name, str(value))


@contextmanager
def _connecting_late() -> Iterator[None]:
    """Let Gloo connect two ranks when they first exchange something, and not all with all at once."""
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def rendezvous_if_possible(comm: Communicator, interface: str = "") -> Rendezvous:
    """Collective. Meet over TCP, or else have a store that says why there is none, and no address."""
    try:
        return rendezvous(comm, interface)
    except CommunicationError as error:
        return Rendezvous(cast(Any, NoStore(error)), "", "")


class NoStore(dist.Store):
    """Takes the place of torch's store where ranks reach each other by MPI only: refuses what needs one.

    Args:
        reason: what `rendezvous` has raised.
    """

    made: ClassVar[list[NoStore]] = []  # kept, as a process group keeps the part in C++ alone, without these methods

    def __init__(self, reason: CommunicationError):
        super().__init__()
        self._reason = reason
        self.made.append(self)

    def _refuse(self, *args: Any) -> Any:
        raise CommunicationError(f"a process group on Gloo or NCCL must meet by TCP: {self._reason}")

    set = get = add = wait = check = compare_set = delete_key = num_keys = multi_get = multi_set = append = cast(
        Any, _refuse
    )
