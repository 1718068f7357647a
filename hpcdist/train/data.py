"""The data file of a job: made where it is not there yet, and opened."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcdist.comm.communicator import Communicator, mpi_of
from hpcdist.config import JobConfig
from hpcdist.data.hdf5 import COLUMNS, HDF5Dataset
from hpcdist.errors import NO_SPACE, OutputError
from hpcdist.records import writing
from hpcdist.train.job import Job


def open_data(
    job: Job, config: JobConfig, comm: Communicator, columns: Collection[str] = COLUMNS
) -> tuple[HDF5Dataset, HDF5Dataset]:
    """Collective. Open the splits `train` and `test` of a job's data file, which rank 0 makes if it isn't there.

    Args:
        columns: those that this rank reads, of x and y.
    """
    path = Path(config.data.path)
    if comm.rank == 0:
        make_data(job, path)
    comm.barrier()
    given: dict[str, Any] = {"mpi_comm": mpi_of(comm) if config.data.parallel else None, "columns": columns}
    return HDF5Dataset(path, "train", **given), HDF5Dataset(path, "test", **given)


def make_data(job: Job, path: Path) -> None:
    """Make the data file if it isn't there; remove one that was not written to its end."""
    if path.exists():
        return
    try:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        job.data(path)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise OutputError.of(path, error) from error
        raise
