"""Averages of the local optimiser's tensors with the shape of a parameter: momentum, mean squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel

_ALONG = "along"  # represents a tensor with the shape of the parameter
Described = dict[str, Any]  # one parameter's state, by name: _ALONG, a number, or [number] for a tensor of one element


def groups(model: FlatModel, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any] | None]:
    """Return the group of each parameter, in the order of `model.slots`; None for a parameter outside of all groups."""
    all_groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(parameter): group for group in all_groups for parameter in group["params"]}
    return [group_of.get(id(slot.tensor)) for slot in model.slots]


def required(optimizer: torch.optim.Optimizer | None, where: str) -> torch.optim.Optimizer:
    """Return the optimiser; raise ConfigError if it is None.

    Args:
        where: for the message, what needs an optimiser, such as `strategy.inner_state is not keep`.
    """
    if optimizer is None:
        raise ConfigError(
            f"strategy.optimizer must be the local optimiser where {where}; got None. Set it after creating the "
            "strategy, or use hpcdist.DistributedOptimizer, which does."
        )
    return optimizer


class Moments:
    """Averages the tensors of an optimiser's state that have the shape of their parameter.

    Scalars, such as Adam's count of steps, are not averaged. If a rank has no state for a parameter, because it has had
    no gradient of it yet, it contributes zeros, and gets a state with the scalars of the lowest rank that has one.
    State with tensors of other shapes, such as Adafactor's, stays unchanged.

    Messages: until every parameter has a state on all ranks, one exchange of a few bytes per parameter at each average.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self._names: list[str] = []  # once every parameter has its state on all ranks

    def average(self, optimizer: torch.optim.Optimizer, mean: Callable[[list[Tensor]], object]) -> None:
        """Collective. Replace each tensor of the state by its mean.

        Args:
            mean: Collective. Replaces flat tensors like `model.params` by their means over some or all ranks.
        """
        for name in self._names or self._agree(optimizer):
            flats = [torch.zeros_like(flat) for flat in self._model.params]
            pairs = [(view, state[name]) for view, state in self._along(optimizer, flats) if name in state]
            for view, tensor in pairs:
                view.copy_(tensor)
            mean(flats)
            for view, tensor in pairs:
                tensor.copy_(view)

    def reset(self) -> None:
        """Collective. Forget what ranks have agreed on, after the optimisers' states were replaced."""
        self._names = []

    def _along(self, optimizer: torch.optim.Optimizer, flats: list[Tensor]) -> Iterator[tuple[Tensor, dict]]:
        """Yield each parameter's view of `flats`, with the state's tensors of the same shape, by name."""
        for slot in self._model.slots:
            state = optimizer.state.get(slot.tensor, {})
            along = [name for name, what in _describe(slot.tensor, state).items() if what == _ALONG]
            yield slot.view(flats), {name: state[name] for name in along}

    def _agree(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Collective. Create missing state; return the names of tensors with their parameter's shape on any rank.

        `agreed` has for each parameter the description by the lowest rank that has a state for it.
        """
        indices = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        parameters = [slot.tensor for slot in self._model.slots if slot.tensor in indices]
        local = [_describe(parameter, optimizer.state.get(parameter, {})) for parameter in parameters]
        described = self._comm.gather(local)
        agreed: list[Described] = [next(filter(None, of_ranks), {}) for of_ranks in zip(*described, strict=True)]
        lacking = [(p, new) for p, old, new in zip(parameters, local, agreed, strict=True) if new and not old]
        if lacking:
            state_dict = optimizer.state_dict()  # so that torch moves each tensor to the right device
            state_dict["state"] |= {indices[p]: _create_state(p, described) for p, described in lacking}
            optimizer.load_state_dict(state_dict)
        names = list(dict.fromkeys(name for new in agreed for name, what in new.items() if what == _ALONG))
        if all(agreed):
            self._names = names
        return names


def _describe(parameter: Tensor, state: dict[str, Any]) -> Described:
    """Describe a parameter's state in JSON's types; return {} if it has a tensor of another shape, or an object."""
    described: Described = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) and (value is None or isinstance(value, int | float)):
            described[name] = value
        elif isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
            described[name] = _ALONG
        elif isinstance(value, Tensor) and value.dim() == 0:
            described[name] = [value.item()]
        else:
            return {}
    return described


def _create_state(parameter: Tensor, described: Described) -> dict[str, Any]:
    """Return a state of zeros in the parameter's shape, and the described numbers."""
    state: dict[str, Any] = {}
    for name, what in described.items():
        if what == _ALONG:
            state[name] = torch.zeros_like(parameter)
        else:
            state[name] = torch.tensor(what[0]) if isinstance(what, list) else what
    return state
