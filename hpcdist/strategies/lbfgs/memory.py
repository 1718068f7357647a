"""Open the windows through which workers fetch parameters from shards, and push gradients into them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.strategies.lbfgs.roles import LbfgsRoles
from hpcdist.strategies.server.placement import Shard, cut


class ShardMemory:
    """Collective. Open windows on the shards: the point that is evaluated, and a slot for each worker's gradient.

    Args:
        params: flat parameters, of which every shard has a range of about as many bytes.

    Attributes:
        shards: the range of each shard's rank.
        point: this shard's part of the point; empty on other ranks.
    """

    def __init__(self, comm: Communicator, roles: LbfgsRoles, params: Sequence[Tensor]):
        self._workers = {worker: slot for slot, worker in enumerate(roles.workers)}
        self._rank = comm.rank
        self.shards: dict[int, Shard] = dict(zip(roles.shards, cut(params, len(roles.shards))))
        own = self.shards[comm.rank].of(params) if comm.rank in self.shards else [flat[:0] for flat in params]
        self._lengths = [part.numel() for part in own]
        self._points = [comm.window(part.numel(), part.dtype) for part in own]
        self._slots = [comm.window(len(roles.workers) * part.numel(), part.dtype) for part in own]
        self.point = [window.local for window in self._points]

    def fetch(self, into: Sequence[Tensor]) -> None:
        """Copy the point from all shards into flat parameters."""
        for rank, shard in self.shards.items():
            for window, part in zip(self._points, shard.of(into), strict=True):
                if part.numel():
                    window.get(part, rank)

    def puts(self, rank: int, gradients: Sequence[Tensor]) -> list[Put]:
        """Return the puts that bring this worker's gradients into its slot on a shard."""
        slot, parts = self._workers[self._rank], self.shards[rank].of(gradients)
        return [
            Put(window, part, rank, slot * part.numel())
            for window, part in zip(self._slots, parts, strict=True)
            if part.numel()
        ]

    def pushed(self, worker: int) -> list[Tensor]:
        """Return what lies in a worker's slot here."""
        slot = self._workers[worker]
        return [
            window.local[slot * length : (slot + 1) * length]
            for window, length in zip(self._slots, self._lengths, strict=True)
        ]

    def close(self) -> None:
        """Collective. Close the windows."""
        self.point = []  # their memory goes
        for window in (*self._points, *self._slots):
            window.close()
