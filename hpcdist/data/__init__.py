"""Data: HDF5 files that every rank reads its own part of, each sample exactly once per epoch.

`create` writes a file, `HDF5Dataset` reads it, `EpochPlan` says which rank reads which samples, `Loader` iterates one
rank's batches, `describe` tells what a file holds, `importers` makes such files from other formats.
"""

from hpcdist.data.description import describe
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader, ShardedBatchSampler
from hpcdist.data.sharding import EpochPlan
from hpcdist.data.writer import Split, create

__all__ = ["EpochPlan", "HDF5Dataset", "Loader", "ShardedBatchSampler", "Split", "create", "describe"]
