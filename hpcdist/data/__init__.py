"""Data: HDF5 files that every rank reads its part of, each sample exactly once per epoch.

`create` writes a file, `HDF5Dataset` reads it, `describe` describes it, `EpochPlan` divides an epoch's samples among
the ranks, `Loader` iterates one rank's batches, `importers` creates such files from other formats.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hpcdist.errors import require_packages

if TYPE_CHECKING:  # for editors and checkers of types; see __getattr__
    from hpcdist.data.description import describe
    from hpcdist.data.hdf5 import HDF5Dataset
    from hpcdist.data.loader import Loader, ShardedBatchSampler
    from hpcdist.data.sharding import EpochPlan
    from hpcdist.data.writer import Split, create

_HOMES = {
    "EpochPlan": "sharding",
    "HDF5Dataset": "hdf5",
    "Loader": "loader",
    "ShardedBatchSampler": "loader",
    "Split": "writer",
    "create": "writer",
    "describe": "description",
}
__all__ = ["EpochPlan", "HDF5Dataset", "Loader", "ShardedBatchSampler", "Split", "create", "describe"]


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that a loop on other data doesn't load h5py.
    if name in _HOMES:
        if _HOMES[name] != "sharding":
            require_packages(f"hpcdist.data.{name}", "tools", "h5py")
        return getattr(importlib.import_module(f"hpcdist.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hpcdist.data' has no attribute {name!r}")
