"""Broadcast the model at the start, and average parameters and buffers over replicas."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hpcdist.comm.chunks import CHUNK, sums
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MismatchError
from hpcdist.model.flat import FlatModel
from hpcdist.model.flat_buffers import FlatBuffers
from hpcdist.model.slots import describe_difference
from hpcdist.strategies.common.gradients import shorten

_log = logging.getLogger("hpcdist")
_warned: WeakSet[FlatBuffers] = WeakSet()  # a warning about these has been logged


def broadcast_model(comm: Communicator, model: FlatModel) -> None:
    """Collective. Broadcast rank 0's parameters and buffers to all ranks.

    Raises:
        MismatchError: a rank's parameters or buffers differ from rank 0's in name, shape or dtype.
    """
    _require_equal_models(comm, model)
    for tensor in (*model.params, *model.frozen, *model.buffers):
        comm.broadcast(tensor, 0)
    flat_parameters = {id(slot.tensor) for slot in (*model.slots, *model.frozen_slots)}
    for tensor in (p.detach() for p in model.module.parameters() if id(p) not in flat_parameters):  # not trained here
        flat = tensor.contiguous().reshape(-1)
        comm.broadcast(flat, 0)
        tensor.copy_(flat.view(tensor.shape))


def _require_equal_models(comm: Communicator, model: FlatModel) -> None:
    text = model.description()
    signatures = comm.gather(hashlib.sha256(text.encode()).hexdigest())
    different = [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]
    if not different:
        return
    descriptions = comm.gather(text if comm.rank in (0, different[0]) else "")  # long: only of the two to compare
    where = describe_difference(descriptions[0], descriptions[different[0]], "on rank 0", f"on rank {different[0]}")
    others = f", and those of {shorten([f'rank {rank}' for rank in different[1:]])}," if different[1:] else ""
    raise MismatchError(
        f"the model must be the same on every rank; rank {different[0]}'s parameters or buffers{others} differ from "
        f"rank 0's in name, shape, dtype or requires_grad, first {where}. Build it from the same code and options "
        "everywhere."
    )


def with_buffers(strategy: Any, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Collective. Return `params`, and the buffers: by kind the mean over the workers, or the first worker's value."""
    comm, workers, flat = strategy.comm, _workers(strategy), strategy.model.flat_buffers
    local_buffers, buffers = strategy.model.buffers, []
    for tensor, kind in zip(local_buffers, flat.kinds, strict=True):
        (value,) = mean_over(comm, [tensor], workers) if kind == "mean" else [tensor.clone()]
        if kind != "mean":
            comm.broadcast(value, workers[0])
        buffers.append(value)
    warn_differences(comm, flat, local_buffers, workers)
    return params, buffers


def warn_differences(
    comm: Communicator, buffers: FlatBuffers, flats: Sequence[Tensor], ranks: Sequence[int], counts: bool = True
) -> None:
    """Collective. Warn once if buffers of kind "first", in `flats`, differ among those `ranks` that pass `counts`."""
    slots = [slot for slot in buffers.slots if buffers.kinds[slot.group] == "first"]
    if not slots or buffers in _warned:
        return
    local_sums = [repr(sums([slot.view(flats).reshape(-1)])) for slot in slots] if counts else []
    gathered = comm.gather(local_sums)
    sums_of_ranks = [gathered[rank] for rank in ranks if gathered[rank]]
    different = [slot.name for slot, of_slot in zip(slots, zip(*sums_of_ranks)) if len(set(of_slot)) > 1]
    if different:
        _warned.add(buffers)
    if different and comm.rank == ranks[0]:
        _log.warning(
            "Ranks have changed buffers differently, and the first worker's are used: %s. To combine the values of all "
            "ranks, call hpcdist.allgather where the model changes them; or choose by DistributedOptimizer(..., "
            "buffers={name: 'mean'}), or 'own'.",
            shorten(different),
        )


def frozen_consensus(strategy: Any) -> list[Tensor] | None:
    """Collective. Average the workers' frozen parameters, shaped like `model.frozen`; None where all are equal.

    A loop may change frozen parameters, for example those of a moving average of the model.
    """
    comm = strategy.comm
    gathered = comm.gather(repr(sums(strategy.model.frozen)))
    if len({gathered[rank] for rank in comm.failures.alive}) == 1:
        return None
    return mean_over(comm, strategy.model.frozen, _workers(strategy))


def _workers(strategy: Any) -> list[int]:
    lost = strategy.comm.failures.lost  # few: `in alive` would compare with every rank
    return [rank for rank in strategy.config.workers(strategy.comm.size) if rank not in lost]


def mean_over(comm: Communicator, tensors: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Collective. Average each tensor over `ranks`; return new tensors, the same on every rank."""
    # Summed in float64, so that the mean of equal float32 replicas is the same float32 to the bit.
    means = []
    for tensor in tensors:
        mean = tensor.clone() if comm.size == 1 else torch.empty_like(tensor)
        pairs = zip(torch.split(mean, CHUNK), torch.split(tensor, CHUNK), strict=True)
        for part, values in pairs if mean.numel() and comm.size > 1 else ():
            total = values.to(torch.complex128 if part.is_complex() else torch.float64, copy=True)
            if comm.rank not in ranks:
                total.zero_()
            comm.allreduce(total)
            total /= len(ranks)
            part.copy_(total if part.is_floating_point() or part.is_complex() else total.round())
        means.append(mean)
    return means
