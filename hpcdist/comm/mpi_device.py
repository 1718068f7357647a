"""Device memory given to MPI as it is, where MPI was built to read and write it (CUDA-aware MPI)."""

from __future__ import annotations

import ctypes

import torch
from mpi4py import MPI

from hpcdist.comm.mpi import library


def obstacle() -> str:
    """Why this rank's MPI can't be given the memory of its device; empty where it can, or does not tell."""
    return explain(torch.cuda.device_count(), supports_cuda())


def explain(devices: int, supported: bool | None) -> str:
    """In words: the number of CUDA devices, and whether MPI reads their memory (None: it does not tell)."""
    if devices == 0:
        return "torch finds no CUDA device"
    return f"{library()} was built or started without CUDA support" if supported is False else ""


def supports_cuda() -> bool | None:
    """What MPI says of itself; None where it has no such call. Open MPI and MPICH have it, outside the standard."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)  # looked up in the library beneath too
    return None if query is None else bool(query())
