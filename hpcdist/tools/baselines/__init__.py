"""Train a job with other libraries, for comparison: one file per library.

    mpirun -n 4 python -m hpcdist.tools.baselines.ddp jobs/digits.py --output runs/ddp --set epochs=4

A baseline uses the settings of `hpcdist train` and the same batches, and writes the same files.
"""

from __future__ import annotations

import importlib
import pkgutil

from hpcdist.tools.baselines.base import Library


def available() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def load(name: str) -> type[Library]:
    """Import a baseline by name."""
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Library) and cls is not Library
    )
