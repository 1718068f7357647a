"""Distributed training in the user's own loop, with Horovod's nouns::

    hd.init()
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy="gossip_pull")
    loader = hd.shard(loader)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""

from hpcdist.session.leaving import Leaving
from hpcdist.session.optimizer import DistributedOptimizer
from hpcdist.session.shard import shard
from hpcdist.session.world import broadcast, init, local_rank, rank, size

__all__ = ["DistributedOptimizer", "Leaving", "broadcast", "init", "local_rank", "rank", "shard", "size"]
