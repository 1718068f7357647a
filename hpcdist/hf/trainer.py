"""Run Hugging Face's Trainer on all ranks, by any strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import EvalPrediction, TrainerCallback
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from hpcdist import checkpoint, strategies
from hpcdist.hf.batches import TrainingBatches, UpdateBatches, torch_loader
from hpcdist.hf.evaluation import join_results, mean_loss
from hpcdist.session import rules
from hpcdist.session.checkpoints import load, save
from hpcdist.session.consensus import consensus, finish
from hpcdist.session.loader.sharded import shard
from hpcdist.session.optimizer import DistributedOptimizer
from hpcdist.session.values import allgather, barrier, broadcast, metric
from hpcdist.session.world import current

FOLDER = "hpcdist"  # in a checkpoint of the Trainer: the ranks' state

_Base: Any = object  # for type checkers; the Trainer's class follows in the method resolution order

# Arguments by which the Trainer distributes the model itself, or one rank deviates from the others.
_REFUSED = (
    *("deepspeed", "fsdp", "parallelism_config", "auto_find_batch_size", "enable_jit_checkpoint"),
    *("accelerator_config.split_batches", "accelerator_config.dispatch_batches"),
)


class _LoopCallback(TrainerCallback):
    """Tells the trainer the position of its loop."""

    def __init__(self, trainer: TrainerMixin):
        self.trainer = trainer

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.epoch_ended = False

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        state.epoch = self.trainer.epoch_of(state.epoch)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.trainer.epoch_ended = True


class TrainerMixin(_Base):
    """Makes a class of transformers' Trainer train on all ranks: `class MyTrainer(TrainerMixin, Seq2SeqTrainer)`.

    Each worker trains on its share of the samples; `per_device_train_batch_size` is that of a worker. Steps, epochs and
    schedules count the steps of one worker. If the model divides the loss by the number of labels
    (`num_items_in_batch`), the loss is with allreduce and hardsync the mean over the labels of all workers' batches in
    the step; with other strategies over this worker's. `max_grad_norm` is the strategy's `clip_norm`.

    `train`, `evaluate`, `predict` and `save_model` are collective. Evaluations use the consensus of all ranks; each
    rank evaluates its share of the samples. `train` leaves the trained model on every rank. The first worker is the
    main process, which logs and writes the model. Server ranks take part in all that the Trainer does between steps.

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or a dict of `name` and the strategy's options.

    Raises:
        ConfigError: TrainingArguments request another kind of distribution.
    """

    compute_metrics: Any
    optimizer: Any
    _total_loss_scalar: float

    def __init__(self, *args: Any, strategy: str | Mapping[str, Any] = "allreduce", **kwargs: Any):
        options = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
        self._name, self._options = str(options.pop("name", "allreduce")), options
        self._distributed: Any = None  # the optimiser, while `train` runs
        self._batches: Any = None
        self._window: Any = None  # the UpdateBatches of the current update
        self._random: Any = None  # random state of a checkpoint
        self._epoch, self._skipped, self._steps_in_epoch = 0, 0, 1  # of a resumed epoch
        self._evaluated: list[tuple[Tensor | None, int]] | None = None  # loss and size of each evaluated batch
        self.epoch_ended = False
        super().__init__(*args, **kwargs)
        self.add_callback(_LoopCallback(self))

    # --- the world ------------------------------------------------------------------------------------------------
    def create_accelerator_and_postprocess(self) -> None:
        """Create an Accelerator that distributes nothing; the first worker is the main process."""
        session = current()
        for name in _REFUSED:
            value: Any = self.args
            for part in name.split("."):
                value = getattr(value, part, None)
            if value:
                raise rules.error("the Trainer distributes the model itself", name=name, value=value)
        cls = strategies.load(self._name)
        self.workers = cls.Config.from_mapping(self._options, "strategy").workers(session.outer.size)
        state, comm = self.args.distributed_state, session.comm
        index_of_rank = [(rank - self.workers[0]) % comm.size for rank in range(comm.size)]
        local_indices = sorted(index_of_rank[rank] for rank in comm.memory.local_ranks)
        state.distributed_type, state.backend, state.num_processes = DistributedType.NO, None, 1
        state.process_index = index_of_rank[comm.rank]
        state.local_process_index = local_indices.index(index_of_rank[comm.rank])
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False  # the Trainer moves the model, and each batch
        self.accelerator.clip_grad_norm_ = self._norm  # the strategy clips
        self.accelerator.dataloader_config.dispatch_batches = False  # with it one process would read for all

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * len(self.workers)

    # --- the start ------------------------------------------------------------------------------------------------
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimiser, and distribute it. Collective while `train` runs."""
        super().create_optimizer(*args, **kwargs)
        if self.is_in_train and self._distributed is None:
            optimizer = self.optimizer
            while isinstance(optimizer, AcceleratedOptimizer):
                optimizer = optimizer.optimizer
            norm = self.args.max_grad_norm or None
            self._distributed = DistributedOptimizer(optimizer, self.model, self._name, clip_norm=norm, **self._options)
        return self.optimizer

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Replace the Trainer's loader by this rank's batches."""
        self.create_optimizer()  # determines which ranks have batches
        self._batches = TrainingBatches(dataloader)
        within = [(args.eval_strategy, args.eval_steps), (args.save_strategy, args.save_steps)]
        if not self._batches.sized and any(kind == "steps" and (n or 0) < args.max_steps for kind, n in within):
            rules.refuse("an epoch of a stream is left for an evaluation", self._distributed.strategy)
        return super().set_initial_training_values(args, self._batches)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        return super()._prepare_for_training(max_steps, self._batches, resume_from_checkpoint)

    # --- steps ----------------------------------------------------------------------------------------------------
    def _run_epoch(self, **kwargs: Any) -> None:
        """Run an epoch, or its rest after resuming."""
        resumes = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        self._epoch, self._skipped, self._steps_in_epoch = kwargs["epoch"], 0, kwargs["steps_in_epoch"]
        if resumes and kwargs["steps_trained_in_current_epoch"]:
            # The Trainer would skip batches in another loader.
            self._skipped = kwargs["steps_trained_in_current_epoch"]
            self._batches.resume(self._skipped, self._epoch if self._random is None else None)
            kwargs["steps_in_epoch"] -= self._skipped
            kwargs["num_update_steps_per_epoch"] -= self._skipped // self.args.gradient_accumulation_steps
            kwargs["resume_from_checkpoint"] = None
        if self._distributed.strategy.is_worker:
            super()._run_epoch(**kwargs)
        else:
            self._serve_epoch(kwargs)

    def epoch_of(self, counted: float) -> float:
        """Return the position in the data, in epochs; `counted` is the position in the rest of a resumed epoch."""
        total, remaining = self._steps_in_epoch, self._steps_in_epoch - self._skipped
        if total == remaining:
            return counted
        return self._epoch + (self._skipped + (counted - self._epoch) * remaining) / total

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        """Return the batches of an update, and the number of their labels. Collective with allreduce and hardsync."""
        read = super().get_batch_samples
        batches, num_items = read(epoch_iterator, num_batches, device)
        weights, self._batches.weights = self._batches.weights, []
        if self._skipped and self._random is not None:
            checkpoint.set_random_state(self._random)  # before later batches are computed, as the Trainer does
            self._random = None
        strategy = self._distributed.strategy
        contract, is_real = strategy.contract, [float(weight > 0) for weight in weights]
        reported = weights if contract.synchronous else is_real  # in the mean over the workers, or this one's
        if num_items is not None:
            real = [batch for batch, flag in zip(batches, is_real) if flag]  # without padding batches
            labels = float(read(iter(real), len(real), device)[1]) if real else 0.0
            joins = contract.weights_batches and contract.synchronizes == "every step"  # labels of all workers
            joins = joins and self.args.average_tokens_across_devices
            divisor, scale = (self._mean(labels) if joins else labels) or 1.0, 1.0
            if contract.weights_batches and contract.updates == "on servers" and real:
                # Servers divide by the mean weight of an update's batches; padding batches have weight 0.
                scale = labels / divisor * len(batches) / len(real)
            weights = [flag * scale for flag in is_real]
            reported = reported if contract.synchronous and not joins else weights
            dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
            num_items = torch.tensor(divisor * scale or 1.0, dtype=dtype, device=self.args.device)
        self._window = UpdateBatches(batches, weights, reported, strategy.model)
        return self._window, num_items

    def _mean(self, value: float) -> float:
        """Return the mean of all workers' values. Collective among the workers."""
        workers, sums = self._distributed.attachment.workers, torch.tensor([value], dtype=torch.float64)
        workers.allreduce(sums)
        return sums.item() / workers.size

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Add a batch's gradients; return its loss, weighted for the mean over the workers."""
        with nullcontext() if self.accelerator.sync_gradients else self._distributed.no_sync():
            return super().training_step(model, *args, **kwargs) * self._window.reported

    def _norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the norm of this rank's gradients, for logs, without clipping."""
        norms = [torch.linalg.vector_norm(p.grad, norm_type) for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        scaler = self.accelerator.scaler
        return norm if scaler is None else norm / scaler.get_scale()

    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) * len(self.workers)

    # --- between steps --------------------------------------------------------------------------------------------
    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Leave the epoch first if it ends, or if server ranks take part in what follows."""
        control, strategy = self.control, self._distributed.strategy
        logs = control.should_log and self.state.global_step > self._globalstep_last_logged
        if logs and strategy.contract.synchronous:
            tr_loss.fill_(self._mean(tr_loss.item()))
        stops = self.epoch_ended or control.should_epoch_stop or control.should_training_stop
        done, some_serve = stops or self._batches.exhausted, strategy.contract.ranks == "some serve"
        if self._batches.open and done:
            self._batches.leave()
        elif self._batches.open and some_serve and (control.should_evaluate or control.should_save):
            self._batches.pause()
        if some_serve and not self._batches.open:
            progress = {"more": not done, "ended": self.epoch_ended, "logged": self._globalstep_last_logged}
            broadcast({"state": self.state, "control": control, **progress}, self.workers[0])
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _serve_epoch(self, kwargs: Mapping[str, Any]) -> None:
        """Serve an epoch, and take part in what the workers do between its steps."""
        sharded, more, ended = self._batches.sharded, True, False
        sharded.set_epoch(kwargs["epoch"])
        while not ended:
            for _ in sharded if more else ():
                pass
            progress = broadcast(None, self.workers[0])
            more, ended = progress["more"], progress["ended"]
            self.state, self.control = progress["state"], progress["control"]
            self._globalstep_last_logged = progress["logged"]
            self.control.should_log = False
            self.state.is_world_process_zero = self.state.is_local_process_zero = False
            super()._maybe_log_save_evaluate(
                self._tr_loss, None, kwargs["model"], kwargs["trial"], kwargs["epoch"], kwargs["ignore_keys_for_eval"],
                kwargs["start_time"],
            )  # fmt: skip
            more = more and not (self.control.should_epoch_stop or self.control.should_training_stop)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Leave the trained model on every rank."""
        worker = self._distributed.strategy.is_worker
        self._total_loss_scalar = metric(self._total_loss_scalar + self._tr_loss.item(), weight=float(worker))
        self._tr_loss.zero_()
        finish(self.model)
        self._distributed = self._batches = self._random = None
        return super()._finalize_training(*args, **kwargs)

    # --- evaluation -----------------------------------------------------------------------------------------------
    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Collective. Evaluate this rank's share of the batches, and join all ranks' results, on every rank.

        With `batch_eval_metrics` each rank evaluates all batches.
        """
        run, metrics_of, optimizer = super().evaluation_loop, self.compute_metrics, self.optimizer
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._distributed is not None:
            optimizer.eval()  # of a schedule-free one, which must come before the consensus
            self.optimizer = None  # the Trainer would call its `eval` again
        with self._consensus():
            try:
                if self.args.batch_eval_metrics:
                    return run(dataloader, *rest)
                predictions: list[EvalPrediction] = []
                self._evaluated, self.gather_function = [], self._local_part
                self.compute_metrics = metrics_of and partial(_record_predictions, predictions)
                output = run(shard(torch_loader(dataloader), training=False), *rest)
                losses = [(float("nan") if loss is None else loss.item(), size) for loss, size in self._evaluated]
                has_loss = any(loss is not None for loss, _ in self._evaluated)
            finally:
                self._evaluated, self.compute_metrics, self.optimizer = None, metrics_of, optimizer
        part = predictions[0] if predictions else EvalPrediction(None, None)
        local = (losses, has_loss, output.predictions, output.label_ids, part.losses, part.inputs)
        return self._joined(allgather(local), output, metric_key_prefix)

    def _joined(self, parts: list[Any], output: EvalLoopOutput, prefix: str) -> EvalLoopOutput:
        """Join the ranks' parts of an evaluation, and compute its metrics."""
        losses, has_loss, *arrays = zip(*parts)
        sizes = [[size for _, size in of_rank] for of_rank in losses]
        predictions, labels, *more = (join_results(each, sizes, self.args.eval_do_concat_batches) for each in arrays)
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            extra = {name: value for name, value in zip(("losses", "inputs"), more) if value is not None}
            metrics = self.compute_metrics(EvalPrediction(predictions, labels, **extra))
        metrics = denumpify_detensorize(metrics)
        if any(has_loss):
            metrics[f"{prefix}_loss"] = mean_loss(losses, self.args.logging_nan_inf_filter)
        metrics = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in metrics.items()}
        samples = output.num_samples if output.num_samples else sum(map(sum, sizes))
        return EvalLoopOutput(predictions, labels, {**output.metrics, **metrics}, samples)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, and record its loss and size."""
        outputs = super().prediction_step(model, inputs, *args, **kwargs)
        if self._evaluated is not None:
            self._evaluated.append((outputs[0], find_batch_size(inputs) or 1))
        return outputs

    def _local_part(self, tensors: Any) -> Any:
        """Return this rank's results of a batch; the Trainer repeats the loss for each sample."""
        size = self._evaluated[-1][1] if self._evaluated else None
        return tensors[:size] if isinstance(tensors, Tensor) else tensors

    def _consensus(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._distributed is None else consensus(self.model)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the consensus of all ranks, by the main process. Collective while `train` runs."""
        model = self.model
        model.should_save_on_this_rank = bool  # else only rank 0 of torch.distributed would save, perhaps a server
        try:
            with self._consensus():
                super().save_model(*args, **kwargs)
        finally:
            del model.should_save_on_this_rank
        if self._distributed is not None:
            barrier()  # all ranks see the file

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Collective. Save the state of all ranks."""
        save(os.path.join(output_dir, FOLDER), workers=len(self.workers), **self._stateful())

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        """Collective. Load the state of all ranks, or a plain Trainer's on every rank."""
        values = None if checkpoint_dir is None else load(os.path.join(checkpoint_dir, FOLDER), **self._stateful())
        if values is None:
            super()._load_optimizer_and_scheduler(checkpoint_dir)
            return
        if values["workers"] != len(self.workers):
            raise rules.error("a run is resumed on other workers", saved=values["workers"], count=len(self.workers))
        self._random = checkpoint.random_state()

    def _stateful(self) -> dict[str, Any]:
        return {"optimizer": self._distributed, "schedule": self.lr_scheduler, "loader": self._batches.sharded}

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the ranks' state includes it."""

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        if self._random is None:
            super()._load_rng_state(checkpoint_dir)
        else:
            checkpoint.set_random_state(self._random)


def _record_predictions(predictions: list[EvalPrediction], part: EvalPrediction) -> dict[str, float]:
    predictions.append(part)
    return {}


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on all ranks, by a strategy; see TrainerMixin.

    Example:
        >>> trainer = hpcdist.hf.Trainer(model, args, train_dataset=data, strategy="gossip_pull")  # doctest: +SKIP
    """
