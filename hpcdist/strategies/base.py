"""Train by a strategy: each is a file with one final subclass of `Strategy`."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.comm.chunks import some_values
from hpcdist.comm.communicator import Communicator
from hpcdist.config import Settings
from hpcdist.errors import ConfigError, RankFailedError, refuse_former
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import Hyperparameters, require_equal_values
from hpcdist.parallel.agreement import Agreement
from hpcdist.records import StepRecord
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.gradients import LocalGradients
from hpcdist.strategies.common.records import Outcome, Recorder
from hpcdist.strategies.common.replicas import mean_over, spread_model, with_buffers
from hpcdist.strategies.common.state import Flats, State

_FORMER = {  # methods of before, and the line to write instead
    "entries": 'self.rounds = self.state.value("rounds", 0, self, reshard="first") in __init__',
    "state": 'self.momentum = self.state.sharded("momentum", model.params, reshard="mean") in __init__',
    "load_state": "self.state.after_load(self.follow) in __init__",
    "take_up": "def reset_from_model(self): self.state.reset()",
    "masters": "self.state.parameters = lambda: Flats(self.x) in __init__",
}

Update = Callable[[], None]  # runs the local optimiser on the gradients that are in the model


class Strategy(abc.ABC):
    """Collective. Train `model` together with the other ranks of `comm`.

    All ranks start from rank 0's parameters and buffers. The strategy owns `comm` but does not close it. A subclass
    declares its `contract`, and overrides those of the methods below from `advance` to `close` that concern it.

    Args:
        config: this strategy's options.
        comm: a communicator of its own: nobody else sends on it.
        model: the flat view of this rank's replica.
        optimizer: the optimiser that `update` runs, for a strategy that reads its state or its hyper-parameters
            (learning rate, momentum, decay...). None: these are the same on all ranks, and stay.
        clip_norm: largest 2-norm of the gradients of an update, all together; None does not clip.
        on_record: receives what a rank records outside `step`, such as a server.
        loss: whether the loss of a batch is a mean over its samples, or a sum, so that workers' gradients add up.
        stages: agrees with the ranks that have the other stages of this rank's replica, where `model` is one stage
            of it and `comm` are the ranks that have the same one; None where each rank has the whole model.

    Attributes:
        state: what checkpoints keep beyond parameters, buffers and the local optimiser; a subclass declares its values
            where it creates them, see `State`.
        steps: taken by this rank.
        adds_up: the gradients of an update are added up, and not averaged.
        gradients: clips this rank's gradients, and leaves out those that are not finite.
        records: makes the records of steps.
        hyperparameters: the numbers in the optimiser's param_groups.

    Raises:
        MismatchError: the ranks' models differ.
    """

    class Config(Settings):
        """Options that all strategies have; and the ranks' parts, which follow from the options."""

        on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
            "stop", description="at a NaN or infinite gradient end the run, leave the update out, or ignore it"
        )

        _former: ClassVar[Mapping[str, str]] = {}  # options that have another name now, by that of before

        @model_validator(mode="before")
        @classmethod
        def _refuse_former(cls, given: Any) -> Any:
            for name in cls._former if isinstance(given, Mapping) else ():
                if name in given:
                    raise ValueError(
                        f"strategy.{name} must be given as strategy.{cls._former[name]}, its name now; got "
                        f"{given[name]!r}. Rename it."
                    )
            return given

        @classmethod
        def by_names_of_now(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
            """Return saved options by the names that they have now."""
            return {cls._former.get(name, name): value for name, value in saved.items()}

        def workers(self, size: int) -> tuple[int, ...]:
            """Return those of `size` ranks that compute gradients; the others serve."""
            return tuple(range(size))

        def needed(self, size: int) -> tuple[int, ...]:
            """Return the ranks without which the others can't go on."""
            return tuple(range(size))

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            """Return the ranks that have a part of one optimiser's state; none where each has its own whole one."""
            return ()

        def narrow(self, contract: Contract, size: int) -> Contract:
            """Return the contract with these options on `size` ranks."""
            return contract

        def synchronizes(self, step: int) -> bool:
            """Tell whether the ranks of a synchronous strategy communicate in this step; counts from 1."""
            return True

        def require_plain(self, optimizer: str) -> None:
            """Raise ConfigError where an option changes the gradient that an optimiser's line search needs as it is.

            Args:
                optimizer: name of the optimiser, which evaluates its closure several times.
            """

    contract: Contract

    @classmethod
    def require_complete(cls, name: str) -> None:
        """Raise ConfigError where the class lacks what the library reads of it: contract, options, arguments."""
        if not isinstance(getattr(cls, "contract", None), Contract):
            raise ConfigError(
                f"{name} must declare a contract, which says how it deals with training loops; got "
                f"{getattr(cls, 'contract', None)!r}. Write contract = Contract(averages=..., synchronizes=...) in the "
                "class, of hpcdist.strategies.Contract."
            )
        if not issubclass(cls.Config, Strategy.Config):
            raise ConfigError(
                f"Config of {name} must be a subclass of Strategy.Config; got one of {cls.Config.__base__!r}. Write "
                "class Config(Strategy.Config)."
            )
        own = inspect.signature(cls.__init__)
        try:
            own.bind(*(None,) * 4, **{key: None for key, one in _ARGUMENTS.items() if one.kind is one.KEYWORD_ONLY})
        except TypeError as error:
            raise ConfigError(
                f"__init__ of {name} must take the arguments of Strategy's; got {own}: {error}. Write def __init__("
                "self, config, comm, model, **given), which calls super().__init__(config, comm, model, **given)."
            ) from None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        refuse_former(cls, _FORMER)

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        model: FlatModel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        loss: Literal["mean", "sum"] = "mean",
        stages: Agreement | None = None,
    ):
        self.require_complete(type(self).__name__)
        self.config, self.comm, self.model = config, comm, model
        self.optimizer, self.stages = optimizer, stages
        self.contract = config.narrow(type(self).contract, comm.size)
        self.is_worker = comm.rank in config.workers(comm.size)
        self.hyperparameters = Hyperparameters(optimizer)
        self.gradients = LocalGradients(comm, model, config.on_nonfinite, clip_norm, stages)
        self.records = Recorder(comm, on_record)
        self.state = State(comm, model)
        self.steps = self.state.value("steps", 0, self, reshard="first")
        here = self.contract.synchronous and self.contract.updates == "here" and self.contract.averages != "gradients"
        self._compared = here and comm.size > 1
        self._synchronizations = 0  # steps in which ranks might have compared hyper-parameters
        model.gradients.weights_batches = self.contract.weights_batches
        if comm.size > 1 and not self.contract.uses_changed_gradients:
            model.gradients.fingerprint = _sum
        elif comm.size > 1 and self.contract.replicates:  # where a change on all ranks is fine: less will do
            model.gradients.fingerprint = some_values
        self.adds_up = loss == "sum"
        if self.adds_up:  # a mean of p times the gradients is their sum; servers don't divide
            model.gradients.set_equal_weight(comm.size if self.contract.updates == "here" else 1.0)
        if not self.contract.reads_gradients:
            model.keep_gradients(None)
        spread_model(comm, model)
        if comm.trace.timeline is not None:
            comm.trace.timeline.role = "worker" if self.is_worker else "server"

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def advance(self, update: Update) -> Outcome:
        """Take one step of a worker along its batch's gradients; decide when `update` runs."""

    def serve(self, update: Update) -> None:
        """Apply the workers' gradients, on server ranks, until every worker has paused."""

    def pause(self) -> None:
        """Pause, on workers: no step follows for now (end of an epoch, a checkpoint), so that `serve` returns."""

    def settle(self) -> None:
        """Collective, inside an epoch. Answer the requests of other ranks, before all ranks make a collective call."""

    def synchronize(self) -> None:
        """Collective where ranks average gradients. Make gradients those that the step will use."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add to this rank's gradients."""
        return nullcontext()

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Compute the parameters and buffers that the ranks stand for: the exact mean over all ranks.

        Returns new tensors shaped like `model.params` and `model.buffers`; the model is untouched.
        """
        params = (self.state.parameters() or Flats(self.model.params)).tensors
        return with_buffers(self, mean_over(self.comm, params, self.comm.failures.alive))

    def reset_from_model(self) -> None:
        """Collective. Start the strategy's copies of the parameters again, which the loop has set on all ranks."""
        self.state.reset()

    def shrink(self) -> None:
        """Collective among the surviving ranks. Shrink the group to the ranks that live, to go on without the others.

        Raises:
            RankFailedError: a rank that has died is needed.
        """
        self.comm.failures.shrink()
        for rank in set(self.config.needed(self.comm.size)) & set(self.comm.failures.lost):
            raise RankFailedError(
                f"rank {rank} has died, and the others can't go on without it. Resume from the last checkpoint."
            )
        self.records.report_remarks(self.steps)

    def close(self) -> None:
        """Collective. Release windows and threads."""

    # --- what the loop calls --------------------------------------------------------------------------------------
    def step(
        self, update: Update, *, skips: bool = False, unscale: float | None = None, changed: bool | None = None
    ) -> StepRecord:
        """Take one step of a worker, and return its record. Collective for synchronous strategies.

        Gradients of a batch of weight 0 count for nothing; the rank takes part all the same.

        Args:
            skips: leaves the update out where gradients are not finite, whatever `on_nonfinite` says.
            unscale: gradients are multiplied by it first; for a loss that was scaled.
            changed: the loop has changed gradients since the backward pass; None: they are looked at here.

        Raises:
            ConfigError: the module is not the one that was wrapped any more.
            NonFiniteError: a gradient is not finite, and `on_nonfinite` is "stop".
            MismatchError: hyper-parameters of a synchronous strategy differ between ranks.
        """
        if changed is None:
            self.model.refresh()
            changed = self.model.gradients.changed()
        self.model.flat_buffers.restore()
        self.gradients.start(self.steps + 1, skips, changed=changed and unscale is None)
        if unscale is not None:
            for slot in self.model.slots:
                if slot.tensor.grad is not None:
                    slot.tensor.grad.mul_(unscale)
        if self._compared and self._compares():
            require_equal_values(self.comm, self.hyperparameters, self.steps + 1, self.model.gradients.batch)
            update = self.hyperparameters.track_counters(update)
        with self.comm.trace.span(type(self).__name__, "strategy") as details:
            outcome = self.advance(update)
            if not isinstance(outcome, Outcome):
                raise ConfigError(
                    f"advance() of {type(self).__name__} must return the outcome of the step, an Outcome; got "
                    f"{outcome!r}. Return what self.gradients.step_alone(update) returns, or Outcome(clock=...)."
                )
            if details is not None and outcome.waited_for:
                details["held up, s"] = {f"by rank {rank}": seconds for rank, seconds in outcome.waited_for.items()}
        self.model.gradients.done()
        self.gradients.done()
        self.steps += 1
        return self.records.record(self.steps, outcome)

    def _compares(self) -> bool:
        """Tell whether ranks compare hyper-parameters now: at their 1st, 2nd, 4th, 8th... and every 64th meeting.

        Strategies that average gradients in every step send a checksum along with them instead, and servers compare
        the numbers that come with gradients.
        """
        if self.comm.failures.tolerant:  # a rank that dies while ranks compare would end them all
            return False
        if not self.hyperparameters or not self.config.synchronizes(self.steps + 1):
            return False
        self._synchronizations += 1
        return self._synchronizations & (self._synchronizations - 1) == 0 or self._synchronizations % 64 == 0


_ARGUMENTS = inspect.signature(Strategy.__init__).parameters


def _sum(tensor: Tensor) -> str:
    return str(tensor.sum().item())  # as text: a NaN is equal to itself


def name_of(strategy: Strategy | type[Strategy]) -> str:
    """Return the name of a strategy's file, for messages."""
    cls = strategy if isinstance(strategy, type) else type(strategy)
    return cls.__module__.rpartition(".")[2].removeprefix("hpcdist_job_")  # of a file of the user's
