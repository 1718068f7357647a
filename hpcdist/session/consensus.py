"""Use the model that the ranks stand for, in the user's own loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.comm.pieces import sum_and_norm
from hpcdist.session import rules
from hpcdist.session.consistency import require_same_steps
from hpcdist.session.optimizer import release
from hpcdist.session.pipeline import share_tied
from hpcdist.session.world import current
from hpcdist.strategies.common.replicas import frozen_consensus


@contextmanager
def consensus(model: nn.Module) -> Iterator[nn.Module]:
    """Collective. Give `model`, inside the context, the consensus of all ranks; afterwards its own parameters again.

    The consensus is the model that all ranks have trained together: the servers' parameters, or without servers the
    mean of all ranks' parameters; buffers such as batch norm's statistics are the mean of the workers'. Evaluate and
    export there::

        with hpcdist.consensus(model):
            model.eval()
            ...

    Raises:
        ConfigError: no DistributedOptimizer trains the model; or ranks that serve can't take part, inside the loop.
    """
    with consensus_of(_holders(model)):
        yield model


@contextmanager
def consensus_of(optimizers: Iterable[Any]) -> Iterator[None]:
    """Collective. Give the models of these optimisers, inside the context, the parameters that all ranks stand for.

    Raises:
        ConfigError: a model's running statistics have changed inside, which are lost.
    """
    begin_collective("an evaluation")
    optimizers = list(optimizers)
    stack = ExitStack()
    try:
        with normal_tensors():
            for optimizer in optimizers:
                flat = optimizer.strategy.model
                if not flat.is_swapped:  # else within another context
                    require_same_steps(optimizer, "at an evaluation")
                    flat.refresh()
                    stack.enter_context(flat.swapped(*optimizer.strategy.consensus()))
                    stack.enter_context(_holding(flat.frozen, frozen_consensus(optimizer.strategy)))
            for optimizer in optimizers:
                share_tied(optimizer.strategy.model.module)
        before = _batches_counted(optimizers)
        yield
        if _batches_counted(optimizers) != before:
            raise rules.error("batch norm's statistics change in an evaluation")
    finally:
        with normal_tensors():
            stack.close()


def _batches_counted(optimizers: Iterable[Any]) -> list[int]:
    """Return the number of batches in each of the models' running statistics."""
    modules = [module for optimizer in optimizers for module in optimizer.strategy.model.module.modules()]
    counts = [module.num_batches_tracked for module in modules if isinstance(module, _NormBase)]
    return [int(count) for count in counts if count is not None]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make tensors that can be trained, inside of `torch.inference_mode()` too; record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _holding(tensors: Sequence[Tensor], values: Sequence[Tensor] | None) -> Iterator[None]:
    """Give the tensors these values inside the context; None: their own."""
    kept = [] if values is None else [tensor.clone() for tensor in tensors]
    for tensor, value in zip(tensors, values or ()):
        tensor.copy_(value)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, kept):
            tensor.copy_(value)


@normal_tensors()
def finish(*models: nn.Module) -> Any:
    """Collective. End the training of the models, leave the trained ones on every rank, and return them.

    Parameters and buffers become the consensus of all ranks (see `consensus`). The optimisers are plain ones again.
    One model is returned itself, several as a tuple. A model that is finished, as by a Trainer's end, stays as it is.

    Raises:
        CheckpointError: a checkpoint in the background could not be written.
        ConfigError: no DistributedOptimizer has trained a model; or ranks that serve can't take part, inside the loop.
    """
    begin_collective("the end of training")
    current().saver.wait()
    for model in models:
        _finish(model)
    return models[0] if len(models) == 1 else models


def _finish(model: nn.Module) -> None:
    for optimizer in _holders(model):
        flat = optimizer.strategy.model
        require_same_steps(optimizer, "at the end of training")
        flat.refresh()
        params, buffers = optimizer.strategy.consensus()
        frozen = frozen_consensus(optimizer.strategy) or flat.frozen
        mine = (*flat.params, *flat.buffers, *flat.frozen)
        for own, value in zip(mine, (*params, *buffers, *frozen), strict=True):
            own.copy_(value)
        session = current()
        if session.run is not None and session.run.strategy is optimizer.strategy:
            session.run.finish(flat.params, session.stages)
        release(optimizer)
        current().optimizers.remove(optimizer)
    current().finished.add(model)
    share_tied(model)


def _holders(model: nn.Module) -> list[Any]:
    """Collective for a model that is finished: ranks compare it, since they may have trained it on alone."""
    session = current()
    optimizers = [o for o in session.optimizers if o.strategy.model.module is model]
    if not optimizers:
        norms = [f"{sum_and_norm(each.detach().reshape(-1))[1]:.6g}" for each in model.parameters()]
        if model not in session.finished or any(theirs != norms for theirs in session.outer.gather(norms)):
            raise rules.error("the model is trained by no distributed optimiser")
    return optimizers


def begin_collective(what: str) -> None:
    """Collective. Let servers on the workers' ranks answer, so that all ranks can make the call `what`.

    Raises:
        ConfigError: some ranks only serve, inside the loop.
    """
    session = current()
    if session.group is not None:
        raise rules.error("a call of all ranks stands inside the loop", call=what)
    for optimizer in session.optimizers if session.loader is not None else ():
        optimizer.strategy.settle()
