"""Inspect batches: whether ranks have the same ones, and how many samples they hold."""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.records.digest import tensor_bytes
from hpcdist.session import rules


class AroundLoader:
    """An object around a `_loader`, from which it has attributes such as `dataset`, `batch_size` or `sampler`."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _BatchPickler(pickle.Pickler):
    """Pickles a batch to record its tensors' shapes; with `sums` also the contents, of torch's tensors as checksums."""

    def __init__(self, file: io.BytesIO, sums: bool):
        super().__init__(file)
        self.shapes: list[tuple[int, ...]] = []  # of the tensors and arrays, in order
        self._sums = sums

    def reducer_override(self, value: Any) -> Any:
        """Record a tensor's shape, and pickle its checksum instead, because pickles of tensors contain addresses."""
        if not isinstance(value, (Tensor, np.ndarray)):
            return NotImplemented
        self.shapes.append(tuple(value.shape))
        if isinstance(value, np.ndarray):
            return NotImplemented if self._sums else (str, ())
        dense = value if value.layout is torch.strided else value.to_dense()
        return str, (f"{value.dtype} {zlib.crc32(tensor_bytes(dense).data)}" if self._sums else "",)


def _pickled(batch: Any, sums: bool) -> tuple[str, list[tuple[int, ...]]]:
    """Return a checksum of a batch's contents ("" if it can't be pickled), and the shapes of its tensors."""
    file = io.BytesIO()
    pickler = _BatchPickler(file, sums)
    try:
        pickler.dump(batch)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return "", pickler.shapes
    return f"{pickler.shapes} {zlib.crc32(file.getbuffer())}", pickler.shapes


def _digests(group: Communicator, batch: Any) -> list[str]:
    """Collective. Return a checksum of each rank's batch; raise ConfigError if one can't be pickled."""
    digests = group.gather(_pickled(batch, True)[0])
    if not all(digests):
        raise rules.error("batches can't be compared", kind=type(batch).__name__)
    return digests


def count_samples(batch: Any) -> tuple[int, int]:
    """Return the number of samples in a batch, and a code that shows whether the number is certain.

    Batches of graphs, tensordicts and PackedSequences report their size; else it is the length of the first tensor.

    Returns:
        The number of samples; and a checksum of the first tensor's other dimensions: if it differs between ranks, the
        first dimension may not be that of samples. −1 if tensors differ in the first dimension, or there is no tensor.
    """
    for name in ("num_graphs", "batch_size", "batch_sizes"):
        size = getattr(batch, name, None)
        size = size[0] if isinstance(size, (tuple, Tensor)) and len(size) else size
        if isinstance(size, int) or (isinstance(size, Tensor) and size.dim() == 0):
            return int(size), 0
    shapes = [shape for shape in _pickled(batch, False)[1] if shape]
    if not shapes:
        return 1, -1
    return shapes[0][0], -1 if any(s[0] != shapes[0][0] for s in shapes) else zlib.crc32(repr(shapes[0][1:]).encode())


def same_on_all_ranks(group: Communicator, batch: Any) -> bool:
    """Collective. Return whether all ranks have the same batch; raise ConfigError if it can't be pickled."""
    return len(set(_digests(group, batch))) == 1


def require_same(inner: Communicator, batch: Any) -> None:
    """Collective in the replica. Raise MismatchError unless all its ranks have the same batch, or none has one."""
    digests = _digests(inner, batch)
    differing = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if differing is not None:
        ranks = [inner.platform.world_ranks[rank] for rank in (0, differing)]
        raise rules.error("the ranks of a replica read different batches", first=ranks[0], rank=ranks[1])


def counting_message(counts: Tensor, shapes: Tensor) -> tuple[int, str] | None:
    """Return a log level and message on how samples were counted; None for equal counts.

    Args:
        counts, shapes: the results of `count_samples` on all ranks: numbers, and the codes of shapes.
    """
    codes, sizes = set(shapes[counts > 0].tolist()), sorted(set(counts[counts > 0].tolist()))
    doubtful = -1 in codes or len(codes) > 1
    if not doubtful and len(sizes) < 2:
        return None
    why = ", although its tensors differ in other dimensions, or there is no tensor" if doubtful else ""
    return logging.WARNING if doubtful else logging.INFO, (
        "Ranks' batches are weighted by their numbers of samples, the length of the first dimension of a batch's first "
        f"tensor: {' and '.join(f'{number:.0f}' for number in sizes)}{why}. If that is not the number of samples "
        "(for example if time comes first), call optimizer.set_batch_weight(n) before backward()."
    )
