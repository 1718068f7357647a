"""One stage of a model: forward and backward passes of the micro-batches in it, with recomputation if set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge as gradient_edge
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from hpcdist.errors import ConfigError
from hpcdist.parallel.boundary import Described, Values
from hpcdist.parallel.layers import Chain


class _Alias(torch.autograd.Function):
    """Returns a tensor with the same memory that is no view for torch, so that it may change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Stage:
    """One stage of a model, on the rank that has it.

    Calls for each micro-batch: `enter` (not in the first stage), `forward` and directly after it `keep_outputs`; later
    `backward`, or `backward_inputs` and then `backward_weights`.

    Args:
        number: 0 for the first one.
        chain: its layers.
        layers: their numbers in the model, for messages.
        recompute: keep only the inputs of a forward pass; compute the rest again for the backward pass, with the same
            random numbers.
    """

    def __init__(self, number: int, chain: Chain, layers: range, recompute: bool):
        self.number, self._chain, self._layers, self._recompute = number, chain, layers, recompute
        self.parameters = list(chain.parameters())
        self._inputs_of: dict[int, list[Tensor]] = {}  # by micro-batch: inputs that get a gradient
        self._outputs: dict[int, list[Tensor]] = {}  # by micro-batch: outputs that get one, or the loss
        self._later: dict[int, Callable[[], Any] | None] = {}  # postponed parts of backward passes
        self._latest: Recomputation | None = None  # of the last forward pass, until `keep_outputs`
        self._recomputations: dict[int, Recomputation | None] = {}

    def __str__(self) -> str:
        first, last = self._layers[0], self._layers[-1]
        return f"stage {self.number} ({f'layer {first}' if first == last else f'layers {first} to {last}'})"

    # --- forward --------------------------------------------------------------------------------------------------
    def enter(self, micro_batch: int, tensors: list[Tensor | None], tree: pytree.TreeSpec, grads: list[bool]) -> Values:
        """Return received tensors as values for `forward`, of structure `tree`; those with `grads` get a gradient."""
        self._inputs_of[micro_batch] = [
            t.requires_grad_() for t, grad in zip(tensors, grads, strict=True) if grad and t is not None
        ]
        entered = [_Alias.apply(t) if grad else t for t, grad in zip(tensors, grads, strict=True)]
        return pytree.tree_unflatten(entered, tree)

    def forward(self, values: Values) -> Values:
        """Compute the stage's outputs.

        Raises:
            ConfigError: the layers refuse the values. The first stage raises the error itself.
        """
        try:
            if not self._recompute or not torch.is_grad_enabled():
                return self._chain.run(values)
            self._latest = Recomputation(self._run_on_copies, self._buffers_kept)
            return self._latest.first(values)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if self.number == 0:
                raise
            got = [
                Described(leaf.dtype, tuple(leaf.shape), False) if isinstance(leaf, Tensor) else type(leaf).__name__
                for leaf in pytree.tree_leaves(values)
            ]
            raise ConfigError(
                f"{self} must be able to take what stage {self.number - 1} returns; got {', '.join(map(str, got))}, "
                f"and {type(error).__name__}: {error}"
            ) from error

    def _run_on_copies(self, values: Values) -> Values:
        """Run on copies: layers may change inputs in place, which are needed again."""
        return self._chain.run(pytree.tree_map_only(Tensor, Tensor.clone, values))

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Compute on copies of the buffers, so that running statistics count a micro-batch once."""
        originals = [(module, dict(module._buffers)) for module in self._chain.modules() if module._buffers]
        for module, buffers in originals:
            module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for module, buffers in originals:
                module._buffers.update(buffers)

    def keep_outputs(self, micro_batch: int, tensors: list[Tensor]) -> None:
        """Keep the outputs, or the loss, where the backward pass starts."""
        self._outputs[micro_batch] = tensors
        self._recomputations[micro_batch], self._latest = self._latest, None

    # --- backward -------------------------------------------------------------------------------------------------
    def backward(self, micro_batch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the backward pass: add to the gradients of the weights, and return the gradients of the inputs.

        Args:
            gradients: of the tensors passed to `keep_outputs`; None for a loss.
        """
        outputs, gradients = self._take_outputs(micro_batch, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return self._gradients(micro_batch)

    def backward_inputs(self, micro_batch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the inputs, and postpone the gradients of the weights.

        Uses the function of torch.distributed.pipelining, which walks autograd's graph. If the graph can't be divided
        (see `_divides`), the whole pass runs now.

        Reference: Penghui Qi, Xinyi Wan, Guangxing Huang, Min Lin, "Zero bubble pipeline parallelism", 2023.
        """
        outputs, entered = self._outputs[micro_batch], self._inputs_of.get(micro_batch, [])
        if not entered:
            self._later[micro_batch] = partial(self.backward, micro_batch, gradients)
            return []
        if not _divides([tensor for tensor in outputs if tensor.requires_grad], entered, self.parameters):
            self._later[micro_batch] = None
            return self.backward(micro_batch, gradients)
        from torch.distributed.pipelining import _backward as torchs  # not at import: it takes a second

        outputs, gradients = self._take_outputs(micro_batch, gradients)
        # Aliases, because torch's function detaches its outputs, and the graph may need them.
        outputs = [_Alias.apply(tensor) for tensor in outputs]
        _, groups = torchs.stage_backward_input(outputs, gradients, entered, iter(self.parameters))
        self._later[micro_batch] = partial(torchs.stage_backward_weight, iter(self.parameters), groups)
        return self._gradients(micro_batch)

    def backward_weights(self, micro_batch: int) -> None:
        """Add the gradients of the weights that `backward_inputs` has postponed."""
        later = self._later.pop(micro_batch)
        if later is not None:
            later()

    def _take_outputs(
        self, micro_batch: int, gradients: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Recompute if set, and return the outputs that have gradients, with these."""
        recomputation, outputs = self._recomputations.pop(micro_batch), self._outputs.pop(micro_batch)
        if recomputation is not None:
            recomputation.compute()
        kept = [index for index, tensor in enumerate(outputs) if tensor.requires_grad]  # not of frozen layers
        return [outputs[index] for index in kept], None if gradients is None else [gradients[index] for index in kept]

    def _gradients(self, micro_batch: int) -> list[Tensor]:
        entered = self._inputs_of.pop(micro_batch, [])
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in entered]


def _divides(outputs: list[Tensor], entered: list[Tensor], parameters: list[nn.Parameter]) -> bool:
    """Return whether gradients of the weights can be computed later than gradients of the inputs.

    Each output must depend on an input, and each weight must join the path to the inputs at one node only. With two
    nodes, torch's function may run twice through the graph between them, which fails or counts gradients twice.
    """
    from torch.distributed.pipelining import _backward as torchs

    above = torchs.construct_reverse_graph([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])
    on_the_way, _ = torchs.reverse_closure([gradient_edge(tensor).node for tensor in entered], set(), above)
    if not all(tensor.grad_fn in on_the_way for tensor in outputs):
        return False
    leaves = [gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
    return all(len(torchs.reverse_closure([leaf], on_the_way, above)[1]) <= 1 for leaf in leaves)


# --- recomputation ----------------------------------------------------------------------------------------------------
class _Holder:
    """A placeholder for a tensor in the graph of a forward pass; it is freed with that part of the graph."""


class _AllComputed(Exception):
    """Ends a recomputation once all tensors that the graph needs are there."""


class Recomputation:
    """A forward pass whose graph keeps no tensors: `compute` computes them again once; they are freed with the graph.

    torch's `checkpoint` computes the pass again for each walk through the graph, and hands each tensor out once.
    Gradients of inputs first and of weights later need several walks, which share tensors, such as a normalisation's
    inputs.

    Args:
        run: the pass, which depends only on its inputs and on torch's random numbers.
        context: surrounds it when it is run again.

    Reference: Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training deep nets with sublinear memory cost",
    2016.
    """

    def __init__(self, run: Callable[[Values], Values], context: Callable[[], AbstractContextManager[None]]):
        self._run, self._context = run, context
        self._inputs: Values = ()
        self._holders: list[ref[_Holder]] = []
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._tensors: WeakKeyDictionary[_Holder, Tensor] = WeakKeyDictionary()

    def first(self, inputs: Values) -> Values:
        """Run the pass, and return its outputs. Inputs are kept until `compute`; they must not change until then."""
        self._inputs = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), inputs)
        self._random = torch.get_rng_state()
        self._devices, self._random_there = get_device_states(*pytree.tree_leaves(inputs))
        with saved_tensors_hooks(self._drop, self._tensors.__getitem__):
            return self._run(inputs)

    def compute(self) -> None:
        """Run the pass once more, with the same random numbers; random states stay as they are.

        Raises:
            ConfigError: it computes something else than before.
        """
        if not self._holders:
            return
        recomputed: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            """Hook of the second pass: store a tensor for the holder that the graph has in its place."""
            tensor = tensor.detach()
            holder = self._holders[len(recomputed)]()
            if holder is not None:
                self._tensors[holder] = tensor
            recomputed.append(tensor)
            if len(recomputed) == len(self._holders):
                raise _AllComputed
            return tensor

        hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.random.fork_rng(self._devices), suppress(_AllComputed), self._context(), hooks:
            torch.set_rng_state(self._random)
            if self._devices:
                set_device_states(self._devices, self._random_there)
            self._run(self._inputs)
        self._inputs = ()
        if [(tensor.dtype, tensor.shape) for tensor in recomputed] != self._kinds:
            raise ConfigError(
                "layers must compute the same from the same inputs each time with recompute = True; got "
                f"{len(self._kinds)} tensors kept for the backward pass, and {len(recomputed)} or others when computed "
                "again. Draw random numbers from torch's generators only; or set recompute = False."
            )

    def _drop(self, tensor: Tensor) -> _Holder:
        """Hook of the first pass: give autograd a holder instead of the tensor that it would keep."""
        holder = _Holder()
        self._holders.append(ref(holder))
        self._kinds.append((tensor.dtype, tensor.shape))
        return holder
