"""What the tests of the collectives share: making an algorithm, and the vectors to be summed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hpcdist.collectives import AllReduce, load
from hpcdist.comm.communicator import Communicator
from hpcdist.records import tensor_bytes


def make(name: str, comm: Communicator, cache_dir: Path) -> AllReduce:
    """Collective. The algorithm; `auto` with its table in a folder of the test's."""
    return load(name)(comm, cache_dir) if name == "auto" else load(name)(comm)


def addend(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """One rank's vector: any bits of an integer type, normally distributed numbers otherwise."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_complex:
        parts = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    n_bytes = count * torch.empty(0, dtype=dtype).itemsize
    return torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor_bytes(tensor).tobytes()


def summed_in_rank_order(count: int, dtype: torch.dtype, size: int) -> Tensor:
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = addend(0, count, dtype).to(wide)
    for rank in range(1, size):
        total += addend(rank, count, dtype)
    return total.to(dtype)
