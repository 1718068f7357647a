"""What the ranks of a collective call must agree on, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.collectives.calls.exchange import Exchange
from hpcdist.collectives.calls.tensors import DTYPES, type_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MismatchError

CALLS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"),
    *("barrier",),
)
NONE = -1  # of a length: nothing is sent, or received
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


def fingerprint_of(call: str, dtype: torch.dtype, *more: int) -> int:
    """Make the note of a call: a number that stands for all that must be the same on all ranks. Never 0."""
    return hash((CALLS.index(call), _NUMBERS[dtype], *more)) or 1


def shape_numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Write shapes as numbers that no other shapes have."""
    return [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]


def refuse(comm: Communicator, call: str, detail: str | int, *tensors: Tensor) -> None:
    """Collective. Raise what says how ranks differ, once all of them have seen that they do.

    Args:
        detail: the operation, or root's number.
    """
    described = [f"{type_of(one.dtype)} {tuple(one.shape)}" for one in tensors]
    described.append(f"root {detail}" if isinstance(detail, int) else detail)
    text = f"{call}: {', '.join(filter(None, described))}".rstrip(": ")
    found: dict[str, list[int]] = {}
    for rank, other in enumerate(comm.gather(text)):
        found.setdefault(other, []).append(rank)
    differ = "; ".join(f"{other} on {_named(ranks)}" for other, ranks in found.items())
    raise MismatchError(f"all ranks must make the same collective call; got {differ}. Make the same on each.")


def tell_lengths(
    comm: Communicator, exchange: Exchange, call: str, dtype: torch.dtype, root: int, sent: Sequence[int],
    wanted: Sequence[int],
) -> list[list[int]]:  # fmt: skip
    """Collective. Let all ranks know the lengths of all parts; refuse the call where they do not fit.

    Args:
        sent: elements that this rank has for each one, or NONE; empty if it has none at all.
        wanted: elements that it has room for of each one's, or NONE; empty if it wants nothing.

    Returns:
        By source and destination: the elements.
    """
    size, nothing = comm.size, [NONE] * comm.size
    row = [CALLS.index(call), _NUMBERS[dtype], root, *(sent or nothing), *(wanted or nothing)]
    rows = [one.tolist() for one in exchange.show_all(torch.tensor(row))]
    if len({tuple(one[:3]) for one in rows}) != 1:
        refuse(comm, call, f"{type_of(dtype)}, root {root}")
    brought, kept = [one[3 : 3 + size] for one in rows], [one[3 + size :] for one in rows]
    for source in range(size):
        for dest in range(size):
            if brought[source][dest] != kept[dest][source]:
                raise MismatchError(
                    f"{call}: a tensor must be as long where it is received as where it is sent; got "
                    f"{_count(brought[source][dest])} on rank {source} for rank {dest}, which expects "
                    f"{_count(kept[dest][source])}. Give both the same length."
                )
    return [[max(0, length) for length in row] for row in brought]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _count(length: int) -> str:
    return "nothing" if length == NONE else f"{length} elements"
