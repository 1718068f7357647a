"""Compute a forward pass again before its backward pass, instead of keeping what that needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from hpcdist.errors import ConfigError


class _Holder:
    """The place of a tensor in the graph of a forward pass; it goes with the part of the graph that needs it."""


class _AllComputed(Exception):
    """Ends a recomputation once the tensors that the graph needs are there."""


class Recomputation:
    """One forward pass, whose graph keeps no tensors: `compute` brings them back, once, and they go with the graph.

    torch's own `checkpoint` computes a pass again for each walk through the graph, and gives each tensor away once.
    Where the gradients of inputs and of weights are made one after the other there are several walks, which share
    tensors: a normalisation's inputs, say.

    Args:
        run: the pass; it returns the same for the same inputs, and the same random numbers of torch.
        context: surrounds it when it is run again.

    Reference: Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training deep nets with sublinear memory cost",
    2016.
    """

    def __init__(self, run: Callable[..., Any], context: Callable[[], AbstractContextManager[None]] = nullcontext):
        self._run, self._context = run, context
        self._inputs: list[Any] = []
        self._places: list[ref[_Holder]] = []
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._tensors: WeakKeyDictionary[_Holder, Tensor] = WeakKeyDictionary()

    def first(self, *inputs: Any) -> Any:
        """Run the pass, and return its outputs.

        Args:
            inputs: tensors, kept until `compute`, and others; they must not be changed in place until then.
        """
        self._inputs = [i.detach().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else i for i in inputs]
        self._random = torch.get_rng_state()
        self._devices, self._random_there = get_device_states(*inputs)
        with saved_tensors_hooks(self._drop, self._tensors.__getitem__):
            return self._run(*inputs)

    def compute(self) -> None:
        """Run the pass once more, in the first one's random state; random states stay as they are.

        Raises:
            ConfigError: it takes another course than before.
        """
        if not self._places:
            return
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            place = self._places[len(found)]()
            if place is not None:
                self._tensors[place] = tensor
            found.append(tensor)
            if len(found) == len(self._places):
                raise _AllComputed
            return tensor

        hooks = saved_tensors_hooks(keep, _as_it_is)
        with torch.random.fork_rng(self._devices), suppress(_AllComputed), self._context(), hooks:
            torch.set_rng_state(self._random)
            if self._devices:
                set_device_states(self._devices, self._random_there)
            self._run(*self._inputs)
        self._inputs.clear()
        if list(map(_kind, found)) != self._kinds:
            raise ConfigError(
                "layers must compute the same from the same inputs each time with recompute = True; got "
                f"{len(self._kinds)} tensors kept for the backward pass, and {len(found)} or others when computed "
                "again. Draw random numbers from torch's generators only; or set recompute = False."
            )

    def _drop(self, tensor: Tensor) -> _Holder:
        place = _Holder()
        self._places.append(ref(place))
        self._kinds.append(_kind(tensor))
        return place


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
