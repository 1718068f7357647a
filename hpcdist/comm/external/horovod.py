"""Sums by Horovod: obstacles to its use, its start in this process, and the groups of ranks that sum on their own.

mpi4py starts MPI, before; Horovod joins that same MPI with a communicator of its own and a thread that does all
communication. It runs in a process while there are objects that sum by it and are not closed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.comm.external.base import OtherLibrary
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.library import loaded_here
from hpcdist.errors import CommunicationError, ConfigError

BUILD = "Run `hpcdist horovod build`."
CYCLE_TIME, FUSION = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"
FUSION_BYTES = 128 << 20  # Horovod's own default


def obstacle() -> str:
    """Say why Horovod can't be used in this process; empty where it can. Imports nothing."""
    package = importlib.util.find_spec("horovod")
    folder = Path(package.origin).parent / "torch" if package is not None and package.origin else Path()
    extension = next(iter(sorted(folder.glob("mpi_lib_v2*.so"))), None)
    if extension is None:
        return f"Horovod is not installed in this environment, or without its part for torch. {BUILD}"
    wanted = sorted({name.decode() for name in re.findall(rb"libmpi\w*\.so[.\d]*", extension.read_bytes())})
    used = loaded_here()
    if used and not any(f"{path.name}.".startswith(f"{name}.") for path in used for name in wanted):
        return f"Horovod was built for {' or '.join(wanted)}, and mpi4py uses {used[0]}. {BUILD}"
    return ""


def load() -> Any:
    """Import the module horovod.torch; raise ConfigError where it can't be used beside mpi4py."""
    if reason := obstacle():
        raise ConfigError(f"Horovod must be built for this environment's torch and MPI; got none: {reason}")
    import horovod.torch as module

    if not hasattr(module, "init"):  # it says why, and goes on without
        raise ConfigError(f"Horovod must be built for this torch, {torch.__version__}; got another's. {BUILD}")
    require_one_mpi(loaded_here())
    return module


def require_one_mpi(libraries: list[Path]) -> None:
    """Check that a process has loaded one MPI library; raise CommunicationError of two, each with its own world."""
    if len({path.resolve() for path in libraries}) > 1:
        raise CommunicationError(
            f"mpi4py and Horovod must use one MPI library; got {' and '.join(map(str, libraries))}. {BUILD}"
        )


def built_with() -> list[str]:
    """Name the parts that the installed Horovod was built with: some of MPI, Gloo, NCCL and CUDA."""
    hvd = load()
    parts = {"MPI": hvd.mpi_built, "Gloo": hvd.gloo_built, "NCCL": hvd.nccl_built, "CUDA": hvd.cuda_built}
    return [name for name, built in parts.items() if built()]


# --- the Horovod of this process --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tuning:
    """The settings that Horovod starts with.

    A Horovod with a cycle time of its own crashes when it is started again in the same process, so it runs to the end
    of the process.
    """

    fusion_bytes: int
    cycle_time_ms: float | None  # None: its own default

    @classmethod
    def of(cls, fusion_bytes: int | None, cycle_time_ms: float | None) -> Tuning:
        """Make settings; those that are None come from Horovod's own environment variables, which its users know."""
        cycle = os.environ.get(CYCLE_TIME)
        return cls(
            int(os.environ.get(FUSION, FUSION_BYTES)) if fusion_bytes is None else fusion_bytes,
            (float(cycle) if cycle else None) if cycle_time_ms is None else cycle_time_ms,
        )

    def variables(self) -> dict[str, str]:
        cycle = {} if self.cycle_time_ms is None else {CYCLE_TIME: str(self.cycle_time_ms)}
        # Gloo's operations crash beside MPI as controller.
        return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", FUSION: str(self.fusion_bytes), **cycle}


class Running:
    """Collective. Run Horovod on the ranks of `comm`, with the groups of them that sum on their own."""

    def __init__(self, comm: MpiCommunicator, tuning: Tuning):
        self.hvd, self.tuning = load(), tuning
        if self.hvd.is_initialized():
            raise ConfigError(
                "Horovod must not have been started by this program already: hpcdist starts it on the ranks and with "
                "the settings it is told. Leave out hvd.init(), or shut it down before."
            )
        self.comm = comm.split(0)
        self.users, self.made, self.broken = 0, 0, False
        self._groups: dict[tuple[int, ...], Any] = {}  # by ranks in `comm`: Horovod's process set
        self._start()

    def _start(self) -> None:
        sets = {ranks: self.hvd.ProcessSet(list(ranks)) for ranks in self._groups}
        with _variables(self.tuning.variables()):
            self.hvd.init(comm=self.comm.mpi, process_sets=list(sets.values()))
        self._groups = sets

    def place(self, world_ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """Convert ranks of the world to Horovod's numbers; None unless it runs on all of them."""
        own = {rank: i for i, rank in enumerate(self.comm.platform.world_ranks)}
        return tuple(sorted(own[r] for r in world_ranks)) if set(world_ranks) <= set(own) else None

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process set of these ranks: of all of them, or of a group that was added by `add`."""
        return self.hvd.global_process_set if len(ranks) == self.comm.size else self._groups[ranks]

    def add(self, ranks: tuple[int, ...]) -> None:
        """Collective among Horovod's ranks. Add the groups of all of them; restart Horovod if one is new."""
        groups = dict.fromkeys(map(tuple, self.comm.gather(ranks)))
        new = {ranks: None for ranks in groups if ranks not in self._groups and len(ranks) < self.comm.size}
        if new and self.tuning.cycle_time_ms is not None:
            raise ConfigError(
                f"cycle_time_ms must be omitted where groups of the ranks that Horovod runs on sum on their own; got "
                f"{self.tuning.cycle_time_ms}. It starts anew for them, and can't with that."
            )
        if new:
            self._groups |= new
            self.comm.barrier()  # nobody has a sum under way
            self.hvd.shutdown()
            self._start()

    def close(self) -> bool:
        """Collective. End Horovod, once all ranks are done; return False where it can't be ended."""
        if self.broken or self.tuning.cycle_time_ms is not None:
            return False
        self.comm.barrier()
        self.hvd.shutdown()
        self.comm.close()
        return True


_running: Running | None = None


def join(comm: MpiCommunicator, tuning: Tuning) -> tuple[Running, tuple[int, ...]]:
    """Collective. Return the Horovod of this process, started if necessary, and the numbers of `comm`'s ranks in it."""
    global _running
    if _running is None:
        _running = Running(comm, tuning)
    if tuning != _running.tuning:
        raise ConfigError(
            f"Horovod's settings must be those it runs with in this process, {_running.tuning}; got {tuning}. Use "
            "the same everywhere."
        )
    ranks = _running.place(comm.platform.world_ranks)
    if ranks is None:
        raise ConfigError(
            f"Horovod must run on all ranks that sum by it; got {_running.comm.size} on which it runs, and a group of "
            f"{comm.size} that is not among them. Begin with the largest group."
        )
    _running.add(ranks)
    _running.users += 1
    _running.made += 1
    return _running, ranks


def leave() -> None:
    global _running
    if _running is not None:
        _running.users -= 1
        if _running.users == 0 and _running.close():
            _running = None


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, the only way to give Horovod settings."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


SUMMED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)

Op = Literal["sum", "average", "adasum"]


class Horovod(OtherLibrary):
    """Collective. Sum by Horovod: GPU tensors by its NCCL operations where it was built with them, others by MPI.

    Horovod sends tensors that are ready at about the same time as one, and says at the end of each cycle which ranks
    have them, so that a sum takes a cycle's time at least, however short.

    The first object starts Horovod on the ranks of `comm`, and the last one that is closed ends it. While it runs,
    another one's ranks must be among these, and all of these make one at the same time, each for the ranks of its own
    group: a process set.

    Args:
        comm: real ranks, of an MPI that was started with MPI_THREAD_MULTIPLE.
        op: the reduction: the sum, the mean, or Adasum, which adds the orthogonal parts of the ranks' tensors and
            averages the parallel ones, for 1, 2, 4, 8... ranks.
        compression: "fp16" sends and sums tensors of floating-point numbers in half precision.
        fusion_bytes: tensors are sent together up to this size; 128 MiB by default.
        cycle_time_ms: pause between two rounds in which ranks announce their tensors; 1 ms by default. Where it is
            given, Horovod runs with it to the end of the process, and without groups.

    Raises:
        ConfigError: Horovod is not installed, or can't run with these arguments.
        CommunicationError: MPI was started without threads, or Horovod loads another MPI than mpi4py.

    Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
    2018; Saeed Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """

    label = "Horovod"

    def __init__(
        self,
        comm: MpiCommunicator,
        *,
        op: Op = "sum",
        compression: Literal["none", "fp16"] = "none",
        fusion_bytes: int | None = None,
        cycle_time_ms: float | None = None,
    ):
        super().__init__(comm)
        if not comm.platform.concurrent:
            raise CommunicationError(
                "MPI must be started with MPI_THREAD_MULTIPLE for Horovod, whose thread communicates beside this one; "
                "got less. Let mpi4py start MPI, or use an MPI built with threads."
            )
        if op == "adasum" and comm.size & (comm.size - 1):
            raise ConfigError(f"Adasum must run on 1, 2, 4, 8... ranks; got {comm.size}. Use op = 'average'.")
        self._running, self._ranks = join(comm, Tuning.of(fusion_bytes, cycle_time_ms))
        if op == "adasum" and comm.size < self._running.comm.size:
            leave()
            raise ConfigError(
                f"Adasum must run on all ranks that Horovod runs on, {self._running.comm.size}; got {comm.size} of "
                "them. Use op = 'average' for groups."
            )
        self._prefix = f"hpcdist {self._running.made}"  # the same on all ranks, which make objects at the same time
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
        """Collective. End Horovod in this process, unless another object uses it."""
        if not self._closed:
            self._closed = True
            leave()
