"""Save and restore the global random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch

from hpcdist.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """Return the states of Python's `random`, NumPy's legacy generator, torch's on the CPU and the CUDA device's.

    The CUDA state is included only if CUDA is in use, so that this call does not allocate memory on a device.
    """
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the states from `random_state`; raise CheckpointError if `state` is not its result.

    A CUDA state is skipped, with a warning, if there is no CUDA.
    """
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"random state must hold the states of python, numpy and torch; got {type(error).__name__}: {error}. "
            "Pass what random_state() returned."
        ) from None
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    elif "cuda" in state:
        warnings.warn(
            "The checkpoint was saved with CUDA, which is not available here: random numbers on the device, such as "
            "dropout's, will not continue where they were.",
            stacklevel=2,
        )
