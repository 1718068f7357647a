"""Base of strategies whose rule replaces the optimiser's step, with the hyper-parameters of its groups."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import groups
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update, name_of
from hpcdist.strategies.synchronous.agreement import StepAgreement


class Trained(NamedTuple):
    """A parameter with its optimiser's group, and its views of flat tensors."""

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    views: tuple[Tensor, ...]


class OwnStep(Strategy):
    """Base of synchronous strategies with a rule in place of the optimiser's step.

    The loop sees and clips local gradients. A gradient that is not finite on one rank skips the update on all ranks. A
    missing gradient counts as zeros; a parameter without a gradient on any rank is not updated. Changed buffers become
    their mean over the ranks in every step, and param_groups are compared, as with `allreduce`.

    Attributes:
        average: Collective. Replaces flat tensors by their means over all ranks, bitwise equal on all ranks.
        calls: collective calls for the means.
        updates: number of updates.
    """

    class Config(Strategy.Config):
        algorithm: str = Field("auto", "all-reduce algorithm; auto chooses by size and ranks")

    config: Config
    contract = Contract(averages="gradients", synchronizes="every step", step="the strategy's")
    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]  # supported optimisers; empty: any
    plain: ClassVar[Mapping[str, Any]] = {}  # unsupported settings of the optimiser, with the value that is off
    runs_optimizer: bool = False  # the optimiser updates a part of the parameters, and calls its hooks
    advice: ClassVar[str]  # the optimiser to use, for messages

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        complex_names = [slot.name for slot in model.slots if slot.tensor.is_complex()]
        if complex_names:
            raise ConfigError(
                f"parameters must be real with {name_of(self)}, whose rule is for real ones; got {complex_names[0]!r}, "
                "which is complex. Take allreduce, or hold it as two real ones."
            )
        self.updates = self.state.value("updates", 0, self, reshard="first")
        self.calls = self.open_calls(config.algorithm)
        self.average = partial(self.calls.all_reduce, op="mean", algorithm=config.algorithm)
        self.agreement = StepAgreement(self)
        if self.optimizer is not None:
            self.require_optimizer(self.kinds)  # a distributed optimiser will be of another class

    # --- methods that a subclass defines --------------------------------------------------------------------------
    @abc.abstractmethod
    def move(self, update: Update) -> None:
        """Collective. Update the parameters with the local gradients in `model.grads`; may average these in place.

        Args:
            update: runs the optimiser on the model's gradients; for a class that `runs_optimizer`.
        """

    def advance(self, update: Update) -> Outcome:
        self.require_optimizer()
        used, bad = self.agreement(self.model.gradients.collect(), self.gradients.nonfinite())
        event = self.gradients.skip_update(bad) if bad else None
        self.model.gradients.release(used)  # None if no rank has a gradient, so that the parameter is not updated
        if not bad:
            self.gradients.clip(self.model.gradients.mean_weight)
            self.hooked(lambda: self.move(update))
            self.updates += 1
        return Outcome(self.updates, staleness=self.gradients.staleness(bad), event=event)

    def hooked(self, step: Callable[[], None]) -> None:
        """Run `step` in place of the optimiser's, with the hooks on the optimiser's step."""
        optimizer: Any = self.optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if self.runs_optimizer:  # which calls its hooks itself
            before = after = {}
        for hook in list(before.values()):
            hook(optimizer, (), {})
        with torch.no_grad():
            step()
        for hook in list(after.values()):
            hook(optimizer, (), {})

    def require_optimizer(self, kinds: Sequence[type[torch.optim.Optimizer]] = ()) -> None:
        """Raise ConfigError unless there is an optimiser, of one of `kinds` if any, with supported settings."""
        optimizer = self.optimizer
        if optimizer is None or (kinds and type(optimizer) not in kinds):
            raise ConfigError(
                f"the optimiser of {name_of(self)} must be {self.advice}, whose numbers it reads to make the step "
                f"itself; got {'none' if optimizer is None else type(optimizer).__name__}. Take that."
            )
        self._check_settings(optimizer)

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get("lr") is None:  # such as Adafactor's
                raise self.setting_error("lr", "a number", None)
            for key, plain in self.plain.items():
                if group.get(key, plain) != plain:
                    raise self.setting_error(key, plain, group[key])

    def setting_error(self, key: str, plain: object, got: object) -> ConfigError:
        """Return the error for an unsupported setting of the optimiser."""
        return ConfigError(
            f"{key} of the optimiser must be {plain} with {name_of(self)}, which makes the step itself; got {got}. "
            f"Take {self.advice}."
        )

    def trained(self, *flats: Sequence[Tensor]) -> Iterator[Trained]:
        """Yield the optimiser's parameters with a gradient, in the order of `model.slots`, with views of `flats`."""
        used = self.model.gradients.present()
        for slot, group, is_used in zip(self.model.slots, groups(self.model, self.optimizer), used, strict=True):
            if is_used and group is not None:
                yield Trained(slot.name, slot.tensor, group, tuple(slot.view(flat) for flat in flats))


def rate_of(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate as a number."""
    return float(group["lr"])
