"""Mix with the neighbours, x ← Wx, while the ranks compute; and the learning rates that some rules need for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.messages import Messages
from hpcdist.config import Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.optimizer_state import groups
from hpcdist.topology import Topology, make_topology


def rates(model: FlatModel, optimizer: torch.optim.Optimizer | None) -> list[float]:
    """Return the learning rate of each parameter, in the order of `model.slots`; 1 where none is known.

    Adafactor's may be None, for example, where it finds its own.
    """
    found = (None if group is None else group.get("lr") for group in groups(model, optimizer))
    return [1.0 if rate is None else float(rate) for rate in found]


def conserving(chosen: Named, comm: Communicator, strategy: str) -> Topology:
    """Make a topology for a strategy, one whose weights conserve the mean.

    Raises:
        ConfigError: they don't.
    """
    topology = make_topology(chosen, comm)
    if not topology.doubly_stochastic:
        raise ConfigError(
            f"strategy.topology of {strategy} must be doubly stochastic; got {chosen.name}. Take ring, torus, "
            "exponential, one_peer_exponential, complete or graph; or strategy sgp."
        )
    return topology


class Mixing:
    """Collective. Mix tensors xᵢ over ranks i with a topology's weights: xᵢ ← Σⱼ Wᵢⱼ xⱼ.

    Where the neighbours never change they make a neighbourhood of the communicator, else each step has messages of its
    own. Messages: one per tensor and neighbour sent to.

    Args:
        comm: nobody else sends on it.
        overlap: ranks compute between `start` and `finish`.
        kept: part k of a rank's own tensors that stays: it mixes by kI + (1 − k)W.
    """

    def __init__(self, comm: Communicator, topology: Topology, *, overlap: bool, kept: float = 0.0):
        self._comm, self._topology, self._kept = comm, topology, kept
        self._static = comm.neighbourhood(*self._peers(0)) if topology.static else None
        self._received: list[Tensor] = []
        self._sent: Sequence[Tensor] = ()
        self._requests: list[Request] = []  # of the exchange under way
        self._step = 0  # that it is of
        self._context = ExitStack()
        if overlap and comm.size > 1:
            self._context.enter_context(comm.overlapping())

    @property
    def in_flight(self) -> bool:
        """Tell whether an exchange has been started and not finished."""
        return bool(self._requests)

    def start(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Start sending `tensors`, flat ones, to the neighbours of `step`.

        Never blocks. The tensors must not change until `finish`.
        """
        sources, destinations = self._peers(step)
        around = self._static or Messages(self._comm, sources, destinations)
        wanted = [len(sources) * tensor.numel() for tensor in tensors]
        types = [tensor.dtype for tensor in tensors]
        if wanted != [r.numel() for r in self._received] or types != [r.dtype for r in self._received]:
            self._received = [t.new_empty(n) for t, n in zip(tensors, wanted, strict=True)]
        self._sent = tuple(tensors)
        self._requests = [around.start(t, r) for t, r in zip(tensors, self._received, strict=True)]
        self._step = step

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Wait for the exchange and mix `tensors`, in place.

        They were sent, or rounded copies of them; rounding errors then stay, so that sums are conserved.
        """
        self.drop()
        weights = self._topology.in_neighbours(self._comm.rank, self._step)
        if self._kept:
            weights = {peer: (1 - self._kept) * weight for peer, weight in weights.items()}
            weights[self._comm.rank] += self._kept
        own = weights.pop(self._comm.rank)
        with torch.no_grad():
            for tensor, sent, received in zip(tensors, self._sent, self._received, strict=True):
                for mine, as_sent, *theirs in alongside(tensor, sent, *received.view(len(weights), tensor.numel())):
                    if sent.dtype != tensor.dtype:
                        mine.sub_(as_sent, alpha=1 - own)
                        for weight, part in zip(weights.values(), theirs, strict=True):
                            mine.add_(part, alpha=weight)
                        continue
                    whole = own
                    for weight, part in zip(weights.values(), theirs, strict=True):
                        whole += weight
                        mine.lerp_(part, weight / whole)  # by differences: equal values stay the same to the bit
                    if not math.isclose(whole, 1):  # only columns of W add up to 1
                        mine.mul_(whole)

    def mix(self, tensors: Sequence[Tensor], step: int) -> None:
        """Collective. Mix `tensors` with the neighbours of `step`, in place, and wait for it."""
        self.start(tensors, step)
        self.finish(tensors)

    def drop(self) -> None:
        """Collective. Wait for the exchange under way, if there is one, and drop its result."""
        for request in self._requests:
            request.wait()
        self._requests = []

    def close(self) -> None:
        """Collective. Wait for the exchange under way, and release the neighbourhood."""
        self.drop()
        if self._static is not None:
            self._static.close()
        self._context.close()

    def _peers(self, step: int) -> tuple[list[int], list[int]]:
        """Return the ranks received from at `step`, in the order of their weights, and those sent to."""
        rank, topology = self._comm.rank, self._topology
        sides = topology.in_neighbours(rank, step), topology.out_neighbours(rank, step)
        received_from, sent_to = ([peer for peer in side if peer != rank] for side in sides)
        return received_from, sent_to
