"""Exchange values between ranks in the user's training loop: broadcast, allreduce, allgather, barrier, metric."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.collectives.calls.reduction import reduction
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import SIGNED, WIDE
from hpcdist.errors import ConfigError, MismatchError, UnknownNameError
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.session.world import current

Op = Literal["mean", "sum", "min", "max"]


def _ranks() -> Communicator:
    """Return all ranks; in a training loop with servers only the workers, because servers don't run its body."""
    session = current()
    session.calls += 1
    return session.group or session.comm


def barrier() -> None:
    """Collective. Wait until all ranks have called it.

    Example:
        >>> hd.barrier()
    """
    _ranks().barrier()


def broadcast(value: Any, root: int = 0) -> Any:
    """Collective. Return the value of rank `root` on every rank.

    A tensor, a module (parameters and buffers) or a list or dict of tensors is overwritten in place; for a model in
    stages each rank gets the values of its stage in root's replica. Any other value that can be pickled (numbers,
    strings, lists, dicts...) is returned as a new value, with the type that it has on `root`.

    Example:
        >>> hd.broadcast({"seed": hd.rank()}, root=1)
        {'seed': 1}
    """
    comm = _ranks()
    source = _group_rank(comm, root)
    if isinstance(value, Pipeline):
        session = current()
        comm, source = session.peers or session.outer, source // session.stages
    tensors = _tensors(value)
    if tensors is None:
        return broadcast_in(comm, value, source)
    for tensor in tensors:
        if tensor.layout is torch.strided:
            flat = tensor.detach().contiguous().reshape(-1)
            comm.broadcast(flat, source)
            tensor.detach().copy_(flat.view(tensor.shape))
        else:
            received = broadcast_in(comm, tensor.detach().to_sparse_coo(), source)
            with torch.no_grad():  # a detached tensor would not get the new indices
                tensor.copy_(received.to_sparse(layout=tensor.layout))
    return value


def broadcast_in(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Collective. Return the value of rank `root` of `comm`, on all of its ranks."""
    return pickle.loads(comm.gather(_pickled(value) if comm.rank == root else b"")[root])


class AnyDtype:
    """Lets a pickler take tensors of all dtypes: those that torch can't pickle (unsigned, narrow) as integers."""

    def reducer_override(self, value: Any) -> Any:
        narrow = type(value) is Tensor and (value.dtype in SIGNED or value.dtype in WIDE)
        if not narrow or value.layout is not torch.strided or value.requires_grad:
            return getattr(super(), "reducer_override", lambda _: NotImplemented)(value)  # cloudpickle has one
        int_dtype = getattr(torch, f"int{8 * value.itemsize}")
        return Tensor.view, (value.resolve_conj().resolve_neg().view(int_dtype), value.dtype)


class _Pickler(AnyDtype, pickle.Pickler):
    """Pickles by reference, as pickle does."""


def _pickled(value: Any) -> bytes:
    _Pickler(file := io.BytesIO()).dump(value)
    return file.getvalue()


def _group_rank(comm: Communicator, root: int) -> int:
    """Convert rank `root` of all ranks to its rank in `comm`."""
    session = current()
    if comm is session.comm:
        return root
    ranks = session.loader.workers
    if root not in ranks:
        raise ConfigError(
            f"root must be a worker inside the training loop, where server ranks don't take part; got {root}. "
            f"Use {ranks[0]}, or broadcast outside of the loop."
        )
    return ranks.index(root)


def _tensors(value: Any) -> list[Tensor] | None:
    """Return the tensors of a tensor, module, list or dict of tensors; None for any other value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, (list, tuple)) and items and all(isinstance(item, Tensor) for item in items):
        return list(items)
    return None


def allreduce(value: Any, op: Op = "mean") -> Any:
    """Collective. Return the mean, sum, minimum or maximum of all ranks' values, as a new value.

    The result has the type of the value: a tensor or NumPy array of the same shape and dtype, a number, or a list,
    tuple or dict of results. Python integers are combined exactly; their mean is a float. Integer tensors wrap around
    on overflow; tensors of 16- and 8-bit floats are combined in float32 and rounded once. NaN propagates in all
    operations. Inside a training loop whose strategy has servers, only the workers take part.

    Example:
        >>> hd.allreduce(torch.tensor([1.0, hd.rank()]), op="sum")
        tensor([2., 1.])

    Raises:
        UnknownNameError: no such op.
        ConfigError: op is mean for a tensor of integers, or is not defined for the dtype; a result is an integer beyond
            int64; or the value has another type.
        MismatchError: shapes differ.
    """
    if op not in get_args(Op):
        raise UnknownNameError("op", str(op), get_args(Op))
    return _map_leaves(value, lambda leaf: _reduce(leaf, op))


def _map_leaves(value: Any, work: Callable[[Any], Any]) -> Any:
    """Apply a collective `work` to each value in nested containers, which have the same structure on all ranks."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, work) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        results = [_map_leaves(item, work) for item in value]
        return type(value)(*results) if hasattr(value, "_fields") else type(value)(results)  # a namedtuple
    return work(value)


def _reduce(value: Any, op: Op) -> Any:
    """Collective. Reduce a single tensor, array or number."""
    if isinstance(value, np.ndarray):
        return _reduce(torch.from_numpy(value.copy()), op).numpy()
    if not isinstance(value, Tensor):
        return _reduce_numbers(_same_kind(_number(value)), op)
    if value.layout is not torch.strided:
        return _reduce(value.to_dense(), op).to_sparse(layout=value.layout)
    if op == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise ConfigError(
            f"op must be sum, min or max for a tensor of {value.dtype}, which can't hold a mean; got mean. Convert it "
            "(.float()), or take the sum."
        )
    combine = reduction(op, value.dtype)
    _same_kind(f"{value.dtype} {tuple(value.shape)}")
    comm, wide_dtype = _ranks(), WIDE.get(value.dtype, value.dtype)
    if op in ("min", "max") or value.dtype is torch.bool:
        result = torch.empty(value.numel(), dtype=value.dtype)
        combine([each.reshape(-1) for each in _values_of_all(comm, value.detach().cpu())], result)
        return result.view(value.shape).to(value.device)
    # A mean is rounded once, after the division: the sum of float16 values may overflow although their mean doesn't.
    total = torch.empty(value.shape, dtype=wide_dtype, device=value.device).copy_(value.detach())
    comm.allreduce(total.view(-1))
    return (total.div_(len(comm.failures.alive)) if op == "mean" else total).to(value.dtype)


def _number(value: Any) -> int | float:
    """Convert to a Python number; integers stay integers."""
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, int) and not hasattr(value, "__float__"):
        raise ConfigError(
            "value must be a tensor, a NumPy array, a real number, or a list, tuple or dict of them; got "
            f"{type(value).__name__}. Use allgather for other values."
        )
    return value if isinstance(value, int) else float(value)


def _reduce_numbers(values: Sequence[int | float], op: Op) -> int | float:
    """Combine the numbers of all ranks, on each rank, in Python: its integers don't overflow."""
    if op in ("sum", "mean"):
        result = sum(values) / len(values) if op == "mean" else sum(values)
    else:
        result = next((value for value in values if value != value), (min if op == "min" else max)(values))
    if isinstance(result, int) and not -(2**63) <= result < 2**63:
        raise ConfigError(
            f"the {op} of integers must be within int64, from -2**63 to 2**63 - 1; got {result}. Convert the values to "
            "float, or use allgather."
        )
    return result


def _same_kind(value: Any) -> list[Any]:
    """Collective. Exchange numbers, or a tensor's dtype and shape; raise MismatchError if dtypes or shapes differ."""
    comm = _ranks()
    values = _values_of_all(comm, value)
    first, *others = [each if isinstance(each, str) else "a number" for each in values]
    for rank, kind in zip(comm.failures.alive[1:], others, strict=True):
        if kind != first:
            raise MismatchError(
                f"value must have the same shape on every rank; got {first} on rank {comm.failures.alive[0]} and "
                f"{kind} on rank {rank}. Use allgather for values of different lengths."
            )
    return values


def _values_of_all(comm: Communicator, value: Any) -> list[Any]:
    pickles = comm.gather(_pickled(value))
    return [pickle.loads(pickles[rank]) for rank in comm.failures.alive]


def allgather(value: Any) -> Any:
    """Collective. Return the values of all ranks, in rank order, on every rank.

    Tensors are concatenated along their first dimension, whose length may differ between ranks; scalars become a
    vector. A dict gives a dict of results. Any other value that can be pickled gives a list with one entry per rank.

    Example:
        >>> hd.allgather(torch.tensor(hd.rank()))
        tensor([0, 1])
    """
    if isinstance(value, Mapping):
        return {key: allgather(item) for key, item in value.items()}
    comm = _ranks()
    if not isinstance(value, Tensor):
        return _values_of_all(comm, value)
    if value.layout is not torch.strided:
        joined = torch.cat(_values_of_all(comm, value.detach().cpu().to_sparse_coo()))
        return joined.to_sparse(layout=value.layout).to(value.device)
    tensors = _values_of_all(comm, value.detach().cpu().contiguous())
    return (torch.cat(tensors) if value.dim() else torch.stack(tensors)).to(value.device)


def metric(value: Any, weight: float = 1.0) -> Any:
    """Collective. Return the weighted mean over all ranks of a loss, an accuracy or another metric, on every rank.

    Pass the mean over this rank's samples, and the number of samples as `weight`. With weight 0, as on a server rank,
    the value is ignored. A dict gives a dict. If all weights are 0 the result is NaN.

    Example:
        >>> hd.metric(0.9 if hd.rank() == 0 else 0.6, weight=200 if hd.rank() == 0 else 100)
        0.8
    """
    if isinstance(value, Mapping):
        return {key: metric(item, weight) for key, item in value.items()}
    part = [float(value) * weight, float(weight)] if weight else [0.0, 0.0]
    sums = torch.tensor(part, dtype=torch.float64)
    _ranks().allreduce(sums)
    total, weights = sums.tolist()
    return total / weights if weights else math.nan
