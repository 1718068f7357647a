"""Data that differ between workers: samples split by label, so that each worker has more of some labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.sharding import check_range
from hpcdist.errors import ConfigError

_SPLIT = 2  # spawn key, beside those of an epoch's order


def dirichlet(labels: np.ndarray, workers: int, alpha: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Split samples among workers by their labels; each sample goes to one worker, and all get as many, to one.

    Each worker draws the shares of the labels in its part from a Dirichlet distribution, with the concentration α
    times a label's share of all samples over that of evenly frequent labels: with a small α a worker has few labels,
    with a large one the same shares as all others. Where the samples of a label are used up, the others take its place,
    so that what the last workers get is what is left.

    Args:
        labels: one integer for each sample, shape (n,).
        alpha: α, more than 0.
        seed: of the draw, at least 0; the split depends on nothing else.

    Returns:
        For each worker the indices of its samples, ascending, int64.

    Reference: Tzu-Ming Harry Hsu, Hang Qi, Matthew Brown, "Measuring the effects of non-identical data distribution for
    federated visual classification", 2019.
    """
    check_range("seed", seed, 0)
    if not isinstance(alpha, Real) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha must be a finite number above 0; got {alpha!r}. Take 0.1 for parts that differ much.")
    if len(labels) < workers:
        raise ConfigError(
            f"samples must be at least {workers}, one for each worker, to be split by label; got {len(labels)}. Start "
            "fewer ranks, or leave the split out."
        )
    names, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SPLIT,)))
    waiting = [generator.permutation(np.flatnonzero(place == label)) for label in range(len(names))]
    concentration = alpha * len(names) * counts / len(labels)
    cuts = [len(labels) * worker // workers for worker in range(workers + 1)]
    parts: list[np.ndarray] = [np.empty(0, np.int64)] * workers
    for worker in generator.permutation(workers).tolist():  # no worker is always the last one
        shares, wanted = generator.dirichlet(concentration), cuts[worker + 1] - cuts[worker]
        taken = _drawn(generator, shares, np.array([len(left) for left in waiting]), wanted)
        parts[worker] = np.sort(np.concatenate([left[:n] for left, n in zip(waiting, taken, strict=True)]))
        waiting = [left[n:] for left, n in zip(waiting, taken, strict=True)]
    return tuple(parts)


def _drawn(generator: np.random.Generator, shares: np.ndarray, there: np.ndarray, wanted: int) -> list[int]:
    """Draw how many samples of each label a worker takes, at most those that are there."""
    taken = np.zeros(len(there), np.int64)
    while missing := wanted - int(taken.sum()):
        open_shares = np.where(taken < there, shares, 0.0)
        if not open_shares.sum() > 0:  # its own labels are used up
            open_shares = (there - taken).astype(float)
        drawn = generator.multinomial(missing, open_shares / open_shares.sum())
        taken = np.minimum(taken + drawn, there)
    return taken.tolist()


def labels_of(dataset: Any, given: Sequence[int] | np.ndarray | Tensor | None = None) -> np.ndarray:
    """Return the label of each sample: those given, or the data set's `targets`, `labels` or last tensor.

    Raises ConfigError where there are none, or not one integer for each sample.
    """
    found = _found(dataset) if given is None else given
    if found is None:
        raise ConfigError(
            f"labels must be given where samples are split by label; a {type(dataset).__name__} has none in targets, "
            "labels or tensors. Pass labels=, one integer for each sample."
        )
    labels = _array(found).reshape(-1)
    if len(labels) != len(dataset) or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"labels must be one integer for each of {len(dataset)} samples; got {len(labels)} of {labels.dtype}. Pass "
            "labels=, or do not split by label."
        )
    return labels


def _found(dataset: Any) -> Any:
    if isinstance(dataset, torch.utils.data.Subset):
        inner = _found(dataset.dataset)
        return None if inner is None else _array(inner)[np.asarray(dataset.indices, dtype=np.int64)]
    for name in ("targets", "labels"):
        value = getattr(dataset, name, None)
        if value is not None:
            return value() if callable(value) else value
    tensors = getattr(dataset, "tensors", None)
    return tensors[-1] if isinstance(tensors, (tuple, list)) and tensors else None


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.numpy(force=True)
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        return np.asarray(values, dtype=object)


def counts(labels: np.ndarray, parts: Sequence[np.ndarray]) -> list[dict[str, int]]:
    """Count each worker's samples by label."""
    found = []
    for part in parts:
        names, numbers = np.unique(labels[part], return_counts=True)
        found.append(dict(zip(map(str, names.tolist()), numbers.tolist(), strict=True)))
    return found
