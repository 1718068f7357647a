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
    """Collective. Copy root_rank's parameters, `model.state_dict()` or `model.named_parameters()`, to all ranks."""
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [(name, one) for name, one in named if torch.is_tensor(one)]
    for handle in [broadcast_async_(one, root_rank, name, process_set) for name, one in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Collective. Copy root_rank's state of an optimiser, and its options, to all ranks.

    Raises:
        ValueError: the optimiser is LBFGS, whose state is of other kinds.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must not be LBFGS, whose state can't be broadcast; got one.")
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _ScriptPickler(AnyDtype, cloudpickle.Pickler):
    """Pickles functions of scripts, too."""


def _bytes_of(value: Any) -> Tensor:
    _ScriptPickler(file := io.BytesIO()).dump(value)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective. Return root_rank's object, which is pickled."""
    name, here = name or "object", rank() == root_rank  # whatever others have in place of root's
    data = _bytes_of(obj) if here else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    data = data if here else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if here else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collective. Return all ranks' objects, which are pickled."""
    name, data = name or "object", _bytes_of(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz", process_set).tolist()
    parts = allgather(data, f"{name}.t", process_set).split(lengths)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]
