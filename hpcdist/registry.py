"""Find and load plug-ins: strategies, compressors, topologies...

A plug-in's name is that of its module in the folder of its kind; or of an entry point, by which installed packages add
plug-ins; or it is `path/to/file.py:Class`, relative to the current folder. Listing names imports nothing; only the
plug-in that is used is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hpcdist.config.files import is_class, load_member, split_reference
from hpcdist.errors import ConfigError, HpcdistError, UnknownNameError, place

Take = Callable[[Any, str, str], Any]  # (imported module or member, plug-in's name, its origin) -> plug-in


class Origin(NamedTuple):
    """Where a plug-in comes from: a description for messages, and a function that imports it or its module."""

    where: str
    open: Callable[[], Any]


@dataclass(frozen=True)
class Catalogue:
    """The plug-ins of one kind.

    Args:
        group: entry points of other packages are in the group `hpcdist.<group>`.
        package: every module in this package is a plug-in, except `base` and names that start with `_`.
        setting: the setting that names a plug-in, for messages.
        take: converts an imported object to the plug-in, or raises ConfigError.
        member: placeholder for the name after the colon in `path/to/file.py:member`, for messages.

    Example:
        >>> from hpcdist.registry import catalogue
        >>> "ring" in catalogue("topologies").available()
        True
        >>> catalogue("topologies").load("ring").__name__
        'RingGraph'
    """

    group: str
    package: str
    setting: str
    take: Take
    member: str = "Class"

    def available(self) -> list[str]:
        """Return the names of hpcdist's and of installed packages' plug-ins, sorted. Imports nothing."""
        return sorted({*_modules(self.package), *self._installed()})

    def find(self, name: str) -> Origin:
        """Return the origin of the plug-in `name`: a file, hpcdist's package or an entry point. Imports nothing.

        The origin's `open` imports it later; `load` converts what it returns by `take`.

        Raises:
            UnknownNameError: no plug-in has this name; the message lists the known ones.
            ConfigError: several plug-ins have this name, it names a file that does not exist, or it is not text.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"{self.setting} must be a name or path/to/file.py:{self.member}; got {name!r:.60}. Pass the name as "
                "text, and its options separately."
            )
        if ":" in name or name.endswith(".py"):
            path, member = split_reference(name, self.setting, self.member)
            return Origin(name, lambda: load_member(path, member, self.setting, self._fits))
        origins = [*self._installed().get(name, ())]
        if name in _modules(self.package):
            module = f"{self.package}.{name}"
            origins = [Origin(module, lambda: importlib.import_module(module)), *origins]
        if not origins:
            raise UnknownNameError(self.setting, name, self.available())
        if len(origins) > 1:
            raise ConfigError(
                f"{self.setting} {name!r} must be the name of one plug-in; got "
                f"{' and '.join(o.where for o in origins)}. Rename the entry point, or uninstall its package."
            )
        return origins[0]

    def load(self, name: str) -> Any:
        """Import the plug-in of this name, or the one at `path/to/file.py:member`.

        Raises:
            UnknownNameError: no plug-in has this name; the message lists the known ones.
            ConfigError: several plug-ins have this name, it can't be imported, or it is of another kind.
        """
        origin = self.find(name)
        try:
            imported = origin.open()
        except HpcdistError:
            raise
        except Exception as error:
            if origin.where == f"{self.package}.{name}":
                raise
            raise ConfigError(
                f"{self.setting} must be in a file that can be imported; got {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}{place(error)}, from {origin.where}. Fix it."
            ) from error
        return self.take(imported, name, origin.where)

    def _installed(self) -> dict[str, tuple[Origin, ...]]:
        return _entry_points(f"hpcdist.{self.group}", tuple(sys.path))

    def _fits(self, value: Any) -> bool:
        """Return whether a member of a file is such a plug-in."""
        try:
            self.take(value, "", "")
        except ConfigError:
            return False
        return True


@cache
def _modules(package: str) -> frozenset[str]:
    """Return the names of the plug-ins in a folder of hpcdist. Importing its packages could take seconds."""
    folder = Path(__file__).parents[1].joinpath(*package.split("."))
    modules = pkgutil.iter_modules([str(folder)])
    return frozenset(m.name for m in modules if not m.ispkg and m.name != "base" and not m.name.startswith("_"))


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, tuple[Origin, ...]]:
    """Return the entry points of a group by name; `path` is sys.path, as a key of the cache."""
    origins: dict[str, tuple[Origin, ...]] = {}
    for point in _all_entry_points(path).select(group=group):
        where = f"{point.value} of the package {point.dist.name if point.dist else 'that declares it'}"
        origins[point.name] = (*origins.get(point.name, ()), Origin(where, point.load))
    return origins


@lru_cache(maxsize=8)
def _all_entry_points(path: tuple[str, ...]) -> Any:
    return importlib.metadata.entry_points()  # reads the files of all packages, for any group


def installed() -> list[str]:
    """Return all plug-ins of other packages as `group name: origin`, sorted."""
    return sorted(
        f"hpcdist.{group} {name}: {origin.where}"
        for group, kind in CATALOGUES.items()
        for name, origins in kind._installed().items()
        for origin in origins
    )


def label(name: str) -> str:
    """Convert a plug-in's name for use in a file name: `path/to/mine.py:Averaging` becomes `mine-Averaging`."""
    file, colon, member = name.rpartition(":")
    return re.sub(r"[^\w.+-]", "_", f"{Path(file).stem}-{member}" if colon else name)


# --- kinds of plug-ins ------------------------------------------------------------------------------------------------
def subclass_of(base: str) -> Take:
    """Return a `Take` that accepts concrete subclasses of `base`, given as `package.module:Class`.

    A module's plug-in is the class of its name; else its only `final` class; else its only class without leading `_`.
    """

    def take(imported: Any, name: str, where: str) -> type:
        parent = pkgutil.resolve_name(base)
        if isinstance(imported, ModuleType):
            return _class_of(imported, parent, name)
        if not is_class(imported) or not issubclass(imported, parent) or imported is parent:
            raise ConfigError(
                f"{where} must be a subclass of {parent.__name__}; got {imported!r}. See CONTRIBUTING.md."
            )
        if inspect.isabstract(imported):
            lacking = ", ".join(sorted(imported.__abstractmethods__))  # type: ignore[attr-defined]
            raise ConfigError(
                f"{where} must define the abstract methods of {parent.__name__}; got no {lacking}. Add it."
            )
        return imported

    return take


@cache
def _class_of(module: ModuleType, parent: type, name: str) -> type:
    """Returns a module's plug-in by the rules of `subclass_of`."""
    classes = [
        value
        for value in dict.fromkeys(filter(is_class, vars(module).values()))
        if issubclass(value, parent) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    ]
    classes = [cls for cls in classes if not cls.__name__.startswith("_")]
    named = [cls for cls in classes if cls.__name__.lower() == name.replace("_", "").lower()]
    final = [cls for cls in classes if vars(cls).get("__final__")]
    for chosen in (named, final, classes):
        if len(chosen) == 1:
            return chosen[0]
    raise ConfigError(
        f"{module.__file__} must define one subclass of {parent.__name__}; got "
        f"{' and '.join(cls.__name__ for cls in classes) or 'none'}. Name it after the file, or mark it with "
        "@typing.final (from Python 3.11 on); start the names of others with _."
    )


def function(name: str) -> Take:
    """Return a `Take` that accepts functions; a module's plug-in is its function `name`."""

    def take(imported: Any, plugin: str, where: str) -> Callable[..., Any]:
        imported = getattr(imported, name, None) if isinstance(imported, ModuleType) else imported
        if not callable(imported):
            raise ConfigError(f"{where} must be, or define, a function {name}; got none. See CONTRIBUTING.md.")
        return imported

    return take


def functions(*names: str) -> Take:
    """Return a `Take` that accepts modules and other objects with these functions."""

    def take(imported: Any, plugin: str, where: str) -> Any:
        lacking = [name for name in names if not callable(getattr(imported, name, None))]
        if lacking:
            raise ConfigError(f"{where} must define {' and '.join(names)}; got no {lacking[0]}. See CONTRIBUTING.md.")
        return imported

    return take


CATALOGUES = {
    kind.group: kind
    for kind in (
        Catalogue("strategies", "hpcdist.strategies", "strategy", subclass_of("hpcdist.strategies.base:Strategy")),
        Catalogue(
            "compressors", "hpcdist.compress", "strategy.compression", subclass_of("hpcdist.compress.base:Compressor")
        ),
        Catalogue("topologies", "hpcdist.topology", "topology", subclass_of("hpcdist.topology.base:Topology")),
        Catalogue(
            "collectives",
            "hpcdist.collectives",
            "all-reduce algorithm",
            subclass_of("hpcdist.collectives.base:AllReduce"),
        ),
        Catalogue("importers", "hpcdist.data.importers", "importer", function("convert"), "convert"),
        Catalogue("loggers", "hpcdist.session.loggers", "log", subclass_of("hpcdist.session.loggers.base:Logger")),
        Catalogue("schedules", "hpcdist.parallel.schedules", "schedule", function("table"), "table"),
        Catalogue("checks", "hpcdist.tools.doctor.checks", "check", functions("measure", "judge"), "name"),
        Catalogue(
            "baselines", "hpcdist.tools.baselines", "baseline", subclass_of("hpcdist.tools.baselines.base:Library")
        ),
        Catalogue("commands", "hpcdist.tools.cli", "command", function("app"), "app"),
        Catalogue("figures", "hpcdist.tools.report.figures", "figure", functions("draw"), "draw"),
    )
}


def catalogue(group: str) -> Catalogue:
    """Return the catalogue of one kind of plug-in, by its group: `catalogue("strategies").available()`."""
    return CATALOGUES[group]
