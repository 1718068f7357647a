"""Train a job by other libraries, as their users write it: what one would pick instead, one file per library.

    mpirun -n 4 python -m hpcdist.tools.baselines.ddp jobs/digits.py --output runs/ddp --set epochs=4

A baseline trains with the settings of `hpcdist train`, on the same batches, and leaves the same folder.
"""

from __future__ import annotations

import importlib
import pkgutil

from hpcdist.tools.baselines.base import Library


def available() -> list[str]:
    """List the baselines' names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def load(name: str) -> type[Library]:
    """Import the baseline of a name that is available."""
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Library) and cls is not Library
    )
