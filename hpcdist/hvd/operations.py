"""Collective calls on tensors, by Horovod's names: blocking or with a handle, in place or not, alone or in groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.hvd.compression import Compressed, Compression
from hpcdist.hvd.exceptions import HorovodInternalError
from hpcdist.hvd.matching import Join, NamedCall
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
    Reducescatter,
    Sum,
    scaled,
)
from hpcdist.hvd.named_calls import Max as Max
from hpcdist.hvd.named_calls import Min as Min
from hpcdist.hvd.named_calls import Product as Product
from hpcdist.hvd.state import ProcessSet, global_process_set, matcher_of

# --- handles ----------------------------------------------------------------------------------------------------------
_handles: dict[int, tuple[Any, NamedCall, Callable[[Any], Any]]] = {}
_next = itertools.count()


def _start(
    result: Callable[[Any], Any], process_set: ProcessSet, name: str | None, kind: type[NamedCall], *args: Any
) -> int:
    """Hand a request in; return a handle, by which `result`, of what is found, is asked for."""
    matcher = matcher_of(process_set)
    request = kind(process_set.number(kind.kind) if name is None else name, *args)
    matcher.submit(request)
    handle = next(_next)
    _handles[handle] = matcher, request, result
    return handle


def poll(handle: int) -> bool:
    """Tell whether a call is over, so that `synchronize` returns at once."""
    return _handles[handle][1].over


def synchronize(handle: int) -> Any:
    """Wait for a call, and return its result; the handle is not valid any more.

    Raises:
        HorovodInternalError: the call has failed, on all ranks alike.
    """
    found = _handles.pop(handle, None)
    if found is None:
        return None
    matcher, request, result = found
    return result(matcher.wait(request))


def _first(found: Any) -> Any:
    return found[0]


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach() if one.requires_grad else one for one in tensors]


# --- all-reduce -------------------------------------------------------------------------------------------------------
def _operation(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise ValueError("average must not be given where op is; got both. Use op=hvd.Average.")
    chosen = (Average if average or average is None else Sum) if op is None else op
    if chosen not in (*OPERATIONS, Adasum):
        raise ValueError(f"op must be one of hvd's: Average, Sum, Adasum, Min, Max, Product; got {chosen!r}.")
    return chosen


def _allreduce(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], name: str | None, op: str, prescale: float, postscale: float,
    process_set: ProcessSet, result: Callable[[Any], Any],
) -> int:  # fmt: skip
    own = _flat(tensors)
    into = own if outs is tensors else _flat(outs)
    return _start(result, process_set, name, Allreduce, own, into, op, prescale, postscale)


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to combine a tensor over the ranks; return a handle. The tensor keeps its elements."""
    op = _operation(average, op)
    out = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    return _allreduce([tensor], [out], name, op, prescale_factor, postscale_factor, process_set, _first)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to combine a tensor over the ranks, in place; return a handle."""
    op = _operation(average, op)
    own = [tensor]
    return _allreduce(own, own, name, op, prescale_factor, postscale_factor, process_set, lambda _: tensor)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to combine several tensors together; return a handle."""
    op = _operation(average, op)
    outs = [torch.empty_like(one.detach(), memory_format=torch.contiguous_format) for one in tensors]
    return _allreduce(tensors, outs, name, op, prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to combine several tensors together, in place; return a handle."""
    op = _operation(average, op)
    given = list(tensors)
    return _allreduce(given, given, name, op, prescale_factor, postscale_factor, process_set, lambda _: given)


def compressed_allreduce_async_(
    tensors: Sequence[Tensor], name: str, op: str, compression: Compressed, process_set: ProcessSet
) -> int:
    """Begin to sum or average several tensors in place, compressed together; return a handle."""
    return _start(lambda _: tensors, process_set, name, CompressedAllreduce, _flat(tensors), op, compression)


class _AllreduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, name: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.given = op, prescale, postscale, process_set
        return tuple(synchronize(grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale, process_set = ctx.given
        handle = grouped_allreduce_async(gradients, None, None, op, prescale, postscale, process_set)
        return None, None, None, None, None, *synchronize(handle)


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: str | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Collective. Combine a tensor over the ranks, by default to its mean; gradients flow through."""
    (found,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return found


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Collective. Combine several tensors together; gradients flow through."""
    op = _operation(average, op)
    small, contexts = zip(*map(compression.compress, tensors))
    found = _AllreduceFunction.apply(op, name, prescale_factor, postscale_factor, process_set, *small)
    return [compression.decompress(one, context) for one, context in zip(found, contexts)]


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Collective. Combine a tensor over the ranks, in place; see `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **options))


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Collective. Combine several tensors together, in place; see `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to combine a sparse tensor; return a function that waits for it, and returns the sum or the mean."""
    if op not in (Average, Sum):
        raise ValueError(f"op of sparse tensors must be Average or Sum; got {op}. Make the tensor dense.")
    own = tensor if tensor.is_sparse else tensor.to_sparse()
    own = own.coalesce()
    handles = [
        allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set),
        allgather_async(own.values(), f"{name}.values", process_set),
    ]

    def wait() -> Tensor:
        places, values = map(synchronize, handles)
        values = values / process_set.size() if op == Average else values
        return torch.sparse_coo_tensor(places.t(), values, tensor.shape)

    return wait


# --- gather, broadcast, exchange, reduce-scatter ----------------------------------------------------------------------
def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, result: Callable[[Any], Any]) -> int:
    if any(one.dim() == 0 for one in tensors):
        raise ValueError("a tensor that is gathered must have a dimension; got one without. Use tensor.view(1).")
    return _start(result, process_set, name, Allgather, _flat(tensors))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to collect all ranks' tensors, one after the other along the first dimension; return a handle."""
    return _gather([tensor], name, process_set, lambda found: found[0][0])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to collect several tensors of all ranks; return a handle."""
    return _gather(tensors, name, process_set, lambda found: [one for one, _ in found])


class _AllgatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        found = synchronize(_gather(tensors, name, process_set, list))
        ctx.lengths, ctx.process_set = [lengths for _, lengths in found], process_set
        return tuple(one for one, _ in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        handle = grouped_allreduce_async(gradients, op=Average, process_set=ctx.process_set)
        place, parts = ctx.process_set.rank(), []
        for total, lengths in zip(synchronize(handle), ctx.lengths):
            parts.append(total.split(lengths)[place])
        return None, None, *parts


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Collective. Collect all ranks' tensors along the first dimension; gradients flow through."""
    return _AllgatherFunction.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Collective. Collect several tensors of all ranks; gradients flow through."""
    return list(_AllgatherFunction.apply(name, process_set, *tensors))


def _broadcast(
    tensor: Tensor, out: Tensor, root_rank: int, name: str | None, process_set: ProcessSet,
    result: Callable[[Any], Any],
) -> int:  # fmt: skip
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank must be a rank of {process_set!r}; got {root_rank}.")
    place = process_set.ranks.index(root_rank)
    return _start(result, process_set, name, Broadcast, tensor.detach(), out.detach(), place, root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy root_rank's tensor to all; return a handle. The tensor keeps its elements."""
    out = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
    return _broadcast(tensor, out, root_rank, name, process_set, _first)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy root_rank's tensor into everyone's; return a handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set, lambda _: tensor)


class _BroadcastFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Any:
        ctx.given = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        root_rank, process_set = ctx.given
        total = synchronize(allreduce_async(gradients[0], op=Average, process_set=process_set))
        here = process_set.ranks[process_set.rank()] == root_rank
        return total if here else total * 0, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective. Return root_rank's tensor; gradients flow through."""
    return _BroadcastFunction.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective. Copy root_rank's tensor into everyone's."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to send rows of a tensor to all ranks; return a handle.

    Args:
        splits: how many rows each rank gets; by default as many.
    """
    ranks, rows = process_set.size(), tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(f"rows must be as many for each of {ranks} ranks; got {rows}. Give splits.")
        return _start(_first, process_set, name, Alltoall, tensor.detach(), [rows // ranks] * ranks)
    numbers = torch.as_tensor(splits)
    if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.dim() != 1 or len(numbers) != ranks:
        raise ValueError(f"splits must be an integer for each of {ranks} ranks; got {splits}.")
    if int(numbers.sum()) > rows or int(numbers.min()) < 0:
        raise ValueError(f"splits must be of at most {rows} rows in all, the tensor's; got {numbers.tolist()}.")
    used = tensor.detach()[: int(numbers.sum())]
    return _start(tuple, process_set, name, Alltoall, used, numbers.tolist())


class _AlltoallFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        sent = torch.full((process_set.size(),), tensor.shape[0] // process_set.size()) if splits is None else splits
        if splits is None and tensor.shape[0] % process_set.size():
            alltoall_async(tensor, None, name, process_set)  # raises
        out, received = synchronize(alltoall_async(tensor, sent, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found, _ = synchronize(alltoall_async(gradients[0], ctx.received, process_set=ctx.process_set))
        return found, None, None, None


def alltoall(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective. Send rows of a tensor to all ranks; gradients flow through.

    Returns:
        What has been received; where splits are given, with how many rows came from each rank.
    """
    out, received = _AlltoallFunction.apply(tensor, splits, name, process_set)
    return out if splits is None else (out, received)


def _reducescatter(
    tensors: Sequence[Tensor], name: str | None, op: str, prescale: float, postscale: float, process_set: ProcessSet,
    result: Callable[[Any], Any],
) -> int:  # fmt: skip
    if op not in (Average, Sum):
        raise HorovodInternalError(f"op of reducescatter must be Average or Sum; got {op}.")
    if any(one.dim() == 0 for one in tensors):
        raise ValueError("a tensor that is scattered must have a dimension; got one without. Use tensor.view(1).")
    return _start(result, process_set, name, Reducescatter, _flat(tensors), op, prescale, postscale)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: str = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin to combine a tensor, of whose rows each rank gets some; return a handle."""
    return _reducescatter([tensor], name, op, prescale_factor, postscale_factor, process_set, _first)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin to combine several tensors, of whose rows each rank gets some; return a handle."""
    return _reducescatter(tensors, name, op, prescale_factor, postscale_factor, process_set, list)


class _ReducescatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, name: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Any) -> Any:
        ctx.given = op, process_set, prescale, postscale
        handle = grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, process_set, prescale, postscale = ctx.given
        scale = prescale * postscale * (1 if op == Average else process_set.size())
        found = synchronize(grouped_allgather_async(gradients, process_set=process_set))
        return None, None, None, None, None, *(scaled(one, scale) for one in found)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Collective. Combine a tensor, and return this rank's rows; gradients flow through."""
    (found,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return found


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: str = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Collective. Combine several tensors, and return this rank's rows of each; gradients flow through."""
    small, contexts = zip(*map(compression.compress, tensors))
    found = _ReducescatterFunction.apply(op, name, process_set, prescale_factor, postscale_factor, *small)
    return [compression.decompress(one, context) for one, context in zip(found, contexts)]


# --- the end of a rank's samples --------------------------------------------------------------------------------------
def join(device: int = -1) -> int:
    """Collective. Take part in others' all-reduces, with zeros, until all ranks have called it.

    Returns:
        The last rank that did.
    """
    del device  # where Horovod allocates zeros
    ranks, matcher = global_process_set, matcher_of(global_process_set)
    last = matcher.wait(matcher.submit(Join()))
    ranks.joins, ranks.unnamed = ranks.joins + 1, Counter()  # till then ranks may have made more calls than others
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective. Return once all ranks have called it."""
    synchronize(_start(lambda _: None, process_set, None, Barrier))
