"""Exchange values between ranks in the user's own loop: broadcast, allreduce, allgather, barrier, metric."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError, MismatchError, UnknownNameError
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.session.world import current

Op = Literal["mean", "sum", "min", "max"]


def _ranks() -> Communicator:
    """Return all ranks; in a training loop with servers the workers, as servers don't run its body."""
    session = current()
    session.calls += 1
    return session.group or session.comm


def barrier() -> None:
    """Collective. Wait for all ranks."""
    _ranks().barrier()


def broadcast(value: Any, root: int = 0) -> Any:
    """Collective. Replace every rank's `value` by that of rank `root`, and return it.

    A tensor, a module (parameters and buffers) or a list or dict of tensors is overwritten in place; with a
    model in stages each rank gets the values of its own stage in root's replica. Any other value that can be pickled
    (numbers, strings, lists, dicts...) is returned as a new value, with the type that it has on `root`.
    """
    comm = _ranks()
    source = _place(comm, root)
    if isinstance(value, Pipeline):
        session = current()
        comm, source = session.peers or session.outer, source // session.stages
    tensors = _tensors(value)
    if tensors is None:
        return broadcast_in(comm, value, source)
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        comm.broadcast(flat, source)
        tensor.detach().copy_(flat.view(tensor.shape))
    return value


def broadcast_in(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Collective. Return the value of rank `root` of `comm`, on all of its ranks."""
    return pickle.loads(comm.gather(pickle.dumps(value) if comm.rank == root else b"")[root])


def _place(comm: Communicator, root: int) -> int:
    """Convert rank `root` to its number among the ranks that take part."""
    session = current()
    if comm is session.comm:
        return root
    ranks = session.loader.workers
    if root not in ranks:
        raise ConfigError(
            f"root must be a worker inside the training loop, where ranks that serve don't take part; got {root}. "
            f"Use {ranks[0]}, or broadcast outside of the loop."
        )
    return ranks.index(root)


def _tensors(value: Any) -> list[Tensor] | None:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, (list, tuple)) and items and all(isinstance(item, Tensor) for item in items):
        return list(items)
    return None


def allreduce(value: Any, op: Op = "mean") -> Any:
    """Collective. Return the mean of all ranks' values, or their sum, minimum or maximum, as a new value.

    The result has the type of the value: a tensor of the same shape and dtype, a number, or a list, tuple or dict of
    results. Inside a training loop whose strategy has servers, only the workers take part.

    Raises:
        UnknownNameError: no such op.
        ConfigError: op is the mean of a tensor of integers, which can't hold it.
        MismatchError: shapes differ.
    """
    if op not in get_args(Op):
        raise UnknownNameError("op", str(op), get_args(Op))
    return _each(value, lambda leaf: _reduce(leaf, op))


def _each(value: Any, work: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _each(item, work) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, work) for item in value)
    return work(value)


def _reduce(value: Any, op: Op) -> Any:
    if not isinstance(value, Tensor):
        result = _reduce(torch.tensor(float(value), dtype=torch.float64), op).item()
        whole = isinstance(value, int) and op != "mean"
        return int(result) if whole else result
    if op == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise ConfigError(
            f"op must be sum, min or max for a tensor of {value.dtype}, which can't hold a mean; got mean. Convert it "
            "(.float()), or take the sum."
        )
    comm = _ranks()
    _require_same_shape(comm, value)
    if op in ("min", "max"):
        stacked = torch.stack(_gathered(comm, value))
        return stacked.amin(dim=0) if op == "min" else stacked.amax(dim=0)
    flat = value.detach().clone().contiguous().reshape(-1)
    comm.allreduce(torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat)
    return (flat / len(comm.failures.living) if op == "mean" else flat).view(value.shape)


def _require_same_shape(comm: Communicator, value: Tensor) -> None:
    kinds = comm.gather(f"{value.dtype} {tuple(value.shape)}")
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise MismatchError(
            f"value must have the same shape on every rank; got {kinds[0]} on rank 0 and {kinds[odd]} on rank {odd}. "
            "Use allgather for values of different lengths."
        )


def _gathered(comm: Communicator, value: Tensor) -> list[Tensor]:
    flat = value.detach().cpu().contiguous()
    return [tensor.to(value.device) for tensor in _values_of_all(comm, flat)]


def _values_of_all(comm: Communicator, value: Any) -> list[Any]:
    pickles = comm.gather(pickle.dumps(value))
    return [pickle.loads(pickles[rank]) for rank in comm.failures.living]


def allgather(value: Any) -> Any:
    """Collective. Return all ranks' values, in rank order, on every rank.

    Tensors are joined along their first dimension, whose length may differ between ranks; scalars become a vector. A
    dict gives a dict of results. Any other value that can be pickled gives a list with one entry per rank.
    """
    if isinstance(value, Mapping):
        return {key: allgather(item) for key, item in value.items()}
    comm = _ranks()
    if not isinstance(value, Tensor):
        return _values_of_all(comm, value)
    tensors = _gathered(comm, value)
    return torch.cat(tensors) if value.dim() else torch.stack(tensors)


def metric(value: Any, weight: float = 1.0) -> Any:
    """Collective. Return the weighted mean over all ranks of a figure such as a loss or an accuracy, on every rank.

    Pass this rank's own mean, and as `weight` the number of its samples. With weight 0, as on a rank that serves, the
    value does not matter. A dict gives a dict. If all weights are 0 the result is NaN.
    """
    if isinstance(value, Mapping):
        return {key: metric(item, weight) for key, item in value.items()}
    part = [float(value) * weight, float(weight)] if weight else [0.0, 0.0]
    sums = torch.tensor(part, dtype=torch.float64)
    _ranks().allreduce(sums)
    total, weights = sums.tolist()
    return total / weights if weights else math.nan
