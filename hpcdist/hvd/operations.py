"""Collective calls on tensors, by Horovod's names: blocking or with a handle, in place or not, single or grouped."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hpcdist.hvd.compression import Compressed, Compression
from hpcdist.hvd.exceptions import HorovodInternalError
from hpcdist.hvd.named_calls import (
    OPERATIONS,
    Adasum,
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Barrier,
    Broadcast,
    CompressedAllreduce,
    Join,
    NamedCall,
    Reducescatter,
    Sum,
    scaled,
)
from hpcdist.hvd.named_calls import Max as Max
from hpcdist.hvd.named_calls import Min as Min
from hpcdist.hvd.named_calls import Product as Product
from hpcdist.hvd.state import ProcessSet, global_process_set, matcher_of, rank

# --- handles ----------------------------------------------------------------------------------------------------------
_handles: dict[int, tuple[Any, NamedCall, Callable[[Any], Any]]] = {}  # matcher, request, `finish` of `_start`
_next = itertools.count()


def _start(
    finish: Callable[[Any], Any], process_set: ProcessSet, name: str | None, kind: type[NamedCall], *args: Any
) -> int:
    """Submit a request; return a handle. `finish` converts the request's result to that of `synchronize`."""
    matcher = matcher_of(process_set)
    request = kind(process_set.next_name(kind.kind) if name is None else name, *args)
    matcher.submit(request)
    handle = next(_next)
    _handles[handle] = matcher, request, finish
    return handle


def poll(handle: int) -> bool:
    """Return whether a call is complete, so that `synchronize` returns immediately."""
    return _handles[handle][1].done


def synchronize(handle: int) -> Any:
    """Wait for a call, and return its result or raise its error on all ranks; the handle becomes invalid."""
    pending = _handles.pop(handle, None)
    if pending is None:
        return None
    matcher, request, finish = pending
    return finish(matcher.wait(request))


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach() if each.requires_grad else each for each in tensors]


class _Differentiable(torch.autograd.Function):
    """A call on tensors, and the call that computes their gradients from those of the results."""

    @staticmethod
    def forward(ctx: Any, call: Any, gradients_call: Any, *tensors: Any) -> Any:
        ctx.gradients_call = gradients_call
        return tuple(call(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.gradients_call(gradients)


# --- all-reduce -------------------------------------------------------------------------------------------------------
def _operation(average: bool | None, op: str | None) -> str:
    """Return the operation that `op`, or Horovod's older argument `average`, selects; by default Average."""
    if average is not None and op is not None:
        raise ValueError("average must not be given where op is; got both. Use op=hvd.Average.")
    chosen = (Average if average or average is None else Sum) if op is None else op
    if chosen not in (*OPERATIONS, Adasum):
        raise ValueError(f"op must be one of hvd's: Average, Sum, Adasum, Min, Max, Product; got {chosen!r}.")
    return chosen


def _allreduce(
    tensors: Sequence[Tensor], average: bool | None, name: str | None, op: str | None, prescale: float,
    postscale: float, process_set: ProcessSet, finish: Callable[[list[Tensor]], Any], in_place: bool = False,
) -> int:  # fmt: skip
    op, inputs = _operation(average, op), _detached(tensors)
    outs = inputs if in_place else [torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs]
    results = list(tensors) if in_place else outs
    return _start(lambda _: finish(results), process_set, name, Allreduce, inputs, outs, op, prescale, postscale)


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start an allreduce of a tensor, which stays unchanged; return a handle."""
    return _allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set, itemgetter(0))


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start an allreduce of a tensor, in place; return a handle."""
    scales = prescale_factor, postscale_factor
    return _allreduce([tensor], average, name, op, *scales, process_set, itemgetter(0), in_place=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start one allreduce of several tensors; return a handle."""
    return _allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start one allreduce of several tensors, in place; return a handle."""
    return _allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, list, in_place=True)


def compressed_allreduce_async_(
    tensors: Sequence[Tensor], name: str, op: str, compression: Compressed, process_set: ProcessSet
) -> int:
    """Start to sum or average several tensors in place, compressed jointly; return a handle."""
    return _start(lambda _: tensors, process_set, name, CompressedAllreduce, _detached(tensors), op, compression)


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: str | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Collective. Reduce a tensor over the ranks, by default to its mean; differentiable.

    Example on 1 rank:
        >>> import hpcdist.hvd as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum)
        tensor([1., 1.])
        >>> hvd.shutdown()
    """
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Collective. Reduce several tensors by one allreduce; differentiable."""

    def reduce(tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
        scales = prescale_factor, postscale_factor
        return synchronize(grouped_allreduce_async(tensors, average, name, op, *scales, process_set))

    def gradients_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        if op not in (None, Average, Sum):
            raise ValueError(f"op of tensors with gradients must be Average or Sum; got {op}. Give tensor.detach().")
        return reduce(gradients)

    compressed, contexts = zip(*map(compression.compress, tensors))
    results = _Differentiable.apply(lambda tensors: reduce(tensors, name), gradients_of, *compressed)
    return [compression.decompress(each, context) for each, context in zip(results, contexts)]


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Collective. Reduce a tensor over the ranks, in place; see `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **options))


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Collective. Reduce several tensors by one allreduce, in place; see `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to reduce a sparse tensor; return a function that waits for it and returns the sum or the mean."""
    if op not in (Average, Sum):
        raise ValueError(f"op of sparse tensors must be Average or Sum; got {op}. Convert the tensor to a dense one.")
    sparse = (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()
    handles = [
        allgather_async(sparse.indices().t().contiguous(), f"{name}.indices", process_set),
        allgather_async(sparse.values(), f"{name}.values", process_set),
    ]

    def wait() -> Tensor:
        indices, values = map(synchronize, handles)
        values = values / process_set.size() if op == Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return wait


# --- gather, broadcast, exchange, reduce-scatter ----------------------------------------------------------------------
def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, finish: Callable[[Any], Any]) -> int:
    if any(each.dim() == 0 for each in tensors):
        raise ValueError("a tensor that is gathered must have a dimension; got one without. Use tensor.view(1).")
    return _start(finish, process_set, name, Allgather, _detached(tensors))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to concatenate all ranks' tensors along the first dimension; return a handle."""
    return _gather([tensor], name, process_set, lambda result: result[0][0])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather several tensors of all ranks; return a handle."""
    return _gather(tensors, name, process_set, lambda result: [each for each, _ in result])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Collective. Concatenate all ranks' tensors along the first dimension; differentiable.

    Example on 1 rank:
        >>> import hpcdist.hvd as hvd
        >>> hvd.init()
        >>> hvd.allgather(torch.tensor([hvd.rank()]))
        tensor([0])
        >>> hvd.shutdown()
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Collective. Gather several tensors of all ranks; differentiable."""
    lengths_of: list[list[int]] = []  # by tensor: of each rank

    def gather(tensors: Sequence[Tensor]) -> list[Tensor]:
        results = synchronize(_gather(tensors, name, process_set, list))
        lengths_of.extend(lengths for _, lengths in results)
        return [gathered for gathered, _ in results]

    def gradients_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        # The mean, as Horovod's.
        means = synchronize(grouped_allreduce_async(gradients, op=Average, process_set=process_set))
        return [mean.split(lengths)[process_set.rank()] for mean, lengths in zip(means, lengths_of)]

    return list(_Differentiable.apply(gather, gradients_of, *tensors))


def _broadcast(tensor: Tensor, out: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank must be a rank of {process_set!r}; got {root_rank}.")
    root = process_set.ranks.index(root_rank)
    return _start(lambda _: out, process_set, name, Broadcast, tensor.detach(), out.detach(), root, root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast root_rank's tensor; return a handle. `tensor` stays unchanged."""
    out = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    return _broadcast(tensor, out, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast root_rank's tensor into `tensor` of all ranks; return a handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective. Return root_rank's tensor; differentiable."""

    def gradients_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        means = synchronize(grouped_allreduce_async(gradients, op=Average, process_set=process_set))
        return means if rank() == root_rank else [means[0] * 0]

    def send(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [synchronize(broadcast_async(tensors[0], root_rank, name, process_set))]

    return _Differentiable.apply(send, gradients_of, tensor)[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective. Copy root_rank's tensor into `tensor` of all ranks."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send `splits[r]` rows (by default equal numbers) to each rank r; return a handle of rows and counts."""
    ranks, rows = process_set.size(), tensor.shape[0]
    if splits is None and rows % ranks:
        raise ValueError(f"rows must be divisible by the number of ranks, {ranks}; got {rows}. Give splits.")
    counts = torch.full((ranks,), rows // ranks) if splits is None else torch.as_tensor(splits)
    if counts.is_floating_point() or counts.dtype == torch.bool or counts.dim() != 1 or len(counts) != ranks:
        raise ValueError(f"splits must be an integer for each of {ranks} ranks; got {splits}.")
    if int(counts.sum()) > rows or int(counts.min()) < 0:
        raise ValueError(f"splits must add up to at most the tensor's {rows} rows; got {counts.tolist()}.")
    sent = tensor.detach()[: int(counts.sum())]
    dtype = splits.dtype if isinstance(splits, Tensor) else torch.int32
    return _start(lambda found: (found[0], found[1].to(dtype)), process_set, name, Alltoall, sent, counts.tolist())


def alltoall(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective. Send rows of a tensor to all ranks; differentiable.

    Returns:
        The received rows; with splits, also the number of rows from each rank.
    """
    n_received: list[Tensor] = []

    def exchange(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows, counts = synchronize(alltoall_async(tensors[0], splits, name, process_set))
        n_received.append(counts)
        return [rows]

    def gradients_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        return [synchronize(alltoall_async(gradients[0], n_received[0], process_set=process_set))[0]]

    (out,) = _Differentiable.apply(exchange, gradients_of, tensor)
    return out if splits is None else (out, n_received[0])


def _reducescatter(
    tensors: Sequence[Tensor], name: str | None, op: str, prescale: float, postscale: float, process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> int:  # fmt: skip
    if op not in (Average, Sum):
        raise HorovodInternalError(f"op of reducescatter must be Average or Sum; got {op}.")
    if any(each.dim() == 0 for each in tensors):
        raise ValueError("a tensor that is scattered must have a dimension; got one without. Use tensor.view(1).")
    return _start(finish, process_set, name, Reducescatter, _detached(tensors), op, prescale, postscale)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: str = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start to reduce a tensor; each rank gets some rows of the result; return a handle."""
    return _reducescatter([tensor], name, op, prescale_factor, postscale_factor, process_set, itemgetter(0))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start to reduce several tensors; each rank gets some rows of each result; return a handle."""
    return _reducescatter(tensors, name, op, prescale_factor, postscale_factor, process_set, list)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Collective. Reduce a tensor, and return this rank's rows; differentiable."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Collective. Reduce several tensors, and return this rank's rows of each; differentiable."""

    def scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
        scales = prescale_factor, postscale_factor
        return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, *scales))

    def gradients_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        scale = prescale_factor * postscale_factor * (1 if op == Average else process_set.size())
        gathered = synchronize(grouped_allgather_async(gradients, process_set=process_set))
        return [scaled(each, scale) for each in gathered]

    compressed, contexts = zip(*map(compression.compress, tensors))
    results = _Differentiable.apply(scatter, gradients_of, *compressed)
    return [compression.decompress(each, context) for each, context in zip(results, contexts)]


# --- the end of a rank's samples --------------------------------------------------------------------------------------
def join(device: int = -1) -> int:
    """Collective. Take part in other ranks' allreduces, with zeros, until all ranks call it; return the last caller."""
    del device  # where Horovod allocates the zeros
    ranks, matcher = global_process_set, matcher_of(global_process_set)
    last = matcher.wait(matcher.submit(Join()))
    ranks.joins, ranks.unnamed = ranks.joins + 1, Counter()  # ranks may have run different numbers of calls
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective. Return when all ranks have called it."""
    synchronize(_start(lambda _: None, process_set, None, Barrier))
