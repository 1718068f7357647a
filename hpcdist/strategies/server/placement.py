"""Place one rank among servers, aggregators and workers, and the parameters on the servers."""

from __future__ import annotations

from hpcdist.compress import spans
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.roles import Roles
from hpcdist.strategies.server.shards import Shard, cut


class Placement:
    """Place one rank: the shard that it serves, and the ranks with which it exchanges requests.

    Args:
        split_parameters: shards have equal bytes, and may begin inside a parameter.

    Attributes:
        shards: what the requests to each server or aggregator cover.
        shard: what this rank serves; None: it doesn't serve.
        everything: the whole model.
        parents, children: the ranks to which this one pushes, and those that push to it.
        colocated: it is a worker, and serves while it is inside a step.
        aggregates: it passes sums of gradients on to its own parent.
        alone: there is no other rank, and no server.
    """

    def __init__(self, rank: int, roles: Roles, model: FlatModel, *, split_parameters: bool):
        self.rank, self.roles = rank, roles
        self.everything = Shard(tuple((0, flat.numel()) for flat in model.params))
        shards = cut(model.params, max(1, len(roles.servers)), None if split_parameters else spans(model))
        self.shards = dict(zip(roles.servers, shards)) | dict.fromkeys(roles.aggregators, self.everything)
        self.shard = self.shards.get(rank)
        self.parents, self.children = roles.parents.get(rank, ()), roles.children(rank)
        self.colocated = rank in roles.workers and bool(self.children)
        self.aggregates = rank in roles.aggregators
        self.alone = not roles.servers

    def ranges(self) -> list[list[list[int]]]:
        """Return each server's ranges, for a checkpoint; on one rank they are all its own."""
        shards = [self.everything] if self.alone else [self.shards[server] for server in self.roles.servers]
        return [[list(found) for found in shard.ranges] for shard in shards]
