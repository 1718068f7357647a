"""Use the consensus of all ranks' models in the user's training loop: evaluate, export, end training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.comm.chunks import sum_and_norm
from hpcdist.errors import ConfigError
from hpcdist.session import rules
from hpcdist.session.consistency import require_same_steps
from hpcdist.session.optimizer import release
from hpcdist.session.pipeline import share_tied
from hpcdist.session.world import current
from hpcdist.strategies.common.replicas import frozen_consensus


@contextmanager
def consensus(model: nn.Module) -> Iterator[nn.Module]:
    """Collective. Set `model`, inside the context, to the consensus of all ranks; restore its parameters afterwards.

    Evaluate and export the model inside it. The consensus is the model that all ranks have trained: the servers'
    parameters, or without servers the mean of all ranks' parameters. Batch norm's statistics are the workers' mean.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, strategy="local_sgd")
        >>> with hd.consensus(model), torch.no_grad():
        ...     outputs = model(torch.ones(1, 4))

    Raises:
        ConfigError: no DistributedOptimizer trains the model; or server ranks can't take part, inside the loop.
    """
    with consensus_of(_optimizers_of(model)):
        yield model


@contextmanager
def consensus_of(optimizers: Iterable[Any]) -> Iterator[None]:
    """Collective. Set the models of these optimisers, inside the context, to the consensus of all ranks.

    Raises:
        ConfigError: running statistics of a model changed inside the context; the change would be lost.
    """
    prepare_collective("an evaluation")
    optimizers = list(optimizers)
    stack = ExitStack()
    try:
        with normal_tensors():
            for optimizer in optimizers:
                model = optimizer.strategy.model
                if not model.is_swapped:  # else within another context
                    require_same_steps(optimizer, "at an evaluation")
                    model.refresh()
                    consensus = optimizer.strategy.consensus()
                    stack.enter_context(model.swapped(*consensus, frozen_consensus(optimizer.strategy)))
            for optimizer in optimizers:
                share_tied(optimizer.strategy.model.module)
        batches_before = _tracked_batches(optimizers)
        yield
        if _tracked_batches(optimizers) != batches_before:
            raise rules.error("batch norm's statistics change in an evaluation")
    finally:
        with normal_tensors():
            stack.close()


def _tracked_batches(optimizers: Iterable[Any]) -> list[int]:
    """Return the number of batches in each of the models' running statistics."""
    modules = [module for optimizer in optimizers for module in optimizer.strategy.model.module.modules()]
    counts = [module.num_batches_tracked for module in modules if isinstance(module, _NormBase)]
    return [int(count) for count in counts if count is not None]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Create tensors that can be trained, inside of `torch.inference_mode()` too; record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@normal_tensors()
def finish(*models: nn.Module) -> Any:
    """Collective. End the training of the models: set them to the consensus on every rank, and return them.

    Parameters and buffers become the consensus of all ranks (see `consensus`); the optimisers become plain ones again.
    A single model is returned directly, several models in a tuple. A model that is finished already stays unchanged.

    Example:
        >>> distributed = hd.DistributedOptimizer(sgd, model)
        >>> model = hd.finish(model)

    Raises:
        CheckpointError: a checkpoint could not be written in the background.
        ConfigError: no DistributedOptimizer trains a model; or server ranks can't take part, inside the loop.
    """
    prepare_collective("the end of training")
    current().saver.wait()
    for model in models:
        _finish(model)
    return models[0] if len(models) == 1 else models


def _finish(model: nn.Module) -> None:
    """Collective. Set a model to the consensus, and release its optimisers."""
    for optimizer in _optimizers_of(model):
        flat = optimizer.strategy.model
        require_same_steps(optimizer, "at the end of training")
        flat.refresh()
        params, buffers = optimizer.strategy.consensus()
        frozen = frozen_consensus(optimizer.strategy) or flat.frozen
        tensors = (*flat.params, *flat.buffers, *flat.frozen)
        for tensor, value in zip(tensors, (*params, *buffers, *frozen), strict=True):
            tensor.copy_(value)
        session = current()
        if session.run is not None and session.run.strategy is optimizer.strategy:
            session.run.finish(flat.params, session.stages)
        release(optimizer)
        current().optimizers.remove(optimizer)
    current().finished.add(model)
    share_tied(model)


def _optimizers_of(model: nn.Module) -> list[Any]:
    """Return the model's optimisers; none after `finish`.

    Collective for a finished model, whose parameters must still be equal on the ranks with the same layers.
    """
    session = current()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module; got {type(model).__name__}. Pass the model it trains.")
    optimizers = [o for o in session.optimizers if o.strategy.model.module is model]
    if not optimizers:
        norms = [f"{sum_and_norm(each.detach().reshape(-1))[1]:.6g}" for each in model.parameters()]
        if model not in session.finished or any(remote != norms for remote in session.outer.gather(norms)):
            raise rules.error("no distributed optimiser trains the model")
    return optimizers


def prepare_collective(what: str) -> None:
    """Collective. Complete pending exchanges with servers that run on worker ranks, before the collective call `what`.

    Raises:
        ConfigError: inside the loop of a strategy with separate server ranks.
    """
    session = current()
    if session.group is not None:
        raise rules.error("a collective call is inside the loop", call=what)
    for optimizer in session.optimizers if session.loader is not None else ():
        optimizer.strategy.drain()
