"""All-reduce by Horovod: checks that it can be used, its start in this process, and its process sets.

mpi4py starts MPI first; Horovod uses the same MPI with a separate communicator and a thread for all communication.
Horovod runs in a process while there are open `Horovod` objects.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.comm.external.base import OtherLibrary, environment
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.library import loaded_here
from hpcdist.errors import CommunicationError, ConfigError

BUILD = "Run `hpcdist horovod build`."
CYCLE_TIME, FUSION = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"
FUSION_BYTES = 128 << 20  # Horovod's default


def obstacle() -> str:
    """Return why Horovod can't be used in this process; empty if it can. Imports nothing."""
    package = importlib.util.find_spec("horovod")
    folder = Path(package.origin).parent / "torch" if package is not None and package.origin else Path()
    extension = next(iter(sorted(folder.glob("mpi_lib_v2*.so"))), None)
    if extension is None:
        return f"Horovod is not installed in this environment, or without its part for torch. {BUILD}"
    required = sorted({name.decode() for name in re.findall(rb"libmpi\w*\.so[.\d]*", extension.read_bytes())})
    used = loaded_here()
    # A library is required as libmpi.so.40, and loaded from a file such as libmpi.so.40.30.6.
    if used and not any(f"{path.name}.".startswith(f"{name}.") for path in used for name in required):
        return f"Horovod was built for {' or '.join(required)}, and mpi4py uses {used[0]}. {BUILD}"
    return ""


def load() -> Any:
    """Import the module horovod.torch; raise ConfigError if it can't be used with mpi4py."""
    if reason := obstacle():
        raise ConfigError(f"Horovod must be built for this environment's torch and MPI; got none: {reason}")
    import horovod.torch as module

    if not hasattr(module, "init"):  # its import has failed with only a warning
        raise ConfigError(f"Horovod must be built for this torch, {torch.__version__}; got another's. {BUILD}")
    libraries = loaded_here()
    if len({path.resolve() for path in libraries}) > 1:  # each would have another world
        raise CommunicationError(
            f"mpi4py and Horovod must use one MPI library; got {' and '.join(map(str, libraries))}. {BUILD}"
        )
    return module


def built_with() -> list[str]:
    """Return the backends that the installed Horovod was built with: some of MPI, Gloo, NCCL and CUDA."""
    hvd = load()
    parts = {"MPI": hvd.mpi_built, "Gloo": hvd.gloo_built, "NCCL": hvd.nccl_built, "CUDA": hvd.cuda_built}
    return [name for name, built in parts.items() if built()]


# --- the Horovod of this process --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tuning:
    """The settings that Horovod starts with.

    Horovod with a non-default cycle time crashes when it is restarted in the same process, so it then runs until the
    process ends.
    """

    fusion_bytes: int
    cycle_time_ms: float | None  # None: Horovod's default

    @classmethod
    def of(cls, fusion_bytes: int | None, cycle_time_ms: float | None) -> Tuning:
        """Return the settings; values that are None come from Horovod's environment variables."""
        cycle = os.environ.get(CYCLE_TIME)
        return cls(
            int(os.environ.get(FUSION, FUSION_BYTES)) if fusion_bytes is None else fusion_bytes,
            (float(cycle) if cycle else None) if cycle_time_ms is None else cycle_time_ms,
        )

    def variables(self) -> dict[str, str]:
        cycle = {} if self.cycle_time_ms is None else {CYCLE_TIME: str(self.cycle_time_ms)}
        # Gloo's operations crash with MPI as controller.
        return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", FUSION: str(self.fusion_bytes), **cycle}


class Running:
    """Collective. Runs Horovod on the ranks of `comm`, with process sets for groups of them."""

    def __init__(self, comm: MpiCommunicator, tuning: Tuning):
        self.hvd, self.tuning = load(), tuning
        if self.hvd.is_initialized():
            raise ConfigError(
                "Horovod must not have been started by this program already: hpcdist starts it on the ranks and with "
                "the requested settings. Remove hvd.init(), or call hvd.shutdown() before."
            )
        self.comm = comm.split(0)
        self.users, self.n_created, self.broken = 0, 0, False
        self._groups: dict[tuple[int, ...], Any] = {}  # by ranks in `comm`: Horovod's process set
        self._start()

    def _start(self) -> None:
        """Start Horovod with the current process sets."""
        sets = {ranks: self.hvd.ProcessSet(list(ranks)) for ranks in self._groups}
        with environment(self.tuning.variables()):  # Horovod reads its settings only from there
            self.hvd.init(comm=self.comm.mpi, process_sets=list(sets.values()))
        self._groups = sets

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process set of all ranks, or of a group that was added by `add`."""
        return self.hvd.global_process_set if len(ranks) == self.comm.size else self._groups[ranks]

    def add(self, ranks: tuple[int, ...]) -> None:
        """Collective among Horovod's ranks. Add each rank's group; restart Horovod if one is new."""
        groups = dict.fromkeys(map(tuple, self.comm.gather(ranks)))
        new = {ranks: None for ranks in groups if ranks not in self._groups and len(ranks) < self.comm.size}
        if new and self.tuning.cycle_time_ms is not None:
            raise ConfigError(
                f"cycle_time_ms must not be set if groups of Horovod's ranks sum separately; got "
                f"{self.tuning.cycle_time_ms}. Remove it: Horovod can't restart for new groups with it."
            )
        if new:
            self._groups |= new
            self.comm.barrier()  # no rank has a sum in flight
            self.hvd.shutdown()
            self._start()

    def close(self) -> bool:
        """Collective. Shut down Horovod after all ranks have called this; return False if that is impossible."""
        if self.broken or self.tuning.cycle_time_ms is not None:
            return False
        self.comm.barrier()
        self.hvd.shutdown()
        self.comm.close()
        return True


_running: Running | None = None


def join(comm: MpiCommunicator, tuning: Tuning) -> tuple[Running, tuple[int, ...]]:
    """Collective. Return the Horovod of this process, started if necessary, and the Horovod ranks of `comm`."""
    global _running
    if _running is None:
        _running = Running(comm, tuning)
    if tuning != _running.tuning:
        raise ConfigError(
            f"Horovod's settings must be the same for all objects in this process, {_running.tuning}; got {tuning}. "
            "Use the same settings everywhere."
        )
    number = {rank: i for i, rank in enumerate(_running.comm.platform.world_ranks)}
    ranks = tuple(sorted(number[rank] for rank in comm.platform.world_ranks if rank in number))
    if len(ranks) < comm.size:
        raise ConfigError(
            f"Horovod must run on all ranks that sum by it; it runs on {_running.comm.size} ranks, got a group of "
            f"{comm.size} with other ranks. Start with the largest group."
        )
    _running.add(ranks)
    _running.users += 1
    _running.n_created += 1
    return _running, ranks


def release() -> None:
    """Collective. Give up one use of Horovod; the last one shuts it down."""
    global _running
    if _running is not None:
        _running.users -= 1
        if _running.users == 0 and _running.close():
            _running = None


SUMMED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)

Op = Literal["sum", "average", "adasum"]


class Horovod(OtherLibrary):
    """Collective. All-reduce by Horovod: GPU tensors by NCCL if Horovod was built with it, others by MPI.

    Horovod fuses tensors that are ready at about the same time, and negotiates once per cycle which ranks have them; so
    a sum takes at least one cycle, however short it is.

    The first object starts Horovod on the ranks of `comm`; closing the last one shuts it down. While it runs, further
    objects must use a subset of these ranks, and all of these ranks must create one at the same time, each for its
    group: a process set.

    Args:
        comm: real ranks, of an MPI that was started with MPI_THREAD_MULTIPLE.
        op: the reduction: sum, mean, or Adasum, which adds the orthogonal parts of the ranks' tensors and averages the
            parallel parts, for 1, 2, 4, 8... ranks.
        compression: "fp16" sends and sums floating-point tensors in half precision.
        fusion_bytes: maximum size of fused tensors; 128 MiB by default.
        cycle_time_ms: pause between two negotiation cycles; 1 ms by default. If set, Horovod runs until the process
            ends, and groups are impossible.

    Raises:
        ConfigError: Horovod is not installed, or can't run with these arguments.
        CommunicationError: MPI was started without threads, or Horovod loads another MPI than mpi4py.

    Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
    2018; Saeed Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """

    label = "Horovod"

    def __init__(
        self, comm: MpiCommunicator, *, op: Op = "sum", compression: Literal["none", "fp16"] = "none",
        fusion_bytes: int | None = None, cycle_time_ms: float | None = None,
    ):  # fmt: skip
        super().__init__(comm)
        if not comm.platform.concurrent:
            raise CommunicationError(
                "MPI must be started with MPI_THREAD_MULTIPLE for Horovod, which communicates in a background thread; "
                "got less. Let mpi4py start MPI, or use an MPI built with threads."
            )
        if op == "adasum" and comm.size & (comm.size - 1):
            raise ConfigError(f"Adasum must run on 1, 2, 4, 8... ranks; got {comm.size}. Use op = 'average'.")
        self._running, self._ranks = join(comm, Tuning.of(fusion_bytes, cycle_time_ms))
        if op == "adasum" and comm.size < self._running.comm.size:
            release()
            raise ConfigError(
                f"Adasum must run on all ranks that Horovod runs on, {self._running.comm.size}; got {comm.size} of "
                "them. Use op = 'average' for groups."
            )
        self._prefix = f"hpcdist {self._running.n_created}"  # the same on all ranks: they create objects in step
        hvd = self._hvd = self._running.hvd
        self._op = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}[op]
        self._half = compression == "fp16"
        self._closed = False

    def check(self, tensor: Tensor) -> None:
        if tensor.dtype not in SUMMED:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ConfigError(
                f"dtype must be one of {known} to be summed by Horovod; got {tensor.dtype}. Convert it, or use "
                "provider = 'hpcdist'."
            )

    def _sent(self, tensor: Tensor) -> Tensor:
        sent = tensor.half() if self._half and tensor.is_floating_point() else tensor
        return sent.cpu() if sent.is_cuda and not self._hvd.cuda_built() else sent

    def _start(self, tensor: Tensor, name: str) -> Any:
        group = self._running.group(self._ranks)
        return self._hvd.allreduce_async_(tensor, name=f"{self._prefix} {name}", op=self._op, process_set=group)

    def _poll(self, handle: Any) -> bool:
        return bool(self._hvd.poll(handle))

    def _finish(self, handle: Any) -> None:
        try:
            self._hvd.synchronize(handle)
        except self._hvd.HorovodInternalError:
            self._running.broken = True
            raise

    def close(self) -> None:
        """Collective. Shut down Horovod in this process, unless another object uses it."""
        if not self._closed:
            self._closed = True
            release()
