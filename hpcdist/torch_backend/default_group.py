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
from hpcdist.comm.external.base import environment
from hpcdist.comm.external.torch_distributed import Rendezvous, rendezvous, timeout_of
from hpcdist.comm.network import interface_of
from hpcdist.errors import CommunicationError, ConfigError

HPCDIST = "hpcdist"  # the name of this library's backend
_started: tuple[Communicator, object] | None = None  # the ranks and the group, if this library has started it


@contextmanager
def default_group(comm: Communicator, backend: str) -> Iterator[None]:
    """Collective. Context with torch.distributed's default process group; see `start_default_group`."""
    start_default_group(comm, backend)
    try:
        yield
    finally:
        end_default_group()


def start_default_group(comm: Communicator, backend: str, interface: str = "") -> Rendezvous:
    """Collective. Start torch.distributed's default process group; return its rendezvous, at an address of rank 0.

    The group replaces an earlier one of this library, and is destroyed when the scripts of all ranks have ended.

    Args:
        comm: real ranks.
        backend: hpcdist, gloo, or nccl (each rank must have selected a separate GPU); or a backend per device type:
            `cpu:hpcdist,cuda:nccl`.
        interface: network interface of the rendezvous, as for `rendezvous`.

    Raises:
        CommunicationError: ranks don't reach each other over TCP, which only the backend hpcdist can do without.
    """
    global _started
    end_default_group()
    by_mpi = HPCDIST in backend
    point = (rendezvous_if_possible if by_mpi else rendezvous)(comm, interface)
    hook = sys.excepthook  # restored below: torch's hook would delay its output
    if point.address and (interface := interface_of(point.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # for groups that the script creates, too
    with environment({"TORCH_GLOO_LAZY_INIT": "1"}):  # ranks connect at their first message, not all pairs now
        dist.init_process_group(
            backend, store=point.store, rank=comm.rank, world_size=comm.size,
            timeout=timeout_of(comm, 0.0) if by_mpi else timeout_of(comm), pg_options=comm if by_mpi else None,
        )  # fmt: skip
    sys.excepthook = hook
    _started = comm, dist.group.WORLD
    real: Any = comm  # an MpiCommunicator: only real ranks have a `process`
    if _END not in real.process.threads:
        real.process.threads.insert(0, _END)  # before the watchdog, which reports calls that other ranks never run
    return point


def started_for() -> Communicator | None:
    """Return the communicator of the default process group if this library has started it, else None."""
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
    except Exception:  # from an asynchronous call that was not waited for
        sys.excepthook(*sys.exc_info())


_END = SimpleNamespace(stop=_end)  # `stop` is called at the end of the process, when all ranks have arrived


def host_backend(comm: Communicator) -> str:
    """Return the backend for host tensors: hpcdist; Gloo if the job tolerates deaths or MPI is single-threaded."""
    return HPCDIST if comm.platform.concurrent and not comm.failures.tolerant else "gloo"


def init_torch_distributed(comm: Communicator, backend: str | bool, interface: str = "") -> None:
    """Collective. Start torch.distributed's default group, and set torchrun's variables for libraries that read them.

    Args:
        comm: real ranks.
        backend: gloo, nccl, or True: hpcdist, with NCCL for GPU tensors if each rank has a separate GPU.
        interface: network interface of the rendezvous, as for `rendezvous`.

    Raises:
        CommunicationError: ranks don't reach each other over TCP, which only the backend hpcdist can do without.
        ConfigError: nccl is requested, and a rank has no separate GPU.
    """
    local_ranks = comm.memory.local_ranks
    local_rank = local_ranks.index(comm.rank)
    count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    # By rank: its node's first rank, and its GPU of that node.
    gpus = comm.gather([local_ranks[0], visible[local_rank % count] if count else ""])
    without_own = [rank for rank, gpu in enumerate(gpus) if not gpu[1] or gpu in gpus[:rank]]
    if backend == "nccl" and without_own:
        raise ConfigError(
            "torch_distributed = 'nccl' must have NCCL and a separate GPU on every rank; rank "
            f"{without_own[0]} has none. Remove it: tensors then go through the host's memory."
        )
    if backend not in ("gloo", "nccl"):
        backend = host_backend(comm)
        backend = f"cpu:{HPCDIST},cuda:nccl" if backend == HPCDIST and not without_own else backend
    point = start_default_group(comm, str(backend), interface)
    os.environ.update({"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)})
    variables: dict[str, Any] = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": len(local_ranks)}
    if point.host:
        variables |= {"MASTER_ADDR": point.host, "MASTER_PORT": point.store.port}
    if torch.cuda.device_count() == 0 and not torch.xpu.is_available():
        variables["ACCELERATE_USE_CPU"] = "true"  # otherwise Accelerate assumes one process if there is no GPU
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def rendezvous_if_possible(comm: Communicator, interface: str = "") -> Rendezvous:
    """Collective. Return the rendezvous over TCP; if it fails, a store that raises the reason when it is used."""
    try:
        return rendezvous(comm, interface)
    except CommunicationError as error:
        return Rendezvous(cast(Any, NoStore(error)), "", "")


class NoStore(dist.Store):
    """Stands in for torch's store if ranks reach each other only by MPI: every method raises CommunicationError.

    Args:
        reason: the error that `rendezvous` raised.
    """

    created: ClassVar[list[NoStore]] = []  # kept alive: a process group holds only the C++ part, without these methods

    def __init__(self, reason: CommunicationError):
        super().__init__()
        self._reason = reason
        self.created.append(self)

    def _refuse(self, *args: Any) -> Any:
        raise CommunicationError(f"a process group on Gloo or NCCL must have a rendezvous over TCP: {self._reason}")

    set = get = add = wait = check = compare_set = delete_key = num_keys = multi_get = multi_set = append = cast(
        Any, _refuse
    )
