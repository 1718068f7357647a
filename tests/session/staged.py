"""A small model in stages, its data, and the same training in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd

SAMPLES, FEATURES, BATCH = 48, 6, 16
mse = nn.functional.mse_loss


def make(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The unsplit model."""
    torch.manual_seed(0)
    sizes = (FEATURES, 8, 8, 8, 2)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def data(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(FEATURES, 2, generator=generator, dtype=torch.float64)).tanh()
    return TensorDataset(x.to(dtype), y.to(dtype))


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.5} | options)


def batches(joint: int = 1, samples: int = SAMPLES, dtype: torch.dtype = torch.float64, **options: Any) -> DataLoader:
    """A loader whose batches make, on `joint` replicas, one batch of `BATCH`."""
    return DataLoader(data(samples, dtype), batch_size=BATCH // joint, **options)


def pipeline(comm: Any, stages: int, model: Callable[[], nn.Module] = make, **options: Any) -> Any:
    """Collective. Begins a session, and cuts the model."""
    hd.init(comm=comm)
    return hd.pipeline(model, mse, stages=stages, **options)


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What ranks have of the model, as that of one process; ranks that have the same must have it to the bit."""
    raise_on_all_ranks: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in raise_on_all_ranks or torch.equal(raise_on_all_ranks[name], tensor), (
                f"ranks differ in {name}"
            )
            raise_on_all_ranks[name] = tensor
    return raise_on_all_ranks


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def loss_of(state: dict[str, Tensor]) -> float:
    """The loss of the unsplit model with these values, on all samples."""
    model = make()
    model.load_state_dict(state)
    x, y = data().tensors
    with torch.no_grad():
        return float(mse(model(x), y))
