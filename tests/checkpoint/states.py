"""States, ways to save and load them, and how to tell that nothing changed on the way."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hpcdist.checkpoint import SavedRank, save, verify
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError, MismatchError
from hpcdist.records import tensor_bytes


@contextmanager
def short_files() -> Iterator[None]:
    """Files of at most 50,000 bytes: a longer one fails half-way with an OSError, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_alone(folder, step, state, **options) -> Path:
    return run_virtual(lambda comm: save(comm, folder, step, state, **options), 1)[0]


def loaded(path) -> list:
    """The states of all ranks in a checkpoint, which is verified."""
    return [SavedRank(path, rank).at() for rank in range(verify(path).ranks)]


def through_a_file(folder, state):
    return loaded(save_alone(folder, 0, state))[0]


def bits(value):
    """The value with all that must survive, types and NaN's bits included, in a form that `==` compares."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, bytes(tensor_bytes(value))
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), value


def state_of(rank, step):
    """A rank's state. `common` is the same on all ranks, so that one of them writes it."""
    common = torch.full((40,), step / 8)
    weight = torch.full((4,), rank + step / 8)
    return {"rank": rank, "step": step, "weight": weight, "data": (rank, [step]), "common": common}


def refused(comm, *args, **options):
    """Which error a rank gets when it saves."""
    try:
        save(comm, *args, **options)
    except (CheckpointError, MismatchError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def names(folder):
    return sorted(os.listdir(folder))
