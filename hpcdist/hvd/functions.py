"""Broadcasts of models, optimisers and objects, by Horovod's names."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hpcdist.hvd.operations import allgather, broadcast_, broadcast_async_, synchronize
from hpcdist.hvd.state import ProcessSet, global_process_set, rank
from hpcdist.session.values import AnyDtype


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Collective. Broadcast root_rank's parameters: `model.state_dict()` or `model.named_parameters()`.

    Example on 1 rank:
        >>> import hpcdist.hvd as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> hvd.broadcast_optimizer_state(sgd, root_rank=0)
        >>> hvd.shutdown()
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [(name, each) for name, each in named if torch.is_tensor(each)]
    for handle in [broadcast_async_(each, root_rank, name, process_set) for name, each in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Collective. Broadcast root_rank's state and options of an optimiser; raise ValueError for LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must not be LBFGS, whose state can't be broadcast; got one.")
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _ScriptPickler(AnyDtype, cloudpickle.Pickler):
    """Pickles functions of scripts too, unlike pickle."""


def _bytes_of(value: Any) -> Tensor:
    _ScriptPickler(file := io.BytesIO()).dump(value)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective. Return root_rank's object, sent by pickle."""
    name, here = name or "object", rank() == root_rank  # `obj` of other ranks is ignored
    data = _bytes_of(obj) if here else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    data = data if here else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if here else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collective. Return all ranks' objects, sent by pickle, in rank order."""
    name, data = name or "object", _bytes_of(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz", process_set).tolist()
    parts = allgather(data, f"{name}.t", process_set).split(lengths)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]
