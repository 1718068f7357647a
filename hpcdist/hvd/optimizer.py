"""An optimiser whose step takes gradients that are combined over the ranks, by Horovod's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpcdist.hvd.compression import Compressed, Compression
from hpcdist.hvd.operations import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    compressed_allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from hpcdist.hvd.state import ProcessSet, global_process_set

Wait = Callable[[], None]  # waits for a gradient, and puts it in its place


class _Combined:
    """What an optimiser has beside its own: it begins to combine each gradient when the backward pass has made it."""

    def start_combining(
        self, names: dict[Tensor, str], compression: Any, passes: int, op: str, predivide: float,
        groups: Sequence[Sequence[Tensor]], sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        """Register what is called when a gradient is there."""
        self._parameter_names, self._compression, self.backward_passes_per_step = names, compression, passes
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self._process_set = process_set
        self._waits: dict[Tensor, Wait | None] = {}  # of gradients under way; None: the group's others are not there
        self._left: dict[Tensor, int] = {}  # backward passes until a gradient is combined
        self._group_of = {param: tuple(group) for group in groups for param in group}
        self._synchronized, self._should_synchronize = False, True
        for group in self.param_groups:  # type: ignore[attr-defined]
            for param in group["params"]:
                if param.requires_grad and process_set.included():  # other ranks take steps of their own
                    self._left[param] = passes
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)  # scripts written for Horovod find one
                    param.register_post_accumulate_grad_hook(self._arrived)

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._left, passes)

    def _arrived(self, param: Tensor) -> None:
        if param in self._waits and (self._waits[param] is not None or self._left[param] <= 0):
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[param] -= 1
        if self._left[param] == 0:
            self._start(param)

    def _start(self, param: Tensor) -> None:
        """Begin to combine a gradient, or those of its group once all are there."""
        group = self._group_of.get(param)
        if group is None:
            self._waits[param] = self._combine(param)
            return
        self._waits[param] = None
        members = [one for one in group if one.requires_grad]
        if all(one in self._waits for one in members):
            for one, wait in zip(members, self._combine_group(members)):
                self._waits[one] = wait

    def _scales(self) -> tuple[str, float, float]:
        if self._op == Average and self._predivide != 1.0:
            return Sum, 1.0 / self._predivide, self._predivide / self._process_set.size()
        return self._op, 1.0, 1.0

    def _gradient(self, param: Tensor) -> Tensor:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        return param.grad.to_dense() if param.grad.is_sparse and self._sparse_as_dense else param.grad

    def _combine(self, param: Tensor) -> Wait:
        gradient, (op, prescale, postscale) = self._gradient(param), self._scales()
        name = f"allreduce.{self._parameter_names[param]}"
        if gradient.is_sparse:
            found = sparse_allreduce_async(gradient, name, op, self._process_set)

            def put() -> None:
                param.grad = found()

            return put
        small, context = self._compression.compress(gradient)
        handle = allreduce_async_(small, None, name, op, prescale, postscale, self._process_set)
        return lambda: self._put(param, gradient, synchronize(handle), context)

    def _combine_group(self, params: Sequence[Tensor]) -> list[Wait]:
        op, prescale, postscale = self._scales()
        gradients = [self._gradient(param) for param in params]
        name = f"allreduce.group.{self._parameter_names[params[0]]}"
        contexts: Sequence[Any] = [None] * len(params)
        if isinstance(self._compression, Compressed):
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError(
                    "gradients must be dense where they are compressed by one of hpcdist's compressors; got a sparse "
                    "one. Give sparse_as_dense=True."
                )
            handle = compressed_allreduce_async_(gradients, name, op, self._compression, self._process_set)
        else:
            small, contexts = zip(*map(self._compression.compress, gradients))
            handle = grouped_allreduce_async_(small, None, name, op, prescale, postscale, self._process_set)

        def put_all() -> None:
            for param, gradient, found, context in zip(params, gradients, synchronize(handle), contexts):
                self._put(param, gradient, found, context)

        return [put_all, *[_nothing] * (len(params) - 1)]

    def _put(self, param: Tensor, gradient: Tensor, found: Tensor, context: Any) -> None:
        whole = self._compression.decompress(found, context)
        if whole.data_ptr() != gradient.data_ptr():
            gradient.copy_(whole)
        if param.grad is not None and param.grad.is_sparse:
            param.grad = gradient.to_sparse(param.grad.sparse_dim())

    def synchronize(self) -> None:
        """Collective. Wait for all gradients; begin to combine those that no backward pass has made."""
        for param in self._left:
            if param.requires_grad and param not in self._waits:
                self._start(param)
        for group in {self._group_of[param] for param, wait in self._waits.items() if wait is None}:
            members = [one for one in group if one in self._waits]
            for one, started in zip(members, self._combine_group(members)):
                self._waits[one] = started
        for wait in self._waits.values():
            if wait is not None:
                wait()
        self._waits.clear()
        self._left = dict.fromkeys(self._left, self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step`, inside the context, take gradients as they are: after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Collective. Wait for all gradients, and take the optimiser's own step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a state, and forget gradients that are under way."""
        self._waits.clear()
        self._left = dict.fromkeys(self._left, self.backward_passes_per_step)
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **options: Any) -> Any:
        if self._waits:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        return super().zero_grad(*args, **options)  # type: ignore[misc]


class _AddsChanges(_Combined):
    """Each rank takes a step of its own; the ranks' changes are combined by Adasum."""

    def synchronize(self) -> None:
        pass

    def _arrived(self, param: Tensor) -> None:
        pass

    def step(self, closure: Any = None) -> Any:
        """Collective. Take the optimiser's own step, and combine what it has changed."""
        params = list(self._left)
        before = [param.detach().clone() for param in params]
        result = super(_Combined, self).step(closure)  # type: ignore[misc]
        handles = []
        for param, start in zip(params, before):
            small, context = self._compression.compress(param.detach() - start)
            name = f"allreduce.{self._parameter_names[param]}"
            handles.append((allreduce_async_(small, None, name, Adasum, process_set=self._process_set), context))
        for param, start, (handle, context) in zip(params, before, handles):
            with torch.no_grad():
                param.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimiser combine gradients over the ranks; return one of the same kind, with the same parameters.

    Args:
        named_parameters: `model.named_parameters()`; by default parameters are named by their numbers.
        backward_passes_per_step: passes whose gradients are added up on a rank before they are combined.
        op: Average, Sum, or Adasum, with which each rank takes a step of its own, and the changes are combined.
        gradient_predivide_factor: with Average: by which gradients are divided before they are summed, not after.
        compression: one of `Compression`'s; `Compression.by("topk", ratio=0.01)` is one of hpcdist's compressors, with
            which all gradients travel together, or those of a group.
        groups: lists of parameters whose gradients travel together; or the number of such lists.

    Raises:
        ValueError: names are missing, or occur twice, or options don't fit each other.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = _names(named_parameters, params)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    wanted = groups if groups is not None else num_groups
    if isinstance(compression, Compressed):
        wanted = _check_compressed(wanted, op, gradient_predivide_factor, params)
        compression = compression.anew()  # what is not sent yet is this optimiser's
    kind = _AddsChanges if op == Adasum and process_set.size() > 1 else _Combined
    made: Any = optimizer.__class__.__new__(type(optimizer.__class__.__name__, (kind, optimizer.__class__), {}))
    made.__dict__.update(optimizer.__dict__)
    made.start_combining(
        names, compression, backward_passes_per_step, Average if op == Adasum and kind is _Combined else op,
        gradient_predivide_factor, _groups(wanted, params), sparse_as_dense,
        process_set,
    )  # fmt: skip
    return made


def _check_compressed(wanted: Any, op: str, predivide: float, params: Sequence[Tensor]) -> Any:
    """Return the groups in which gradients are compressed together: by default all of them."""
    if op not in (Average, Sum) or predivide != 1.0:
        raise ValueError(
            f"op must be Average or Sum, without gradient_predivide_factor, where gradients are compressed by one of "
            f"hpcdist's compressors; got {op} and {predivide}."
        )
    trained = {id(one) for one in params if one.requires_grad}
    if not isinstance(wanted, int) and trained - {id(one) for group in wanted for one in group}:
        raise ValueError(
            "groups must have all parameters where gradients are compressed by one of hpcdist's compressors; some are "
            "in none. Leave out groups."
        )
    return wanted or 1


def _names(named: Iterable[tuple[str, Tensor]] | None, params: Sequence[Tensor]) -> dict[Tensor, str]:
    if named is None:
        return {param: f"noname.{number}" for number, param in enumerate(params)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    once = [name for name, _ in pairs]
    if twice := sorted({name for name in once if once.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {param: name for name, param in pairs}
    if missing := sum(param not in names for param in params):
        raise ValueError(f"named_parameters must name all parameters of the optimizer; {missing} have no name.")
    return names


def _groups(groups: int | Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> list[list[Tensor]]:
    if not isinstance(groups, int):
        wanted = [list(group) for group in groups]
        inside = [id(param) for group in wanted for param in group]
        if any(not torch.is_tensor(param) for group in wanted for param in group):
            raise ValueError("groups must be lists of parameters, or a number of lists.")
        if len(set(inside)) < len(inside):
            raise ValueError("groups must not have a parameter twice.")
        return wanted
    if groups < 0:
        raise ValueError(f"groups must be at least 0; got {groups}.")
    trained = [param for param in params if param.requires_grad]
    size = -(-len(trained) // groups) if groups else 0
    return [trained[start : start + size] for start in range(0, len(trained), size)] if groups else []


def _nothing() -> None:
    pass
