"""Give all replicas the same model at the start, and compute the model that they stand for together."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

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


def spread_model(comm: Communicator, model: FlatModel) -> None:
    """Collective. Give all ranks the parameters and buffers of rank 0.

    Raises:
        MismatchError: a rank has parameters or buffers of other names, shapes or types than rank 0.
    """
    _require_equal_models(comm, model)
    for tensor in (*model.params, *model.frozen, *model.buffers):
        comm.broadcast(tensor, 0)
    own = {id(slot.tensor) for slot in (*model.slots, *model.frozen_slots)}
    for tensor in (p.detach() for p in model.module.parameters() if id(p) not in own):  # which nobody trains here
        flat = tensor.contiguous().reshape(-1)
        comm.broadcast(flat, 0)
        tensor.copy_(flat.view(tensor.shape))


def _require_equal_models(comm: Communicator, model: FlatModel) -> None:
    text = model.description()
    signatures = comm.gather(hashlib.sha256(text.encode()).hexdigest())
    odd = [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]
    if not odd:
        return
    descriptions = comm.gather(text if comm.rank in (0, odd[0]) else "")
    where = describe_difference(descriptions[0], descriptions[odd[0]], "on rank 0", f"on rank {odd[0]}")
    others = f", and those of {shorten([f'rank {rank}' for rank in odd[1:]])}," if odd[1:] else ""
    raise MismatchError(
        f"the model must be the same on every rank; rank {odd[0]}'s parameters or buffers{others} differ from rank 0's "
        f"in name, shape, dtype or requires_grad, first {where}. Build it from the same code and options everywhere."
    )


def with_buffers(strategy: Any, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Collective. Return the given parameters, and buffers: means of the workers', or the first one's."""
    comm, workers, flat = strategy.comm, _workers(strategy), strategy.model.flat_buffers
    own, buffers = strategy.model.buffers, []
    for tensor, kind in zip(own, flat.kinds, strict=True):
        (value,) = mean_over(comm, [tensor], workers) if kind == "mean" else [tensor.clone()]
        if kind != "mean":
            comm.broadcast(value, workers[0])
        buffers.append(value)
    tell_differences(comm, flat, own, workers)
    return params, buffers


def tell_differences(
    comm: Communicator, buffers: FlatBuffers, flats: Sequence[Tensor], ranks: Sequence[int], counts: bool = True
) -> None:
    """Collective. Say once where `ranks`, all but those with counts=False, have different buffers of the kind first."""
    slots = [slot for slot in buffers.slots if buffers.kinds[slot.group] == "first"]
    if not slots or buffers.told:
        return
    mine = [repr(sums([slot.view(flats).reshape(-1)])) for slot in slots] if counts else []
    found = comm.gather(mine)
    held = [found[rank] for rank in ranks if found[rank]]
    odd = [slot.name for slot, texts in zip(slots, zip(*held)) if len(set(texts)) > 1]
    buffers.told = bool(odd)
    if odd and comm.rank == ranks[0]:
        _log.warning(
            "Ranks have changed buffers differently, and the first worker's count: %s. To put together what all ranks "
            "have, call hpcdist.allgather where the model changes them; or choose by DistributedOptimizer(..., "
            "buffers={name: 'mean'}), or 'own'.",
            shorten(odd),
        )


def frozen_consensus(strategy: Any) -> list[Tensor] | None:
    """Collective. Average the workers' frozen parameters, shaped like `model.frozen`; None where all are equal.

    A loop may change frozen parameters: those of a slow copy of the model that follows it, for example.
    """
    comm = strategy.comm
    found = comm.gather(repr(sums(strategy.model.frozen)))
    if len({found[rank] for rank in comm.failures.alive}) == 1:
        return None
    return mean_over(comm, strategy.model.frozen, _workers(strategy))


def _workers(strategy: Any) -> list[int]:
    return [rank for rank in strategy.config.workers(strategy.comm.size) if rank in strategy.comm.failures.alive]


def mean_over(comm: Communicator, tensors: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Collective. Average each tensor over some ranks; return new tensors, the same on every rank."""
    # Summed in float64, so that the mean of equal float32 replicas is that same float32 to the bit.
    means = []
    for tensor in tensors:
        mean = tensor.clone()
        for part in torch.split(mean, CHUNK) if mean.numel() and comm.size > 1 else ():
            wide = part.to(torch.complex128 if part.is_complex() else torch.float64)
            if comm.rank not in ranks:
                wide.zero_()
            comm.allreduce(wide)
            wide /= len(ranks)
            part.copy_(wide if part.is_floating_point() or part.is_complex() else wide.round())
        means.append(mean)
    return means
