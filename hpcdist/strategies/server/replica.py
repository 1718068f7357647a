"""Keep a worker's copy of the parameters, and count the updates in it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.placement import Placement
from hpcdist.strategies.server.requests import ReplyHead


class Replica:
    """Take parameters from replies into the model, shard by shard; a shard that lies in the model already stays.

    Attributes:
        clock: updates of the parameters in the model; of the first shard's, where there are several.
        clocks: for each parent, updates of the parameters that have come from it.
    """

    def __init__(self, place: Placement, model: FlatModel):
        self._model = model
        others = [place.shards[parent] for parent in place.parents if parent != place.rank]
        self._whole = len(others) == len(place.parents)
        self._shards = [place.everything] if self._whole else others
        self.clock, self.clocks = 0, [0] * len(place.parents)

    def take(self, heads: Sequence[ReplyHead], arrived: Sequence[Tensor]) -> None:
        """Copy what has arrived from all parents into the model."""
        for shard in self._shards:
            own, new = self._model.params, arrived
            if not self._whole:
                own, new = shard.of(own), shard.of(new)
            for params, values in zip(own, new, strict=True):
                params.copy_(values)
        self.clocks = [head.clock for head in heads]
        self.clock = self.clocks[0]
