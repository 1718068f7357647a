"""Train by a strategy: each is a file with one final subclass of `Strategy`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.config import Settings
from hpcdist.errors import ConfigError, MismatchError, NonFiniteError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import Hyperparameters, require_equal_values
from hpcdist.model.pieces import PIECE, sums
from hpcdist.model.slots import describe_difference
from hpcdist.parallel.agreement import Agreement, clip_gradients
from hpcdist.records import StepRecord
from hpcdist.strategies.common.state import (
    Entry,
    attribute,
    first,
    load_entries,
    mean,
    reshard_entries,
    save_entries,
)

Update = Callable[[], None]  # runs the local optimiser on the gradients that are in the model


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step of a strategy.

    `clock` counts the updates of the parameters this rank now has; `staleness` has one entry per gradient applied on
    this rank; `event` says what was out of the ordinary; `dropped` counts gradients that were too stale; `waited_for`
    has the seconds that a server held this rank up because of each other rank.
    """

    clock: int
    staleness: tuple[int, ...] = ()
    event: str | None = None
    dropped: int = 0
    waited_for: dict[int, float] = field(default_factory=dict)


class Strategy(abc.ABC):
    """Collective. Train `model` together with the other ranks of `comm`.

    All ranks start from rank 0's parameters and buffers. The strategy owns `comm` but does not close it.

    Args:
        config: this strategy's options.
        comm: a communicator of its own: nobody else sends on it.
        model: the flat view of this rank's replica.
        optimizer: that `update` runs, for a strategy that reads its state or its hyper-parameters (learning rate,
            momentum, decay...). None: these are the same on all ranks, and stay.
        clip_norm: largest 2-norm of the gradients of an update, all together; None does not clip.
        on_record: receives what a rank records outside `step`, such as a server.
        stages: what agrees with the ranks that have the other stages of this rank's replica, where `model` is one stage
            of it and `comm` are the ranks that have the same one; None where each rank has the whole model.

    Raises:
        MismatchError: the ranks' models differ.
    """

    class Config(Settings):
        """Options that all strategies have."""

        on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
            "stop", description="a NaN or infinite gradient: end the run, leave the update out, or ignore it"
        )

    synchronous = False  # in each step all workers communicate with each other, so that all must take as many
    compares_always = False  # a step compares hyper-parameters by itself, every time
    weighs = False  # gradients are averaged over ranks, each weighted by its number of samples
    survives_deaths = False  # the others go on without a rank, or a worker, that dies, where the launcher lets them
    read_by_others = False  # while a rank computes, other nodes read its memory, which a thread of its own answers
    # It has `minimise`, as allreduce: a step of an optimiser that evaluates its closure several times, such as L-BFGS.
    supports_closures = False
    # Each step is given a closure of a portion of all workers' joint batch (`joint`), and evaluates it as often as it
    # likes, in place of a gradient of the worker's own batch; it has `minimise`, which does not run the optimiser.
    evaluates_portions = False
    sends_hyperparameters = False  # servers apply gradients with those of the workers' param_groups
    # Whether this rank's own update is of its gradients as they are at the step, so that the loop may change them.
    takes_changed_gradients = True
    replicates = False  # all ranks have the same parameters after every step
    replaces_parameters = False  # a worker's, in its steps, by others' values: what the loop has changed is lost
    # A step reads gradients in `model.grads`; else they stay where autograd makes them, for the local optimiser alone.
    reads_gradients = True
    sends_between_steps = False  # parameters are under way while the loop runs, so that its own changes come too late

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        model: FlatModel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        stages: Agreement | None = None,
    ):
        self.config, self.comm, self.model = config, comm, model
        self.optimizer, self.clip_norm, self.on_record = optimizer, clip_norm, on_record
        self.stages = stages
        self.hyperparameters = Hyperparameters(optimizer)
        self.steps = 0  # taken by this rank
        self._meetings = 0  # in which ranks might have compared hyper-parameters
        self._skips = config.on_nonfinite == "skip"  # gradients that are not finite, in this step
        self._since, self._before = comm.now(), Traffic()
        model.passes.configure(weighs=self.weighs, looks_closely=not self.takes_changed_gradients and comm.size > 1)
        if not self.reads_gradients:
            model.leave_gradients()
        _require_equal_models(comm, model)
        for tensor in (*model.params, *model.frozen, *model.buffers):
            comm.broadcast(tensor, 0)
        for tensor in model.others():
            flat = tensor.contiguous().reshape(-1)
            comm.broadcast(flat, 0)
            tensor.copy_(flat.view(tensor.shape))
        if comm.timeline is not None:
            comm.timeline.role = "worker" if self.is_worker else "server"

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @classmethod
    def worker_ranks(cls, config: Config, size: int) -> tuple[int, ...]:
        """Return the ranks that compute gradients; the others serve."""
        return tuple(range(size))

    @classmethod
    def check_closures(cls, config: Config, optimizer: str) -> None:
        """Raise ConfigError where an option does not suit an optimiser, of that name, that evaluates its closure."""

    @abc.abstractmethod
    def advance(self, update: Update) -> Outcome:
        """Take one step of a worker along its batch's gradients; decide when `update` runs."""

    def serve(self, update: Update) -> None:
        """Apply the workers' gradients, on server ranks, until every worker has paused."""

    def pause(self) -> None:
        """Pause, on workers: no step follows for now (end of an epoch, a checkpoint), so that `serve` returns."""

    def synchronize(self) -> None:
        """Collective where ranks average gradients. Make gradients those that the step will use."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add to this rank's gradients."""
        return nullcontext()

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Compute the parameters and buffers that the ranks stand for: the exact mean over all ranks.

        Returns new tensors shaped like `model.params` and `model.buffers`; the model is untouched.
        """
        return self._means(self.model.params), self._means(self.model.buffers)

    def frozen_consensus(self) -> list[Tensor] | None:
        """Collective. Average the workers' frozen parameters, shaped like `model.frozen`; None where all are equal.

        A loop may change them: a slow copy of the model that follows it, say.
        """
        sums_of = self.comm.gather(repr(sums(self.model.frozen)))
        if len({sums_of[rank] for rank in self.comm.living}) == 1:
            return None
        workers = self.worker_ranks(self.config, self.comm.size)
        return self._means(self.model.frozen, [rank for rank in workers if rank in self.comm.living])

    def entries(self) -> list[Entry]:
        """Declare this rank's state beyond parameters, buffers and the local optimiser."""
        return [attribute(self, "steps")]

    def state(self) -> dict[str, Any]:
        """Return this rank's state, as it is declared in `entries`."""
        return save_entries(self.entries())

    def load_state(self, saved: dict[str, Any]) -> None:
        """Collective. Restore the result of `state` or `reshard_state`, after the model's parameters."""
        load_entries(self.entries(), saved)

    def reshard_state(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the state of every rank of a world of another size from the states of all saved ranks."""
        return reshard_entries(self.entries(), states)

    def reshard_unsent(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the entries that have what compression has not sent yet, as `reshard_state` does with all of them."""
        return reshard_entries([entry for entry in self.entries() if entry.unsent], states)

    @classmethod
    def reshard_params(cls, params: list[list[Tensor]], states: list[dict[str, Any]]) -> list[Tensor]:
        """Make the first parameters of all ranks of a world of another size from those of all saved ranks."""
        return mean(params)

    def reshard_optimizer(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the optimiser's state of all ranks of a world of another size from those of all saved ranks."""
        return first(states)

    def take_up(self) -> None:
        """Collective. Update the strategy's copies of the parameters, which the loop has set anew on all ranks."""

    @property
    def needed(self) -> tuple[int, ...]:
        """Return the ranks without which the others can't go on."""
        return tuple(range(self.comm.size))

    def shrink(self) -> None:
        """Collective among the living. Shrink the group to the ranks that live, to go on without the others.

        Raises:
            RankFailedError: a rank that has died is `needed`.
        """
        self.comm.shrink()
        for rank in set(self.needed) & set(self.comm.lost):
            raise RankFailedError(
                f"rank {rank} has died, and the others can't go on without it. Resume from the last checkpoint."
            )

    def close(self) -> None:
        """Collective. Release windows and threads."""

    # --- what the loop calls --------------------------------------------------------------------------------------
    @property
    def optimizer_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a part of one optimiser's state; none where each has its own whole one."""
        return ()

    @cached_property
    def is_worker(self) -> bool:
        return self.comm.rank in self.worker_ranks(self.config, self.comm.size)

    def start(self) -> None:
        """Begin the next step's record here: it leaves out setting up, an evaluation, a checkpoint before."""
        self._since, self._before = self.comm.now(), self.traffic()

    def step(self, update: Update, *, skips: bool = False, unscale: float | None = None) -> StepRecord:
        """Take one step of a worker, and return its record. Collective for synchronous strategies.

        Gradients of a batch of weight 0 count for nothing; the rank takes part all the same.

        Args:
            skips: leaves the update out where gradients are not finite, whatever `on_nonfinite` says.
            unscale: gradients are multiplied by it first; for a loss that was scaled.

        Raises:
            ConfigError: the module is not the one that was wrapped any more; or gradients were changed after the
                backward pass, and the update is not of this rank's own.
            NonFiniteError: a gradient is not finite, and `on_nonfinite` is "stop".
            MismatchError: hyper-parameters of a synchronous strategy differ between ranks.
        """
        self._skips = skips or self.config.on_nonfinite == "skip"
        self.model.refresh()
        self.model.restore_buffers()
        if self.model.unfrozen:
            self.unfreeze()
        if unscale is not None:
            self.model.unscale(unscale)
        if self._compares():
            require_equal_values(self.comm, self.hyperparameters, self.steps + 1, self.model.passes.batch)
        with self.comm.span(type(self).__name__, "strategy") as details:
            outcome = self.advance(update)
            if details is not None and outcome.waited_for:
                details["held up, s"] = {f"by rank {rank}": seconds for rank, seconds in outcome.waited_for.items()}
        self.model.reveal()
        self.model.passes.done()
        self.steps += 1
        return self.record(outcome)

    def meets(self, step: int) -> bool:
        """Tell whether the ranks of a synchronous strategy communicate in this step; counts from 1."""
        return True

    def _compares(self) -> bool:
        """Tell whether ranks compare hyper-parameters now: at their 1st, 2nd, 4th, 8th... and every 64th meeting."""
        if not self.synchronous or self.compares_always or self.comm.size == 1 or not len(self.hyperparameters):
            return False
        if self.comm.tolerant or not self.meets(self.steps + 1):  # who dies while ranks compare would end them all
            return False
        self._meetings += 1
        return self._meetings & (self._meetings - 1) == 0 or self._meetings % 64 == 0

    def unfreeze(self) -> None:
        """Start to train parameters that have been unfrozen.

        Raises:
            ConfigError: this strategy can't.
        """
        raise ConfigError(
            f"requires_grad of {self.model.unfrozen!r} must stay False with {name_of(self)}; got True. Unfreeze it "
            "first and make the DistributedOptimizer after; with plain allreduce it may be unfrozen at any time."
        )

    def require_unchanged_gradients(self) -> None:
        """Check that the loop has not changed gradients, where this strategy can't use changed ones.

        Raises:
            ConfigError: it has.
        """
        if not self.takes_changed_gradients and self.comm.size > 1 and self.model.changed_since_backward():
            raise ConfigError(
                f"gradients must stay as backward() leaves them with {name_of(self)}, whose update is of several "
                "workers' gradients and is made on a server; got gradients that were changed before step(). To clip "
                "them, pass clip_norm to DistributedOptimizer; to scale them, scale the loss; or use allreduce."
            )

    def record(self, outcome: Outcome) -> StepRecord:
        """Make the record of all that happened since the last record of this rank.

        `computing_s` is the time in which the rank was neither communicating nor waiting.
        """
        now, traffic = self.comm.now(), self.traffic()
        spent, passed_s = traffic - self._before, now - self._since
        self._since, self._before = now, traffic
        return StepRecord(
            step=self.steps,
            clock=outcome.clock,
            staleness=outcome.staleness,
            event=outcome.event,
            dropped=outcome.dropped,
            waited_for=outcome.waited_for,
            computing_s=max(0.0, passed_s - spent.communicating_s - spent.waiting_s),
            **vars(spent),
        )

    @property
    def pending(self) -> int:
        """Count the gradients that this rank has taken and no update has applied yet."""
        return 0

    def traffic(self) -> Traffic:
        """Return the account of all that this strategy has sent and received so far."""
        return self.comm.traffic.copy()

    # --- shared -----------------------------------------------------------------------------------------------------
    def clip(self, weight: float = 1.0) -> None:
        """Collective in the replica. Scale all gradients down to the norm `clip_norm`, where theirs is larger.

        Args:
            weight: the factor of the gradients, by which the norm is multiplied too.
        """
        if self.clip_norm is None:
            return
        parameters, largest = self.model.parameters(), self.clip_norm * weight
        if self.stages is None:
            nn.utils.clip_grad_norm_(parameters, largest)
        else:
            clip_gradients(parameters, largest, self.stages.norm(parameters))

    @property
    def ignores_nonfinite(self) -> bool:
        """Tell whether gradients that are not finite are used as they are, in this step."""
        return self.config.on_nonfinite == "ignore" and not self._skips

    def nonfinite(self) -> list[str]:
        """Collective in the replica. Name the parameters whose local gradient has NaN or infinity, in all its stages.

        None where they are to be ignored.
        """
        if self.ignores_nonfinite:
            return []
        names = self.model.nonfinite()
        return names if self.stages is None else self.stages.nonfinite({0: names} if names else {}).get(0, [])

    def refuse_nonfinite(self, names_of: dict[int, list[str]]) -> str:
        """Leave out an update of gradients that are not finite: return the event's text for the record.

        Args:
            names_of: the parameters' names, by rank, or by replica where its ranks have a stage each.

        Raises:
            NonFiniteError: `on_nonfinite` is "stop".
        """
        holder = "rank" if self.stages is None else "replica"
        where = "; ".join(f"{holder} {rank}: {_shorten(names)}" for rank, names in sorted(names_of.items()))
        text = f"NaN or infinite gradient at step {self.steps + 1}, {where}"
        if not self._skips:
            raise NonFiniteError(
                f"gradients must be finite; got {text}. Lower the learning rate, clip the gradients, or set "
                "strategy.on_nonfinite = 'skip' to leave such updates out."
            )
        return f"skipped: {text}"

    def zero_staleness(self, left_out: object) -> tuple[int, ...]:
        """Return the staleness of this rank's own gradient, (0,); () if it was left out, or its batch weighs 0."""
        return () if left_out or not self.model.passes.contributes else (0,)

    def step_alone(self, update: Update) -> Outcome:
        """Take the local optimiser's step on this rank's own gradient, left out where that is not finite."""
        self.model.settle()
        bad = self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        if not bad:
            self.clip()
            update()
        return Outcome(clock=self.steps + 1, staleness=self.zero_staleness(bad), event=event)

    def _means(self, tensors: Sequence[Tensor], over: Sequence[int] | None = None) -> list[Tensor]:
        """Collective. Average each tensor over the ranks `over` (default: all), on every rank."""
        # Summed in float64, so that the mean of equal float32 replicas is that same float32 to the bit.
        over = self.comm.living if over is None else over
        means = []
        for tensor in tensors:
            mean = tensor.clone()
            for part in torch.split(mean, PIECE) if mean.numel() and self.comm.size > 1 else ():
                wide = part.to(torch.complex128 if part.is_complex() else torch.float64)
                if self.comm.rank not in over:
                    wide.zero_()
                self.comm.allreduce(wide)
                wide /= len(over)
                part.copy_(wide if part.is_floating_point() or part.is_complex() else wide.round())
            means.append(mean)
        return means


def _require_equal_models(comm: Communicator, model: FlatModel) -> None:
    """Collective. Check that all ranks have the same parameters and buffers.

    Raises:
        MismatchError: one has others than rank 0; on all ranks alike.
    """
    signatures = comm.gather(model.signature())
    odd = [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]
    if not odd:
        return
    text = model.description() if comm.rank in (0, odd[0]) else ""
    descriptions = comm.gather(text)
    where = describe_difference(descriptions[0], descriptions[odd[0]], "on rank 0", f"on rank {odd[0]}")
    others = f", and those of {_shorten([f'rank {rank}' for rank in odd[1:]])}," if odd[1:] else ""
    raise MismatchError(
        f"the model must be the same on every rank; rank {odd[0]}'s parameters or buffers{others} differ from rank 0's "
        f"in name, shape, dtype or requires_grad, first {where}. Build it from the same code and options everywhere."
    )


def name_of(strategy: Strategy) -> str:
    """Return the name of a strategy's file, for messages."""
    return type(strategy).__module__.rpartition(".")[2].removeprefix("hpcdist_job_")  # of a file of the user's


def _shorten(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
