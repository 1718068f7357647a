"""Averaging with one's neighbours, who are told compressed differences."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.compress import CompressionConfig, Feedback, spans
from hpcdist.compress.gather import TAG, cut, join
from hpcdist.errors import ConfigError
from hpcdist.flat import FlatModel
from hpcdist.strategies.families.mixing import Mixing
from hpcdist.topology import Topology


class CompressedMixing:
    """Collective. As `Mixing`, where neighbours know public copies of each other only: x ← x + γ(Wx̂ − x̂).

    Each rank sends the difference of its x to its own public copy x̂, compressed; it and its neighbours add to that
    copy what the message says. What the message lacks is in the next difference by itself. Kept are x̂ and Wx̂, two
    parameter vectors however many neighbours there are. The mean of all x stays the same, to rounding.

    Args:
        rate: γ, at most 1. The less of a difference a message says the smaller it must be, or x runs after copies that
            are far behind, and diverges.

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
        self._copies = [_on_host(flat) for flat in model.params]  # x̂
        self._mixed = [_on_host(flat) for flat in model.params]  # Wx̂: all ranks begin with the same parameters
        self._sends: list[Request] = []
        self._own: list[Tensor] = []  # the messages under way
        self._whole = False  # they are not compressed
        self._coders: list[dict] | None = None  # what the compressors remembered before

    @property
    def under_way(self) -> bool:
        """Whether an exchange has been started and not finished."""
        return bool(self._own)

    def start(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Starts sending what neighbours don't know of `tensors`. Never blocks."""
        self._whole = step < self._warmup_steps
        self._coders = [deepcopy(feedback.compressor.state()) for feedback in self._feedbacks]
        for tensor, copy, feedback in zip(tensors, self._copies, self._feedbacks, strict=True):
            feedback.residual.zero_()  # nothing but the difference is to be sent
            self._own.append(feedback.encode(_on_host(tensor).sub_(copy), self._whole))
        message = join(self._own)
        self._sends = [self._comm.isend(message, peer, TAG) for peer in self._dests]

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Waits for the exchange and mixes `tensors`, which were sent, in place."""
        own, messages, rate = self._own, self._receive(), 1.0 if self._whole else self._rate
        for i, feedback in enumerate(self._feedbacks):
            copy, mixed = self._copies[i], self._mixed[i]
            feedback.add(own[i], copy, self._whole)
            feedback.add(own[i], mixed, self._whole, self._own_weight)
            for peer, weight in self._weights.items():
                feedback.add(messages[peer][i], mixed, self._whole, weight)
            with torch.no_grad():
                tensors[i].add_(torch.sub(mixed, copy).to(tensors[i].device, tensors[i].dtype), alpha=rate)

    def drop(self) -> None:
        """Collective. Waits for the exchange under way, if there is one, and does not use it."""
        if self.under_way:
            self._receive()

    def _receive(self) -> dict[int, list[Tensor]]:
        """Each neighbour's messages."""
        found = {}
        for peer in self._weights:
            joined = torch.empty(self._comm.probe(peer, TAG).n_bytes, dtype=torch.uint8)
            self._comm.irecv(joined, peer, TAG).wait()
            found[peer] = cut(joined, len(self._copies))
        for send in self._sends:
            send.wait()
        self._sends, self._own = [], []
        return found

    def state(self) -> dict:
        """What neighbours know, less the exchange under way: from there it is started again."""
        coders = self._coders if self.under_way else [feedback.compressor.state() for feedback in self._feedbacks]
        return {"copies": self._copies, "mixed": self._mixed, "coders": coders}

    def load_state(self, state: dict | None, tensors: Sequence[Tensor]) -> None:
        """Collective. Takes up a saved state; without one all ranks tell their neighbours `tensors` whole."""
        self.drop()
        self._copies = [_on_host(flat) for flat in (tensors if state is None else state["copies"])]
        self._mixed = [_on_host(flat) for flat in (tensors if state is None else state["mixed"])]
        if state is None:
            mixing = Mixing(self._comm, self._topology, overlap=False)
            mixing.start(self._mixed, 0)
            mixing.finish(self._mixed)
            mixing.close()
            return
        for feedback, saved in zip(self._feedbacks, state["coders"], strict=True):
            feedback.compressor.load_state(deepcopy(saved))

    def close(self) -> None:
        """Collective."""
        self.drop()


def _on_host(flat: Tensor) -> Tensor:
    """A copy to compute with."""
    return flat.detach().to("cpu", torch.float64 if flat.dtype == torch.float64 else torch.float32, copy=True)
