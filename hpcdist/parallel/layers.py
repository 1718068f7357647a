"""Call layers one after the other, so that a model can be cut between any two of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hpcdist.errors import ConfigError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Chain(nn.Module):
    """Call layers one after the other, as nn.Sequential does, whatever their signatures.

    A layer is called with as many of the values as its `forward` has required positional parameters (all, with *args,
    at least one); a tuple or list that it returns is that many values. Values that it does not take are carried past
    it, and follow those that it returns. So a skip connection is a layer that returns (x, skip), layers that take x,
    and one that takes (x, skip)::

        Chain([Split(), nn.Linear(8, 8), nn.ReLU(), Join()])   # Split returns (x, x), Join.forward(self, x, skip)

    Parameters are named as nn.Sequential names them: `4.weight`.

    Args:
        layers: modules, or modules by their names.
    """

    def __init__(self, layers: Iterable[nn.Module] | Mapping[str, nn.Module]):
        super().__init__()
        named = layers.items() if isinstance(layers, Mapping) else ((str(i), layer) for i, layer in enumerate(layers))
        self._one_value = False  # as nn.Sequential, which gives each layer what the one before has returned
        self._counts: dict[str, int | None] = {}
        for name, layer in named:
            if not isinstance(layer, nn.Module):
                raise ConfigError(f"layers must be torch.nn.Modules; got {type(layer).__name__} as layer {name}.")
            self.add_module(name, layer)
            self._counts[name] = _parameters(layer)

    @staticmethod
    def of(model: Any) -> Chain:
        """Make a chain of a model's layers; a Chain is returned as it is.

        Raises:
            ConfigError: it is no Chain, nn.Sequential or list of modules.
        """
        if isinstance(model, Chain):
            return model
        if isinstance(model, nn.Sequential):
            chain = Chain(dict(model._modules))
            chain._one_value = True
            return chain
        if isinstance(model, (list, tuple, nn.ModuleList)):
            return Chain(model)
        raise ConfigError(
            "model in stages must be an nn.Sequential, a list of layers or a hpcdist.parallel.Chain; got "
            f"{type(model).__name__}. Write it as a list of its layers, each called with what the one before returns."
        )

    def __len__(self) -> int:
        return len(self._modules)

    def layer(self, number: int) -> nn.Module:
        """Return the layer of that number."""
        return list(self._modules.values())[number]

    def part(self, numbers: Iterable[int]) -> Chain:
        """Return a chain of the layers of these numbers, which keep their names."""
        items = list(self._modules.items())
        part = Chain({items[number][0]: items[number][1] for number in numbers})
        part._one_value = self._one_value
        return part

    def forward(self, *values: Any) -> Any:
        """Call all layers; return the last one's value, or a tuple of several."""
        return unwrapped(self.run(values))

    def run(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call all layers; return all values."""
        for name, layer in self._modules.items():
            values = self._call(name, layer, values)
        return values

    def values(self, x: Any) -> tuple[Any, ...]:
        """Return the values that a batch's inputs are: those of a tuple or list, else itself."""
        return tuple(x) if isinstance(x, (tuple, list)) and not self._one_value else (x,)

    def _call(self, name: str, layer: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._one_value:
            return (layer(*values),)
        count = self._counts[name]
        taken, carried = (values, ()) if count is None else (values[:count], values[count:])
        returned = layer(*taken)
        return (*(returned if isinstance(returned, (tuple, list)) else (returned,)), *carried)


def unwrapped(values: tuple[Any, ...]) -> Any:
    """Return the only value, or all of several."""
    return values[0] if len(values) == 1 else values


def _parameters(layer: nn.Module) -> int | None:
    """Count the values that a layer takes; None for all."""
    try:
        parameters = inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):  # compiled
        return None
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return max(1, sum(p.kind in _POSITIONAL and p.default is inspect.Parameter.empty for p in parameters))
