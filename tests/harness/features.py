"""For scripts of MPI's ranks that check one feature after the other, and print the name of each that holds.

from harness.features import feature, require, run

@feature
def sums():
    require(...)

run(rank, barrier)  # with names on the command line: these alone
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

STEPS, OWN = 3, 8  # of trainings; samples of a rank
FEATURES: dict[str, Callable[[], None]] = {}


def feature(check: Callable[[], None]) -> Callable[[], None]:
    FEATURES[check.__name__] = check
    return check


def require(holds: bool, *what: object) -> None:
    if not holds:
        raise AssertionError(what)


def run(rank: int, barrier: Callable[[], object]) -> None:
    """Checks those that the command line names, or all; raises what is not as it should be."""
    for name in sys.argv[1:] or FEATURES:
        FEATURES[name]()
        barrier()
        if rank == 0:
            print(name, flush=True)


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all ranks."""
    torch.manual_seed(0)
    return torch.randn(OWN * size, 8), torch.randn(OWN * size, 8)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, passes: int = 1) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(passes), y.chunk(passes)):
            (F.mse_loss(net(xs), ys) / passes).backward()
        optimizer.step()
