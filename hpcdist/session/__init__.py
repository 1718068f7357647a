"""Train in the user's loop, with Horovod's nouns::

hd.init()
optimizer = hd.DistributedOptimizer(optimizer, model, strategy="gossip_pull")
loader = hd.shard(loader)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
"""

from hpcdist.session.checkpoints import load, save, unsplit
from hpcdist.session.consensus import consensus, finish
from hpcdist.session.leaving import Leaving
from hpcdist.session.loader.sharded import shard
from hpcdist.session.optimizer import DistributedOptimizer
from hpcdist.session.pipeline import device_mesh, local_shards, pipeline
from hpcdist.session.sync_batch_norm import SyncBatchNorm
from hpcdist.session.values import allgather, allreduce, barrier, broadcast, metric
from hpcdist.session.world import init, is_main, local_rank, local_size, log_metrics, rank, size
