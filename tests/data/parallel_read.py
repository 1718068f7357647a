"""Run under mpirun with an h5py that has parallel HDF5: reads the files that are named, and checks every value.

The files hold (i, i) as x and i % 3 as y of sample i.
"""

from __future__ import annotations

import os
import pickle
import sys

import h5py
import numpy as np
import torch
from mpi4py import MPI

from hpcdist.data import HDF5Dataset, Loader
from hpcdist.errors import ConfigError

BATCH = 8


def refused(call, message: str) -> None:
    """Raises unless `call()` ends in a ConfigError that begins with `message`."""
    try:
        call()
    except ConfigError as error:
        if str(error).startswith(message):
            return
        raise
    raise RuntimeError(f"not refused: {message}")


def read_all(dataset: HDF5Dataset, comm: MPI.Comm) -> None:
    """Each sample is read by one rank only, all are read, and all values are right."""
    mine = []
    for x, y in Loader(dataset, BATCH, worker=comm.rank, workers=comm.size, seed=1):
        indices = x[:, 0].long()
        torch.testing.assert_close(x, indices[:, None].expand(-1, 2).float(), rtol=0, atol=0)
        torch.testing.assert_close(y, indices % 3)
        mine += indices.tolist()
    everyone = sorted(sum(comm.allgather(mine), []))
    if everyone != list(range(len(dataset))):
        raise RuntimeError(f"read {everyone}")


def fails_in_a_child(dataset: HDF5Dataset) -> None:
    child = os.fork()
    if child == 0:
        try:
            dataset.batch([0])
        except ConfigError as error:
            os._exit(7 if "must be used in the process that opened it" in str(error) else 8)
        os._exit(9)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7:
        raise RuntimeError("a forked process was not refused")


def main(paths: list[str]) -> None:
    comm = MPI.COMM_WORLD
    if not h5py.get_config().mpi:
        raise RuntimeError("this h5py has no parallel HDF5")
    for path in paths:
        with HDF5Dataset(path, mpi_comm=comm) as dataset:
            if not dataset.parallel or dataset.mapped:
                raise RuntimeError(f"{path} is not read by parallel HDF5")
            read_all(dataset, comm)
            refused(
                lambda dataset=dataset: pickle.dumps(dataset), "a dataset on parallel HDF5 must be used in the process"
            )
            fails_in_a_child(dataset)
        refused(lambda dataset=dataset: dataset.batch([0]), "a dataset on parallel HDF5 must be used in the process")
        with HDF5Dataset(path) as dataset:  # the same h5py, each rank by itself
            np.testing.assert_array_equal(dataset.batch([5, 0])[1], [2, 0])
    print(f"rank {comm.rank} of {comm.size} has read everything", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
