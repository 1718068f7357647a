"""The published toy task of asynchronous local SGD: which of four classes a point of a mixture of Gaussians is of.

Each class has eight clusters, with centres on the unit sphere in 512 dimensions and a deviation of 0.5 along each axis.
A hidden layer of 65,000 units learns 128,000 points; 10,000 of these are evaluated, as in the publication. The name of
the data file ends with the number of points.

mpirun -n 5 hpcdist train jobs/studies/clusters_job.py --set strategy=async_diloco --set strategy.period=20

Reference: Bo Liu et al., "Asynchronous local-SGD training for language modeling", 2024, and the code that it publishes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from hpcdist.data.writer import Split, create
from hpcdist.train import Job, Metric, accuracy

DIMENSIONS, CLASSES, CLUSTERS, DEVIATION = 512, 4, 8, 0.5
EVALUATED = 10_000


def model(hidden: int = 65_000) -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSIONS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def data(path: Path) -> None:
    """Draw the points, as many of each cluster, and write them in random order."""
    count = int(path.stem.rpartition("-")[2])
    draw = np.random.default_rng(42)
    centres = draw.standard_normal((CLASSES * CLUSTERS, DIMENSIONS))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    cluster = draw.permutation(np.arange(count) % len(centres))
    x = (centres[cluster] + DEVIATION * draw.standard_normal((count, DIMENSIONS))).astype(np.float32)
    y = cluster // CLUSTERS
    test = draw.permutation(count)[:EVALUATED]
    create(
        path,
        {"train": Split.of(x, y), "test": Split.of(x[test], y[test])},
        task="classification",
        source="A mixture of 32 Gaussians in 512 dimensions",
        classes=[str(number) for number in range(CLASSES)],
    )


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=data,
    defaults={
        "data": {"path": "data/clusters-128000.h5"},
        "batch_size": 32,  # of each worker
        "optimizer": {"name": "AdamW", "lr": 2e-4, "weight_decay": 1e-3},
    },
)
