"""Mix with the neighbours by compressed differences of public copies, as CHOCO-SGD does."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.compress import CompressionConfig, Feedback, spans
from hpcdist.compress.coding.reduction import TAG, cut, join
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.topology import Topology


class CompressedMixing:
    """Collective. Mix parameters by the neighbours' public copies x̂ alone: x ← x + γ(Wx̂ − x̂).

    Each rank sends the difference of its x to its own public copy x̂, compressed; it and its neighbours add the decoded
    message to that copy. The error of the message is in the next difference by itself. Kept are x̂ and Wx̂, two
    parameter vectors however many neighbours there are. The mean of all x stays the same, to rounding.

    Args:
        rate: γ, at most 1. The larger the error of a message the smaller it must be, or x follows copies that are far
            behind, and diverges.

    Raises:
        ConfigError: the topology changes from step to step.

    Reference: Anastasia Koloskova, Sebastian Stich, Martin Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", 2019, CHOCO-SGD in its form with two vectors.
    """

    def __init__(
        self, comm: Communicator, topology: Topology, model: FlatModel, config: CompressionConfig, rate: float
    ):
        if not topology.static:
            raise ConfigError(
                "strategy.topology must have the same neighbours at every step with strategy.compression, for they "
                "follow each other; got one that changes. Take ring, torus, exponential, complete or graph."
            )
        self._comm, self._topology, self._rate = comm, topology, rate
        self._warmup_steps = config.warmup_steps
        self._weights = topology.in_neighbours(comm.rank, 0)
        self._own_weight = self._weights.pop(comm.rank)
        self._dests = [peer for peer in topology.out_neighbours(comm.rank, 0) if peer != comm.rank]
        self._feedbacks = [
            Feedback(config.make(flat.numel(), own, place * comm.size + comm.rank), flat)
            for place, (flat, own) in enumerate(zip(model.params, spans(model), strict=True))
        ]
        self._public = [_on_host(flat) for flat in model.params]  # x̂
        self._public_mixed = [_on_host(flat) for flat in model.params]  # Wx̂: all ranks begin with the same parameters
        self._sends: list[Request] = []
        self._sent: list[Tensor] = []  # the messages under way
        self._whole = False  # whether they are not compressed
        self._before: list[dict] | None = None  # the compressors' states before it

    @property
    def under_way(self) -> bool:
        """Tell whether an exchange has been started and not finished."""
        return bool(self._sent)

    def start(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Start sending the differences of `tensors` to their public copies. Never blocks."""
        self._whole = step < self._warmup_steps
        self._before = [deepcopy(feedback.compressor.state()) for feedback in self._feedbacks]
        for tensor, copy, feedback in zip(tensors, self._public, self._feedbacks, strict=True):
            feedback.residual.zero_()  # nothing but the difference is to be sent
            self._sent.append(feedback.encode(_on_host(tensor).sub_(copy), self._whole))
        message = join(self._sent)
        self._sends = [self._comm.isend(message, peer, TAG) for peer in self._dests]

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Wait for the exchange and mix `tensors`, which were sent, in place."""
        sent, messages, rate = self._sent, self._receive(), 1.0 if self._whole else self._rate
        for i, feedback in enumerate(self._feedbacks):
            copy, mixed = self._public[i], self._public_mixed[i]
            feedback.add(sent[i], copy, self._whole)
            feedback.add(sent[i], mixed, self._whole, self._own_weight)
            for peer, weight in self._weights.items():
                feedback.add(messages[peer][i], mixed, self._whole, weight)
            with torch.no_grad():
                tensors[i].add_(torch.sub(mixed, copy).to(tensors[i].device, tensors[i].dtype), alpha=rate)

    def drop(self) -> None:
        """Collective. Wait for the exchange under way, if there is one, and drop its result."""
        if self.under_way:
            self._receive()

    def _receive(self) -> dict[int, list[Tensor]]:
        """Collective. Receive each neighbour's messages."""
        messages = {}
        for peer in self._weights:
            joined = torch.empty(self._comm.probe(peer, TAG).n_bytes, dtype=torch.uint8)
            self._comm.irecv(joined, peer, TAG).wait()
            messages[peer] = cut(joined, len(self._public))
        for send in self._sends:
            send.wait()
        self._sends, self._sent = [], []
        return messages

    def state(self) -> dict:
        """Return the public copies of before the exchange under way, which is started again from there."""
        coders = self._before if self.under_way else [feedback.compressor.state() for feedback in self._feedbacks]
        return {"copies": self._public, "mixed": self._public_mixed, "coders": coders}

    def load_state(self, state: dict | None, tensors: Sequence[Tensor]) -> None:
        """Collective. Restore a saved state; without one all ranks send their neighbours `tensors` whole."""
        self.drop()
        self._public = [_on_host(flat) for flat in (tensors if state is None else state["copies"])]
        self._public_mixed = [_on_host(flat) for flat in (tensors if state is None else state["mixed"])]
        if state is None:
            mixing = Mixing(self._comm, self._topology, overlap=False)
            mixing.start(self._public_mixed, 0)
            mixing.finish(self._public_mixed)
            mixing.close()
            return
        for feedback, saved in zip(self._feedbacks, state["coders"], strict=True):
            feedback.compressor.load_state(deepcopy(saved))

    def close(self) -> None:
        """Collective. Wait for the exchange under way."""
        self.drop()


def _on_host(flat: Tensor) -> Tensor:
    """Copy a flat tensor to the host, as float32 or float64."""
    return flat.detach().to("cpu", torch.float64 if flat.dtype == torch.float64 else torch.float32, copy=True)
