"""How many names the model in flat memory has: each is one more that a reader of strategies and sessions meets."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import hpcdist.model
from test_seam import members

NAMES = 67


def names() -> list[str]:
    """The public methods and attributes of the public classes in `hpcdist.model`."""
    found = []
    for info in pkgutil.iter_modules(hpcdist.model.__path__):
        module = importlib.import_module(f"hpcdist.model.{info.name}")
        classes = {name: cls for name, cls in inspect.getmembers(module, inspect.isclass) if not name.startswith("_")}
        own = [(name, cls) for name, cls in classes.items() if cls.__module__ == module.__name__]
        found += [f"{name}.{member}" for name, cls in own for member in members(cls)]
    return sorted(found)


def test_the_model_has_few_names():
    assert len(names()) <= NAMES, names()
