"""SPARTA: in every step the ranks average a small, changing part of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.calls import Work
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.records import waiting_for_work


class Part(NamedTuple):
    """A part of the parameters whose all-reduce is in flight."""

    indices: list[Tensor]  # in each of `model.params`
    sent: list[Tensor]  # the values sent, plus changes by means of other parts since then
    values: list[Tensor]  # the values sent, replaced by their mean
    work: Work  # the all-reduce


@final
class SPARTA(Strategy):
    """Run the local optimiser; after each step replace a part of the parameters by its mean over all ranks.

    The part is the fraction `share` of the elements, sampled from (seed, step) equally on all ranks, so that no indices
    are sent. `selection` = random: each element with probability `share`; shuffled: consecutive slices of one random
    order; partition: the same, with a new order after each round, so that each element is averaged once in 1/`share`
    steps. The optimiser's state and all other parameters are local. With `delay` = τ the mean is merged τ steps later,
    while these compute: `merge` = shift keeps the rank's local steps since then, plain does not. An element in several
    parts in flight is corrected once.

    Averaging does not change the mean of all ranks' parameters. Replicas differ by the change of an element in
    1/`share` steps; evaluations use their mean. With `share` = 1 this is `local_sgd` with period 1, to rounding.
    `slowmo` with this base adds a slow outer step. On one rank only the optimiser runs.

    Bytes per rank and step: 2·share·n(p − 1)/p for n bytes of parameters. Memory: a part, twice, for each step of the
    delay; with shuffled and partition an index of 8 bytes for each element.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sparta", share=0.1)

    Reference: Matt Beton, Mohamed Baioumy, Tycho van der Ouderaa, Matthew Reed, Seth Howes, Alex Cheema, Gelu Vrabie,
    "Improving the efficiency of distributed training using sparse parameter averaging", 2025. The rules for a delay are
    our choice.
    """

    class Config(Strategy.Config):
        share: float = Field(0.005, "part of the parameters that a step averages", ge=0, le=1)
        selection: Literal["random", "shuffled", "partition"] = Field(
            "random", "sample elements in each step, or slices of one random order, or of one per round"
        )
        delay: int = Field(0, "τ: steps from sending a part to merging its mean", ge=0)
        merge: Literal["shift", "plain"] = Field(
            "shift", "after a delay keep this rank's own steps since then, or replace them by the mean"
        )
        seed: int = Field(0, "seed of the parts", ge=0)
        algorithm: str = Field("auto", "all-reduce algorithm; auto chooses by size and ranks")

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.alone = comm.size == 1
        self.calls = self.open_calls(config.algorithm)
        self._parts: dict[int, Part] = {}  # parts in flight, by the step that sent them
        self.state.custom("under_way", self._save_parts, self._load_parts, self._parts.clear)
        self.state.before_save(self._complete)
        self.state.before_load(self._complete)
        self._round, self._orders = -1, list[Tensor]()

    def advance(self, update: Update) -> Outcome:
        outcome = self.gradients.step_alone(update)
        if not self.alone and self.config.share:
            self._send(self.steps)
            for step in [sent for sent in self._parts if sent + self.config.delay <= self.steps]:
                self._merge(step)
        return outcome

    def _send(self, step: int) -> None:
        """Start to average the part of this step."""
        indices = self._placed(self._select(step))
        sent = [flat.index_select(0, index) for flat, index in zip(self.model.params, indices, strict=True)]
        values = [tensor.clone() for tensor in sent]
        work = self.calls.all_reduce(values, "mean", algorithm=self.config.algorithm, async_op=self.config.delay > 0)
        self._parts[step] = Part(indices, sent, values, work or Work(values))

    def _complete(self, last: int | None = None) -> None:
        """Wait for the means of the parts sent up to step `last`; None: of all parts."""
        with waiting_for_work(self.calls.comm):
            for step, part in self._parts.items():
                if last is None or step <= last:
                    part.work.wait()

    def _merge(self, step: int) -> None:
        """Replace the elements sent in `step` by their mean; with `shift` add this rank's changes since then."""
        self._complete(step)
        part, in_flight = self._parts.pop(step), self._parts.values()
        keeps = step < self.steps and self.config.merge == "shift"
        for number, (flat, index, mean) in enumerate(zip(self.model.params, part.indices, part.values, strict=True)):
            if not keeps:
                flat[index] = mean
                continue
            # Parts in flight move with the change to this mean, or they would correct the same deviation again, and
            # replicas would oscillate.
            before = [flat.index_select(0, other_part.indices[number]) for other_part in in_flight]
            flat[index] = mean + flat.index_select(0, index).sub_(part.sent[number])
            for other_part, old in zip(in_flight, before, strict=True):
                other_part.sent[number] = (
                    flat.index_select(0, other_part.indices[number]).sub_(old).add_(other_part.sent[number])
                )

    def _placed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move tensors, one for each of `model.params`, to the devices of these."""
        return [tensor.to(flat.device) for tensor, flat in zip(tensors, self.model.params, strict=True)]

    def _select(self, step: int) -> list[Tensor]:
        """Return the indices to average in a step, in each of `model.params`; equal on all ranks."""
        share, lengths = self.config.share, [len(flat) for flat in self.model.params]
        if share == 1:
            return [torch.arange(length) for length in lengths]
        if self.config.selection == "random":
            generator = np.random.default_rng([self.config.seed, 0, step])
            return [_bernoulli(generator, length, share) for length in lengths]
        slices = math.ceil(1 / share - 1e-9)  # 3 for the float next to 1/3
        round_ = step // slices if self.config.selection == "partition" else 0
        if round_ != self._round:
            generator = np.random.default_rng([self.config.seed, 1, round_])
            self._round = round_
            self._orders = [torch.from_numpy(generator.permutation(length)) for length in lengths]
        part = step % slices
        return [order[len(order) * part // slices : len(order) * (part + 1) // slices] for order in self._orders]

    def _save_parts(self) -> list[list[Any]]:
        return [[step, list(part.sent), part.values, part.indices] for step, part in self._parts.items()]

    def _load_parts(self, saved: list[list[Any]]) -> None:
        self._parts.clear()
        for step, sent, values, *indices in saved:
            chosen = indices[0] if indices else self._select(step)  # old checkpoints lack indices
            self._parts[step] = Part(self._placed(chosen), self._placed(sent), self._placed(values), Work())

    def reset_from_model(self) -> None:
        self._complete()
        self._parts.clear()


def _bernoulli(generator: np.random.Generator, length: int, share: float) -> Tensor:
    """Sample each of `length` elements with probability `share`, by geometric gaps; return ascending indices."""
    positions, last = [], -1
    while last < length:
        gaps = generator.geometric(share, size=int(length * share + 4 * (length * share) ** 0.5) + 8)
        positions.append(last + np.cumsum(gaps))
        last = int(positions[-1][-1])
    indices = np.concatenate(positions)
    return torch.from_numpy(indices[indices < length])
