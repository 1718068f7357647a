"""The Horovod of this process: obstacles to its use, its start, and the groups of ranks that sum on their own.

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
from typing import Any

import torch

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


def horovod() -> Any:
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
    hvd = horovod()
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

    @property
    def again(self) -> bool:
        """Tell whether Horovod can be started again with these settings."""
        return self.cycle_time_ms is None

    def variables(self) -> dict[str, str]:
        cycle = {} if self.cycle_time_ms is None else {CYCLE_TIME: str(self.cycle_time_ms)}
        # Gloo's operations crash beside MPI as controller.
        return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", FUSION: str(self.fusion_bytes), **cycle}


class Running:
    """Collective. Run Horovod on the ranks of `comm`, with the groups of them that sum on their own."""

    def __init__(self, comm: MpiCommunicator, tuning: Tuning):
        self.hvd, self.tuning = horovod(), tuning
        if self.hvd.is_initialized():
            raise ConfigError(
                "Horovod must not have been started by this program already: hpcdist starts it on the ranks and with "
                "the settings it is told. Leave out hvd.init(), or shut it down before."
            )
        self.comm = comm.split(0, name="horovod")
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
        own = {rank: i for i, rank in enumerate(self.comm.trace.world_ranks)}
        return tuple(sorted(own[r] for r in world_ranks)) if set(world_ranks) <= set(own) else None

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process set of these ranks: of all of them, or of a group that was added by `add`."""
        return self.hvd.global_process_set if len(ranks) == self.comm.size else self._groups[ranks]

    def add(self, ranks: tuple[int, ...]) -> None:
        """Collective among Horovod's ranks. Add the groups of all of them; restart Horovod if one is new."""
        groups = dict.fromkeys(map(tuple, self.comm.gather(ranks)))
        new = {ranks: None for ranks in groups if ranks not in self._groups and len(ranks) < self.comm.size}
        if new and not self.tuning.again:
            raise ConfigError(
                f"cycle_time_ms must be left out where groups of the ranks that Horovod runs on sum on their own; got "
                f"{self.tuning.cycle_time_ms}. It starts anew for them, and can't with that."
            )
        if new:
            self._groups |= new
            self.comm.barrier()  # nobody has a sum under way
            self.hvd.shutdown()
            self._start()

    def close(self) -> bool:
        """Collective. End Horovod, once all ranks are done; return False where it can't be ended."""
        if self.broken or not self.tuning.again:
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
    ranks = _running.place(comm.trace.world_ranks)
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
