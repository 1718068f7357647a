"""Base of strategies with periods: local steps, then a common update of all ranks, at once or by fragments."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.calls import Work
from hpcdist.collectives.calls.tensors import zeros_like
from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, Reduction
from hpcdist.config.settings import Field
from hpcdist.errors import CheckpointError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.records import waiting_for_work
from hpcdist.strategies.common.state import Reshard, first
from hpcdist.strategies.synchronous.fragments import Fragment, split_layers


class Periodic(Strategy):
    """Take local steps for a period; then update the common parameters x, equal on all ranks, and continue from x.

    Ranks average only the differences δᵢ = x − θᵢ of their parameters θᵢ. All ranks have the same weight, even without
    samples in some step. With `compression` they send compressed δᵢ with error feedback. A subclass defines how x moves
    by the mean δ, bitwise equal on all ranks. On one rank only the optimiser runs, without x.

    The mean may be merged some steps after δᵢ was sent. Then each rank keeps its steps since then,
    θᵢ ← x + (θᵢ − θᵢ when sent), or blends its parameters with x. Only a second thread for MPI calls saves time.

    Attributes:
        fragments: the parts of the parameters that are exchanged separately.
        calls: collective calls for the means.
        average: Collective. Replaces flat tensors by their means over all ranks, bitwise equal on all ranks.
        in_flight: numbers of the fragments that were sent and not merged, with the step that sent them.
        common: x, flat tensors like `model.params`; empty on a single rank.
        mean: the mean δ; flat tensors like `model.params`, or `model.params`.
        sent: δᵢ of the fragments in flight; flat tensors like `model.params`.
        used: flags of the parameters with a gradient on any rank in the period of `mean`.
        momentum: the outer optimiser's momentum, flat tensors; empty unless a subclass sets them.
        blend: weight of the rank's parameters when a mean is merged; None: keep the rank's steps since it was sent.
        of_ranks: the `reshard` rule of x, see `State`.
    """

    class Config(Strategy.Config):
        period: int = Field(10, "H: steps between two exchanges of all ranks", ge=1)
        algorithm: str = Field("auto", "all-reduce algorithm; auto chooses by size and ranks")
        compression: CompressionConfig = Field(
            CompressionConfig(), "how differences are compressed; its warmup_steps count exchanges"
        )

        @property
        def steps_in_flight(self) -> float:
            """Steps from sending a fragment to merging its mean."""
            return 0

        def synchronizes(self, step: int) -> bool:
            return step % self.period == 0

    config: Config
    contract = Contract(averages="parameters", synchronizes="every period")
    momentum: Sequence[Tensor] = ()
    blend: float | None = None
    of_ranks: Reshard = "first"

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.alone = comm.size == 1
        self.calls = self.open_calls(config.algorithm)
        self.average = partial(self.calls.all_reduce, op="mean", algorithm=config.algorithm)
        self.fragments = [] if self.alone else self.split_layers()
        channel, templates = self.calls.comm, [] if self.alone else model.params
        self.in_flight: dict[int, int] = {}
        self._works: dict[int, Work] = {}  # of fragments whose mean may not be in `mean` yet
        self._delay = config.steps_in_flight
        self.common = self.state.sharded("common", templates, start="parameters", reshard=self.of_ranks, resets=True)
        # Memory that the ranks of a node average in place, if there is such memory.
        shared = None if config.compression else zeros_like(channel, self.common)
        # `mean` has δᵢ of the fragments in flight, then their means; `sent` keeps δᵢ. On another number of ranks all
        # start from the mean of the parameters, whose distance from x is the mean of δᵢ. If x replaces the parameters
        # in the step that sends δᵢ, δᵢ overwrites the parameters.
        overwrites_params = self.blend is None and not self._delay
        if overwrites_params and shared:
            model.move_params(shared)
        means = [] if overwrites_params else shared or [torch.empty_like(x) for x in self.common]
        declared = self._declare_in_flight("mean", means, "first")
        self.mean: Sequence[Tensor] = model.params if overwrites_params else declared
        keeps_steps = self.blend is None and self._delay
        sent = [torch.empty_like(x) for x in self.common if keeps_steps]
        self.sent = self._declare_in_flight("gone", sent, "mean")
        # Old names in checkpoints: "gone" is `sent`, "moving" is `used` below, "under_way" is `in_flight`.
        self.state.flags("used", self.gradients.used)
        self.used = self.state.flags("moving", torch.ones_like(self.gradients.used))  # on any rank, of `mean`
        self._compressed = [
            self.opened(Reduction(channel, config.compression, part.take(self.common), part.spans, self.over_senders))
            for part in (self.fragments if config.compression else ())
        ]
        if self._compressed:
            self.declare_compressed(self._compressed)
        self.state.custom(
            "under_way", lambda: [[n, step, self.fragments[n].numbers] for n, step in sorted(self.in_flight.items())],
            self._load_in_flight, self.in_flight.clear, reshard=first, optional=True,
        )  # fmt: skip
        self.state.before_save(self.complete)
        self.state.before_load(self.complete)
        self.state.after_load(self._keep_mergeable)

    # --- methods that a subclass defines --------------------------------------------------------------------------
    @property
    def over_senders(self) -> bool:
        """Whether compressed means are over the ranks that have sent an element."""
        return False

    def split_layers(self) -> list[Fragment]:
        """Split the model into fragments; by default a single one."""
        return split_layers(self.model, None, "sequential")

    @abc.abstractmethod
    def move(self, fragment: Fragment) -> None:
        """Move a fragment of `common` by the fragment of `mean`, equally on all ranks; may overwrite `mean`."""

    def sends(self, step: int) -> list[int]:
        """Return the numbers of the fragments to send at the end of a step, counted from 1."""
        return [0] if self.config.synchronizes(step) else []

    def inner_step(self, update: Update) -> Outcome:
        """Take a step of the period; by default a local step."""
        return self.gradients.step_alone(update)

    def advance(self, update: Update) -> Outcome:
        outcome = self.inner_step(update)
        if self.fragments:
            step = self.steps + 1
            for number in self.sends(step):
                self.send(number, step)
            for number in sorted(fragment for fragment, sent in self.in_flight.items() if sent + self._delay <= step):
                self.merge(number, step)
        return outcome

    def send(self, number: int, step: int) -> None:
        """Start averaging a fragment's δᵢ."""
        if number in self.in_flight:
            self.merge(number, step)
        fragment = self.fragments[number]
        for mean, x, local in fragment.views(self.mean, self.common, self.model.params):
            torch.sub(x, local, out=mean)
        if self.sent:
            for sent, mean in fragment.views(self.sent, self.mean):
                sent.copy_(mean)
        self.start(number, step)

    def start(self, number: int, step: int) -> None:
        """Start averaging a fragment of `mean` over the ranks."""
        fragment = self.fragments[number]
        values, used = fragment.take(self.mean), self.gradients.take_used(fragment.flag_index)

        def average() -> None:
            if self._compressed:
                self._compressed[number].mean(values, used)
            else:
                self.average(values)
            if self.momentum:
                self.average([used])

        self.in_flight[number] = step
        work = self.calls.queue.run(average, [*values, used], async_op=self._delay > 0)
        self._works[number] = work or Work([*values, used])

    def complete(self, number: int | None = None) -> None:
        """Wait for the mean of a fragment, and of those sent before it, and copy them into `mean`; None: for all."""
        for arrived, work in list(self._works.items()) if number is None or number in self._works else ():
            with waiting_for_work(self.calls.comm):
                work.wait()
            del self._works[arrived]
            fragment, (*values, used) = self.fragments[arrived], work.tensors
            if not fragment.contiguous:
                fragment.put(values, self.mean)
            if self.momentum:
                self.used[fragment.flag_index] = used > 0
            if arrived == number:
                return

    def merge(self, number: int, step: int) -> None:
        """Move a fragment of x by its mean, and set the rank's parameters from x."""
        self.complete(number)
        fragment, sent_at = self.fragments[number], self.in_flight.pop(number)
        keeps_steps = self.blend is None and sent_at < step
        if keeps_steps:
            for local, x, sent in fragment.views(self.model.params, self.common, self.sent):
                local.sub_(x).add_(sent)  # the steps since then: x − sent are the parameters when sent
        with self.model.skip_unused(self.used, self.momentum):
            self.move(fragment)
        for local, x in fragment.views(self.model.params, self.common):
            if keeps_steps:
                local.add_(x)
            elif not self.blend:
                local.copy_(x)
            elif self.blend < 1:
                local.mul_(self.blend).add_(x, alpha=1 - self.blend)

    def _declare_in_flight(self, name: str, tensors: Sequence[Tensor], reshard: Reshard) -> list[Tensor]:
        """Declare tensors that are saved while fragments are in flight."""
        return self.state.sharded(name, tensors=tensors, start="any", reshard=reshard, saves=lambda: self.in_flight)

    def _load_in_flight(self, saved: Sequence[Sequence[Any]]) -> None:
        """Find the fragments of this run that were in flight when another run, with the same or other fragments, saved.

        A fragment of which only some parameters were in flight is not: its next δᵢ contains these changes.
        """
        self.in_flight.clear()
        sent_at = {}
        for number, step, *numbers in saved:
            if not numbers and number < len(self.fragments):
                numbers = [self.fragments[number].numbers]  # old checkpoints lack them
            sent_at.update({parameter: step for fragment in numbers for parameter in fragment})
        for number, fragment in enumerate(self.fragments):
            steps = [sent_at[parameter] for parameter in fragment.numbers if parameter in sent_at]
            if len(steps) == len(fragment.numbers):
                self.in_flight[number] = min(steps)
            elif steps and self._delay == math.inf:
                raise CheckpointError(
                    "strategy.fragment_layers and strategy.order must be those of the checkpoint, which was saved in "
                    "the first period: the mean of a part of a fragment is not merged yet. Take the same options, or "
                    "load a later checkpoint."
                )

    def _keep_mergeable(self) -> None:
        """Keep the loaded exchanges in flight that this run can merge."""
        loaded, in_flight = self.state.loaded, self.in_flight
        if "gone" in loaded and "under_way" not in loaded:  # old checkpoints lack it
            in_flight[0] = self.steps
        if self.blend is None and not (self.sent and "gone" in loaded):  # overlap in only one of the two runs
            in_flight.clear()  # the next δᵢ contains these changes

    def declare_compressed(self, of_fragments: Sequence[Reduction]) -> None:
        """Declare the state of the compressed means."""
        self.state.reduction("compressed", of_fragments[0])

    def reset_from_model(self) -> None:
        self.complete()
        self.in_flight.clear()
        super().reset_from_model()
        self.average(self.common)


class OverlapConfig(Periodic.Config):
    """Options of strategies that exchange all parameters at the same time."""

    overlap: bool = Field(False, "exchange while the next step computes, and merge the result after that step")

    @property
    def steps_in_flight(self) -> float:
        return int(self.overlap)


def outer_step(config: Any, x: Tensor, momentum: Tensor, gradient: Tensor, *, nesterov: bool = True) -> None:
    """Step x like torch's SGD, by `outer_lr` and `outer_momentum`; updates momentum, overwrites the gradient."""
    if config.outer_momentum:
        momentum.mul_(config.outer_momentum).add_(gradient)
        if nesterov:
            gradient.add_(momentum, alpha=config.outer_momentum)
        else:
            gradient = momentum
    x.add_(gradient, alpha=-config.outer_lr)
