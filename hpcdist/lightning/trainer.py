"""Train with Lightning's Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import IterableDataset

from hpcdist.errors import ConfigError
from hpcdist.lightning.epochs import Epochs
from hpcdist.lightning.progress import WorkersProgress
from hpcdist.lightning.ranks import AmongRanks, only_adding
from hpcdist.session import broadcast, finish, load, rules, save, shard
from hpcdist.session.consensus import consensus_of
from hpcdist.session.loader.sharded import ShardedLoader
from hpcdist.session.world import current


class HpcdistStrategy(AmongRanks, ParallelStrategy):
    """Collective. Train a LightningModule by a strategy of hpcdist, on the ranks that mpirun or srun started::

        Trainer(strategy=HpcdistStrategy("gossip_pull"), max_epochs=10).fit(model, loader)

    Optimizers become DistributedOptimizers; training data are dealt out by `hpcdist.shard`, those of validation, test
    and prediction too, each sample to one rank. `batch_size` is that of a rank. Evaluations and checkpoints are of the
    parameters that the ranks stand for together (`hpcdist.consensus`); after `fit` every rank has these.

    A rank that only serves runs the loop with batches that are None, and no training step. Lightning's rank 0, which
    logs and writes checkpoints, is the first rank that trains.

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or `path/to/file.py:Class`.
        clip_norm: see DistributedOptimizer. `gradient_clip_val` of the Trainer works as well: where servers make the
            updates, it becomes this.
        options: the strategy's own.

    Raises:
        ConfigError: the strategy's workers compute portions of a joint batch; or an option is none of the strategy's.
    """

    strategy_name = "hpcdist"
    restore_checkpoint_after_setup = True  # when precision plug-ins have converted the model
    is_distributed = True  # for Lightning, which then lets `self.log(sync_dist=True)` reduce

    def __init__(self, strategy: str = "allreduce", *, clip_norm: float | None = None, **options: Any):
        super().__init__()
        self._join(strategy, clip_norm, options)
        self.running: list[Epochs] = []  # loaders in an epoch, the one that came first at first
        self._evaluation = ExitStack()
        self._progress: WorkersProgress | None = None
        self._clip_value: float | None = None
        self._loaded: Path | None = None
        self._failed = False

    # --- set-up -------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer) -> None:
        """Collective. Put the model on its device, and distribute its optimisers."""
        module = self._module()
        self._failed = False
        trainer._accelerator_connector.use_distributed_sampler = False  # hpcdist.shard deals the samples out
        if trainer.state.fn == "fit" and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        super().setup(trainer)
        self._share_metrics(module)
        if trainer.state.fn != "fit":
            broadcast(module)
            return
        self._progress = WorkersProgress(trainer, self.reduce)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _EndsEpochs) for callback in callbacks):
            callbacks.insert(0, _EndsEpochs(self))
        # Lightning has rank 0 broadcast in every step whether it was signalled, by torch.distributed: ranks that serve,
        # or step alone, don't take part.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None

    def model_to_device(self) -> None:
        self._module().to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Collective. Make the module's optimisers, and distribute them."""
        super().setup_optimizers(trainer)
        optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in self.optimizers]
        self._distribute(optimizers, self._module(), self._norm_for(trainer))
        self.optimizers = optimizers  # as they are now

    def _norm_for(self, trainer: Trainer) -> float | None:
        """Return the norm that hpcdist clips to: the Trainer's, where its own clipping would come too late."""
        value = trainer.gradient_clip_val
        late = rules.forbids("gradients are changed between backward() and step()", self.strategy_class)
        scaled = getattr(self.precision_plugin, "scaler", None) is not None  # a step unscales by itself
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        if not value or not by_norm or is_overridden("configure_gradient_clipping", self._module()):
            return self.clip_norm
        if scaled or (late and self.world_size > 1):
            self._clip_value, trainer.gradient_clip_val = value, None  # until the end of `fit`
            return float(value)
        return self.clip_norm

    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise ConfigError("strategy must be used by a Trainer; got no LightningModule. Call trainer.fit(model).")
        return module

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give this rank its share of the samples."""
        training = self._module().trainer.training
        if isinstance(dataloader, ShardedLoader):  # by the user
            return Epochs(dataloader, self) if training else dataloader
        if not training:
            self._require_shares(dataloader)
            return shard(dataloader, training=False)
        if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            raise ConfigError(
                "data for training must be a map-style data set with Lightning, whose loop must know the number of "
                "each rank's batches; got an IterableDataset. Use a map-style one, or a loop of your own."
            )
        return Epochs(shard(dataloader), self)

    # --- an epoch -----------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Have what a step logs not counted where its batch repeats samples, see `hpcdist.shard`."""
        if self.running and self.running[0].weight == 0:
            self._module().trainer._results.batch_size = 0  # type: ignore[union-attr]

    def begin_batch(self, loader: Epochs) -> None:
        """Note that a step begins."""
        if self._progress is not None and loader is self.running[0]:
            self._progress.begin_batch()

    def follow(self, loader: Epochs) -> None:
        """Serve, on a rank that does, until the workers pause; then follow their steps, one at each call."""
        progress = self._progress
        if loader not in self.running:
            self.running.append(loader)
        if progress is None or loader is not self.running[0]:
            return
        if not progress.left:
            with self._own_rates():
                loader.serve()
            progress.receive(broadcast(None, self.cluster_environment.order[0]))
            if not progress.left:
                raise StopIteration
        self.idle = True
        progress.follow_step()

    @contextmanager
    def _own_rates(self) -> Iterator[None]:
        """Give the optimisers their numbers back that the workers' replace: schedules go on from them here too."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        numbers = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        yield
        if self._module().automatic_optimization:
            for group, own in zip(groups, numbers):
                group.update(own)

    def pause(self) -> None:
        """Collective. End the epoch here, or until the next batch: what follows is of all ranks."""
        if not self.running:
            return
        for loader in () if self.serves else reversed(self.running):
            loader.close()
        self.running.clear()
        self.idle = False
        if self._progress is not None and self.some_serve and not self.serves:
            broadcast(self._progress.report(), self.cluster_environment.order[0])

    def _pause_for_servers(self) -> None:
        if self.idle or current().group is not None:
            self.pause()

    def begin_evaluation(self) -> None:
        """Collective. Give the model the parameters that the ranks stand for, until `end_evaluation`."""
        self._pause_for_servers()
        self._evaluation.enter_context(consensus_of(current().optimizers))

    def end_evaluation(self) -> None:
        self._evaluation.close()

    def block_backward_sync(self) -> Any:
        """Return a context in which backward passes only add to this rank's gradients."""
        return only_adding(self.optimizers)

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the state of the model that the ranks stand for together, on Lightning's rank 0."""
        self._pause_for_servers()
        with consensus_of(current().optimizers):
            state = self._module().state_dict()
            return {name: _copied(value) for name, value in state.items()} if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this rank's optimiser; others', and that of servers, is saved beside the file."""
        plain = getattr(optimizer, "optimizer", optimizer)
        held = any(plain is each for each in current().optimizers)
        return plain.attachment.local_state_dict() if held else plain.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective. Write a checkpoint on rank 0; and beside it a folder of what each rank has of its own."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        trained = self._trained()
        if "optimizer_states" in checkpoint and _differ(trained):
            save(_beside(filepath), keep=1, **trained)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Restore each rank's own state, where there is one, or rank 0's optimisers."""
        trained, folder = self._trained(), self._loaded
        if _differ(trained) and broadcast(folder is not None and folder.is_dir()):
            load(folder, **trained)  # type: ignore[arg-type]
        else:
            super().load_optimizer_state_dict(checkpoint)

    def _trained(self) -> dict[str, Any]:
        held = [each for each in self.optimizers if any(each is other for other in current().optimizers)]
        return {f"optimizer_{number}": each for number, each in enumerate(held)}

    # --- the end ------------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Collective, unless an exception has ended the run. Leave the trained model on every rank."""
        if not self._failed and self._trained():
            self.pause()
            finish(self._module())
        if self._clip_value is not None:
            self._module().trainer.gradient_clip_val, self._clip_value = self._clip_value, None
        super().teardown()


class _EndsEpochs(Callback):
    """Tell the strategy where the Trainer's loop is: the first of its callbacks, so that the others find it so."""

    def __init__(self, strategy: HpcdistStrategy):
        self._strategy = strategy

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.begin_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.end_evaluation()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.pause()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _differ(optimizers: Mapping[str, Any]) -> bool:
    """Tell whether ranks have parameters, or states of optimisers, that one of them has not."""
    strategies = [optimizer.strategy for optimizer in optimizers.values()]
    return any(strategy.comm.size > 1 and not strategy.contract.replicates for strategy in strategies)


def _beside(path: Any) -> Path:
    return Path(f"{path}.ranks")
