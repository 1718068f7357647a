"""Device memory given to MPI as it is, where MPI was built to read and write it (CUDA-aware MPI)."""

from __future__ import annotations

import ctypes

import torch
from mpi4py import MPI

from hpcdist.comm.mpi.library import version


def obstacle() -> str:
    """Say why this rank's MPI can't use the memory of its device; empty where it can, or where that is unknown."""
    return explain(torch.cuda.device_count(), supports_cuda())


def explain(devices: int, supported: bool | None) -> str:
    """Say so, given the number of CUDA devices, and whether MPI reads their memory (None: unknown)."""
    if devices == 0:
        return "torch finds no CUDA device"
    return f"{version()} was built or started without CUDA support" if supported is False else ""


def supports_cuda() -> bool | None:
    """Ask MPI whether it reads CUDA memory; None where it has no such call, an extension of Open MPI and MPICH."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)  # looked up in the library beneath too
    return None if query is None else bool(query())
