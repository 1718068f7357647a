"""What the processes of the pool's tests do: they import it by name."""

from __future__ import annotations

import os

import torch


def square(settings: dict) -> dict:
    if settings["x"] < 0:
        raise ArithmeticError(f"x is {settings['x']}")
    return {"square": settings["x"] ** 2, "process": os.getpid(), "threads": torch.get_num_threads(), "by": {3: 1}}


def unwanted(settings: dict) -> dict:
    raise AssertionError("this run was made before")
