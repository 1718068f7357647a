"""A small convolutional network on scikit-learn's handwritten digits: 1,797 images of 8 by 8 pixels, 10 classes.

mpirun -n 4 hpcdist train jobs/digits.py --set strategy=gossip_pull
"""

from torch import nn

from hpcdist.data import importers
from hpcdist.train import Job, Metric, accuracy


def model(channels: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, 64),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(64, 10),
    )


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=lambda path: importers.load("digits")(None, path),
    defaults={
        "epochs": 16,
        "batch_size": 16,  # of each worker
        "optimizer": {"name": "Adam", "lr": 0.002},
        "schedule": {"name": "ExponentialLR", "gamma": 0.87},
    },
)
