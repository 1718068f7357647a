"""A process group of torch.distributed with hpcdist's collective calls and MPI's messages."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from hpcdist.collectives.calls import Collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import TAG_LIMIT, Closed
from hpcdist.comm.waiting import wait_until
from hpcdist.comm.work import NO_LIMIT, Work
from hpcdist.errors import ConfigError, DeadlineError, WorldError
from hpcdist.model.gradients import uncompiled

OPERATIONS = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "mean", ReduceOp.PRODUCT: "product", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
    ReduceOp.BAND: "and", ReduceOp.BOR: "or", ReduceOp.BXOR: "xor", ReduceOp.PREMUL_SUM: "sum",
}  # fmt: skip
# Default options, for scripts that call a group's methods directly.
_ALL_TO_ALL = c10d.AllToAllOptions()
_ALLGATHER = c10d.AllgatherOptions()
_ALLREDUCE = c10d.AllreduceOptions()
_BARRIER = c10d.BarrierOptions()
_BROADCAST = c10d.BroadcastOptions()
_GATHER = c10d.GatherOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_SCATTER = c10d.ScatterOptions()
_COMPLETED = Work()  # returned by all blocking calls: creating one takes 5 % of the time of a short call
BARRIER_TAG = TAG_LIMIT - 2  # tag of the monitored barrier's messages


def by_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a group: with the backend `cpu:hpcdist,cuda:nccl`, NCCL runs calls on GPU tensors."""

    @functools.wraps(method)
    def call(group: MpiGroup, tensors: Any, *more: Any, **options: Any) -> Any:
        tensor = tensors
        while isinstance(tensor, (list, tuple)):
            tensor = tensor[0] if tensor else None
        if tensor is not None and tensor.is_cuda and (nccl := group.on_gpus()) is not None:
            with group._lock:
                group._sequence += 1
            return getattr(nccl, method.__name__)(tensors, *more, **options)
        return method(group, tensors, *more, **options)

    return uncompiled(call)


class MpiGroup(dist.ProcessGroup):
    """Collective. A process group of torch.distributed over a communicator.

    Its methods are those that torch.distributed calls, with torch's names and arguments. The calling thread runs
    blocking calls; a thread of the group runs asynchronous calls, in their order.

    Args:
        comm: the ranks, in the group's order; the group closes it.
        store: torch's store, for the rendezvous of NCCL.
    """

    def __init__(self, comm: Communicator, store: Any = None):
        cast(Any, super()).__init__(comm.rank, comm.size)  # torch's type stubs require a store
        self.comm, self._calls, self._store = comm, Collectives(comm), store
        self._nccl: Any = None
        self._coalesced: list[Work] | None = None  # works started since `_start_coalescing`
        self._sequence, self._lock = 0, threading.Lock()
        _groups.add(self)
        self._group_name = self._group_desc = ""

    @classmethod
    def create(cls, options: Any, parent: Communicator) -> MpiGroup:
        """Collective among the ranks of a group. Create the group from torch.distributed's options.

        Args:
            options: torch's `DistributedBackendOptions`.
            parent: the ranks of the default group.

        Raises:
            WorldError: MPI has other ranks than torch.distributed.
        """
        ranks, rank, size = list(options.global_ranks_in_group), options.group_rank, options.group_size
        call_limit_s = creation_limit_s = options.timeout.total_seconds() or parent.failures.deadline_s
        if ranks:  # torch's default timeout of a group is half an hour, even if the default group has another one
            creation_limit_s = min(call_limit_s, parent.failures.deadline_s)
        else:  # the default group
            require_same_world(parent, rank, size)
            torch_ranks = gather_ranks(parent, rank)
            ranks = sorted(range(size), key=torch_ranks.__getitem__)  # MPI's ranks, in torch's order
        if parent.mpi is None:  # one rank, without MPI
            comm: Any = parent.split(0)
        else:
            comm = cast(Any, parent).among(ranks, f"torch.distributed/{options.group_id}", creation_limit_s)
        comm.failures.deadline_s = call_limit_s
        return cls(comm, options.store)

    # --- torch's interface of a group ---------------------------------------------------------------------------------
    def getBackendName(self) -> str:
        return "hpcdist"

    name = getBackendName

    # torch stores the names of a group in its C++ backends, which this group lacks.
    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    group_name = property(getGroupName)

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    def getGroupDesc(self) -> str:
        return self._group_desc

    group_desc = property(getGroupDesc)

    _device_types = property(lambda self: [torch.device("cuda"), torch.device("cpu")])
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        nccl = self._group_for(device)
        return self if nccl is None else nccl._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        for comm in (self.comm, self._calls.comm):
            comm.failures.deadline_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def on_gpus(self) -> Any:
        """Return the NCCL group for calls on GPU tensors; None if this group runs them."""
        if self._nccl is None and "cuda:nccl" in str(c10d._world.pg_backend_config.get(self, "")):
            kind, cuda, rank_size = cast(Any, dist).ProcessGroupNCCL, torch.device("cuda"), (self.rank(), self.size())
            backend = kind(dist.PrefixStore("cuda", self._store), *rank_size, kind.Options())
            # Wrapped in a group, as a backend lacks some of the methods that torch calls on groups.
            self._nccl = cast(Any, dist.ProcessGroup)(*rank_size)
            self._nccl._register_backend(cuda, dist.ProcessGroup.BackendType.NCCL, backend)
        return self._nccl

    def _group_for(self, device: Any) -> Any:
        return self.on_gpus() if torch.device(device).type == "cuda" else None

    # --- collective calls ---------------------------------------------------------------------------------------------
    def _start(self, options: Any, result: Any, call: Callable[..., Any], *args: Any, **more: Any) -> Work:
        """Run a call, or only start it if `options` say so; `result` is what the returned work holds."""
        with self._lock:  # several threads may run calls
            self._sequence += 1
            if getattr(options, "asyncOp", True):
                work = call(*args, async_op=True, **more)
                work.tensors = result
            else:
                call(*args, **more)
                work = _COMPLETED
        return self._track(work)

    @by_device
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = _ALLREDUCE) -> Work:
        if tensors[0].is_sparse:
            if (operation := _operation(opts)[0]) != "sum":
                raise ConfigError(f"op of a sparse all_reduce must be SUM; got {operation}. Make the tensor dense.")
            return self._start(opts, [tensors[0]], self._sum_sparse, tensors[0])
        operation, factor = _operation(opts)
        inputs = tensors[0] if len(tensors) == 1 else tensors
        return self._start(opts, tensors, self._calls.all_reduce, inputs, operation, factor=factor)

    allreduce_coalesced = allreduce

    def _sum_sparse(self, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Sum sparse tensors in place: gather all ranks' indices and values, and add values with the same index."""
        calls = self._calls

        def sum_up() -> None:
            local, lengths = tensor.coalesce(), torch.zeros(self.size(), dtype=torch.int64)
            calls.all_gather(lengths, torch.tensor([local._nnz()]))
            indices = [local.indices().new_empty(local.sparse_dim(), n) for n in lengths.tolist()]
            values = [local.values().new_empty(n, *local.values().shape[1:]) for n in lengths.tolist()]
            calls.all_gather(indices, local.indices())
            calls.all_gather(values, local.values())
            tensor.copy_(torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape).coalesce())

        return calls.queue.run(sum_up, async_op=async_op)

    @by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = _BROADCAST) -> Work:
        return self._start(opts, tensors, self._calls.broadcast, tensors[0], opts.rootRank)

    @by_device
    def reduce(self, tensors: Sequence[Tensor], opts: Any = _REDUCE) -> Work:
        operation, factor = _operation(opts)
        return self._start(opts, tensors, self._calls.reduce, tensors[0], opts.rootRank, operation, factor=factor)

    @by_device
    def allgather(self, outs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = _ALLGATHER) -> Work:
        return self._start(opts, outs[0], self._calls.all_gather, outs[0], tensors[0])

    @by_device
    def allgather_coalesced(
        self, outs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = _ALLGATHER
    ) -> Work:
        works = [self.allgather([list(out_by_rank)], [local], opts) for *out_by_rank, local in zip(*outs, tensors)]
        return Work.of_all(works, outs)

    @by_device
    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Any = _ALLGATHER) -> Work:
        return self._start(opts, [out], self._calls.all_gather, out, tensor)

    @by_device
    def allgather_into_tensor_coalesced(
        self, outs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = _ALLGATHER
    ) -> Work:
        return Work.of_all([self._allgather_base(out, local, opts) for out, local in zip(outs, tensors)], outs)

    @by_device
    def gather(self, outs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = _GATHER) -> Work:
        root_outs = outs[0] if self.rank() == opts.rootRank else None
        return self._start(opts, root_outs or [], self._calls.gather, root_outs, tensors[0], opts.rootRank)

    @by_device
    def scatter(self, outs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _SCATTER) -> Work:
        parts = inputs[0] if self.rank() == opts.rootRank else None
        return self._start(opts, outs, self._calls.scatter, outs[0], parts, opts.rootRank)

    @by_device
    def reduce_scatter(
        self, outs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        operation, factor = _operation(opts)
        return self._start(opts, outs, self._calls.reduce_scatter, outs[0], inputs[0], operation, factor=factor)

    @by_device
    def _reduce_scatter_base(self, out: Tensor, inputs: Tensor, opts: Any = _REDUCE_SCATTER) -> Work:
        operation, factor = _operation(opts)
        return self._start(opts, [out], self._calls.reduce_scatter, out, inputs, operation, factor=factor)

    @by_device
    def reduce_scatter_tensor_coalesced(
        self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        return Work.of_all([self._reduce_scatter_base(out, parts, opts) for out, parts in zip(outs, inputs)], outs)

    @by_device
    def alltoall(self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _ALL_TO_ALL) -> Work:
        return self._start(opts, outs, self._calls.all_to_all, outs, inputs)

    @by_device
    def alltoall_base(
        self, out: Tensor, inputs: Tensor, out_sizes: Sequence[int], sizes: Sequence[int],
        opts: Any = _ALL_TO_ALL,
    ) -> Work:  # fmt: skip
        outs, parts = self._in_parts(out, out_sizes, "output"), self._in_parts(inputs, sizes, "input")
        return self._start(opts, [out], self._calls.all_to_all, outs, parts)

    def _in_parts(self, tensor: Tensor, sizes: Sequence[int], name: str) -> Tensor | list[Tensor]:
        """Split a tensor along its first dimension into `sizes`; return it unchanged without sizes: equal parts."""
        if sizes:
            return list(tensor.split(list(sizes)))
        if tensor.dim() and tensor.shape[0] % self.size():
            raise ConfigError(
                f"{name} of all_to_all_single must have the same number of rows for each of {self.size()} ranks; got "
                f"shape {tuple(tensor.shape)}. Pass {name}_split_sizes."
            )
        return tensor

    def barrier(self, opts: Any = _BARRIER) -> Work:
        return self._start(opts, [], self._calls.barrier)

    # Names of these calls in later versions of torch.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def monitored_barrier(self, timeout: timedelta = NO_LIMIT, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; past the timeout rank 0 raises DeadlineError with the missing ranks.

        Args:
            timeout: by default the group's.
            wait_all_ranks: name all missing ranks instead of only the first.
        """
        # Rank 0 waits for a message from each rank; each other rank waits for rank 0's reply.
        limit_s = timeout.total_seconds() if timeout > NO_LIMIT else self.comm.failures.deadline_s
        token, missing = torch.zeros(1, dtype=torch.uint8), list(range(1, self.size())) if self.rank() == 0 else [0]

        def all_arrived() -> bool:
            """Receive only messages that have arrived: after a timeout no receive may be left to write to memory."""
            for rank in [peer for peer in missing if self.comm.probe(peer, BARRIER_TAG, block=False)]:
                self.comm.irecv(token, rank, BARRIER_TAG).wait()
                missing.remove(rank)
            return not missing

        if self.rank() > 0:
            self.comm.isend(token, 0, BARRIER_TAG).wait()
        try:
            wait_until(all_arrived, limit_s, str)
        except DeadlineError:
            reported = missing if wait_all_ranks else missing[:1]
            raise DeadlineError(
                f"rank{'s' * (len(reported) > 1)} {', '.join(map(str, reported))} did not reach the monitored barrier "
                f"of {self.group_name} within {limit_s:g} s. Check these ranks, or set a longer timeout."
            ) from None
        for rank in range(1, self.size() if self.rank() == 0 else 0):
            self.comm.isend(token, rank, BARRIER_TAG).wait()

    # --- messages -----------------------------------------------------------------------------------------------------
    @by_device
    def send(self, tensors: Sequence[Tensor], dest: int, tag: int = 0) -> Work:
        flat = tensors[0].detach().contiguous().view(-1)
        request = self.comm.isend(flat, dest, tag)
        return self._track(Work(tensors, request.done, request.wait))

    @by_device
    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        return self._track(self._receive(tensors, source, tag))

    @by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        receives: list[Work] = []  # one, as soon as a message has arrived

        def receive(block: bool) -> bool:
            arrived = None if receives else self.comm.probe(tag=tag, block=block)
            if arrived is not None:
                work.source = arrived.source
                receives.append(self._receive(tensors, arrived.source, tag))
            return bool(receives) and (receives[0].wait() if block else receives[0].is_completed())

        work = Work(tensors, lambda: receive(block=False), lambda: receive(block=True))
        return self._track(work)

    def _receive(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start a receive into a tensor of any strides."""
        out = tensors[0].detach()
        flat = out.view(-1) if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        copy_back = None if out.is_contiguous() else functools.partial(out.copy_, flat)
        request = self.comm.irecv(flat.view(-1), source, tag)
        return Work(tensors, request.done, request.wait, copy_back, source)

    def _track(self, work: Work) -> Work:
        """Return a work, after adding it to the coalesced call if one has been started."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # --- coalesced calls, and the end ---------------------------------------------------------------------------------
    def _start_coalescing(self, device: torch.device) -> None:
        if (nccl := self._group_for(device)) is not None:
            nccl._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        if (nccl := self._group_for(device)) is not None:
            return nccl._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return Work.of_all(works, None)

    def shutdown(self) -> None:
        """Collective. Wait for all calls, and release the group's resources; a second call does nothing.

        Raises the exception of an asynchronous call that was not waited for.
        """
        if isinstance(self.comm, Closed):
            return
        if self._nccl:
            self._nccl._get_backend(torch.device("cuda")).shutdown()
        calls, comm, self._store = self._calls, self.comm, None
        self.comm = self._calls = self._nccl = cast(Any, Closed("a process group", "destroyed"))
        calls.close()
        comm.close()

    abort = shutdown


_groups: WeakSet[MpiGroup] = WeakSet()


def _close_in_fork() -> None:
    """Let calls raise in a forked process, which must not use the MPI library of its parent."""
    for group in _groups:
        group.comm = group._calls = cast(Any, Closed("a process group", "in a forked process, as DataLoader workers"))


os.register_at_fork(after_in_child=_close_in_fork)


def require_same_world(world: Communicator, rank: int, size: int) -> None:
    """Raise WorldError if MPI has another number of ranks than torch.distributed."""
    if world.size != size:
        raise WorldError(
            f"the backend hpcdist must run under an MPI launcher, with {size} ranks; MPI has "
            f"{world.size}. torchrun starts ranks without MPI: use `mpirun -n {size} python script.py`, or srun."
        )


def gather_ranks(world: Communicator, rank: int) -> list[int]:
    """Collective. Return torch.distributed's rank of each of MPI's ranks; raise WorldError if two are the same."""
    ranks: list[int] = world.gather(rank)
    if sorted(ranks) != list(range(world.size)):
        raise WorldError(
            f"rank of init_process_group must be a different number from 0 to {world.size - 1} on each rank; got "
            f"{', '.join(map(str, ranks))} on MPI's ranks 0 to {world.size - 1}. Remove it: MPI knows the ranks."
        )
    return ranks


def _operation(options: Any) -> tuple[str, float | None]:
    """Return the name of the reduction in torch's options, and the factor of this rank's tensor (PREMUL_SUM only)."""
    reduce_op = options.reduceOp
    operation = OPERATIONS.get(reduce_op.op)
    if operation is None:
        raise ConfigError(f"op must be a supported ReduceOp; got {reduce_op.op}. Use ReduceOp.SUM, for example.")
    return operation, float(reduce_op.factor) if reduce_op.op == ReduceOp.PREMUL_SUM else None
