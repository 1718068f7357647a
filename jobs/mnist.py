"""The convolutional network of PyTorch's example `mnist` on MNIST or Fashion-MNIST: 60,000 images of 28 by 28 pixels.

mpirun -n 2 hpcdist train jobs/mnist.py                                             # whichever of the two can be had
mpirun -n 2 hpcdist train jobs/mnist.py --set data.path=fashion-mnist.h5            # of `hpcdist data import`
"""

from pathlib import Path

from torch import nn

from hpcdist.data import importers
from hpcdist.data.fetch import RELEASES, fetch_first
from hpcdist.train import Job, Metric, accuracy


def model(dropout: bool = True) -> nn.Module:
    """Make the network of github.com/pytorch/examples, mnist/main.py, which is that of Keras's mnist_cnn.py."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25 if dropout else 0.0),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5 if dropout else 0.0),
        nn.Linear(128, 10),
    )


def data(path: Path) -> None:
    """Write the first data set that is there or can be had."""
    name = fetch_first(["mnist", "fashion-mnist"], path.parent)
    importers.load(RELEASES[name].importer)(path.parent / name, path)


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=data,
    defaults={
        "data": {"path": "data/mnist-or-fashion-mnist.h5"},
        "epochs": 3,
        "batch_size": 64,  # of each worker
        "optimizer": {"name": "Adam", "lr": 0.001},
    },
)
