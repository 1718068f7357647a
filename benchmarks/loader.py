"""The time to read a batch, beside NumPy with a memory map of the same samples."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks import runner
from benchmarks.runner import Row, Run, Side, beside, check, table
from hpcdist.comm.communicator import Communicator
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Batch, Loader
from hpcdist.data.sharding import EpochPlan
from hpcdist.data.writer import Split, create
from hpcdist.errors import UnknownNameError
from hpcdist.session.loader.sharded import shard

Reader = Callable[[int], Iterator[Batch]]  # epoch -> its batches
REFERENCE = "memory_map"
COLUMNS = ("name", "bytes", "ranks", "median_s", "bytes_sent", "ratio")


@dataclass(frozen=True)
class Kind:
    """Samples like those of a well-known data set; `scale` turns them into float32, as the data set's importer does."""

    samples: int
    shape: tuple[int, ...]
    scale: float | None = None


KINDS = {
    "mnist": Kind(60_000, (1, 28, 28)),
    "mnist_scaled": Kind(60_000, (1, 28, 28), 1 / 255),
    "cifar10": Kind(50_000, (3, 32, 32)),
    "cifar10_scaled": Kind(50_000, (3, 32, 32), 1 / 255),
    "imagenet": Kind(2_000, (3, 224, 224)),
}


def measure(
    comm: Communicator,
    kinds: Sequence[str] = tuple(KINDS),
    *,
    batch_size: int = 128,
    rounds: int = 500,
    folder: str | Path | None = None,
) -> list[Row]:
    """Collective. Time reading each rank's part of the same shuffled batches by each reader, file in the page cache.

    Readers: `memory_map` (NumPy fancy indexing, then torch.from_numpy), `batch` (HDF5Dataset.batch), `loader`
    (Loader), `dataloader` (torch's DataLoader without workers, which makes the batches itself), `shard` (the same by
    `hpcdist.shard`).

    Args:
        kinds: Names of KINDS.
        rounds: Batches that each reader reads; a quarter of it of samples above 100 kB.
        folder: Where each rank makes files for itself (and removes them); by default the system's temporary folder.

    Returns: one row per kind and reader: name, bytes (of a batch as stored), ranks, median_s (of one batch),
    bytes_sent (0), ratio (the reader's speed relative to the memory map, 1.0 being equal).
    """
    check(comm, rounds)
    rows = []
    for name in kinds:
        if name not in KINDS:
            raise UnknownNameError("kind", name, KINDS)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            rows += _measure_kind(comm, name, KINDS[name], batch_size, rounds, Path(scratch))
    return table(rows, COLUMNS)


def _measure_kind(comm: Communicator, name: str, kind: Kind, batch_size: int, rounds: int, scratch: Path) -> list[Row]:
    sample_bytes = int(np.prod(kind.shape))
    rounds = max(1, rounds // 4) if sample_bytes > 100_000 else rounds
    plan = EpochPlan(kind.samples, comm.size, batch_size)
    columns = {"bytes": sample_bytes * batch_size, "bytes_sent": 0}
    readers = _readers(kind, plan, comm.rank, scratch)
    sides = [
        Side(f"loader/{name}/{reader}", _reading(read, plan, first, len(readers)), columns)
        for first, (reader, read) in enumerate(readers.items())
    ]
    return beside(runner.measure(comm, sides, rounds), [f"loader/{name}/{REFERENCE}"], ratio="speedup")


def _reading(read: Reader, plan: EpochPlan, first: int, epochs: int) -> Run:
    """Read full batches of several epochs, from the `first` on. One epoch before warms the memory maps, untimed.

    The readers go through the same epochs, but are in different ones at any moment: the second to read a batch would
    find it in the processor's cache.
    """
    deque(read(0), maxlen=0)
    full = plan.n_samples // plan.global_batch
    batches = (batch for turn in count(first) for batch in islice(read(turn % epochs), full))

    def run(steps: int) -> float:
        start = time.perf_counter()
        kept = list(islice(batches, steps))
        taken_s = (time.perf_counter() - start) / steps
        del kept  # which is not timed
        return taken_s

    return run


def _readers(kind: Kind, plan: EpochPlan, worker: int, scratch: Path) -> dict[str, Reader]:
    """Make the readers, by name, that give a worker's batches of an epoch in the plan's order."""
    x = np.random.default_rng(0).integers(0, 256, (kind.samples, *kind.shape), dtype=np.uint8)
    y = np.arange(kind.samples) % 10
    classes = [str(label) for label in range(10)]
    create(scratch / "data.h5", {"train": Split.of(x, y)}, task="classification", classes=classes, scale=kind.scale)
    np.save(scratch / "x.npy", x)
    np.save(scratch / "y.npy", y)
    mapped_x, mapped_y = (np.load(scratch / f"{name}.npy", mmap_mode="r") for name in "xy")
    dataset, size = HDF5Dataset(scratch / "data.h5"), plan.batch_size

    @lru_cache
    def order(epoch: int) -> np.ndarray:
        """List the worker's samples of an epoch once, so that no reader pays for the plan at each step."""
        epoch_plan = plan.at(epoch)
        return np.concatenate([epoch_plan.indices(step, worker) for step in range(plan.steps)])

    def from_map(indices: np.ndarray) -> Batch:
        x, y = torch.from_numpy(mapped_x[indices]), torch.from_numpy(mapped_y[indices])
        return (x if kind.scale is None else x.float().mul_(kind.scale)), y

    def by(fetch: Callable[[np.ndarray], Batch]) -> Reader:
        return lambda epoch: map(fetch, np.split(order(epoch), range(size, len(order(epoch)), size)))

    def by_loader(epoch: int) -> Iterator[Batch]:
        loader = Loader(dataset, size, worker=worker, workers=plan.workers)
        loader.set_epoch(epoch)
        return iter(loader)

    def by_dataloader(epoch: int) -> Iterator[Batch]:
        return iter(DataLoader(dataset, size, sampler=order(epoch).tolist()))

    sharded = shard(DataLoader(dataset, size, shuffle=True), training=False)

    def by_shard(epoch: int) -> Iterator[Batch]:
        sharded.set_epoch(epoch)
        return iter(sharded)

    return {
        REFERENCE: by(from_map),
        "batch": by(dataset.batch),
        "loader": by_loader,
        "dataloader": by_dataloader,
        "shard": by_shard,
    }
