"""A small network fits a noisy function of ten variables; judged by its root-mean-square error, of which 1 is noise.

    mpirun -n 4 hpcdist train jobs/regression.py --set strategy=parameter_server
    python jobs/regression.py    # is distributed training more accurate? about 6 minutes on 2 cores; --quick: 15 s

The study trains on virtual ranks: real arithmetic, and step times that vary by 20 %. Chosen before anything was run,
and kept: plain SGD at the constant rate 0.01, 10,000 steps of the serial run, five seeds. The split of the data is
fixed; initialisation and order vary with the seed, and runs of one seed begin with the same parameters, so that
differences are taken seed by seed. Finished runs are kept in `runs.jsonl` in the output folder and not repeated.
"""

import math
import os
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
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


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, results and the answer.")] = Path("runs/regression"),
    quick: Annotated[bool, typer.Option(help="Few steps and two seeds: how it works, and no answer.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """The study."""
    from regression_study.study import study

    study(output, workers, *((300, 2, 2) if quick else (10_000, 5, job.defaults["epochs"])))


if __name__ == "__main__":
    typer.run(main)
