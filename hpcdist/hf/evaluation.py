"""Join what the ranks have found on their shares of an evaluation's batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
from transformers.trainer_pt_utils import nested_concat


def in_order(sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return where each sample of the data set stands in the ranks' results, one after the other.

    The ranks have the batches in turn: rank r of p has batches r, r + p, r + 2p...

    Args:
        sizes: of each rank's batches.
    """
    counts = [count for of_rank in sizes for count in of_rank]
    batches = iter(np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1]))
    places = [[next(batches) for _ in of_rank] for of_rank in sizes]
    return np.concatenate([np.empty(0, int), *interleaved(places)])


def interleaved(of_ranks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the ranks' batches, in turn."""
    missing = object()
    return [item for step in zip_longest(*of_ranks, fillvalue=missing) for item in step if item is not missing]


def joined(of_ranks: Sequence[Any], sizes: Sequence[Sequence[int]], concatenated: bool) -> Any:
    """Return one result of the ranks' arrays: in the data set's order, padded by -100 where lengths differ.

    Args:
        of_ranks: each rank's, or None where it has none: nests of arrays whose first dimension are samples, or, if not
            `concatenated`, lists of such, one for each batch.
        sizes: of each rank's batches.
    """
    found = [value for value in of_ranks if value is not None]
    if not found:
        return None
    if not concatenated:
        return interleaved([value or () for value in of_ranks])
    order = in_order([own for own, value in zip(sizes, of_ranks) if value is not None])
    return _taken(reduce(lambda one, other: nested_concat(one, other, padding_index=-100), found), order)


def _taken(value: Any, order: np.ndarray) -> Any:
    if isinstance(value, Mapping):
        return type(value)({key: _taken(item, order) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return type(value)(_taken(item, order) for item in value)
    return value[order]


def mean_loss(of_ranks: Sequence[Sequence[tuple[float, int]]], finite_only: bool) -> float | None:
    """Return the mean over samples of the batches' losses; None without any.

    Args:
        of_ranks: each rank's losses and sizes of batches.
        finite_only: leave out what is not finite, unless nothing is.
    """
    losses = np.array([pair for own in of_ranks for pair in own], dtype=np.float64).reshape(-1, 2)
    finite = np.isfinite(losses[:, 0])
    if finite_only and finite.any():
        losses = losses[finite]
    return float(np.average(losses[:, 0], weights=losses[:, 1])) if len(losses) else None
