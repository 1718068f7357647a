"""An optimiser that allreduces gradients before its step, by Horovod's names."""

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

Wait = Callable[[], None]  # waits for a gradient's allreduce, and stores the result


class _AllreducesGradients:
    """A mix-in for an optimiser's class: starts each gradient's allreduce when the backward pass has computed it."""

    def start_combining(
        self, names: dict[Tensor, str], compression: Any, passes: int, op: str, predivide: float,
        groups: Sequence[Sequence[Tensor]], sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        """Set the options of `DistributedOptimizer`, and register the hooks on gradients: instead of `__init__`."""
        self._parameter_names, self._compression, self.backward_passes_per_step = names, compression, passes
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self._process_set, self._should_synchronize = process_set, True
        self._group_of: dict[Tensor, tuple[Tensor, ...]] = {param: (param,) for param in names}
        for group in groups:
            self._group_of |= dict.fromkeys(group, tuple(group))
        self._remaining: dict[Tensor, int] = {}  # backward passes until a gradient's allreduce
        for options in self.param_groups:  # type: ignore[attr-defined]
            for param in options["params"]:
                if param.requires_grad and process_set.included():  # other ranks take local steps
                    self._remaining[param] = passes
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)  # scripts written for Horovod expect one
                    param.register_post_accumulate_grad_hook(self._arrived)
        self._reset(synchronized=False)

    def _reset(self, synchronized: bool) -> None:
        """Start a step: no gradient has arrived. `synchronized`: the caller has called `synchronize` before `step`."""
        self._started: dict[Tensor, bool] = {}  # by gradients that have arrived: whether their allreduce has started
        self._waits: list[Wait] = []  # for the allreduces in flight
        self._remaining = dict.fromkeys(self._remaining, self.backward_passes_per_step)
        self._synchronized = synchronized

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._remaining = dict.fromkeys(self._remaining, passes)

    def _arrived(self, param: Tensor) -> None:
        """Hook of a gradient: start its allreduce in the last of `backward_passes_per_step` passes."""
        if param in self._started:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._remaining[param] -= 1
        if self._remaining[param] == 0:
            self._start(param)

    def _start(self, param: Tensor) -> None:
        """Start the allreduce of a gradient's group, or of it alone, if all of the group's gradients have arrived."""
        self._started[param] = False
        members = [each for each in self._group_of[param] if each.requires_grad]
        if all(each in self._started for each in members):
            self._combine(members)

    def _gradient(self, param: Tensor) -> Tensor:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        return param.grad.to_dense() if param.grad.is_sparse and self._sparse_as_dense else param.grad

    def _combine(self, params: Sequence[Tensor]) -> None:
        """Start one allreduce of the gradients of `params`; add to `_waits` the function that stores the results.

        `params` must be the same on all ranks, as the first one's name is the call's. Sparse gradients are sent alone.
        """
        op, prescale, postscale = self._op, 1.0, 1.0
        if op == Average and self._predivide != 1.0:  # the mean as a sum, divided partly before and partly after
            op, prescale, postscale = Sum, 1.0 / self._predivide, self._predivide / self._process_set.size()
        gradients = [self._gradient(param) for param in params]
        if len(params) > 1 and any(gradient.is_sparse for gradient in gradients):
            for param in params:
                self._combine([param])
            return
        name = f"allreduce.{self._parameter_names[params[0]]}"
        contexts: Sequence[Any] = [None] * len(params)
        self._started |= dict.fromkeys(params, True)
        if isinstance(self._compression, Compressed):
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError(
                    "gradients must be dense if one of hpcdist's compressors compresses them; got a sparse one. Pass "
                    "sparse_as_dense=True."
                )
            handle = compressed_allreduce_async_(gradients, name, op, self._compression, self._process_set)
        elif gradients[0].is_sparse:
            wait = sparse_allreduce_async(gradients[0], name, op, self._process_set)
            self._waits.append(lambda: setattr(params[0], "grad", wait()))
            return
        else:
            compressed, contexts = zip(*map(self._compression.compress, gradients))
            handle = grouped_allreduce_async_(compressed, None, name, op, prescale, postscale, self._process_set)

        def put_all() -> None:
            for param, gradient, result, context in zip(params, gradients, synchronize(handle), contexts):
                combined = self._compression.decompress(result, context)
                if combined.data_ptr() != gradient.data_ptr():
                    gradient.copy_(combined)
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = gradient.to_sparse(param.grad.sparse_dim())

        self._waits.append(put_all)

    def synchronize(self) -> None:
        """Collective. Wait for all gradients; first start the allreduce of those that no backward pass has computed."""
        for param in self._remaining:
            if param.requires_grad and param not in self._started:
                self._start(param)
        # Groups that were not started, because some of their gradients were never computed.
        for group in dict.fromkeys(self._group_of[param] for param, started in self._started.items() if not started):
            self._combine([each for each in group if each in self._started])
        for wait in self._waits:
            wait()
        self._reset(synchronized=True)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step`, inside the context, use the gradients without `synchronize`, which was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Collective. Wait for all gradients, and take the plain optimiser's step."""
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
        """Load a state, and drop gradients in flight."""
        self._reset(synchronized=False)
        self._should_synchronize = True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **options: Any) -> Any:
        if self._started:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        return super().zero_grad(*args, **options)  # type: ignore[misc]


class _AdasumOfChanges(_AllreducesGradients):
    """Each rank takes a local step; the changes of the parameters are combined by Adasum."""

    def synchronize(self) -> None:
        pass

    def _arrived(self, param: Tensor) -> None:
        pass

    def step(self, closure: Any = None) -> Any:
        """Collective. Take the plain optimiser's step, and combine the changes of all ranks."""
        params = list(self._remaining)
        starts = [param.detach().clone() for param in params]
        result = super(_AllreducesGradients, self).step(closure)  # type: ignore[misc]
        handles = []
        for param, start in zip(params, starts):
            compressed, context = self._compression.compress(param.detach() - start)
            name = f"allreduce.{self._parameter_names[param]}"
            handles.append((allreduce_async_(compressed, None, name, Adasum, process_set=self._process_set), context))
        for param, start, (handle, context) in zip(params, starts, handles):
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
    """Return an optimiser of the same class and parameters that averages gradients over the ranks.

    Example on 1 rank:
        >>> import hpcdist.hvd as hvd
        >>> hvd.init()
        >>> wrapped = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        >>> wrapped.step()
        >>> hvd.shutdown()

    Args:
        named_parameters: `model.named_parameters()`; by default parameters are named by their numbers.
        backward_passes_per_step: number of passes whose gradients are accumulated locally before an allreduce.
        op: Average, Sum, or Adasum, with which each rank takes a local step, and the changes are combined.
        gradient_predivide_factor: with Average: factor by which gradients are divided before the sum, not after.
        compression: one of `Compression`; `Compression.by("topk", ratio=0.01)` uses one of hpcdist's compressors, for
            all gradients jointly, or those of a group.
        groups: lists of parameters whose gradients are sent jointly; or the number of such lists.

    Raises:
        ValueError: names are missing, or occur twice, or options don't fit each other.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = _names(named_parameters, params)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    requested = groups if groups is not None else num_groups
    if isinstance(compression, Compressed):
        requested = _check_compressed(requested, op, gradient_predivide_factor, params)
        compression = compression.copy()  # the residuals belong to this optimiser
    kind = _AdasumOfChanges if op == Adasum and process_set.size() > 1 else _AllreducesGradients
    # Created without __init__: it shares the state and the param_groups of `optimizer`.
    wrapped: Any = optimizer.__class__.__new__(type(optimizer.__class__.__name__, (kind, optimizer.__class__), {}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.start_combining(
        names, compression, backward_passes_per_step, Average if op == Adasum and kind is _AllreducesGradients else op,
        gradient_predivide_factor, _groups(requested, params), sparse_as_dense,
        process_set,
    )  # fmt: skip
    return wrapped


def _check_compressed(groups: Any, op: str, predivide: float, params: Sequence[Tensor]) -> Any:
    """Return the groups in which gradients are compressed jointly: by default a single one."""
    if op not in (Average, Sum) or predivide != 1.0:
        raise ValueError(
            "op must be Average or Sum, without gradient_predivide_factor, if one of hpcdist's compressors compresses "
            f"gradients; got {op} and {predivide}."
        )
    trained = {id(each) for each in params if each.requires_grad}
    if not isinstance(groups, int) and trained - {id(each) for group in groups for each in group}:
        raise ValueError(
            "groups must have all parameters if one of hpcdist's compressors compresses gradients; some are in none. "
            "Remove groups."
        )
    return groups or 1


def _names(named: Iterable[tuple[str, Tensor]] | None, params: Sequence[Tensor]) -> dict[Tensor, str]:
    """Return the parameters' names; raise ValueError if a name is missing or used twice."""
    if named is None:
        return {param: f"noname.{number}" for number, param in enumerate(params)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    all_names = [name for name, _ in pairs]
    if twice := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {param: name for name, param in pairs}
    if missing := sum(param not in names for param in params):
        raise ValueError(f"named_parameters must name all parameters of the optimizer; {missing} have no name.")
    return names


def _groups(groups: int | Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of parameters: those of `groups`, or if it is a number, that many groups of equal length."""
    if not isinstance(groups, int):
        lists = [list(group) for group in groups]
        members = [id(param) for group in lists for param in group]
        if any(not torch.is_tensor(param) for group in lists for param in group):
            raise ValueError("groups must be lists of parameters, or a number of lists.")
        if len(set(members)) < len(members):
            raise ValueError("groups must not have a parameter twice.")
        return lists
    if groups < 0:
        raise ValueError(f"groups must be at least 0; got {groups}.")
    trained = [param for param in params if param.requires_grad]
    size = -(-len(trained) // groups) if groups else 0
    return [trained[start : start + size] for start in range(0, len(trained), size)] if groups else []
