"""A perceptron with one hidden layer on Fashion-MNIST: 60,000 images of 28 by 28 pixels to train on, 10,000 to test.

It is small, 203,530 parameters, so that studies of hundreds of runs take hours: see jobs/evidence.sh.

mpirun -n 2 hpcdist train jobs/fashion.py --set strategy.compression=topk --set strategy.compression.ratio=0.001
"""

from pathlib import Path

from torch import nn

from hpcdist.data import importers
from hpcdist.data.fetch import fetch
from hpcdist.train import Job, Metric, accuracy


def model(hidden: int = 256) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def data(path: Path) -> None:
    fetch("fashion-mnist", path.parent / "fashion-mnist")
    importers.load("fashion-mnist")(path.parent / "fashion-mnist", path)


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=data,
    defaults={
        "data": {"path": "data/fashion-mnist.h5"},
        "epochs": 8,
        "batch_size": 32,  # of each worker
        "optimizer": {"name": "SGD", "lr": 0.2},
        "schedule": {"name": "ExponentialLR", "gamma": 0.7},
    },
)
