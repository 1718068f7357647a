"""Average with neighbours in a graph, x ← Wx, overlapped with computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hpcdist.collectives.calls.in_place import MeansInPlace, average
from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Neighbourhood, Request
from hpcdist.config.settings import Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import groups
from hpcdist.topology import Topology, make_topology


def rates(model: FlatModel, optimizer: torch.optim.Optimizer | None) -> list[float]:
    """Return the learning rate of each parameter, in the order of `model.slots`; 1 if unknown (Adafactor's None)."""
    learning_rates = (None if group is None else group.get("lr") for group in groups(model, optimizer))
    return [1.0 if rate is None else float(rate) for rate in learning_rates]


def conserving(chosen: Named, comm: Communicator, strategy: str) -> Topology:
    """Create a topology; raise ConfigError unless its weights conserve the mean, as doubly stochastic ones do."""
    topology = make_topology(chosen, comm)
    if not topology.doubly_stochastic:
        raise ConfigError(
            f"strategy.topology of {strategy} must be doubly stochastic; got {chosen.name}. Take ring, torus, "
            "exponential, one_peer_exponential, complete or graph; or strategy sgp."
        )
    return topology


class Mixing:
    """Collective. Mix tensors xᵢ over ranks i with a topology's weights: xᵢ ← Σⱼ Wᵢⱼ xⱼ.

    A static topology uses a neighbourhood of the communicator, others send messages in each step. Messages: one per
    tensor and destination. `mix` sends none if all its tensors come from `share` and the ranks are on one node, see
    `MeansInPlace`; it counts the messages that it replaces.

    Args:
        comm: a communicator that only this object sends on.
        overlap: ranks compute between `start` and `finish`.
        identity_weight: k, to mix by kI + (1 − k)W.
    """

    def __init__(self, comm: Communicator, topology: Topology, *, overlap: bool, identity_weight: float = 0.0):
        self._comm, self._topology, self._identity_weight = comm, topology, identity_weight
        self._static = comm.neighbourhood(*self._peers(0)) if topology.static else None
        self._received: list[Tensor] = []
        self._in_place = MeansInPlace(comm)
        self.share = self._in_place.share
        self._sent: Sequence[Tensor] = ()
        self._requests: list[Request] = []  # of the exchange in flight
        self._step = 0  # of the exchange in flight
        self._context = ExitStack()
        if overlap and comm.size > 1:
            self._context.enter_context(comm.overlapping())

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has been started and not finished."""
        return bool(self._requests)

    def start(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Start sending flat `tensors` to the neighbours of `step`; they must not change until `finish`."""
        sources, destinations = self._peers(step)
        exchange = self._static or Neighbourhood(self._comm, sources, destinations)
        lengths = [len(sources) * tensor.numel() for tensor in tensors]
        types = [tensor.dtype for tensor in tensors]
        if lengths != [r.numel() for r in self._received] or types != [r.dtype for r in self._received]:
            self._received = [t.new_empty(n) for t, n in zip(tensors, lengths, strict=True)]
        self._sent = tuple(tensors)
        self._requests = [exchange.start(t, r) for t, r in zip(tensors, self._received, strict=True)]
        self._step = step

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Wait for the exchange and mix `tensors`, in place.

        `start` has sent the same tensors, or rounded copies; rounding errors then stay here, which conserves sums.
        """
        self.drop()  # only waits here: the received tensors stay
        weights = self._weights(self._comm.rank, self._step)
        local_weight = weights.pop(self._comm.rank)
        with torch.no_grad():
            for tensor, sent, received in zip(tensors, self._sent, self._received, strict=True):
                remote = received.view(len(weights), tensor.numel())
                for local, as_sent, *parts in alongside(tensor, sent, *remote):
                    weighted = zip(weights.values(), parts, strict=True)
                    if sent.dtype != tensor.dtype:
                        local.sub_(as_sent, alpha=1 - local_weight)  # the rounding error stays in full
                        for weight, part in weighted:
                            local.add_(part, alpha=weight)
                    else:
                        average(local, local_weight, weighted)

    def mix(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Mix `tensors` with the neighbours of `step`, in place; blocking."""
        if self._in_place.suits(tensors):
            self._in_place(tensors, [self._weights(rank, step) for rank in range(self._comm.size)])
            n_to = len(self._peers(step)[1])
            self._comm.trace.traffic.sent(n_to * sum(t.nbytes for t in tensors), n_to * len(tensors))
        else:
            self.start(tensors, step)
            self.finish(tensors)

    def drop(self) -> None:
        """Collective. Wait for the exchange in flight, if any, and drop its result."""
        for request in self._requests:
            request.wait()
        self._requests = []

    def close(self) -> None:
        """Collective. Wait for the exchange in flight, and release the neighbourhood."""
        self.drop()
        if self._static is not None:
            self._static.close()
        self._context.close()

    def _weights(self, rank: int, step: int) -> dict[int, float]:
        """Return a rank's weights at `step` by source, its own among them."""
        weights = self._topology.in_neighbours(rank, step)
        if self._identity_weight:
            weights = {peer: (1 - self._identity_weight) * weight for peer, weight in weights.items()}
            weights[rank] += self._identity_weight
        return weights

    def _peers(self, step: int) -> tuple[list[int], list[int]]:
        """Return the sources at `step`, in the order of their weights, and the destinations."""
        rank, topology = self._comm.rank, self._topology
        neighbours = topology.in_neighbours(rank, step), topology.out_neighbours(rank, step)
        received_from, sent_to = ([peer for peer in ranks if peer != rank] for ranks in neighbours)
        return received_from, sent_to
