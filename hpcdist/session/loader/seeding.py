"""Load the same batches on all ranks of a replica, also where loading them draws random numbers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.records.digest import tensor_bytes
from hpcdist.session import rules


def drawn_alike(loader: DataLoader[Any], inner: Communicator, place: tuple[int, int, int, int]) -> Iterator[Any]:
    """Collective in the replica. Iterate over batches that are the same on all its ranks.

    Whatever is drawn while a batch is loaded follows from its place, so that a resumed epoch goes on alike, and the
    random numbers of the ranks, which compute different layers, may differ.

    Args:
        inner: the ranks of the replica.
        place: seed, epoch, replica, and the samples of the epoch before the first batch.

    Raises:
        MismatchError: the ranks' first batches differ, for the data set draws from elsewhere, or asks for the rank.
    """
    with _drawing(place, "begin"):
        batches = iter(loader)
    step = 0
    while True:
        with _drawing(place, step):
            batch = next(batches, _END)
        if step == 0:
            _require_same(inner, batch)
        if batch is _END:
            return
        yield batch
        step += 1


_END = object()


@contextmanager
def _drawing(place: tuple[int, ...], step: int | str) -> Iterator[None]:
    """Draw the random numbers of Python, NumPy and torch from a seed inside the context; afterwards one's own again."""
    seed = zlib.crc32(repr((place, step)).encode())
    with callers_state_kept():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


def _require_same(inner: Communicator, batch: Any) -> None:
    """Collective in the replica. Check that all ranks have the same batch, or none.

    Raises:
        MismatchError: they have different ones.
    """
    digests = inner.gather(_digest(batch))
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is not None:
        ranks = [inner.trace.world_ranks[rank] for rank in (0, odd)]
        raise rules.error("the ranks of a replica read different batches", first=ranks[0], rank=ranks[1])


def _digest(batch: Any) -> str:
    """Return a checksum of all tensors of a batch, and of other values as text."""
    leaves = [] if batch is _END else pytree.tree_leaves(batch)
    parts = (tensor_bytes(leaf).tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode() for leaf in leaves)
    return f"{len(leaves)} {zlib.crc32(b' '.join(parts))}"
