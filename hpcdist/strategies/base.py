"""The base class of all strategies: each strategy is a file with one final subclass of `Strategy`."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

import torch
from pydantic import model_validator
from torch import Tensor

from hpcdist.collectives.calls import Collectives
from hpcdist.comm.chunks import some_values
from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.config.settings import Field, Settings
from hpcdist.errors import ConfigError, RankFailedError, refuse_former
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import Hyperparameters, require_equal_values
from hpcdist.parallel.agreement import Agreement, PartOfModel
from hpcdist.records import StepRecord
from hpcdist.records.run import FORMER_OPTIONS
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.gradients import LocalGradients
from hpcdist.strategies.common.records import Outcome, Recorder
from hpcdist.strategies.common.replicas import broadcast_model, mean_over, with_buffers
from hpcdist.strategies.common.state import Flats, State

_FORMER = {  # former methods, and the line to write instead
    "entries": 'self.rounds = self.state.value("rounds", 0, self, reshard="first") in __init__',
    "state": 'self.momentum = self.state.sharded("momentum", model.params, reshard="mean") in __init__',
    "load_state": "self.state.after_load(self.follow) in __init__",
    "take_up": "def reset_from_model(self): self.state.reset()",
    "masters": "self.state.parameters = lambda: Flats(self.x) in __init__",
    "settle": "def drain(self)",
}

Update = Callable[[], None]  # runs the local optimiser on the model's gradients


class Resource(Protocol):
    """A window, a communicator, or another object to be closed."""

    def close(self) -> None: ...


R = TypeVar("R", bound=Resource)


class Strategy(abc.ABC):
    """Collective. Train `model` jointly with the other ranks of `comm`.

    All ranks start from rank 0's parameters and buffers. The strategy owns `comm` but does not close it. A subclass
    declares its `contract`, implements `advance`, and overrides the hooks below it, down to `close`, as needed.

    Args:
        config: this strategy's options.
        comm: a communicator that only this strategy sends on.
        model: the flat view of this rank's replica.
        optimizer: the optimiser that `update` runs, for a strategy that reads its state or its hyper-parameters
            (learning rate, momentum, decay...). None: hyper-parameters are equal on all ranks and constant.
        clip_norm: largest 2-norm of an update's whole gradient; None: no clipping.
        on_record: receives records that a rank writes outside `step`, for example on a server.
        loss: whether a batch's loss is the mean over its samples or their sum; sums add workers' gradients.
        stages: agreement among the ranks that hold the stages of one replica, where `model` is one stage and `comm`
            contains the ranks with the same stage; None where each rank has the whole model.

    Attributes:
        state: values that checkpoints keep in addition to parameters, buffers and the local optimiser. A subclass
            declares its values where it creates them, see `State`.
        steps: number of steps of this rank.
        adds_up: an update uses the sum of the workers' gradients, not the mean.
        gradients: clips this rank's gradients, and skips updates with gradients that are not finite.
        records: creates the records of steps.
        hyperparameters: the numbers in the optimiser's param_groups.

    Raises:
        MismatchError: the ranks' models differ.
    """

    class Config(Settings):
        """Options that all strategies have, and the ranks' roles, which depend on the options."""

        on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
            "stop", "at a NaN or infinite gradient end the run, skip the update, or ignore it"
        )

        @classmethod
        def _current_name(cls, name: str) -> str:
            current = FORMER_OPTIONS.get(name, name)
            return current if current in cls.model_fields else name

        @model_validator(mode="before")
        @classmethod
        def _refuse_former(cls, options: Any) -> Any:
            for name, value in options.items() if isinstance(options, Mapping) else ():
                if (current := cls._current_name(name)) != name:
                    raise ValueError(
                        f"strategy.{name} must be given as strategy.{current}, its name now; got {value!r}. Rename it."
                    )
            return options

        @classmethod
        def with_current_names(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
            """Return saved options, with former names replaced by current ones."""
            return {cls._current_name(name): value for name, value in saved.items()}

        def workers(self, size: int) -> tuple[int, ...]:
            """Return the ranks, of `size`, that compute gradients; the others are servers."""
            return tuple(range(size))

        def needed(self, size: int) -> tuple[int, ...]:
            """Return the ranks that the others can't continue without, where a contract says that others continue."""
            return ()

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            """Return the ranks that share one optimiser's state; empty where each rank has a complete optimiser."""
            return ()

        def narrow(self, contract: Contract, size: int) -> Contract:
            """Return the contract that holds with these options on `size` ranks."""
            return contract

        def synchronizes(self, step: int) -> bool:
            """Return whether the ranks of a synchronous strategy communicate in this step, counted from 1."""
            return True

        def require_plain(self, optimizer: str) -> None:
            """Raise ConfigError where an option changes gradients, for an optimiser with a line search.

            Args:
                optimizer: name of the optimiser, which evaluates its closure several times.
            """

    contract: Contract
    saved_role: object = None  # in JSON's types; ranks with another one load a checkpoint by parameter names

    @classmethod
    def require_complete(cls, name: str) -> None:
        """Raise ConfigError unless class `name` has a contract, and a `Config` and `__init__` that fit Strategy's."""
        if not isinstance(getattr(cls, "contract", None), Contract):
            raise ConfigError(
                f"{name} must declare a contract, which describes how it behaves in training loops; got "
                f"{getattr(cls, 'contract', None)!r}. Write contract = Contract(averages=..., synchronizes=...) in the "
                "class, with hpcdist.strategies.Contract."
            )
        if not issubclass(cls.Config, Strategy.Config):
            raise ConfigError(
                f"Config of {name} must be a subclass of Strategy.Config; got one of {cls.Config.__base__!r}. Write "
                "class Config(Strategy.Config)."
            )
        signature = inspect.signature(cls.__init__)
        try:
            signature.bind(
                *(None,) * 4,
                **{key: None for key, parameter in _ARGUMENTS.items() if parameter.kind is parameter.KEYWORD_ONLY},
            )
        except TypeError as error:
            raise ConfigError(
                f"__init__ of {name} must take the arguments of Strategy's; got {signature}: {error}. Write def "
                "__init__(self, config, comm, model, **kwargs), which calls super().__init__(config, comm, model, "
                "**kwargs)."
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
        self.records = Recorder(comm, on_record, model.module if isinstance(model.module, PartOfModel) else None)
        self.state = State(comm, model)
        self._opened: list[Resource] = []
        self.steps = self.state.value("steps", 0, self, reshard="first")
        updates_here = (
            self.contract.synchronous and self.contract.updates == "here" and self.contract.averages != "gradients"
        )
        self._compared = updates_here and comm.size > 1  # by `_compares`; others send hyper-parameters with gradients
        self._synchronizations = 0  # number of steps in which the ranks communicated
        fingerprint: Callable[[Tensor], object] | None = None  # of gradients, to find changes by the loop
        if comm.size > 1 and not self.contract.uses_changed_gradients:  # the loop's changes would be lost: find any
            fingerprint = _sum
        elif comm.size > 1 and self.contract.replicates:  # a change on all ranks is fine: a sample of values will do
            fingerprint = some_values
        self.adds_up = loss == "sum"
        factor = comm.size if self.contract.updates == "here" else 1.0  # a mean of p times the gradients is their sum
        equal_weight = factor if self.adds_up else None  # servers don't divide
        model.gradients.configure(
            weights_batches=self.contract.weights_batches, equal_weight=equal_weight, fingerprint=fingerprint,
            alone=comm.size == 1 and stages is None,
        )  # fmt: skip
        if not self.contract.reads_gradients:
            model.keep_gradients(None)
        broadcast_model(comm, model)
        if comm.trace.timeline is not None:
            comm.trace.timeline.role = "worker" if self.is_worker else "server"

    # --- methods that a subclass defines --------------------------------------------------------------------------
    @abc.abstractmethod
    def advance(self, update: Update) -> Outcome:
        """Take one step of a worker with its batch's gradients, in `model.grads`; call `update` when it is due."""

    def serve(self, update: Update) -> None:
        """On server ranks: apply the workers' gradients until every worker has called `pause`."""

    def pause(self) -> None:
        """On workers: announce a pause between steps (end of an epoch, a checkpoint), so that `serve` returns."""

    def drain(self) -> None:
        """Collective, inside an epoch. Serve pending requests of other ranks before a collective call of all ranks."""

    def synchronize(self) -> None:
        """Collective where ranks average gradients. Replace local gradients by the averaged ones before `step`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate local gradients without communication."""
        return nullcontext()

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Return the parameters and buffers to evaluate and save: the exact mean over all ranks.

        Returns new tensors shaped like `model.params` and `model.buffers`; does not change the model.
        """
        params = (self.state.parameters() or Flats(self.model.params)).tensors
        return with_buffers(self, mean_over(self.comm, params, self.comm.failures.alive))

    def reset_from_model(self) -> None:
        """Collective. Reinitialize the strategy's copies of the parameters after the loop has set new parameters."""
        self.state.reset()

    def shrink(self) -> None:
        """Collective among the surviving ranks. Remove failed ranks from the group, so that the run can continue.

        Raises:
            RankFailedError: the run cannot continue without a rank that failed, see `Config.needed`.
        """
        self.comm.failures.shrink()
        everyone = self.contract.deaths == "end all"
        for rank in (r for r in self.comm.failures.lost if everyone or r in self.config.needed(self.comm.size)):
            raise RankFailedError(
                f"rank {rank} has died, and the others can't continue without it. Resume from the last checkpoint."
            )
        self.records.report_events(self.steps)

    def opened(self, resource: R) -> R:
        """Have `close` close a window, a communicator or another resource, the last opened first; return it."""
        self._opened.append(resource)
        return resource

    def open_calls(self, algorithm: str) -> Collectives:
        """Collective. Open collective calls, and count their traffic; the all-reduce algorithm is checked now."""
        calls = self.opened(Collectives(self.comm, Traffic()))
        self.records.channels.append(calls.comm)
        calls.algorithm(algorithm)
        return calls

    def close(self) -> None:
        """Collective. Release windows and threads."""
        for resource in reversed(self._opened):
            resource.close()

    # --- methods that the loop calls ------------------------------------------------------------------------------
    def step(
        self, update: Update, *, skips: bool = False, unscale: float | None = None, changed: bool | None = None
    ) -> StepRecord:
        """Take one step of a worker, and return its record. Collective for synchronous strategies.

        A batch of weight 0 contributes no gradient; its rank takes part in the communication.

        Args:
            skips: skip the update where gradients are not finite, whatever `on_nonfinite` is.
            unscale: factor applied to the gradients first, the inverse of a loss scale.
            changed: the loop has changed gradients since the backward pass; None: check here.

        Raises:
            ConfigError: the module's parameters are no longer the ones that were wrapped.
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
        return self.finish_step(outcome)

    def finish_step(self, outcome: Outcome, steps: int = 1) -> StepRecord:
        """End a step, which the record counts as `steps` more; return the record."""
        self.model.gradients.done()
        self.gradients.done()
        self.steps += steps
        return self.records.record(self.steps, outcome)

    def _compares(self) -> bool:
        """Return whether ranks compare hyper-parameters now: at the 1st, 2nd, 4th, 8th... and every 64th exchange.

        Strategies that average gradients in every step send a checksum with them instead, and servers compare the
        hyper-parameters that workers send with gradients.
        """
        if self.comm.failures.tolerant:  # a rank that fails during the comparison would end all ranks
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
    return cls.__module__.rpartition(".")[2].removeprefix("hpcdist_job_")  # the prefix of user files
