"""Compute one stage: forward and backward passes of the micro-batches that are under way in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hpcdist.errors import ConfigError
from hpcdist.parallel.boundary import Values
from hpcdist.parallel.layers import Chain
from hpcdist.parallel.recompute import Recomputation


class _Alias(torch.autograd.Function):
    """Hand on a tensor as another one with the same memory, which may be changed in place, and is no view to torch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Stage:
    """One stage of a model, on the rank that has it.

    Args:
        number: 0 for the first one.
        chain: its layers.
        layers: their numbers in the model, for messages.
        recompute: keep the inputs of a forward pass only, and compute the rest again for the backward pass, with the
            same random numbers.
    """

    def __init__(self, number: int, chain: Chain, layers: range, recompute: bool):
        self.number, self._chain, self._layers, self._recompute = number, chain, layers, recompute
        self.parameters = list(chain.parameters())
        self._entered: dict[int, list[Tensor]] = {}  # by micro-batch: the inputs that have a gradient
        self._left: dict[int, list[Tensor]] = {}  # the outputs that get one, or the loss
        self._later: dict[int, Callable[[], Any] | None] = {}  # the part of a backward pass that is left for later
        self._latest: Recomputation | None = None  # of the last forward pass
        self._again: dict[int, Recomputation | None] = {}

    def __str__(self) -> str:
        first, last = self._layers[0], self._layers[-1]
        return f"stage {self.number} ({f'layer {first}' if first == last else f'layers {first} to {last}'})"

    # --- forward --------------------------------------------------------------------------------------------------
    def enter(self, micro_batch: int, tensors: list[Tensor | None], tree: pytree.TreeSpec, grads: list[bool]) -> Values:
        """Return values for `forward` from received tensors, of which some are to have a gradient."""
        self._entered[micro_batch] = [t.requires_grad_() for t, grad in zip(tensors, grads, strict=True) if grad]
        entered = [_Alias.apply(t) if grad else t for t, grad in zip(tensors, grads, strict=True)]
        return pytree.tree_unflatten(entered, tree)

    def forward(self, values: Values) -> Values:
        """Compute the stage's outputs.

        Raises:
            ConfigError: the first stage apart, it can't take the values.
        """
        try:
            if not self._recompute or not torch.is_grad_enabled():
                return self._chain.run(values)
            leaves, tree = pytree.tree_flatten(values)
            self._latest = Recomputation(partial(self._run_on_copies, tree), self._buffers_kept)
            return self._latest.first(*leaves)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if self.number == 0:
                raise
            got = ", ".join(_described(leaf) for leaf in pytree.tree_leaves(values))
            raise ConfigError(
                f"{self} must be able to take what stage {self.number - 1} returns; got {got}, and "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run_on_copies(self, tree: pytree.TreeSpec, *leaves: Any) -> Values:
        """Run on copies, for layers may change their inputs in place, which are needed once more."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._chain.run(pytree.tree_unflatten(copies, tree))

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Compute on copies of the buffers: running statistics, say, count a micro-batch once."""
        originals = [(module, dict(module._buffers)) for module in self._chain.modules() if module._buffers]
        for module, buffers in originals:
            module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for module, buffers in originals:
                module._buffers.update(buffers)

    def leave(self, micro_batch: int, tensors: list[Tensor]) -> None:
        """Keep the outputs, or the loss, from which the backward pass starts."""
        self._left[micro_batch] = tensors
        self._again[micro_batch], self._latest = self._latest, None

    # --- backward -------------------------------------------------------------------------------------------------
    def backward(self, micro_batch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Add to the gradients of the weights; return those of the inputs that have one.

        Args:
            gradients: of what `leave` has got; None for a loss.
        """
        left, gradients = self._leave_again(micro_batch, gradients)
        if left:
            torch.autograd.backward(left, gradients)
        return self._gradients(micro_batch)

    def backward_inputs(self, micro_batch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the inputs that have one, and leave those of the weights for later.

        torch's own pipelines divide a backward pass so, and we take their function, which knows autograd's graph from
        inside; where an output does not depend on the inputs, the whole pass is made now.

        Reference: Penghui Qi, Xinyi Wan, Guangxing Huang, Min Lin, "Zero bubble pipeline parallelism", 2023.
        """
        left, entered = self._left[micro_batch], self._entered.get(micro_batch, [])
        if not entered:
            self._later[micro_batch] = partial(self.backward, micro_batch, gradients)
            return []
        if not all(_depends(tensor, entered) for tensor in left if tensor.requires_grad):
            self._later[micro_batch] = None
            return self.backward(micro_batch, gradients)
        from torch.distributed.pipelining import _backward as torchs  # not at import: it takes a second

        left, gradients = self._leave_again(micro_batch, gradients)
        left = [_Alias.apply(tensor) for tensor in left]  # which torch's function detaches; the graph may need them
        _, groups = torchs.stage_backward_input(left, gradients, entered, iter(self.parameters))
        self._later[micro_batch] = partial(torchs.stage_backward_weight, iter(self.parameters), groups)
        return self._gradients(micro_batch)

    def backward_weights(self, micro_batch: int) -> None:
        """Add to the gradients of the weights what `backward_inputs` has left for later."""
        later = self._later.pop(micro_batch)
        if later is not None:
            later()

    def _leave_again(
        self, micro_batch: int, gradients: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the outputs that have gradients, and these, once what a backward pass needs is there."""
        again = self._again.pop(micro_batch)
        if again is not None:
            again.compute()
        return _with_graph(self._left.pop(micro_batch), gradients)

    def _gradients(self, micro_batch: int) -> list[Tensor]:
        entered = self._entered.pop(micro_batch, [])
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in entered]


def _with_graph(tensors: list[Tensor], gradients: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor] | None]:
    """Leave out tensors that nothing of the stage has led to, such as those of frozen layers."""
    kept = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    return [tensors[place] for place in kept], None if gradients is None else [gradients[place] for place in kept]


def _depends(tensor: Tensor, inputs: list[Tensor]) -> bool:
    """Tell whether a tensor's graph has one of the inputs as a leaf."""
    leaves = {id(leaf) for leaf in inputs}
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _described(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
