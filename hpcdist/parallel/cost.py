"""The cost of each layer of a model, measured: time, parameters, activations, bytes of its outputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.parallel.boundary import Values
from hpcdist.parallel.layers import Chain, build, outline, unwrapped

HELD_BYTES = 2**30
WARM_UP = 2  # passes that are not counted
Run = Callable[[Values], Values]


@dataclass(frozen=True)
class LayerCost:
    """A layer's cost for one micro-batch. The passes of the last layer include the loss."""

    name: str  # number and class of the layer
    forward_s: float
    backward_s: float
    inputs_s: float  # of `backward_s`: for gradients of the inputs; the rest is for gradients of the weights
    parameter_bytes: int
    activation_bytes: int  # kept for the backward pass, outputs that a layer needs included; not inputs and parameters
    boundary_bytes: int  # of the values between this layer and the next one; 0 after the last layer


def measure(
    model: Callable[[], Any] | nn.Module | Sequence[nn.Module],
    x: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    y: Any = None,
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    held_bytes: int = HELD_BYTES,
) -> list[LayerCost]:
    """Measure every layer on the values that the layers before it return. The model and random states do not change.

    Args:
        model: a function that returns a Chain, an nn.Sequential or a list of layers. Several layers are built at a
            time, with at most `held_bytes` of parameters, but at least one. Or the model itself.
        x: inputs of one micro-batch.
        loss: (outputs, targets) -> a scalar. Its cost is added to the last layer.
        y: targets of one micro-batch.
        repeats: passes; the median of their seconds counts.
        device: where layers are measured.

    Raises:
        ConfigError: the model is not a chain of layers, or can't be built on the meta device.
    """
    device = torch.device(device)
    with callers_state_kept():
        whole, layers = _layers(model, device, held_bytes)
        x, y = (pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), each) for each in (x, y))
        probe = _Probe(whole.values(x), repeats, device)
        for number, layer in enumerate(layers):
            probe.measure(f"{number} {type(layer.layer(0)).__name__}", layer.run, layer)
        if loss is not None:
            targets = (leaf for leaf in pytree.tree_leaves(y) if isinstance(leaf, Tensor))
            probe.measure("loss", lambda values: (loss(unwrapped(values), y),), known=targets)
            of_loss, last = probe.costs.pop(), probe.costs[-1]
            sums = ("forward_s", "backward_s", "inputs_s", "activation_bytes")
            probe.costs[-1] = replace(last, **{key: getattr(last, key) + getattr(of_loss, key) for key in sums})
    return [*probe.costs[:-1], replace(probe.costs[-1], boundary_bytes=0)]


def _layers(model: Any, device: torch.device, held_bytes: int) -> tuple[Chain, Iterator[Chain]]:
    """Return the whole model, perhaps on the meta device, and an iterator over copies of its layers in memory."""
    if isinstance(model, (nn.Module, list, tuple)):
        chain = Chain.of(model)
        return chain, (copy.deepcopy(chain.part([number])).to(device) for number in range(len(chain)))
    whole = outline(model)
    return whole, _built(model, whole, device, held_bytes)


def _built(make: Callable[[], Any], whole: Chain, device: torch.device, held_bytes: int) -> Iterator[Chain]:
    """Yield each layer; several are built at a time, with at most `held_bytes` of parameters."""
    sizes = [_bytes(whole.layer(number).parameters()) for number in range(len(whole))]
    first = 0
    while first < len(sizes):
        end = first + 1
        while end < len(sizes) and sum(sizes[first : end + 1]) <= held_bytes:
            end += 1
        chain = build(make, range(first, end), device)
        yield from (chain.part([position]) for position in range(end - first))
        first = end


class _Probe:
    """Measures one layer after the other; keeps the values between them, and for each the layer that computed it."""

    def __init__(self, values: Values, repeats: int, device: torch.device):
        self._values, self._repeats, self._device = values, repeats, device
        self._owners: list[int | None] = [None] * len(pytree.tree_leaves(values))  # None: no layer, or counted
        self.costs: list[LayerCost] = []

    def measure(self, name: str, run: Run, layer: nn.Module | None = None, known: Iterable[Tensor] = ()) -> None:
        """Add the cost of a layer to `costs`; `known` tensors are in memory anyway."""
        parameters = [] if layer is None else [*layer.parameters()]
        passes = [self._pass(run, parameters) for _ in range(WARM_UP + self._repeats)][WARM_UP:]
        forward_s, backward_s, inputs_s = (median(each) for each in zip(*passes, strict=True))
        self.costs.append(LayerCost(name, forward_s, backward_s, min(inputs_s, backward_s), _bytes(parameters), 0, 0))
        self._advance(run, [*known, *parameters, *([] if layer is None else layer.buffers())])
        boundary = _bytes(leaf for leaf in pytree.tree_leaves(self._values) if isinstance(leaf, Tensor))
        self.costs[-1] = replace(self.costs[-1], boundary_bytes=boundary)

    def _pass(self, run: Run, parameters: list[nn.Parameter]) -> tuple[float, float, float]:
        """Return the seconds of a forward pass, of its backward pass, and of a backward pass for the inputs alone."""
        roots, values = self._entered()
        start = self._now()
        outputs = _with_gradient(run(values))
        forward_s = self._now() - start
        output_grads = [torch.ones_like(tensor) for tensor in outputs]
        if not outputs:
            return forward_s, 0.0, 0.0
        start = self._now()
        torch.autograd.backward(outputs, output_grads)
        backward_s = self._now() - start
        if not roots or not any(parameter.requires_grad for parameter in parameters):
            return forward_s, backward_s, backward_s if roots else 0.0
        roots, values = self._entered()
        outputs = _with_gradient(run(values))
        start = self._now()
        torch.autograd.grad(outputs, roots, output_grads, allow_unused=True)
        return forward_s, backward_s, self._now() - start

    def _advance(self, run: Run, in_memory: list[Tensor]) -> None:
        """Run the layer once more, add tensors that autograd keeps to the costs of layers, and store the outputs.

        A kept input is charged to the layer that computed it, others to this layer.
        """
        number = len(self.costs) - 1
        _, values = self._entered()
        index_of = {_address(leaf): i for i, leaf in enumerate(pytree.tree_leaves(values)) if isinstance(leaf, Tensor)}
        known_addresses = {_address(tensor) for tensor in in_memory}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and _address(tensor) not in known_addresses:
                saved[_address(tensor)] = tensor.detach()  # kept alive, so that no other tensor gets this address
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = run(values)
        for address, tensor in saved.items():
            input_index = index_of.get(address)
            owner = number if input_index is None else self._owners[input_index]
            if input_index is not None:
                self._owners[input_index] = None  # counted once
            if owner is not None:
                n_bytes = self.costs[owner].activation_bytes + tensor.untyped_storage().nbytes()
                self.costs[owner] = replace(self.costs[owner], activation_bytes=n_bytes)
        addresses = [_address(leaf) if isinstance(leaf, Tensor) else 0 for leaf in pytree.tree_leaves(outputs)]
        self._owners = [
            self._owners[index_of[address]] if address in index_of else None if address in saved else number
            for address in addresses
        ]
        self._values = _detached(outputs)

    def _entered(self) -> tuple[list[Tensor], Values]:
        """Return the values that have gradients, and copies of all values, which a layer may change in place."""
        roots = _detached(self._values)
        return _with_gradient(roots), pytree.tree_map_only(Tensor, Tensor.clone, roots)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _with_gradient(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _detached(values: Any) -> Any:
    """Detach values, with the same memory; those with gradients get gradients again."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), values)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
