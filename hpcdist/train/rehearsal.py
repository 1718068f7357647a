"""Set a job up on virtual ranks, to find errors that so many ranks would raise at their start."""

from __future__ import annotations

import math

from torch import nn

from hpcdist import session, strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config import JobConfig
from hpcdist.parallel.grid import checked_stages

MOST = 256  # virtual ranks are threads: with more it takes too long
WIDTH = 128  # of a model that every rank can hold a shard of


def rehearse(config: JobConfig, ranks: int, ranks_per_node: int = 1) -> None:
    """Make the strategy and the optimiser of a checked configuration on virtual ranks, and close them.

    Of a model in stages there is a rank for each replica, for the stages don't concern the strategy.

    Of more than 256 ranks only the roles are checked, and of other libraries' sums nothing else.

    Raises:
        ConfigError: the ranks would raise it: too few workers, a topology that does not suit their number...
    """
    cls = strategies.load(config.strategy.name)
    options = cls.Config.from_mapping(config.strategy.options, "strategy")
    stages = config.parallel.stages
    replicas = ranks // checked_stages(stages, ranks)
    options.workers(replicas)
    if replicas > MOST or getattr(options, "provider", None):
        return
    network = Network(0.0, math.inf, ranks_per_node=max(1, ranks_per_node // stages))
    run_virtual(lambda comm: _set_up(config, comm), replicas, network=network)


def _set_up(config: JobConfig, comm: Communicator) -> None:
    session.init(comm=comm)
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = config.optimizer.build(module.parameters())
    options = {"on_nonfinite": "skip" if config.amp == "fp16" else config.on_nonfinite, **config.strategy.options}
    session.DistributedOptimizer(optimizer, module, config.strategy.name, clip_norm=config.clip_norm, **options)
    strategy = optimizer.strategy
    strategy.close()
    strategy.comm.close()
    strategy.model.close()
