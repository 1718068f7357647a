"""Tells, as one line of JSON, what torch, CUDA, NCCL and MPI of this machine are; what can't be told is left out."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable


def torch_facts() -> dict:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [{"name": p.name, "gib": round(p.total_memory / 2**30, 1)} for p in properties],
    }
    if dist.is_nccl_available() and count:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def mpi_facts() -> dict:
    import mpi4py

    mpi4py.rc.initialize = False  # whether it starts is another question
    from mpi4py import MPI

    from hpcdist.comm.mpi.library import supports_cuda

    version = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split()).strip("\0")
    return {"mpi4py": mpi4py.__version__, "mpi": version, "mpi_reads_gpu_memory": supports_cuda()}


def h5py_facts() -> dict:
    import h5py

    return {"h5py": h5py.__version__, "h5py_mpi": h5py.get_config().mpi}


def nvcc_facts() -> dict:
    program = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if program is None:
        return {}
    text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    return {"nvcc": next((line for line in text.splitlines() if "release" in line), program).strip()}


def driver_facts() -> dict:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return {"driver": text.splitlines()[0]}


def main() -> None:
    found = {"python": platform.python_version(), "executable": sys.executable, "cores": _cores()}
    problems: dict[str, str] = {}
    parts: list[Callable[[], dict]] = [torch_facts, mpi_facts, h5py_facts, nvcc_facts, driver_facts]
    for part in parts:
        try:
            found |= part()
        except Exception as error:  # such as a library that is not there: the others are
            problems[part.__name__.removesuffix("_facts")] = f"{type(error).__name__}: {error}"
    print(json.dumps({**found, "problems": problems}))


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
