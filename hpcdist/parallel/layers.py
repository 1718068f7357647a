"""Models as chains of layers, which can be cut between any two of them, and of which a rank builds only some."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.errors import ConfigError

Make = Callable[[], Any]
Register = Callable[[nn.Parameter], nn.Parameter | None]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Chain(nn.Module):
    """A sequence of layers, like nn.Sequential, which also passes several values between layers.

    A layer gets as many values as its `forward` has required positional parameters (at least one), or all values if it
    has *args. A returned tuple or list counts as several values. Further values skip the layer, and follow its outputs.
    For a skip connection write a layer that returns (x, skip), layers that take x, and a layer that takes (x, skip)::

        Chain([Split(), nn.Linear(8, 8), nn.ReLU(), Join()])   # Split returns (x, x), Join.forward(self, x, skip)

    Parameters are named as nn.Sequential names them: `4.weight`.

    Args:
        layers: modules, or modules by their names.
    """

    def __init__(self, layers: Iterable[nn.Module] | Mapping[str, nn.Module]):
        super().__init__()
        named = layers.items() if isinstance(layers, Mapping) else ((str(i), layer) for i, layer in enumerate(layers))
        self._one_value = False  # as in nn.Sequential, each layer gets exactly what the one before has returned
        self._counts: dict[str, int | None] = {}
        for name, layer in named:
            if not isinstance(layer, nn.Module):
                raise ConfigError(f"layers must be torch.nn.Modules; got {type(layer).__name__} as layer {name}.")
            self.add_module(name, layer)
            self._counts[name] = _parameters(layer)

    @staticmethod
    def of(model: Any) -> Chain:
        """Return a Chain, an nn.Sequential or a list of modules as a Chain; raise ConfigError for other models."""
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

    @property
    def _named(self) -> dict[str, nn.Module]:
        return cast(dict[str, nn.Module], self._modules)  # none is None; the same module may be there twice

    def layer(self, number: int) -> nn.Module:
        return list(self._named.values())[number]

    def part(self, numbers: Iterable[int]) -> Chain:
        """Return a chain of the layers of these numbers, which keep their names."""
        items = list(self._named.items())
        part = Chain({items[number][0]: items[number][1] for number in numbers})
        part._one_value = self._one_value
        return part

    def forward(self, *values: Any) -> Any:
        """Call all layers; return the last one's value, or a tuple of several."""
        return unwrapped(self.run(values))

    def run(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call all layers; return all values."""
        for name, layer in self._named.items():
            values = self._call(name, layer, values)
        return values

    def values(self, x: Any) -> tuple[Any, ...]:
        """Return a batch's inputs as values: the items of a tuple or list, else the input itself."""
        return tuple(x) if isinstance(x, (tuple, list)) and not self._one_value else (x,)

    def _call(self, name: str, layer: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call a layer on the first values, as many as it takes; return its outputs, followed by the other values."""
        if self._one_value:
            return (layer(*values),)
        count = self._counts[name]
        inputs, carried = (values, ()) if count is None else (values[:count], values[count:])
        returned = layer(*inputs)
        return (*(returned if isinstance(returned, (tuple, list)) else (returned,)), *carried)


def unwrapped(values: tuple[Any, ...]) -> Any:
    """Return a single value instead of a tuple of one."""
    return values[0] if len(values) == 1 else values


def _parameters(layer: nn.Module) -> int | None:
    """Return the number of a layer's required positional parameters (at least 1); None if it takes all values."""
    try:
        parameters = inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):  # compiled
        return None
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return max(1, sum(p.kind in _POSITIONAL and p.default is inspect.Parameter.empty for p in parameters))


# --- some layers of a model ------------------------------------------------------------------------------------------
def outline(make: Make, register: Register = lambda parameter: None) -> Chain:
    """Build the model on the meta device: shapes without memory. Random states stay as they are.

    Args:
        register: called with each parameter that a module registers.

    Raises:
        ConfigError: the model can't be built there, or does not consist of layers.
    """
    with callers_state_kept(), torch.device("meta"), _registering(register):
        try:
            return Chain.of(make())
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                "model in stages must be one that can be made on torch's meta device, without values; got an error "
                f"there: {error} Compute nothing with parameters' values while it is made."
            ) from error


def build(make: Make, numbers: Collection[int], device: torch.device | str | None = None) -> Chain:
    """Build the layers `numbers` of the model that `make` returns, with their initial values in the whole model.

    `make` runs twice. On the meta device it shows to which layer each parameter belongs. In the second run a parameter
    of another layer is replaced, as soon as it is registered, by a view of one scratch tensor that all of them share.
    So the random numbers are those of the whole model. Memory: that of these layers, and twice that of the
    largest parameter.

    Args:
        make: returns the same model each time: a Chain, an nn.Sequential or a list of layers.
        numbers: numbers of layers.
        device: where the layers are at the end.

    Raises:
        ConfigError: as for `outline`.
    """
    registered: list[nn.Parameter] = []
    chain = outline(make, registered.append)
    kept_ids = {id(parameter) for parameter in chain.part(numbers).parameters()}
    dropped_ids = {id(parameter) for parameter in chain.parameters()} - kept_ids
    dropped = [id(parameter) in dropped_ids for parameter in registered]
    others = [parameter for parameter, drop in zip(registered, dropped, strict=True) if drop]
    longest = {parameter.dtype: parameter.numel() for parameter in sorted(others, key=nn.Parameter.numel)}
    scratch: dict[torch.dtype, Tensor] = {}  # the memory of all of them
    drops = iter(dropped)  # the second run registers parameters in the same order

    def replace(parameter: nn.Parameter) -> nn.Parameter | None:
        """Return a view of the scratch tensor for a parameter of another layer; None: keep the parameter."""
        dtype = parameter.dtype
        if not next(drops, False):
            return None
        if dtype not in scratch:
            scratch[dtype] = parameter.new_zeros(longest.get(dtype, 0)).detach()
        flat = scratch[dtype]
        if flat.device != parameter.device or len(flat) < parameter.numel():
            return None  # `make` built other parameters than for `outline`: keep this one
        return nn.Parameter(flat[: parameter.numel()].view(parameter.shape), requires_grad=parameter.requires_grad)

    with _registering(replace):
        part = Chain.of(make()).part(numbers)
    return part if device is None else part.to(device)


@contextmanager
def _registering(register: Register) -> Iterator[None]:
    """Call `register` with each parameter that a module registers. A returned parameter replaces it."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else register(parameter)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # it may replace one
    try:
        yield
    finally:
        handle.remove()
