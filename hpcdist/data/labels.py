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
    """Split samples among workers by label. Workers get disjoint parts, whose sizes differ by at most one sample.

    For each worker the shares of the labels are sampled from a Dirichlet distribution. Its concentration is α times the
    label's frequency, relative to evenly frequent labels: a small α gives a worker few labels, a large α gives all
    workers the same shares. If the samples of a label are used up, other labels replace them, so the last workers get
    the remaining samples.

    Args:
        labels: one integer for each sample, shape (n,).
        alpha: α, more than 0.
        seed: of the random numbers, at least 0; the split depends on nothing else.

    Returns:
        For each worker the indices of its samples, ascending, int64.

    Example:
        >>> from hpcdist.data.labels import dirichlet
        >>> [len(part) for part in dirichlet(torch.arange(10).numpy() % 2, 3, alpha=0.1)]
        [3, 3, 4]

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
    names, label_index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SPLIT,)))
    unassigned = [generator.permutation(np.flatnonzero(label_index == label)) for label in range(len(names))]
    concentration = alpha * len(names) * counts / len(labels)
    cuts = [len(labels) * worker // workers for worker in range(workers + 1)]
    parts: list[np.ndarray] = [np.empty(0, np.int64)] * workers
    for worker in generator.permutation(workers).tolist():  # no worker is always the last one
        shares, size = generator.dirichlet(concentration), cuts[worker + 1] - cuts[worker]
        taken = _sample_counts(generator, shares, np.array([len(remaining) for remaining in unassigned]), size)
        parts[worker] = np.sort(np.concatenate([remaining[:n] for remaining, n in zip(unassigned, taken, strict=True)]))
        unassigned = [remaining[n:] for remaining, n in zip(unassigned, taken, strict=True)]
    return tuple(parts)


def _sample_counts(generator: np.random.Generator, shares: np.ndarray, available: np.ndarray, size: int) -> list[int]:
    """Return for each label how many of the `size` samples of a worker have it: random, at most those available."""
    counts = np.zeros(len(available), np.int64)
    while missing := size - int(counts.sum()):
        open_shares = np.where(counts < available, shares, 0.0)
        if not open_shares.sum() > 0:  # its labels are used up
            open_shares = (available - counts).astype(float)
        more = generator.multinomial(missing, open_shares / open_shares.sum())
        counts = np.minimum(counts + more, available)
    return counts.tolist()


def labels_of(dataset: Any, given_labels: Sequence[int] | np.ndarray | Tensor | None = None) -> np.ndarray:
    """Return each sample's label, an integer: `given_labels`, or the data set's `targets`, `labels` or last tensor."""
    values = _labels_in(dataset) if given_labels is None else given_labels
    if values is None:
        raise ConfigError(
            f"labels must be given where samples are split by label; a {type(dataset).__name__} has none in targets, "
            "labels or tensors. Pass labels=, one integer for each sample."
        )
    labels = _array(values).reshape(-1)
    if len(labels) != len(dataset) or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"labels must be one integer for each of {len(dataset)} samples; got {len(labels)} of {labels.dtype}. Pass "
            "labels=, or do not split by label."
        )
    return labels


def _labels_in(dataset: Any) -> Any:
    """Return the labels that a data set has in its attributes; None if it has none."""
    if isinstance(dataset, torch.utils.data.Subset):
        inner = _labels_in(dataset.dataset)
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
    tables = (np.unique(labels[part], return_counts=True) for part in parts)
    return [{str(name): int(number) for name, number in zip(*table, strict=True)} for table in tables]
