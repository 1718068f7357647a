"""Make the step in place of the optimiser: its numbers are read, group by group, and its own step is not run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.collectives.calls import Collectives
from hpcdist.comm.communicator import Traffic
from hpcdist.errors import ConfigError
from hpcdist.model.optimizer_state import groups
from hpcdist.strategies.base import Outcome, Strategy, Update, name_of
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.synchronous.agreement import StepAgreement


class Trained(NamedTuple):
    """A parameter, its group's numbers, and its views of flat tensors."""

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    views: tuple[Tensor, ...]


class OwnStep(Strategy):
    """Train all ranks in step by a rule of the strategy's own: gradients stay here, and what they become is exchanged.

    The loop sees this rank's own gradients, and clips these. A gradient that is not finite on one rank leaves the
    update out on all. A parameter that has no gradient counts as one of zeros, and is left alone where no rank has one.
    Buffers that change in training become
    their mean over the ranks in every step, and param_groups are compared, as with `allreduce`.

    Attributes:
        average: Collective. Replaces flat tensors by their means over all ranks, bitwise the same on all of them.
        calls: make the means.
        updates: how many there were.
    """

    class Config(Strategy.Config):
        """Options of strategies that make the step themselves."""

        algorithm: str = Field("auto", description="all-reduce algorithm; auto chooses by size and ranks")

    config: Config
    contract = Contract(averages="gradients", synchronizes="every step", step="the strategy's")
    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]  # whose numbers the rule reads; none: any
    plain: ClassVar[Mapping[str, Any]] = {}  # settings that the rule does not have, with the value that is none
    runs_optimizer: bool = False  # a part of the parameters is stepped by it, with its hooks
    advice: ClassVar[str]  # what to take, for messages

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        odd = [slot.name for slot in model.slots if slot.dtype.is_complex]
        if odd:
            raise ConfigError(
                f"parameters must be real with {name_of(self)}, whose rule is for real ones; got {odd[0]!r}, which is "
                "complex. Take allreduce, or hold it as two real ones."
            )
        self.updates = self.state.value("updates", 0, self, reshard="first")
        self.calls = Collectives(comm, Traffic())
        self.records.count(self.calls.comm)
        self.calls.algorithm(config.algorithm)
        self.average = partial(self.calls.all_reduce, op="mean", algorithm=config.algorithm)
        self.agreement = StepAgreement(self)
        if self.optimizer is not None:
            self._check_kind(type(self.optimizer))
            self._check_settings(self.optimizer)

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def move(self, update: Update) -> None:
        """Collective. Move the parameters by the gradients in `model.grads`, which stay, or become the ranks' mean.

        Args:
            update: runs the optimiser on the gradients that are in the model; for a class that `runs_optimizer`.
        """

    # --- steps ----------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        self.require_optimizer()
        used, bad = self.agreement(self.model.gradients.collect(), self.gradients.nonfinite())
        event = self.gradients.skip_update(bad) if bad else None
        self.model.gradients.release(used)  # None, which leaves a parameter alone, where no rank has one
        if not bad:
            self.gradients.clip(self.model.gradients.mean_weight)
            self.hooked(lambda: self.move(update))
            self.updates += 1
        return Outcome(self.updates, staleness=self.gradients.staleness(bad), event=event)

    def hooked(self, step: Callable[[], None]) -> None:
        """Make a step in place of the optimiser's, with the hooks that it has on that."""
        optimizer: Any = self.optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if self.runs_optimizer:  # which calls them
            before = after = {}
        for hook in list(before.values()):
            hook(optimizer, (), {})
        with torch.no_grad():
            step()
        for hook in list(after.values()):
            hook(optimizer, (), {})

    def require_optimizer(self) -> None:
        """Raise ConfigError unless there is an optimiser whose numbers the rule reads."""
        if self.optimizer is None:
            self._check_kind(None)
        else:
            self._check_settings(self.optimizer)

    def _check_kind(self, kind: type[torch.optim.Optimizer] | None) -> None:
        if kind is None or (self.kinds and kind not in self.kinds):
            raise ConfigError(
                f"the optimiser of {name_of(self)} must be {self.advice}, whose numbers it reads to make the step "
                f"itself; got {'none' if kind is None else kind.__name__}. Take that."
            )

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get("lr") is None:  # as Adafactor's, which finds its own
                raise self.useless("lr", "a number", None)
            for key, plain in self.plain.items():
                if group.get(key, plain) != plain:
                    raise self.useless(key, plain, group[key])

    def useless(self, key: str, plain: object, got: object) -> ConfigError:
        """Make the error for a setting of the optimiser that the rule does not have."""
        return ConfigError(
            f"{key} of the optimiser must be {plain} with {name_of(self)}, which makes the step itself; got {got}. "
            f"Take {self.advice}."
        )

    def trained(self, *flats: Sequence[Tensor], used: Sequence[bool] | None = None) -> Iterator[Trained]:
        """Yield each parameter that is used and the optimiser has, as in `model.slots`, with its views of `flats`.

        Args:
            used: of each parameter; by default those that have a gradient.
        """
        used = self.model.gradients.present() if used is None else used
        for slot, group, is_used in zip(self.model.slots, groups(self.model, self.optimizer), used, strict=True):
            if is_used and group is not None:
                yield Trained(slot.name, slot.tensor, group, tuple(slot.view(flat) for flat in flats))

    def close(self) -> None:
        self.calls.close()


def rate_of(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate as a number."""
    return float(group["lr"])
