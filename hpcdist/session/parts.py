"""Put tensors together of the parts that ranks of a device mesh have, and cut parts out: see `describe_parts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import CheckpointError


def is_cut(part: Mapping[str, Any]) -> bool:
    """Tell whether ranks have different parts of a tensor, see `PartOfModel.describe_parts`; not all of them all."""
    return part["dims"] is None or any(dim is not None for dim in part["dims"])


def put_together(parts: Mapping[int, Tensor], described: Mapping[str, Any], path: Any) -> Tensor:
    """Return the whole tensor of which ranks have parts, some of them padded at their end.

    Args:
        parts: by rank of the replica; further dimensions may follow those that are described.
        described: one rank's part, see `PartOfModel.describe_parts`.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: nobody knows where the parts lie in the whole.
    """
    if described["dims"] is None:
        raise CheckpointError(
            f"parts of parameters must lie one behind the other to be put together; got {described['of']!r} in {path}, "
            "whose placement is another one. Gather it in a program on the same ranks: torch's get_model_state_dict "
            "inside hpcdist.consensus."
        )
    ranks = torch.tensor(described["ranks"]).view(-1).tolist()
    shape = described["shape"]
    whole = parts[ranks[0]].new_empty((*shape, *parts[ranks[0]].shape[len(shape) :]))
    for rank in reversed(ranks):  # of those that have the same part the first one's counts
        where = _place(described, rank)
        whole[where] = parts[rank][_from_zero(where)]
    return whole


def cut_out(whole: Tensor, part: Mapping[str, Any], rank: int, shape: Sequence[int], path: Any) -> Tensor:
    """Return a rank's part of a tensor, see `PartOfModel.describe_parts`, padded with zeros to a shape.

    Raises:
        CheckpointError: nobody knows where the part lies in the whole.
    """
    if part["dims"] is None:
        raise CheckpointError(
            f"parameters must be cut one part behind the other to resume from another mesh; got {part['of']!r}, whose "
            f"placement is another one than in {path}. Resume on the mesh of the checkpoint."
        )
    where = _place(part, rank)
    padded = whole.new_zeros((*shape, *whole.shape[len(part["shape"]) :]))
    padded[_from_zero(where)] = whole[where]
    return padded


def _place(part: Mapping[str, Any], rank: int) -> tuple[slice, ...]:
    """Return where a rank's part lies: along each dimension of the mesh that cuts one, a chunk, as `torch.chunk`'s."""
    ranks = torch.tensor(part["ranks"])
    where = [(0, size) for size in part["shape"]]
    for dim, index, count in zip(part["dims"], (ranks == rank).nonzero()[0].tolist(), ranks.shape, strict=True):
        if dim is not None:
            start, stop = where[dim]
            chunk = -(-(stop - start) // count)
            where[dim] = (min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop))
    return tuple(slice(*span) for span in where)


def _from_zero(where: Sequence[slice]) -> tuple[slice, ...]:
    """Return the same extent at the beginning of a tensor."""
    return tuple(slice(span.stop - span.start) for span in where)
