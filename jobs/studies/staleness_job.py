"""The job of the study of staleness: a perceptron learns the digits, in passes over the data that are one epoch.

mpirun -n 5 hpcdist train jobs/studies/staleness_job.py --set strategy=softsync
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from hpcdist.data.writer import Split, create
from hpcdist.train import Job, Metric, accuracy


def model(hidden: int = 32) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def data(path: Path) -> None:
    """Write the digits: a training set that holds each sample as often as the file's name ends, and the test set."""
    digits, passes = load_digits(), int(path.stem.rpartition("-")[2])
    x, y = digits.images.astype(np.uint8)[:, np.newaxis], digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.5, random_state=0, stratify=y)
    repeated, mean, deviation = np.tile(train, passes), x[train].mean(), x[train].std()
    create(
        path,
        {"train": Split.of(x[repeated], y[repeated]), "test": Split.of(x[test], y[test])},
        task="classification",
        source="scikit-learn, load_digits",
        classes=[str(name) for name in digits.target_names],
        scale=1 / deviation,
        offset=-mean / deviation,
    )


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=data,
    defaults={"data": {"path": "data/digits-passes-16.h5"}},
)
