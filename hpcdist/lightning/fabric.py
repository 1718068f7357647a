"""Train with Lightning's Fabric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.utils.data import DataLoader

from hpcdist.errors import ConfigError
from hpcdist.lightning.ranks import CollectivesMixin, accumulate_locally, clone_tensors
from hpcdist.session import broadcast, shard
from hpcdist.session.consensus import consensus_of
from hpcdist.session.world import current


class HpcdistFabricStrategy(CollectivesMixin, ParallelStrategy):
    """Collective. Train a loop of Fabric by a strategy of hpcdist, on the ranks that mpirun or srun started.

    A loader is iterated for an evaluation if gradients are off or the model is in `eval()` mode: then each sample is
    on one rank, and the model has the consensus of all ranks (`hpcdist.consensus`). `fabric.save` saves the consensus.
    After the loop `hpcdist.finish(model.module)` leaves it on every rank.

    Example:
        >>> fabric = Fabric(strategy=HpcdistFabricStrategy("gossip_pull"))  # doctest: +SKIP
        >>> model, optimizer = fabric.setup(model, optimizer)  # doctest: +SKIP
        >>> loader = fabric.setup_dataloaders(loader)  # doctest: +SKIP

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or `path/to/file.py:Class`.
        clip_norm: see DistributedOptimizer. `fabric.clip_gradients` works if each worker runs its updates.
        options: of the strategy.

    Raises:
        ConfigError: the strategy's workers compute portions of a joint batch; or the strategy lacks an option.
    """

    def __init__(self, strategy: str = "allreduce", *, clip_norm: float | None = None, **options: Any):
        super().__init__()
        self._join(strategy, clip_norm, options)
        self._models: list[nn.Module] = []
        self._backward_sync_control = _Accumulation()

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Collective. Broadcast rank 0's parameters."""
        self._share_metrics(module)
        self._models.append(module)
        return broadcast(module)

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Collective. Distribute an optimiser whose model has been set up, or is set up with it."""
        params = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if params & set(map(id, model.parameters())):
                self._distribute([optimizer], model, self.clip_norm)
                return optimizer
        raise ConfigError(
            "optimizer must have parameters of a model that was passed to fabric.setup or setup_module before; got "
            "others. Set the model up first."
        )

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader of this rank's share of the samples, for training or for an evaluation."""
        return _Loader(dataloader, self._models)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Collective. Return the state dict of the consensus of all ranks' models."""
        with consensus_of([each for each in current().optimizers if each.strategy.model.module is module]):
            return clone_tensors(module.state_dict())


class _Loader:
    """A loader that is sharded once for training, and once for evaluations."""

    def __init__(self, loader: DataLoader[Any], models: Sequence[nn.Module]):
        self._loader, self._models = loader, models
        self._shares = {training: shard(loader, training=training) for training in (True, False)}
        self.dataset = loader.dataset
        self.sampler = self  # for Fabric, which calls its set_epoch

    def _share(self) -> Any:
        """Return the sharded loader for training, or, without gradients or in `eval()` mode, that for evaluations."""
        models = [module for model in self._models for module in model.modules()]
        return self._shares[torch.is_grad_enabled() and (not models or any(module.training for module in models))]

    def set_epoch(self, epoch: int) -> None:
        for each in self._shares.values():
            each.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._share())

    def __iter__(self) -> Iterator[Any]:
        share = self._share()
        if share is self._shares[False]:
            CollectivesMixin._require_shares(self._loader)
        return iter(share)


class _Accumulation(_BackwardSyncControl):
    """Called by `fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        optimizers = [each for each in current().optimizers if each.strategy.model.module is module]
        return accumulate_locally(optimizers) if enabled else nullcontext()
