"""Train with Lightning's Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import IterableDataset
from torchmetrics import Metric

from hpcdist.errors import ConfigError
from hpcdist.lightning.epochs import Epochs
from hpcdist.lightning.progress import WorkersProgress
from hpcdist.lightning.ranks import CollectivesMixin, accumulate_locally, clone_tensors
from hpcdist.session import allgather, broadcast, finish, load, rules, save, shard
from hpcdist.session.consensus import consensus_of
from hpcdist.session.loader.sharded import ShardedLoader
from hpcdist.session.world import current


class HpcdistStrategy(CollectivesMixin, ParallelStrategy):
    """Collective. Train a LightningModule by a strategy of hpcdist, on the ranks that mpirun or srun started.

    Optimizers become DistributedOptimizers; `hpcdist.shard` distributes the samples of training, validation, test and
    prediction. `batch_size` is that of a rank. Evaluations and checkpoints use the consensus of all ranks
    (`hpcdist.consensus`); after `fit` every rank has it.

    A server rank runs the loop with batches that are None, and without training steps. Lightning's rank 0, which logs
    and writes checkpoints, is the first worker.

    Example:
        >>> trainer = Trainer(strategy=HpcdistStrategy("gossip_pull"), max_epochs=10)  # doctest: +SKIP
        >>> trainer.fit(model, loader)  # doctest: +SKIP

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or `path/to/file.py:Class`.
        clip_norm: see DistributedOptimizer. The Trainer's `gradient_clip_val` works too: if servers run the updates,
            it is used as `clip_norm`.
        options: of the strategy.

    Raises:
        ConfigError: the strategy's workers compute portions of a joint batch; or the strategy lacks an option.
    """

    strategy_name = "hpcdist"
    restore_checkpoint_after_setup = True  # after precision plug-ins have converted the model
    is_distributed = True  # lets Lightning reduce in `self.log(sync_dist=True)`

    def __init__(self, strategy: str = "allreduce", *, clip_norm: float | None = None, **options: Any):
        super().__init__()
        self._join(strategy, clip_norm, options)
        self.running: list[Epochs] = []  # loaders in an epoch, the longest first
        self._evaluation = ExitStack()
        self._progress: WorkersProgress | None = None
        self._clip_value: float | None = None
        self._counted: list[tuple[Metric, dict[str, Any]]] = []  # metrics' states before a padding batch
        self._loaded: Path | None = None
        self._failed = False
        self._loop_position = LambdaCallback(  # tells the position of the Trainer's loop
            on_train_batch_end=lambda *_: self.end_batch(),
            on_validation_start=lambda *_: self.start_evaluation(),
            on_validation_end=lambda *_: self._evaluation.close(),
            on_train_epoch_end=lambda *_: self.pause(),
        )

    # --- set-up -------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer) -> None:
        """Collective. Move the model to its device, and distribute its optimisers."""
        module = self._module()
        self._failed = False
        trainer._accelerator_connector.use_distributed_sampler = False  # hpcdist.shard distributes the samples
        if trainer.state.fn == "fit" and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        super().setup(trainer)
        self._share_metrics(module)
        if trainer.state.fn != "fit":
            broadcast(module)
            return
        self._progress = WorkersProgress(trainer, self.reduce)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self._loop_position not in callbacks:
            callbacks.insert(0, self._loop_position)  # before the user's callbacks
        # In every step Lightning broadcasts by torch.distributed whether rank 0 got a signal; server ranks, and ranks
        # that step asynchronously, don't take part.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None

    def model_to_device(self) -> None:
        self._module().to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Collective. Create the module's optimisers, and distribute them."""
        super().setup_optimizers(trainer)
        optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in self.optimizers]
        self._distribute(optimizers, self._module(), self._clip_norm_for(trainer))
        self.optimizers = optimizers  # the setter wraps them again

    def _clip_norm_for(self, trainer: Trainer) -> float | None:
        """Return the strategy's `clip_norm`: the Trainer's `gradient_clip_val`, if its clipping would come too late."""
        value = trainer.gradient_clip_val
        late = rules.forbids("gradients are changed between backward() and step()", self.strategy_class)
        scaled = getattr(self.precision_plugin, "scaler", None) is not None  # then `step` unscales
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
        """Return a loader of this rank's share of the samples."""
        training = self._module().trainer.training
        by_user = isinstance(dataloader, ShardedLoader)
        if not training and not by_user:
            self._require_shares(dataloader)
        loader: Any = dataloader if by_user else shard(dataloader, training=training)
        if training:
            loader.known_workers = self._workers  # the script may ask for the steps before there are optimisers
            _require_one_length(loader)
            return Epochs(loader, self)
        if isinstance(getattr(dataloader, "batch_sampler", None), _IndexBatchSamplerWrapper):
            loader.batch_sampler = _BatchIndices(loader)
        return loader

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; on a server rank training batches are None, with several loaders too."""
        if self.serves and self._module().trainer.training:
            return None
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- an epoch -----------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the weight of logged values to 0 in a padding batch, see `hpcdist.shard`."""
        weights = [loader.weight for loader in self.running if not loader.ended]
        if len(set(weights)) > 1:
            raise ConfigError(
                "several training loaders must distribute the samples of each step equally, as the loss has a single "
                f"weight; got batches of weights {' and '.join(map(str, weights))}, as at the end of an epoch. Pass "
                "drop_last=True to each DataLoader."
            )
        if self.running and self.running[0].weight == 0:
            logged: Any = self._module().trainer._results
            logged.batch_size = 0
            metrics = [module for module in self._module().modules() if isinstance(module, Metric)]
            for metric in (*metrics, *logged.values()):
                states = metric.metric_state.items()
                copies = {name: list(each) if isinstance(each, list) else each.clone() for name, each in states}
                self._counted.append((metric, copies))

    def end_batch(self) -> None:
        """Restore the states of metrics, and of values logged over epochs, of before a padding batch."""
        for metric, states in self._counted:
            for name, value in states.items():
                setattr(metric, name, value)
        self._counted = []

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Collective. As in CollectivesMixin; in a training step the mean is weighted by the samples of the batches."""
        if isinstance(tensor, Tensor) and self.running and not self.idle and self._module().trainer.training:
            weight = self.running[0].weight
            if weight != 1 and str(reduce_op).rpartition(".")[2].lower() in ("mean", "avg"):
                tensor = tensor * weight
        return super().reduce(tensor, group, reduce_op)

    def start(self, loader: Epochs) -> Epochs:
        """Register a loader that is in an epoch, and the longest one before it; return the longest."""
        if not self.running:
            if current().loader is not None:
                raise ConfigError(
                    "a training must have ended before the next one starts; got one that an exception has stopped. "
                    "Start the script again."
                )
            loaders: Any = CombinedLoader(self._module().trainer.train_dataloader).flattened
            self.running.append(max(loaders, key=len))
        if loader not in self.running:
            self.running.append(loader)
        return self.running[0]

    def start_batch(self, loader: Epochs) -> None:
        if self._progress is not None and loader is self.running[0]:
            self._progress.start_batch()

    def follow(self, loader: Epochs) -> None:
        """On a server rank: serve until the workers pause; then follow one of their steps per call."""
        progress = self._progress
        if progress is None or loader is not self.running[0]:
            return
        if not progress.remaining:
            with self._local_rates():
                loader.serve()
            self.idle = True  # the workers have reduced the values logged in steps
            progress.receive(broadcast(None, self.cluster_environment.order[0]))
            if not progress.remaining:
                raise StopIteration
        progress.follow_step()

    @contextmanager
    def _local_rates(self) -> Iterator[None]:
        """Restore the optimisers' numbers afterwards, which the workers' replaced: schedules continue from them."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        options_of = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        yield
        if self._module().automatic_optimization:
            for group, values in zip(groups, options_of):
                group.update(values)

    def pause(self) -> None:
        """Collective. End or pause the epoch, so that all ranks can take part in what follows."""
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

    def start_evaluation(self) -> None:
        """Collective. Set the model to the consensus of all ranks, until it has ended."""
        self._pause_for_servers()
        self._evaluation.enter_context(consensus_of(current().optimizers))

    def block_backward_sync(self) -> Any:
        """Return a context in which backward passes only accumulate this rank's gradients."""
        return accumulate_locally(self.optimizers)

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the state dict of the consensus of all ranks' models, on Lightning's rank 0."""
        self._pause_for_servers()
        with consensus_of(current().optimizers):
            state = self._module().state_dict()
            return clone_tensors(state) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective. Write a checkpoint on rank 0, and next to it a folder of each rank's local state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        trained = self._trained()
        if "optimizer_states" in checkpoint and _ranks_differ(trained):
            save(_ranks_folder(filepath), keep=1, **trained)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_ranks_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded = _ranks_folder(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Restore each rank's local state, if it was saved, or rank 0's optimisers."""
        trained, folder = self._trained(), self._loaded
        if _ranks_differ(trained) and broadcast(folder is not None and folder.is_dir()):
            load(folder, **trained)  # type: ignore[arg-type]
        else:
            super().load_optimizer_state_dict(checkpoint)

    def _trained(self) -> dict[str, Any]:
        """Return the optimisers that are distributed, by their names in a checkpoint."""
        held = [each for each in self.optimizers if hasattr(each, "attachment")]
        return {f"optimizer_{number}": each for number, each in enumerate(held)}

    # --- the end ------------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Leave the trained model on every rank. Collective, unless an exception has ended the run."""
        if not self._failed and self._trained():
            self.pause()
            finish(self._module())
        if self._clip_value is not None:
            self._module().trainer.gradient_clip_val, self._clip_value = self._clip_value, None
        super().teardown()


class _BatchIndices(_IndexBatchSamplerWrapper):
    """Passes the indices of this rank's samples to a BasePredictionWriter."""

    def __init__(self, loader: ShardedLoader):
        self._loader = loader

    @property
    def seen_batch_indices(self) -> list[Any]:  # type: ignore[override]
        return self._loader.batches


def _require_one_length(loader: ShardedLoader) -> None:
    """Collective. Raise ConfigError if the number of batches is unknown, or differs between ranks."""
    try:
        length = len(loader)
    except TypeError:
        length = None
    if length is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise ConfigError(
            "data for training must be a map-style data set with Lightning, whose loop must know the number of "
            "each rank's batches; got an IterableDataset. Use a map-style one, or your own training loop."
        )
    lengths = allgather(length)
    if len(set(lengths)) > 1:
        raise ConfigError(
            "a training loader must have the same number of batches on each rank with Lightning, whose loops count "
            f"them; got {' and '.join(map(str, lengths))}. Let HpcdistStrategy distribute one data set; or skip some "
            "batches."
        )


def _ranks_differ(optimizers: Mapping[str, Any]) -> bool:
    """Return whether ranks have different parameters or states of optimisers."""
    strategies = [optimizer.strategy for optimizer in optimizers.values()]
    return any(strategy.comm.size > 1 and not strategy.contract.replicates for strategy in strategies)


def _ranks_folder(path: Any) -> Path:
    return Path(f"{path}.ranks")
