"""A first job: a small network that classifies the three arms of a spiral.

hpcdist run -n 2 hpcdist train my_job.py
hpcdist run -n 2 hpcdist train my_job.py --set strategy=gossip_pull --set epochs=10
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpcdist.train import Job, Metric, accuracy


# The options of the model are settings: --set model.width=128.
def model(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


# Samples are pairs (x, y). Any Dataset with a length will do, such as torchvision's, also with random augmentations.
def spirals(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2 * torch.pi / 3 * arm + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,  # (outputs, targets) -> the mean over the batch
    metrics={"accuracy": Metric(accuracy)},  # per sample; the first metric is the job's main one
    data={"train": spirals(3000, seed=0), "test": spirals(600, seed=1)},
    defaults={  # of the settings, which --set and --config override
        "epochs": 20,
        "batch_size": 32,  # of each rank
        "optimizer": {"name": "Adam", "lr": 0.003},
    },
)
