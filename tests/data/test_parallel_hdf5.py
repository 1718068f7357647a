"""Reading by parallel HDF5 (driver mpio), where some Python on this machine has it; otherwise skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.data import HDF5Dataset, Split, create

DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")
DEBIAN_PYTHON, DEBIAN_MPIRUN = "/usr/bin/python3", "/usr/bin/mpirun.openmpi"
SAMPLES = 101
LAUNCHER_SETTINGS = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PYTHON")


@pytest.fixture
def launcher(tmp_path):
    """(mpirun, Python, its module path) such that h5py has parallel HDF5 and torch is the one of this process."""
    root, torch_packages = Path(hpcdist.__file__).parents[1], Path(torch.__file__).parents[1]
    if h5py.get_config().mpi and shutil.which("mpirun"):
        return shutil.which("mpirun"), sys.executable, [root, torch_packages]
    if not (DEBIAN_PACKAGES / "h5py" / "_debian_h5py_mpi").is_dir() or not shutil.which(DEBIAN_MPIRUN):
        pytest.skip("no h5py with parallel HDF5 (on Debian: python3-h5py-mpi, python3-mpi4py and openmpi-bin)")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if Path(DEBIAN_PYTHON).resolve().name != version:
        pytest.skip(f"Debian's h5py with parallel HDF5 is for another Python than {version}, which torch is for")
    chosen = tmp_path / "debian"  # these and none of Debian's other packages
    chosen.mkdir()
    for name in ("h5py", "numpy", "mpi4py"):
        (chosen / name).symlink_to(DEBIAN_PACKAGES / name)
    return DEBIAN_MPIRUN, DEBIAN_PYTHON, [chosen, root, torch_packages]


@pytest.fixture
def files(tmp_path):
    x = np.repeat(np.arange(SAMPLES, dtype=np.float32)[:, None], 2, axis=1)
    return [
        create(
            tmp_path / f"{compression}.h5",
            {"train": Split.of(x, np.arange(SAMPLES) % 3)},
            task="classification",
            classes=["a", "b", "c"],
            chunk_samples=7,
            compression=compression,
        )
        for compression in (None, "gzip")
    ]


def test_two_ranks_read_everything(launcher, files):
    mpirun, python, path = launcher
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_SETTINGS)}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    script = Path(__file__).with_name("parallel_read.py")
    command = [mpirun, "--oversubscribe", "-n", "2", python, str(script), *map(str, files)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(f"rank {rank} of 2 has read everything" in run.stdout for rank in range(2))


@pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py has parallel HDF5, so a communicator is made use of")
def test_a_communicator_makes_no_difference_without_parallel_hdf5(files):
    with HDF5Dataset(files[0], mpi_comm=object()) as dataset:
        assert not dataset.parallel and dataset.mapped and len(dataset.batch([1, 2])[0]) == 2
