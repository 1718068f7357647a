"""Distributed deep learning on HPC clusters: any distribution strategy of the literature, by one word."""

import importlib

__version__ = "0.1.0"
__all__ = ["DistributedOptimizer", "Leaving", "broadcast", "init", "local_rank", "rank", "shard", "size"]


def __getattr__(name: str):
    # Looked up on first use, so that importing one module of the package does not load all of it.
    if name in __all__:
        return getattr(importlib.import_module("hpcdist.session"), name)
    raise AttributeError(f"module 'hpcdist' has no attribute {name!r}")
