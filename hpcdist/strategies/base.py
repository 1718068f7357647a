"""What every strategy is: a file with one final subclass of `Strategy`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.config import Settings
from hpcdist.errors import MismatchError, NonFiniteError, RankFailedError
from hpcdist.flat import FlatModel
from hpcdist.records import StepRecord

Update = Callable[[], None]  # runs the local optimiser on the gradients that are in the model
_CHUNK = 1 << 22  # elements averaged at a time: bounds the float64 scratch to 32 MiB


@dataclass(frozen=True)
class Outcome:
    """What one step of a strategy did.

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
    """Collective. How the ranks of `comm` train `model` together.

    All ranks start from rank 0's parameters and buffers. The strategy owns `comm` but does not close it.

    Args:
        config: this strategy's options.
        comm: a communicator of its own: nobody else sends on it.
        model: the flat view of this rank's replica.

    Raises:
        MismatchError: the ranks' models differ.
    """

    class Config(Settings):
        """Options that all strategies have."""

        on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
            "stop", description="a NaN or infinite gradient: end the run, leave the update out, or look away"
        )

    reduces_in_backward = False  # takes gradients, where `overlap` is not "off", before the backward pass has ended

    def __init__(self, config: Config, comm: Communicator, model: FlatModel):
        self.config, self.comm, self.model = config, comm, model
        self.steps = 0  # taken by this rank
        self.on_record: Callable[[StepRecord], None] | None = None  # receives what a server rank records
        self.optimizer: torch.optim.Optimizer | None = None  # that `update` runs; for a strategy that reads its state
        self._since, self._before = comm.now(), Traffic()
        _require_equal_models(comm, model)
        for tensor in (*model.params, *model.frozen, *model.buffers):
            comm.broadcast(tensor, 0)

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @classmethod
    def worker_ranks(cls, config: Config, size: int) -> tuple[int, ...]:
        """The ranks that compute gradients; the others serve."""
        return tuple(range(size))

    @abc.abstractmethod
    def advance(self, update: Update) -> Outcome:
        """One step of a worker: the gradients of its batch are in `model.grads`; decides when `update` runs."""

    def serve(self, update: Update) -> None:
        """Server ranks: applies the workers' gradients until every worker has paused."""

    def pause(self) -> None:
        """Workers: says that no step follows for now (end of an epoch, a checkpoint), so that `serve` returns."""

    def join(self, update: Update) -> StepRecord | None:
        """Workers: takes part in a step for which this rank has no samples, where a step is collective."""
        return None

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. The parameters and buffers that the ranks stand for together: the exact mean over all ranks.

        Returns new tensors shaped like `model.params` and `model.buffers`; the model is untouched.
        """
        return self._means(self.model.params), self._means(self.model.buffers)

    def state(self) -> dict:
        """This rank's state beyond parameters, buffers and the local optimiser."""
        return {"steps": self.steps}

    def adapted_state(self, states: list[dict]) -> dict:
        """One state for each rank of a world of another size, from the states of all ranks of the saved one."""
        return states[0]

    def adapted_params(self, params: list[list[Tensor]], states: list[dict]) -> list[Tensor]:
        """The parameters from which a world of another size goes on, from those of all ranks of the saved one."""
        return mean(params)

    def adapted_optimizer(self, states: list[dict]) -> dict:
        """Likewise the state of every rank's optimiser."""
        return states[0]

    def load_state(self, state: dict) -> None:
        """Collective. Takes up a state that `state()` gave; the model's parameters have been restored before."""
        self.steps = state["steps"]

    @property
    def needed(self) -> tuple[int, ...]:
        """The ranks without which the others can't go on."""
        return tuple(range(self.comm.size))

    def heal(self) -> None:
        """Collective among the living. Goes on without ranks that have died.

        Raises:
            RankFailedError: one of them is `needed`.
        """
        self.comm.heal()
        for rank in set(self.needed) & set(self.comm.lost):
            raise RankFailedError(
                f"rank {rank} has died, and the others can't go on without it. Resume from the last checkpoint."
            )

    def close(self) -> None:
        """Collective. Releases windows and threads."""

    # --- what the loop calls --------------------------------------------------------------------------------------
    @property
    def is_worker(self) -> bool:
        return self.comm.rank in self.worker_ranks(self.config, self.comm.size)

    def start(self) -> None:
        """What happened until now (setting up, an evaluation, a checkpoint) belongs to no step's record."""
        self._since, self._before = self.comm.now(), self.traffic()

    def step(self, update: Update) -> StepRecord:
        """One step of a worker, and its record. Collective for synchronous strategies."""
        outcome = self.advance(update)
        self.steps += 1
        return self.record(outcome)

    def record(self, outcome: Outcome) -> StepRecord:
        """What happened since the last record of this rank.

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
        """Gradients that this rank has taken and no update has applied yet."""
        return 0

    def traffic(self) -> Traffic:
        """All that this strategy has moved so far."""
        return self.comm.traffic.copy()

    # --- shared -----------------------------------------------------------------------------------------------------
    def nonfinite(self) -> list[str]:
        """Names of the parameters whose local gradient has NaN or infinity, unless told to ignore them."""
        return [] if self.config.on_nonfinite == "ignore" else self.model.nonfinite()

    def refuse_nonfinite(self, found: dict[int, list[str]]) -> str:
        """Raises NonFiniteError when told to stop; else the event's text for the record.

        Args:
            found: parameter names by rank.
        """
        where = "; ".join(f"rank {rank}: {_shorten(names)}" for rank, names in sorted(found.items()))
        text = f"NaN or infinite gradient at step {self.steps + 1}, {where}"
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"gradients must be finite; got {text}. Lower the learning rate, clip the gradients, or set "
                "strategy.on_nonfinite = 'skip' to leave such updates out."
            )
        return f"skipped: {text}"

    def step_alone(self, update: Update) -> Outcome:
        """The local optimiser's step on this rank's own gradient, left out where that is not finite; its outcome."""
        self.model.release(self.model.collect())
        bad = self.nonfinite()
        event = self.refuse_nonfinite({self.comm.rank: bad}) if bad else None
        if not bad:
            update()
        return Outcome(clock=self.steps + 1, staleness=() if bad else (0,), event=event)

    def step_without_samples(self, update: Update) -> StepRecord:
        """Takes part in a step without a gradient, so that the optimiser leaves all as it is; its record."""
        self.model.release([False] * len(self.model.names))
        return replace(self.step(update), staleness=())  # no gradient of this rank's was applied

    def _means(self, tensors: Sequence[Tensor], over: Sequence[int] | None = None) -> list[Tensor]:
        """Collective. The mean of each tensor over the ranks `over` (default: all), on every rank."""
        # Summed in float64, so that the mean of equal float32 replicas is that same float32 to the bit.
        over = self.comm.living if over is None else over
        means = []
        for tensor in tensors:
            mean = tensor.clone()
            for part in mean.split(_CHUNK) if mean.numel() else ():
                wide = part.to(torch.complex128 if part.is_complex() else torch.float64)
                if self.comm.rank not in over:
                    wide.zero_()
                self.comm.allreduce(wide)
                wide /= len(over)
                part.copy_(wide if part.is_floating_point() or part.is_complex() else wide.round())
            means.append(mean)
        return means


def mean(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The mean of several ranks' lists of tensors, taken in float64; of integers rounded."""
    means = []
    for tensors in zip(*columns, strict=True):
        wide = torch.stack([t.to(torch.float64) for t in tensors]).mean(dim=0)
        means.append((wide if tensors[0].is_floating_point() else wide.round()).to(tensors[0].dtype))
    return means


def _require_equal_models(comm: Communicator, model: FlatModel) -> None:
    found = comm.exchange(model.signature().encode())
    for rank, signature in enumerate(found):
        if signature != found[0]:
            raise MismatchError(
                f"the model must be the same on every rank; rank {rank}'s parameters or buffers differ from rank 0's "
                "in name, shape, dtype or requires_grad. Build it from the same code and options everywhere."
            )


def _shorten(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
