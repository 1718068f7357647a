"""Build some layers of a model without ever holding all of it, with the values that the whole one would have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.errors import ConfigError
from hpcdist.parallel.layers import Chain

Make = Callable[[], Any]
Register = Callable[[nn.Parameter], nn.Parameter | None]


def outline(make: Make) -> Chain:
    """Make the model on the meta device: it has shapes, and takes no memory. Random states stay as they are.

    Raises:
        ConfigError: the model can't be made there, or is none of layers.
    """
    return _outline(make, lambda parameter: None)


def build(make: Make, mine: Collection[int], device: torch.device | str | None = None) -> Chain:
    """Build the layers `mine` of the model that `make` makes, with their initial values in the whole model.

    `make` runs twice: on the meta device, where it shows which of the parameters that it registers are of which layer;
    and in earnest, where a parameter of another layer is replaced, as soon as it is registered, by a view of one
    scratch tensor for all of them. So all random numbers are drawn as in the whole model, and random states are
    afterwards as if that had been made; the memory is that of these layers, and twice that of the largest parameter.

    Args:
        make: returns the same model each time: a Chain, an nn.Sequential or a list of layers.
        mine: numbers of layers.
        device: on which they are at the end.

    Raises:
        ConfigError: as for `outline`.
    """
    registered: list[nn.Parameter] = []
    chain = _outline(make, registered.append)
    kept = {id(parameter) for parameter in chain.part(mine).parameters()}
    others = {id(parameter) for parameter in chain.parameters()} - kept
    dropped = [id(parameter) in others for parameter in registered]
    scratch = _Scratch(p for p, drop in zip(registered, dropped, strict=True) if drop)
    drops = iter(dropped)

    def replace(parameter: nn.Parameter) -> nn.Parameter | None:
        return scratch.stand_in(parameter) if next(drops, False) else None

    with _registering(replace):
        part = Chain.of(make()).part(mine)
    return part if device is None else part.to(device)


def _outline(make: Make, register: Register) -> Chain:
    with callers_state_kept(), torch.device("meta"), _registering(register):
        try:
            return Chain.of(make())
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                "model in stages must be one that can be made on torch's meta device, without values; got an error "
                f"there: {error} Compute nothing with parameters' values while it is made."
            ) from error


@contextmanager
def _registering(register: Register) -> Iterator[None]:
    """Call `register` with each parameter that a module registers; it may return another one to take its place."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else register(parameter)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Scratch:
    """Memory for parameters that nobody needs: one tensor of each type, as long as the longest of them."""

    def __init__(self, parameters: Iterator[nn.Parameter]):
        self._lengths: dict[torch.dtype, int] = {}
        for parameter in parameters:
            self._lengths[parameter.dtype] = max(parameter.numel(), self._lengths.get(parameter.dtype, 0))
        self._memory: dict[torch.dtype, Tensor] = {}

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of the same shape, dtype and device."""
        dtype = parameter.dtype
        if dtype not in self._memory:
            self._memory[dtype] = parameter.new_zeros(self._lengths.get(dtype, 0)).detach()
        flat = self._memory[dtype]
        if flat.device != parameter.device or len(flat) < parameter.numel():
            return parameter  # of a model that is made otherwise in earnest: keep it
        view = flat[: parameter.numel()].view(parameter.shape)
        return nn.Parameter(view, requires_grad=parameter.requires_grad)
