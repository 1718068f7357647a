"""Check that all ranks call the same collective; otherwise raise MismatchError with their differences."""

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
NONE = -1  # length of a part that is neither sent nor received
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


def fingerprint_of(call: str, dtype: torch.dtype, *more: int) -> int:
    """Hash everything that must be the same on all ranks in a call into one integer. Never 0."""
    return hash((CALLS.index(call), _NUMBERS[dtype], *more)) or 1


def shape_numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Encode shapes as one list of integers, different for different shapes."""
    return [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]


def refuse(comm: Communicator, call: str, detail: str | int, *tensors: Tensor) -> None:
    """Collective, once all ranks know that their calls differ. Raise MismatchError with each rank's call.

    Args:
        detail: the operation, or the root.
        tensors: the local tensors.
    """
    described = [f"{type_of(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors]
    described.append(f"root {detail}" if isinstance(detail, int) else detail)
    text = f"{call}: {', '.join(filter(None, described))}".rstrip(": ")
    ranks_of: dict[str, list[int]] = {}
    for rank, other in enumerate(comm.gather(text)):
        ranks_of.setdefault(other, []).append(rank)
    differ = "; ".join(f"{other} on {_named(ranks)}" for other, ranks in ranks_of.items())
    raise MismatchError(f"all ranks must make the same collective call; got {differ}. Check the call on each rank.")


def exchange_lengths(
    comm: Communicator, exchange: Exchange, call: str, dtype: torch.dtype, root: int, sent: Sequence[int],
    expected: Sequence[int],
) -> list[list[int]]:  # fmt: skip
    """Collective. Gather the lengths of all parts; raise MismatchError if senders and receivers disagree.

    Args:
        sent: number of elements that this rank sends to each rank, or NONE; empty if it sends nothing.
        expected: number of elements that it expects from each rank, or NONE; empty if it receives nothing.

    Returns:
        lengths[source][dest]: number of elements.
    """
    size, nothing = comm.size, [NONE] * comm.size
    row = [CALLS.index(call), _NUMBERS[dtype], root, *(sent or nothing), *(expected or nothing)]
    rows = [tensor.tolist() for tensor in exchange.all_gather(torch.tensor(row))]
    if len({tuple(other[:3]) for other in rows}) != 1:
        refuse(comm, call, f"{type_of(dtype)}, root {root}")
    sent_by, expected_by = [other[3 : 3 + size] for other in rows], [other[3 + size :] for other in rows]
    for source in range(size):
        for dest in range(size):
            if sent_by[source][dest] != expected_by[dest][source]:
                raise MismatchError(
                    f"{call}: a tensor must have the same length on sender and receiver; got "
                    f"{_count(sent_by[source][dest])} on rank {source} for rank {dest}, which expects "
                    f"{_count(expected_by[dest][source])}. Check the shapes on both ranks."
                )
    return [[max(0, length) for length in row] for row in sent_by]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _count(length: int) -> str:
    return "nothing" if length == NONE else f"{length} elements"
