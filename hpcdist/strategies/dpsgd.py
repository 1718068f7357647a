"""Average with one's neighbours, then step along the gradient at one's own, un-mixed parameters: D-PSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from pydantic import Field, model_validator

from hpcdist import compress
from hpcdist.compress import CompressionConfig
from hpcdist.config import Named
from hpcdist.errors import ConfigError
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import Along, Entry, dropped
from hpcdist.strategies.decentralised.choco import CompressedMixing
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import make_topology


@final
class DPSGD(Strategy):
    """Train by decentralised parallel SGD, all ranks together: xᵢ ← Σⱼ Wᵢⱼ xⱼ − η g(xᵢ), j the neighbours.

    The gradient is that at a rank's own x, before averaging; so x is sent as soon as it is made, and the neighbours'
    arrive while the rank computes: a step takes the longer of the two. The optimiser then steps from Wx, which is also
    what its weight decay reads. W is symmetric and doubly stochastic, so the mean of all x follows the mean of the
    updates and nothing else, to rounding, and the distance from it shrinks as the topology's spectral gap has it.

    With `overlap`, whatever changes parameters between steps (a clamp, say) must be part of the optimiser's step: at
    other times they are being sent. Bytes per rank and step: one parameter vector to each neighbour; after the last
    step of a run one more, unused. Memory: one parameter vector per neighbour.

    With `compression` neighbours are sent differences, from which they know public copies x̂ of each other's x, and
    x ← x + γ(Wx̂ − x̂) takes the place of Wx (CHOCO-SGD). Then the topology may not change from step to step. Bytes: a
    message to each neighbour; memory: four parameter vectors. γ is `consensus_rate`: 1 where a message says nearly all
    (fp16, bf16, qsgd); with the largest 10 % of the elements 0.2, with 1 % 0.05 or less.

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017,
    algorithm 1; Anastasia Koloskova, Sebastian Stich, Martin Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", 2019.
    """

    class Config(Strategy.Config):
        """Options of dpsgd."""

        topology: Named = Field(Named(name="ring"), description="who averages with whom, see `hpcdist topology`")
        overlap: bool = Field(True, description="exchange parameters while the next gradient is computed")
        compression: CompressionConfig = Field(CompressionConfig(), description="how differences are compressed")
        consensus_rate: float | None = Field(
            None, gt=0, le=1, description="how far to follow neighbours' copies; none: 1 with fp16, bf16, qsgd, or 0.05"
        )

        @model_validator(mode="after")
        def _copies_are_known_to_neighbours(self):
            if not self.compression.error_feedback or self.compression.warmup_ranks is not None:
                raise ValueError(
                    "strategy.compression of dpsgd must be with error_feedback and without warmup_ranks, for every "
                    f"rank's neighbours follow it; got {self.compression.name} with {self.compression.error_feedback} "
                    f"and {self.compression.warmup_ranks}. Leave them out, or take another compressor."
                )
            return self

        @property
        def rate(self) -> float:
            """Return the consensus rate γ: as set, or the compressor's default."""
            faithful = compress.load(self.compression.name).faithful
            return self.consensus_rate or (1.0 if faithful else 0.05)

        def narrow(self, contract: Contract, size: int) -> Contract:
            return replace(contract, sends="between steps" if self.overlap else "within steps")

    config: Config
    contract = Contract(averages="parameters", meets="every step")

    def __init__(self, config: Config, comm, model, **given):
        topology = make_topology(config.topology, comm)
        if not (topology.symmetric and topology.doubly_stochastic):
            raise ConfigError(
                f"topology of dpsgd must be symmetric and doubly stochastic; got {config.topology.name}. Take ring, "
                "torus, complete, hierarchical or graph; or strategy sgp, which goes with any topology."
            )
        super().__init__(config, comm, model, **given)
        self._compressed = bool(config.compression) and comm.size > 1
        if self._compressed:
            self._mixing = CompressedMixing(comm, topology, model, config.compression, config.rate)
        else:
            self._mixing = Mixing(comm, topology, overlap=config.overlap)

    def advance(self, update: Update) -> Outcome:
        if not self._mixing.under_way:  # at the first step of an epoch, or without overlap
            self._mixing.start(self.model.params, self.steps)
        elif not self._compressed and self._versions != self.model.changes():
            raise ConfigError(
                "parameters must be changed by the optimiser's step alone where strategy.overlap of dpsgd is true, for "
                "they are being sent meanwhile; got some that were changed between steps. Set overlap=False, or change "
                "them between epochs."
            )
        self._mixing.finish(self.model.params)
        outcome = self.gradients.step_alone(update)
        if self.config.overlap:
            self._mixing.start(self.model.params, self.steps + 1)
            self._versions = self.model.changes()
        return outcome

    def pause(self) -> None:
        """Collective. Drop the exchange under way: changes before the next epoch are averaged then."""
        if not self._compressed:
            self._mixing.drop()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def entries(self) -> list[Entry]:
        if not self._compressed:
            return super().entries()
        loaded: dict[str, Any] = {}

        def load(coders: Sequence[Any] | None) -> None:  # in another world ranks send each other their values
            self._mixing.load_state(None if coders is None else {**loaded, "coders": coders}, self.model.params)

        return [
            *super().entries(),
            Along("copies", lambda: self._mixing.state()["copies"], lambda v: loaded.update(copies=v), dropped([])),
            Along("mixed", lambda: self._mixing.state()["mixed"], lambda v: loaded.update(mixed=v), dropped([])),
            Entry("coders", lambda: self._mixing.state()["coders"], load, dropped()),
        ]

    def load_state(self, saved: dict) -> None:
        super().load_state(saved)
        if not self._compressed:
            self._mixing.drop()  # what was sent is not what was loaded

    def close(self) -> None:
        self._mixing.close()
