"""Average the local optimiser's state that lies along the parameters: momentum, mean squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel

_ALONG = "along"  # in the place of a value
Described = dict[str, Any]  # of one parameter's state, by name: _ALONG, a number, or [number] for a tensor of one


class Moments:
    """Average tensors of an optimiser's state with their parameter's shape, the same ones on all ranks.

    Scalars, such as Adam's count of steps, stay as they are on each rank. Where a rank has no state for a parameter
    and another one has (the parameter has had no gradient on the first one yet), it counts as zeros in the mean, and
    is made, with the scalars of the lowest rank that has them. Left alone is the state of a parameter that also has
    tensors of other shapes, such as Adafactor's.

    Messages: until every parameter has a state everywhere, one exchange of a few bytes per parameter at each average.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self._names: list[str] = []  # once every parameter has its state on all ranks

    def average(self, optimizer: torch.optim.Optimizer, mean: Callable[[list[Tensor]], None]) -> None:
        """Collective. Replace each tensor of the state by its mean.

        Args:
            mean: replaces flat tensors like `model.params` by their means over some or all ranks. Collective.
        """
        for name in self._names or self._agree(optimizer):
            flats = [torch.zeros_like(flat) for flat in self._model.params]
            held = [(view, state[name]) for view, state in self._along(optimizer, flats) if name in state]
            for view, tensor in held:
                view.copy_(tensor)
            mean(flats)
            for view, tensor in held:
                tensor.copy_(view)

    def reset(self) -> None:
        """Collective. Forget what the ranks agreed on: the optimisers' states have been replaced."""
        self._names = []

    def _along(self, optimizer: torch.optim.Optimizer, flats: list[Tensor]) -> Iterator[tuple[Tensor, dict]]:
        """Yield each parameter's view of `flats`, and the tensors of its state that lie along it, by name."""
        for parameter, view in self._model.views(flats):
            state = optimizer.state.get(parameter, {})
            yield view, {name: state[name] for name, what in _describe(parameter, state).items() if what == _ALONG}

    def _agree(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Collective. Make the state that this rank lacks; return the names of tensors along parameters on any rank."""
        places = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        parameters = [p for p, _ in self._model.views(self._model.params) if p in places]
        own = [_describe(parameter, optimizer.state.get(parameter, {})) for parameter in parameters]
        described = self._comm.gather(own)
        agreed = [next(filter(None, of_ranks), {}) for of_ranks in zip(*described, strict=True)]
        lacking = [(p, new) for p, old, new in zip(parameters, own, agreed, strict=True) if new and not old]
        if lacking:
            whole = optimizer.state_dict()  # so that torch puts each tensor on the device where it wants it
            whole["state"] |= {places[p]: _make_state(p, described) for p, described in lacking}
            optimizer.load_state_dict(whole)
        names = list(dict.fromkeys(name for new in agreed for name, what in new.items() if what == _ALONG))
        if all(agreed):
            self._names = names
        return names


def _describe(parameter: nn.Parameter, state: dict[str, Any]) -> Described:
    """Describe a parameter's state; empty where it holds something that can't be written in JSON."""
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


def _make_state(parameter: nn.Parameter, described: Described) -> dict[str, Any]:
    """Make a state of zeros along the parameter, and of the numbers given."""
    state: dict[str, Any] = {}
    for name, what in described.items():
        if what == _ALONG:
            state[name] = torch.zeros_like(parameter)
        else:
            state[name] = torch.tensor(what[0]) if isinstance(what, list) else what
    return state
