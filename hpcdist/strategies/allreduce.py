"""Train synchronously: average gradients over all ranks, then apply the same update on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.collectives.calls.tensors import zeros_like
from hpcdist.collectives.tuning.timing import Trial
from hpcdist.comm.communicator import Communicator
from hpcdist.compress import JointCompression, Reduction, spans
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.records import waiting_for_work
from hpcdist.strategies.synchronous.agreement import StepAgreement
from hpcdist.strategies.synchronous.averaging import Averaging, ProviderConfig

TRIALS: dict[str, Any] = {"rounds": 7, "warm_up": 3, "worth": 0.95}


class AllReduce(Strategy):
    """Average the gradients of all ranks, weighted by their sample counts, then apply the same update on all ranks.

    Equals one process with the joint batch of all ranks. Replicas stay bitwise equal. With `overlap`, buckets of
    gradients are reduced on a thread while the backward pass computes the rest; that costs interpreter time and a
    core, so `auto` measures the first steps with and without. Gradients of a model in pipeline stages are reduced
    during the backward pass of its last micro-batch, stage by stage as they are complete.

    The option `provider` selects another library for the sum: Horovod (`hpcdist horovod build`) or torch.distributed,
    both with NCCL for GPUs. Horovod's Adasum is not a mean: it adds orthogonal gradients and averages parallel ones, so
    that the learning rate need not grow with the number of ranks.

    As in DistributedDataParallel, gradients are averaged when `backward()` returns, so that the loop may clip or scale
    them before the step. Several backward passes before a step accumulate; each is followed by an exchange, unless
    `accumulation` is their number, or all but the last run inside the optimiser's `no_sync()`. Learning rates and all
    other numbers in param_groups must be equal on all ranks, and are compared in every step. Buffers that change in
    training, such as batch norm's statistics, become their mean over the ranks in every step.

    With `compression` each rank compresses its gradient plus the residual of earlier messages. All ranks apply the mean
    of the messages, so that replicas stay bitwise equal.

    Gradients of the ranks on a node are in shared memory: each rank writes the mean of its chunk into the memory of all
    ranks (algorithm direct). A rank's resident set size then also counts the shared memory that it reads.

    Bytes per rank and step: 2n(p − 1)/p for n bytes of gradients (ring, direct), or as `hpcdist compressors` shows; 32
    bytes to check that all gradients are present and finite and param_groups equal; and buffers that have changed
    (BatchNorm's averages, for example).

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "topk", "ratio": 0.01})

    Reference: Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017; for the
    buckets, Shen Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020; for
    Adasum, Saeed Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """

    class Config(Strategy.Config):
        algorithm: str = Field("auto", "all-reduce algorithm; auto chooses by size and ranks")
        overlap: Literal["auto", "on", "off"] = Field(
            "auto", "average buckets while the backward pass runs; auto measures both"
        )
        accumulation: int = Field(1, "backward passes per step, whose gradients accumulate", ge=1)
        compression: JointCompression = Field(JointCompression(), "how gradients are compressed")
        provider: ProviderConfig = Field(ProviderConfig(), "the library that sums gradients")

        @joint_rule
        def _goes_together(self) -> None:
            other = self.provider.name
            if self.provider and self.algorithm != "auto":
                raise ValueError(
                    f"strategy.algorithm must be auto with strategy.provider = {other!r}, which has its own; got "
                    f"{self.algorithm}. Leave it out."
                )
            if self.provider and self.compression:
                raise ValueError(
                    f"strategy.compression must be none with strategy.provider = {other!r}, which sums gradients as "
                    f"they are; got {self.compression.name}. Leave it out; Horovod has strategy.provider.compression."
                )
            if self.compression and self.overlap == "on":
                raise ValueError(
                    "strategy.overlap must be off or auto with strategy.compression, which sees all gradients before "
                    "any is sent; got on. Leave it out."
                )

        def narrow(self, contract: Contract, size: int) -> Contract:
            return replace(contract, frozen="before" if self.compression or self.provider else "at any time")

        def require_plain(self, optimizer: str) -> None:
            if self.compression:
                raise ConfigError(
                    f"strategy.compression must be none with {optimizer}, whose line search and curvature need the "
                    f"loss's own gradient; got {self.compression.name}. Leave it out."
                )
            if not self.provider.exact:
                raise ConfigError(
                    f"strategy.provider must give the mean of gradients with {optimizer}, whose line search and "
                    f"curvature need the loss's own gradient; got op {self.provider.op!r}, compression "
                    f"{self.provider.compression!r}. Leave them out."
                )

    config: Config
    contract = Contract(averages="gradients", synchronizes="every step", closure="often", frozen="at any time")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        if self.adds_up and config.provider.op != "average":
            raise ConfigError(
                f"strategy.provider.op must be average with loss = 'sum', which adds up itself; got "
                f"{config.provider.op}. Leave it out."
            )
        self.updates = self.state.value("updates", 0, self, reshard="first")
        self._calls = calls = self.open_calls(config.algorithm)
        averaging = Averaging(calls, config.algorithm, config.provider, model, self._record_nonfinite)
        self._averaging = self.opened(averaging)
        self._alone = comm.size == 1 and not config.provider
        if self._alone:
            model.keep_gradients(None)
        elif not (config.provider or config.compression):
            shared = zeros_like(calls.comm, model.params)
            if shared is not None:
                model.keep_gradients(shared)
        self._compressed: Reduction | None = None
        if config.compression and comm.size > 1:
            self._compressed = self.opened(Reduction(calls.comm, config.compression, model.grads, spans(model)))
        self.state.reduction("compressed", self._compressed)
        self._agreement = StepAgreement(self)
        self._bad: list[str] = []  # names of this rank's non-finite gradients, before averaging
        self._passes = 0  # backward passes whose gradients have not been averaged
        self._merged: dict[int, list[str]] | None = None  # names of non-finite gradients by rank, after averaging
        self._accumulates = False  # inside `no_sync`
        announces = self.stages is None or self.stages.announces
        overlaps = self._averaging.overlaps and self._compressed is None and announces
        # Times steps without overlap (variant 0) and with overlap (variant 1).
        self._trial = Trial(comm, 2, **TRIALS) if config.overlap == "auto" and overlaps else None
        self._merged_s = comm.now()  # time at which gradients were averaged last
        model.gradients.on_bucket = self._averaging.start
        model.gradients.on_end = self._backward_ended
        self._arm(overlapped=config.overlap == "on" and overlaps)

    def _arm(self, overlapped: bool) -> None:
        """Choose whether the next gradients are reduced during the backward pass."""
        self._overlapped = overlapped
        self.model.gradients.announce(early=overlapped and not self._accumulates, passes=self.config.accumulation)

    def _record_nonfinite(self, bucket: Bucket) -> None:
        """Record the names of non-finite gradients of a bucket on this rank, before averaging."""
        self._bad += self.gradients.nonfinite(bucket)

    # --- backward passes ------------------------------------------------------------------------------------------
    def _backward_ended(self) -> None:
        self._passes += 1
        enough = self._passes >= self.config.accumulation or self.model.gradients.ends_epoch
        if not self._accumulates and enough:
            self.synchronize()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate local gradients without averaging."""
        self._accumulates = True
        self._arm(self._overlapped)
        try:
            yield
        finally:
            self._accumulates = False
            self._arm(self._overlapped)

    def synchronize(self) -> None:
        """Collective. Average gradients that no backward pass has averaged yet; usually there are none."""
        if self._alone or (self._merged is not None and not self._passes):
            return
        self._passes = 0
        if self._merged is not None and not self._averaging.repeats:
            raise ConfigError(
                "strategy.accumulation must be the number of backward passes before a step with strategy.provider.op "
                f"{self.config.provider.op!r}, whose result can't be added to; got one more. Set it, or use average."
            )
        if self.model.unfrozen:
            self._unfreeze()
        if self._compressed is not None:
            used, self._merged = self._average_compressed(self._compressed)
        else:
            used, self._merged = self._agreement(self._average(), self._bad)
            self._bad = []
        self.model.gradients.release(used)
        if self._trial is not None and not self._trial.decided:
            now_s = self.comm.now()
            self._trial.record(now_s - self._merged_s)
            self._merged_s = now_s
        overlapped = self._overlapped if self._trial is None else bool(self._trial.variant)
        if overlapped or self._overlapped:
            self._arm(overlapped)  # announce the next step's buckets

    def _finish_averaging(self) -> dict[int, list[str]]:
        """Collective. Average gradients if still necessary; return the names of non-finite gradients by rank."""
        if self.model.unfrozen:
            self._unfreeze()
        if not self._alone:
            self.synchronize()
            bad, self._merged = self._merged or {}, None
            return bad
        self.model.gradients.collect()
        return self._by_rank(self.gradients.nonfinite(again=True))

    def _by_rank(self, names: list[str]) -> dict[int, list[str]]:
        """Return a dict from this rank to `names`; empty without names."""
        return {self.comm.rank: names} if names else {}

    def advance(self, update: Update) -> Outcome:
        if self._passes and self.comm.size > 1 and self.gradients.changed:
            raise ConfigError(
                f"gradients must be averaged before they are changed; got some that were changed after {self._passes} "
                f"backward passes, with strategy.accumulation = {self.config.accumulation} or in no_sync(). Call "
                "optimizer.synchronize() first, where fewer passes make a step."
            )
        bad = self._finish_averaging()
        # False where backward passes have ignored non-finite gradients, and a GradScaler now asks to skip the update.
        was_checked = self.config.on_nonfinite != "ignore" or self.gradients.ignores_nonfinite
        if self.gradients.changed or not was_checked:
            # The loop may have fixed gradients, or set them to non-finite values, equally on all ranks.
            local_bad = self._by_rank(self.gradients.nonfinite(again=True))
            bad = local_bad and (bad or local_bad)
        if self.stages is not None and not self.gradients.ignores_nonfinite:
            bad = self.stages.nonfinite(bad)
        event = self.gradients.skip_update(bad) if bad else None
        if not bad:
            self.gradients.clip()
            update()
            self.updates += 1
        return Outcome(self.updates, staleness=self.gradients.staleness(bad), event=event)

    def minimise(
        self, solve: Callable[[Callable[[], Tensor | None]], Any], closure: Callable[[], Any]
    ) -> tuple[StepRecord, Any]:
        """Collective. Take one step of an optimiser that evaluates the loss several times, such as L-BFGS.

        After each evaluation gradients and loss are averaged over the ranks, so that line searches decide equally on
        all ranks, as in one process with the joint batch. A gradient that is not finite ends the run (or is ignored):
        a step can't be skipped in the middle. Each evaluation sends the messages of a step.

        Args:
            solve: the optimiser's step; receives the closure to evaluate.
            closure: zeroes the gradients, runs this rank's backward pass and returns its loss.

        Returns:
            The step's record, and the result of `solve`; losses are float64 scalars, shape ().

        Reference: Dong Liu, Jorge Nocedal, "On the limited memory BFGS method for large scale optimization", 1989.
        """

        def evaluate() -> Tensor | None:
            loss = closure()
            bad = self._finish_averaging()
            if bad:
                self.gradients.skip_update(bad)
            return None if loss is None else self._mean(torch.as_tensor(loss, dtype=torch.float64).item())

        self.model.refresh()
        contributes = self.model.gradients.weight > 0
        result = solve(evaluate)
        self.model.flat_buffers.restore()
        self.updates += 1
        return self.finish_step(Outcome(self.updates, staleness=(0,) if contributes else ())), result

    def _mean(self, loss: float) -> Tensor:
        """Collective. Average the loss with the gradients' weights; bitwise equal on all ranks."""
        losses = torch.zeros(self.comm.size, dtype=torch.float64)  # an element per rank: adding zeros is exact
        losses[self.comm.rank] = self.model.gradients.weight * loss if self.model.gradients.weight else 0.0
        self.comm.allreduce(losses)
        return torch.tensor(sum(losses.tolist()) / self.comm.size, dtype=torch.float64)

    def _unfreeze(self) -> None:
        """Train parameters that the loop has unfrozen since the last step."""
        if self._overlapped:
            self.model.gradients.collect(last=True)
            self._averaging.wait()
        self.model.relayout()  # averaged gradients do not change when they are averaged again
        self._agreement.forget()
        self._arm(overlapped=False)

    def _average(self) -> Tensor:
        """Collective. Average gradients, or wait until they are; return which parameters have one on this rank."""
        used = self.model.gradients.collect(last=self._overlapped)
        if not self._overlapped:
            self._averaging.now(self.model.gradients.buckets)
            return used
        with self.comm.trace.span("wait for buckets", "wait"), waiting_for_work(self._calls.comm):
            self._averaging.wait()
        return used

    def _average_compressed(self, sum_up: Reduction) -> tuple[Tensor, dict[int, list[str]]]:
        """Collective. Average gradients, unless some are not finite: NaN must not enter the error-feedback residual.

        Returns the result of `_agreement`: parameters with a gradient on any rank, names of non-finite ones by rank.
        """
        used, bad = self._agreement(self.model.gradients.collect(), self.gradients.nonfinite())
        if bad:
            for flat in self.model.grads:  # so that all ranks skip the update
                flat.fill_(torch.nan)
        else:
            sum_up.mean(self.model.grads, used)
        return used, bad
