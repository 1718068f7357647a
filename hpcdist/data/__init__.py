"""Data: HDF5 files that every rank reads its own part of, each sample exactly once per epoch.

`create` writes a file, `HDF5Dataset` reads it, `describe` describes it, `EpochPlan` divides an epoch's samples among
the ranks, `Loader` iterates one rank's batches, `importers` makes such files from other formats.
"""

from hpcdist.data.description import describe
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader, ShardedBatchSampler
from hpcdist.data.sharding import EpochPlan
from hpcdist.data.writer import Split, create

__all__ = ["EpochPlan", "HDF5Dataset", "Loader", "ShardedBatchSampler", "Split", "create", "describe"]
