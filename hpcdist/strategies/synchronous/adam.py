"""Adam as it is in compressed strategies: two moments without bias correction, kept where torch's Adam keeps them."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig
from hpcdist.config.settings import Field
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import groups
from hpcdist.model.slots import Slot
from hpcdist.strategies.base import Update, name_of
from hpcdist.strategies.synchronous.own_step import OwnStep, rate_of

_log = logging.getLogger(__name__)
LEAST_EPS = 1e-4


class ParameterSlice(NamedTuple):
    """Neighbouring parameters of one group, which one call moves."""

    name: str  # of the first parameter
    group: Mapping[str, Any]
    flat: int  # number of the flat tensor
    elements: slice
    states: list[dict[str, Any]]  # of the optimiser, one for each parameter

    def chunks(self, *flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield matching chunks of these elements of tensors like `model.params`."""
        return alongside(*(tensors[self.flat][self.elements] for tensors in flats))


class AdamStep(OwnStep):
    """Adam's moments m and v, and the step θ ← θ − η(m/(√v + ε) + λθ); β₁, β₂, ε, η and λ are read from the groups.

    There is no bias correction, as in the published codes: warm up the learning rate. An element whose gradients were
    all 0 has v = 0 and is not updated, because a one-bit code has no zero and would move it by m/ε.

    On one rank the optimiser steps as usual.

    Attributes:
        m, v: tensors like `model.params`; the moments in the optimiser's `state` are views of them.
        scales: √v + ε, computed by `scale`.
    """

    class Config(OwnStep.Config):
        compression: CompressionConfig = Field(
            CompressionConfig(name="ef_signsgd"), "how means are compressed, in both directions; none: they are not"
        )

    config: Config
    contract = replace(OwnStep.contract, optimizer="Adam")
    kinds: ClassVar = (torch.optim.Adam, torch.optim.AdamW)
    plain: ClassVar = {"amsgrad": False, "maximize": False}
    advice: ClassVar = "torch.optim.AdamW, or torch.optim.Adam without weight_decay"

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any):
        super().__init__(config, comm, model, **kwargs)
        self.runs_optimizer = comm.size == 1
        half = [slot.name for slot in model.slots if slot.tensor.dtype is torch.float16]
        if half and not self.runs_optimizer:
            raise ConfigError(
                f"parameters must be float32, float64 or bfloat16 with {name_of(self)}; got {half[0]!r} in float16, "
                "which holds neither squares of gradients nor Adam's eps. Keep them in float32; use torch.autocast."
            )
        like = [] if self.runs_optimizer else model.params
        self.m, self.v, self.scales = (self.state.scratch([torch.zeros_like(x) for x in like]) for _ in range(3))
        self._scale_inputs: object = None
        self._views = [(slot.view(self.m), slot.view(self.v)) for slot in model.slots if like]

    def move(self, update: Update) -> None:
        if self.runs_optimizer:
            update()
        else:
            if self.steps == 0:
                self._warn_small_eps()
            self.move_all()

    def _warn_small_eps(self) -> None:
        eps = min(group["eps"] for group in self.optimizer.param_groups) if self.optimizer else LEAST_EPS
        if eps < LEAST_EPS and self.config.compression and self.comm.rank == 0:
            _log.warning(
                "eps of the optimiser is %g, and should be at least %g with %s: one-bit messages give all elements of "
                "a parameter the same size, so elements with a tiny v make large steps, and training may end in NaN. "
                "Set eps=%g where you create the optimiser.",
                eps, LEAST_EPS, name_of(self), LEAST_EPS,
            )  # fmt: skip

    @abc.abstractmethod
    def move_all(self) -> None:
        """Collective. Move the parameters of several ranks, see `move`."""

    def runs(
        self, used: Sequence[bool] | None = None, key: Callable[[str], object] = lambda name: None
    ) -> list[ParameterSlice]:
        """Return the optimiser's used parameters as slices: neighbours in flat memory of one param_group are joined.

        Args:
            used: a flag for each parameter; default: whether it has a gradient.
            key: computes a key from a parameter's name; neighbours with different keys are not joined.
        """
        used = self.model.gradients.present() if used is None else used
        parameters = zip(self.model.slots, groups(self.model, self.optimizer), used, self._views, strict=True)
        entries = [(slot, group if is_used else None, views) for slot, group, is_used, views in parameters]
        slices = []
        for (flat, _, _), run in groupby(entries, lambda entry: (entry[0].group, id(entry[1]), key(entry[0].name))):
            slots, (group, *_), views = zip(*run, strict=True)
            if group is not None:
                elements, states = slice(slots[0].start, slots[-1].stop), [*map(self._state, slots, views)]
                slices.append(ParameterSlice(slots[0].name, group, flat, elements, states))
        return slices

    def _state(self, slot: Slot, views: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return the optimiser's state of a parameter; copies new or loaded moments into `m` and `v`."""
        state: dict[str, Any] = self.optimizer.state[slot.tensor]  # type: ignore[union-attr]
        for name, view in zip(("exp_avg", "exp_avg_sq"), views, strict=True):
            if state.get(name) is not view:
                view.copy_(state[name]) if name in state else view.zero_()
                state[name] = view
        if "step" not in state:  # which torch's Adam expects
            state["step"] = torch.tensor(0.0)
        return state

    def update_moments(self, run: ParameterSlice, gradients: Sequence[Tensor], *, squares: bool) -> None:
        """Update the moments with a gradient: m, and v if `squares`."""
        beta, beta_squares = run.group["betas"]
        for m, v, gradient in run.chunks(self.m, self.v, gradients):
            m.mul_(beta).add_(gradient, alpha=1 - beta)
            if squares:
                v.mul_(beta_squares).addcmul_(gradient, gradient, value=1 - beta_squares)
            else:
                zero_untrained(m, v)

    def scale(self, runs: Sequence[ParameterSlice]) -> None:
        """Set `scales` to √v + ε, if v, by the version that torch counts, or ε has changed since the last call."""
        inputs = [flat._version for flat in self.v], [(run.flat, run.elements, run.group["eps"]) for run in runs]
        if inputs != self._scale_inputs:
            for run in runs:
                for v, scale in run.chunks(self.v, self.scales):
                    torch.sqrt(v, out=scale).add_(run.group["eps"])
            self._scale_inputs = inputs

    def step_along(self, run: ParameterSlice, moves: Sequence[Tensor] = ()) -> None:
        """Move parameters by −η(m/`scales` + λθ), and count the step; add −ηm/`scales` to `moves`."""
        rate, decay = rate_of(run.group), run.group["weight_decay"]
        for state in run.states:
            state["step"] += 1
        for param, m, scale, *moved in run.chunks(self.model.params, self.m, self.scales, *([moves] if moves else [])):
            direction = m / scale
            for target in moved:
                target.sub_(direction, alpha=rate)
            param.sub_(direction.add_(param, alpha=decay) if decay else direction, alpha=rate)

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        super()._check_settings(optimizer)
        coupled = [group for group in optimizer.param_groups if group["weight_decay"]]
        if coupled and not coupled[0].get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
            raise self.setting_error("weight_decay", 0, coupled[0]["weight_decay"])


def zero_untrained(values: Tensor, v: Tensor) -> None:
    """Set the values of elements without a gradient so far (v = 0) to 0, in place."""
    values.mul_(v.sign())  # a tenth of a comparison's time
