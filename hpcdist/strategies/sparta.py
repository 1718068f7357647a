"""SPARTA: in every step the ranks average a small part of their parameters, another one each time."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hpcdist.collectives.calls import Collectives, Work
from hpcdist.comm.communicator import Traffic
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract


class Part(NamedTuple):
    """A part of the parameters that is being averaged."""

    indices: list[Tensor]  # in each of `model.params`
    sent: list[Tensor]  # and by how much means of other parts have moved these elements since
    values: list[Tensor]  # sent, and then their mean
    work: Work  # which makes it


@final
class SPARTA(Strategy):
    """Run the local optimiser; after each step replace a part S of the parameters by its mean over all ranks.

    The part has the share `share` of the elements, and all ranks draw the same one from (seed, step), so that no
    indices are sent. `selection` = random: each element with that probability; shuffled: slices of one random order in
    turn; partition: the same, with a new order once all have had their turn, so that each element is averaged once in
    1/`share` steps. The optimiser's state and all other parameters stay each rank's own. With `delay` = τ the mean is
    merged τ steps later, while these compute: `merge` = shift keeps what the rank has done meanwhile by its own
    steps, plain does not. An element that is in several parts under way is corrected once.

    The mean of all ranks' parameters is not changed by averaging. Replicas differ, by what an element moves in
    1/`share` steps; evaluations use their mean. With `share` = 1 this is `local_sgd` with a period of 1, to rounding.
    As the base of `slowmo` it is joined with a slow outer step. On one rank the optimiser runs alone.

    Bytes per rank and step: 2·share·n(p − 1)/p for n bytes of parameters. At synchronizations 1, 2, 4, 8... and each
    64th an all-reduce of 16 bytes compares settings. Memory: a part, twice, for each step of the delay; with shuffled
    and partition an index of 8 bytes for each element.

    Reference: Matt Beton, Mohamed Baioumy, Tycho van der Ouderaa, Matthew Reed, Seth Howes, Alex Cheema, Gelu Vrabie,
    "Improving the efficiency of distributed training using sparse parameter averaging", 2025. What becomes of the steps
    of a delay is our choice.
    """

    class Config(Strategy.Config):
        """Options of sparta."""

        _former: ClassVar = {"take_up": "merge"}
        share: float = Field(0.005, ge=0, le=1, description="part of the parameters that a step averages")
        selection: Literal["random", "shuffled", "partition"] = Field(
            "random", description="draw elements anew in each step, or in turn of one order, or of a new one each round"
        )
        delay: int = Field(0, ge=0, description="τ: steps from sending a part to merging its mean")
        merge: Literal["shift", "plain"] = Field(
            "shift", description="after a delay keep what this rank has done since, or go back to the mean"
        )
        seed: int = Field(0, ge=0, description="seed of the parts")
        algorithm: str = Field("auto", description="all-reduce algorithm; auto chooses by size and ranks")

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        self.alone = comm.size == 1
        self.calls = Collectives(comm, Traffic())
        self.records.count(self.calls.comm)
        self.calls.algorithm(config.algorithm)
        self._parts: dict[int, Part] = {}  # in flight, by the step at whose end they were sent
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
        indices = self._indices(step)
        sent = [flat.index_select(0, at) for flat, at in zip(self.model.params, indices, strict=True)]
        values = [one.clone() for one in sent]
        work = self.calls.all_reduce(values, "mean", algorithm=self.config.algorithm, async_op=self.config.delay > 0)
        self._parts[step] = Part(indices, sent, values, work or Work(values))

    def _complete(self, last: int | None = None) -> None:
        """Wait for the means of the parts up to that of a step, or of all."""
        start = self.comm.now()
        for step, part in self._parts.items():
            if last is None or step <= last:
                part.work.wait()
        self.comm.trace.traffic.waiting_s += self.comm.now() - start

    def _merge(self, step: int) -> None:
        self._complete(step)
        part, others = self._parts.pop(step), self._parts.values()
        keeps = self.config.delay > 0 and self.config.merge == "shift"
        for number, (flat, at, mean) in enumerate(zip(self.model.params, part.indices, part.values, strict=True)):
            if not keeps:
                flat[at] = mean
                continue
            # What this rank has done since is its own steps. The jump to this mean is none of them: a part in flight
            # moves with it, else it would correct the same deviation again, and replicas would swing apart.
            before = [flat.index_select(0, other.indices[number]) for other in others]
            flat[at] = mean + flat.index_select(0, at).sub_(part.sent[number])
            for other, was in zip(others, before, strict=True):
                other.sent[number] = flat.index_select(0, other.indices[number]).sub_(was).add_(other.sent[number])

    # --- which elements -------------------------------------------------------------------------------------------
    def _indices(self, step: int) -> list[Tensor]:
        return [at.to(flat.device) for at, flat in zip(self._select(step), self.model.params, strict=True)]

    def _select(self, step: int) -> list[Tensor]:
        """Return the elements that are averaged at a step, in each of `model.params`; the same on all ranks."""
        share, lengths = self.config.share, [len(flat) for flat in self.model.params]
        if share == 1:
            return [torch.arange(length) for length in lengths]
        if self.config.selection == "random":
            generator = np.random.default_rng([self.config.seed, 0, step])
            return [_bernoulli(generator, length, share) for length in lengths]
        slices = math.ceil(1 / share - 1e-9)  # a third, as it is in binary, makes three
        turn = step // slices if self.config.selection == "partition" else 0
        if turn != self._round:
            generator = np.random.default_rng([self.config.seed, 1, turn])
            self._round, self._orders = turn, [torch.from_numpy(generator.permutation(length)) for length in lengths]
        place = step % slices
        return [order[len(order) * place // slices : len(order) * (place + 1) // slices] for order in self._orders]

    # --- state ----------------------------------------------------------------------------------------------------
    def _save_parts(self) -> list[list[Any]]:
        return [[step, list(part.sent), part.values] for step, part in self._parts.items()]

    def _load_parts(self, saved: list[list[Any]]) -> None:
        self._parts.clear()
        for step, sent, values in saved:
            self._parts[step] = Part(self._indices(step), list(sent), list(values), Work())

    def reset_from_model(self) -> None:
        self._complete()
        self._parts.clear()

    def close(self) -> None:
        self.calls.close()


def _bernoulli(generator: np.random.Generator, length: int, share: float) -> Tensor:
    """Draw each of `length` elements with probability `share`, by the gaps between them; ascending indices."""
    found, last = [], -1
    while last < length:
        gaps = generator.geometric(share, size=int(length * share + 4 * (length * share) ** 0.5) + 8)
        found.append(last + np.cumsum(gaps))
        last = int(found[-1][-1])
    indices = np.concatenate(found)
    return torch.from_numpy(indices[indices < length])
