"""A small network fits a noisy function of ten variables; judged by its root-mean-square error, of which 1 is noise.

    mpirun -n 4 hpcdist train jobs/regression.py --set strategy=parameter_server
"""

import math
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import make_friedman1
from torch import nn

from hpcdist.data import importers
from hpcdist.train import Job, Metric, squared_error

SAMPLES = 1250  # of which a fifth is the test set, so that 1,000 train


def model(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def data(path: Path) -> None:
    """Friedman's first function ("Multivariate adaptive regression splines", 1991) as a table."""
    x, y = make_friedman1(SAMPLES, n_features=10, noise=1.0, random_state=0)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "friedman1.npy"
        np.save(table, np.column_stack([x, y]).astype(np.float32))
        importers.load("table")(table, path, standardise="features")


job = Job(
    model=model,
    loss=nn.functional.mse_loss,
    metrics={"rmse": Metric(squared_error, finish=math.sqrt, higher_is_better=False)},
    data=data,
    defaults={
        "epochs": 80,
        "eval_every": 10,
        "batch_size": 10,  # of each worker
        "optimizer": {"name": "Adam", "lr": 0.01},
        "schedule": {"name": "ExponentialLR", "gamma": 0.97},
    },
)
