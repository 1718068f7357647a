"""A model's step as a pipeline on all ranks, and the same step of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator
    from hpcdist.parallel.pipeline import Pipeline

SEED = 5


class Outcome(NamedTuple):
    """The loss of a step, and the gradients by the names of the parameters; None for those that have none."""

    loss: float
    grads: dict[str, Tensor | None]


def linear(a: int = 4, b: int = 4) -> nn.Linear:
    return nn.Linear(a, b, dtype=torch.float64)


def samples(count: int = 6, inputs: int = 4, targets: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, n, generator=generator, dtype=torch.float64).to(dtype) for n in (inputs, targets)]


def make_pipeline(comm: Communicator, make: Any, loss: Callable, **options: Any) -> Pipeline:
    """Collective. A pipeline on all ranks, built after the seed."""
    from hpcdist.parallel.grid import Grid
    from hpcdist.parallel.pipeline import Pipeline

    torch.manual_seed(SEED)
    return Pipeline(make, loss, Grid(comm, comm.size), **options)


def piped(comm: Communicator, make: Any, loss: Callable, x: Any, y: Any, **options: Any) -> Outcome:
    """Collective. A step of the pipeline: its loss, and the gradients of this rank's part."""
    pipeline = make_pipeline(comm, make, loss, **options)
    value = pipeline.forward_backward(x, y)
    assert value.dtype == torch.float64 and value.ndim == 0
    return outcome(value, pipeline)


def whole(make: Callable[[], nn.Module], loss: Callable, x: Any, y: Any) -> Outcome:
    """The same step of the unsplit model, with the whole batch at a time."""
    torch.manual_seed(SEED)
    model = make()
    value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
    value.backward()
    return outcome(value, model)


def outcome(value: Tensor, module: nn.Module) -> Outcome:
    """The gradients that lie in a module, beside the loss."""
    named = module.named_parameters(remove_duplicate=False)
    return Outcome(value.item(), {name: None if p.grad is None else p.grad.clone() for name, p in named})


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks have together; where several have a parameter, its gradients are the same to the bit."""
    assert len({loss for loss, _ in outcomes}) == 1, "all ranks know the same loss"
    grads: dict[str, Tensor | None] = {}
    for _, part in outcomes:
        for name, grad in part.items():
            if name in grads:
                assert same(grads[name], grad), f"{name} on several ranks"
            grads[name] = grad
    return Outcome(outcomes[0].loss, grads)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """True where both are the same to the bit."""
    return one is other if one is None or other is None else torch.equal(one, other)


def assert_close(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Both have the same parameters; losses and gradients are as close as that."""
    assert set(got.grads) == set(expected.grads)
    assert abs(got.loss - expected.loss) <= tolerance
    for name, grad in expected.grads.items():
        if grad is None or got.grads[name] is None:
            assert grad is None and got.grads[name] is None, name
        else:
            difference = (got.grads[name] - grad).abs().max().item()
            assert difference <= tolerance, f"{name} differs by {difference}"
