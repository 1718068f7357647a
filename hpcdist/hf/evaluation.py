"""Join the ranks' results of their shares of an evaluation's batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree
from transformers.trainer_pt_utils import nested_concat


def in_order(sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the position of each sample of the data set in the concatenation of the ranks' results.

    Batches are distributed round-robin: rank r of p has batches r, r + p, r + 2p...

    Args:
        sizes: of each rank's batches.
    """
    p = len(sizes)
    numbers = [np.repeat(rank + p * np.arange(len(each)), np.array(each, int)) for rank, each in enumerate(sizes)]
    return np.argsort(np.concatenate(numbers), kind="stable")  # `numbers` of batches, by sample


def join_results(of_ranks: Sequence[Any], sizes: Sequence[Sequence[int]], concatenated: bool) -> Any:
    """Return the ranks' results as one, in the data set's order, padded by -100 where lengths differ.

    Args:
        of_ranks: each rank's results, or None: nested arrays whose first dimension are samples, or, if not
            `concatenated`, lists of such arrays, one for each batch.
        sizes: of each rank's batches.
    """
    results = [value for value in of_ranks if value is not None]
    if not results:
        return None
    if not concatenated:
        missing = object()
        steps = zip_longest(*(value or () for value in of_ranks), fillvalue=missing)
        return [batch for step in steps for batch in step if batch is not missing]
    order = in_order([of_rank for of_rank, value in zip(sizes, of_ranks) if value is not None])
    joined = reduce(lambda a, b: nested_concat(a, b, padding_index=-100), results)
    return pytree.tree_map(lambda array: array[order], joined)


def mean_loss(of_ranks: Sequence[Sequence[tuple[float, int]]], finite_only: bool) -> float | None:
    """Return the mean loss over all samples; None without batches.

    Args:
        of_ranks: loss and size of each batch, by rank.
        finite_only: skip batches whose loss is not finite, unless all are.
    """
    losses = np.array([pair for of_rank in of_ranks for pair in of_rank], dtype=np.float64).reshape(-1, 2)
    finite = np.isfinite(losses[:, 0])
    if finite_only and finite.any():
        losses = losses[finite]
    return float(np.average(losses[:, 0], weights=losses[:, 1])) if len(losses) else None
