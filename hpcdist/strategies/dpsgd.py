"""Average with neighbours in a graph, then step along the local gradient: decentralised parallel SGD, D-PSGD."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from hpcdist import compress
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.compress import CompressionConfig, spans
from hpcdist.compress.coding.reduction import TAG, join_messages, receive, split_message
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import Topology, make_topology


@final
class DPSGD(Strategy):
    """Train by decentralised parallel SGD, synchronously: xᵢ ← Σⱼ Wᵢⱼ xⱼ − η g(xᵢ), with the neighbours j of rank i.

    The gradient is computed at the rank's local x, before averaging. So x is sent before the backward pass, and the
    neighbours' parameters arrive while the rank computes: a step takes the longer of the two times. The optimiser then
    steps from Wx, also with its weight decay. W is symmetric and doubly stochastic, so the mean of all x follows the
    mean of the updates, to rounding; the distance from the mean shrinks at a rate given by the topology's spectral gap.

    With `overlap`, a change of parameters between steps (a clamp, say) must be part of the optimiser's step, because
    between steps the parameters are being sent. Bytes per rank and step: one parameter vector to each neighbour; after
    the last step of a run one more, unused. Memory: one parameter vector per neighbour.

    With `compression` a rank sends compressed differences; its neighbours add them to a copy x̂ of its x, and
    x ← x + γ(Wx̂ − x̂) replaces Wx (CHOCO-SGD). The topology must then be static. Bytes: a message to each neighbour;
    memory: four parameter vectors. γ is `consensus_rate`: 1 if a message contains nearly everything (fp16, bf16, qsgd),
    0.2 with the largest 10 % of the elements, at most 0.05 with 1 %.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology="ring", overlap=False)

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017,
    algorithm 1; Anastasia Koloskova, Sebastian Stich, Martin Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", 2019.
    """

    class Config(Strategy.Config):
        topology: Named = Field(Named(name="ring"), "graph of the neighbours, see `hpcdist topology`")
        overlap: bool = Field(True, "exchange parameters while the next gradient is computed")
        compression: CompressionConfig = Field(CompressionConfig(), "how differences are compressed")
        consensus_rate: float | None = Field(
            None, "γ, weight of the mean; none: 1 with fp16, bf16 and qsgd, else 0.05", gt=0, le=1
        )

        @joint_rule
        def _copies_are_known_to_neighbours(self) -> None:
            if not self.compression.error_feedback or self.compression.warmup_ranks is not None:
                raise ValueError(
                    "strategy.compression of dpsgd must be with error_feedback and without warmup_ranks, for every "
                    f"rank's neighbours follow it; got {self.compression.name} with {self.compression.error_feedback} "
                    f"and {self.compression.warmup_ranks}. Leave them out, or take another compressor."
                )

        @property
        def rate(self) -> float:
            """The consensus rate γ: `consensus_rate`, or the compressor's default."""
            faithful = compress.load(self.compression.name).faithful
            return self.consensus_rate or (1.0 if faithful else 0.05)

        def narrow(self, contract: Contract, size: int) -> Contract:
            alters = self.overlap and not self.compression  # the loop could change parameters while they are sent
            return replace(contract, sends="between steps" if alters else "within steps")

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = make_topology(config.topology, comm)
        if not (topology.symmetric and topology.doubly_stochastic):
            raise ConfigError(
                f"topology of dpsgd must be symmetric and doubly stochastic; got {config.topology.name}. Take ring, "
                "torus, complete, hierarchical or graph; or strategy sgp, which goes with any topology."
            )
        super().__init__(config, comm, model, **kwargs)
        self._mixing: Mixing | CompressedMixing
        if config.compression and comm.size > 1:
            self._mixing = CompressedMixing(comm, topology, model, config.compression, config.rate, self.state)
        else:
            self._mixing = Mixing(comm, topology, overlap=config.overlap)
        self.opened(self._mixing)
        self.state.before_load(self._mixing.drop)  # messages in flight have old parameters

    def advance(self, update: Update) -> Outcome:
        if not self._mixing.in_flight:  # at the first step of an epoch, or without overlap
            self._mixing.start(self.model.params, self.steps)
        self._mixing.finish(self.model.params)
        outcome = self.gradients.step_alone(update)
        if self.config.overlap:
            self._mixing.start(self.model.params, self.steps + 1)
        return outcome

    def pause(self) -> None:
        """Collective. Drop the exchange in flight; the next epoch starts it again with the parameters of then."""
        if isinstance(self._mixing, Mixing):
            self._mixing.drop()


class CompressedMixing:
    """Collective. Average with neighbours by compressed differences to public copies x̂: x ← x + γ(Wx̂ − x̂).

    Each rank sends the compressed difference of its x to its public copy x̂; the rank and its neighbours add the decoded
    message to x̂. So the next difference contains the error of this message. Memory: x̂ and Wx̂, two parameter vectors
    for any number of neighbours. The mean of all x is conserved, to rounding.

    Checkpoints contain the public copies from before the exchange in flight, which is started again on resuming. On
    another number of ranks the public copies start from each rank's parameters, sent uncompressed.

    Args:
        rate: γ, at most 1. Must be smaller for a larger error of messages, or x diverges.

    Raises:
        ConfigError: the topology is not static.

    Reference: Anastasia Koloskova, Sebastian Stich, Martin Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", 2019, CHOCO-SGD in its form with two vectors.
    """

    def __init__(
        self, comm: Communicator, topology: Topology, model: FlatModel, config: CompressionConfig, rate: float,
        state: State,
    ):  # fmt: skip
        if not topology.static:
            raise ConfigError(
                "strategy.topology must have the same neighbours at every step with strategy.compression, for they "
                "follow each other; got one that changes. Take ring, torus, exponential, complete or graph."
            )
        self._comm, self._topology, self._state, self._rate = comm, topology, state, rate
        self._warmup_steps = config.warmup_steps
        self._weights = topology.in_neighbours(comm.rank, 0)
        self._self_weight = self._weights.pop(comm.rank)
        self._dests = [peer for peer in topology.out_neighbours(comm.rank, 0) if peer != comm.rank]
        self._feedbacks = config.feedbacks(comm, model.params, spans(model))
        copies, mixed = ([_on_host(flat) for flat in model.params] for _ in range(2))
        self._public = state.sharded("copies", tensors=copies, start="parameters")  # x̂
        # Wx̂: all ranks start with the same parameters
        self._public_mixed = state.sharded("mixed", tensors=mixed, start="parameters")
        state.custom("coders", self._coders, self._load_coders, lambda: None)
        rows = [sorted(topology.in_neighbours(rank, 0).items()) for rank in range(comm.size)]
        self._weights_hash = hashlib.sha256(repr(rows).encode()).hexdigest()  # of W
        self.mixed_by = state.value("mixed_by", self._weights_hash, self)  # hash of the weights in `_public_mixed`
        state.scratch([feedback.residual for feedback in self._feedbacks])  # of one message
        state.after_load(self._mix_copies)
        self._sends: list[Request] = []
        self._sent: list[Tensor] = []  # the messages in flight
        self._whole = False  # messages in flight are uncompressed
        self._before: list[dict] = []  # the compressors' states before the exchange in flight

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has been started and not finished."""
        return bool(self._sent)

    def start(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Start sending the differences of `tensors` to their public copies. Never blocks."""
        self._whole = step < self._warmup_steps
        self._before = self._coders()
        for tensor, copy, feedback in zip(tensors, self._public, self._feedbacks, strict=True):
            feedback.residual.zero_()  # the difference contains the error
            self._sent.append(feedback.encode(_on_host(tensor).sub_(copy), self._whole))
        message = join_messages(self._sent)
        self._sends = [self._comm.isend(message, peer, TAG) for peer in self._dests]

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Wait for the exchange and mix `tensors`, which were sent, in place."""
        sent, messages, rate = self._sent, self._receive(), 1.0 if self._whole else self._rate
        for i, feedback in enumerate(self._feedbacks):
            copy, mixed = self._public[i], self._public_mixed[i]
            feedback.add(sent[i], copy, self._whole)
            feedback.add(sent[i], mixed, self._whole, self._self_weight)
            for peer, weight in self._weights.items():
                feedback.add(messages[peer][i], mixed, self._whole, weight)
            with torch.no_grad():
                tensors[i].add_(torch.sub(mixed, copy).to(tensors[i].device, tensors[i].dtype), alpha=rate)

    def drop(self) -> None:
        """Collective. Wait for the exchange in flight, if any, and drop its result."""
        if self.in_flight:
            self._receive()

    close = drop

    def _receive(self) -> dict[int, list[Tensor]]:
        """Collective. Receive each neighbour's messages."""
        messages = {peer: split_message(receive(self._comm, peer), len(self._public)) for peer in self._weights}
        for send in self._sends:
            send.wait()
        self._sends, self._sent = [], []
        return messages

    def _coders(self) -> list[dict]:
        """Return the compressors' states before the exchange in flight."""
        if self.in_flight:
            return self._before
        return [deepcopy(feedback.compressor.state_dict()) for feedback in self._feedbacks]

    def _load_coders(self, saved: Sequence[dict]) -> None:
        for feedback, state in zip(self._feedbacks, saved):
            feedback.compressor.load_state_dict(state)

    def _mix_copies(self) -> None:
        """Collective. Compute Wx̂ from the public copies if the checkpoint lacks it, or has it with other weights."""
        if "mixed" not in self._state.loaded or self.mixed_by != self._weights_hash:
            self.mixed_by = self._weights_hash
            copy_all(self._public_mixed, self._public)
            mixing = Mixing(self._comm, self._topology, overlap=False)
            mixing.mix(self._public_mixed, 0)
            mixing.close()


def _on_host(flat: Tensor) -> Tensor:
    """Copy a flat tensor to the host, as float32 or float64."""
    return flat.detach().to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True)
