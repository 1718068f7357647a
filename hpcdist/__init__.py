"""Distributed deep learning on HPC clusters: 31 published strategies, chosen by one word."""

import importlib
from typing import TYPE_CHECKING, Any

from hpcdist.version import __version__ as __version__

if TYPE_CHECKING:  # for editors and checkers of types; see __getattr__
    from hpcdist.session.checkpoints import load, save, unsplit
    from hpcdist.session.consensus import consensus, finish
    from hpcdist.session.leaving import Leaving
    from hpcdist.session.loader.sharded import shard
    from hpcdist.session.optimizer import DistributedOptimizer
    from hpcdist.session.pipeline import device_mesh, local_shards, pipeline
    from hpcdist.session.sync_batch_norm import SyncBatchNorm
    from hpcdist.session.values import allgather, allreduce, barrier, broadcast, metric
    from hpcdist.session.world import init, is_main, local_rank, local_size, log_metrics, rank, size
    from hpcdist.tools.compare.functions import compare, simulate, sweep
    from hpcdist.tools.report.page import read_runs
    from hpcdist.tools.slurm.submit import Future, submit

__all__ = [
    "DistributedOptimizer", "Future", "Leaving", "SyncBatchNorm", "allgather", "allreduce", "barrier", "broadcast",
    "compare", "consensus", "device_mesh", "finish", "init", "is_main", "load", "local_rank", "local_shards",
    "local_size", "log_metrics", "metric", "pipeline", "rank", "read_runs", "save", "shard", "simulate", "size",
    "submit", "sweep", "unsplit",
]  # fmt: skip
# Names of the tools, by their modules; all others are in hpcdist.session.
_TOOLS = {
    "Future": "slurm.submit",
    "compare": "compare.functions",
    "read_runs": "report.page",
    "simulate": "compare.functions",
    "submit": "slurm.submit",
    "sweep": "compare.functions",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that importing one module of the package does not load all of it.
    if name in __all__:
        home = f"hpcdist.tools.{_TOOLS[name]}" if name in _TOOLS else "hpcdist.session"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'hpcdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
