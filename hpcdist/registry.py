"""Find plug-ins of every kind: in their folder, in installed packages, in files of the user's.

A plug-in's name is that of a module in the kind's folder, or of an entry point in the kind's group, by which any
installed package adds a plug-in; or it is `path/to/file.py:Class`, relative to the current folder. Names are listed
without importing anything; only the plug-in that is used is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hpcdist.config.files import load_module
from hpcdist.errors import ConfigError, HpcdistError, UnknownNameError, suggestion

BASE = "base"  # the module that a kind's plug-ins share
Take = Callable[[Any, str, str], Any]  # (module, or its member; plug-in's name; where it is) -> plug-in


class Origin(NamedTuple):
    """The place of a plug-in; `open` imports it, or the module that it is in."""

    where: str
    open: Callable[[], Any]


@dataclass(frozen=True)
class Registry:
    """The plug-ins of one kind, found by name.

    Args:
        kind: the kind's name in messages.
        package: the package whose modules are plug-ins, but for `base` and those that begin with `_`.
        group: the group of other packages' entry points.
        member: the part behind the colon, as messages show it.
        take: a function that returns the plug-in of an imported object, or raises ConfigError.
    """

    kind: str
    package: str
    group: str
    member: str
    take: Take

    def available(self) -> list[str]:
        """List all names, sorted, without those of files. Imports none of the modules."""
        return sorted({*_modules(self.package), *self._installed()})

    def find(self, name: str) -> Origin:
        """Find the place of the plug-in of that name. Imports nothing.

        Raises:
            UnknownNameError: there is none.
            ConfigError: there are several; or it names a file that is not there.
        """
        if ":" in name or name.endswith(".py"):
            return self._in_file(name)
        origins = [*self._installed().get(name, ())]
        if name in _modules(self.package):
            module = f"{self.package}.{name}"
            origins = [Origin(module, lambda: importlib.import_module(module)), *origins]
        if not origins:
            raise UnknownNameError(self.kind, name, self.available())
        if len(origins) > 1:
            raise ConfigError(
                f"{self.kind} {name!r} must be the name of one plug-in; got {' and '.join(o.where for o in origins)}. "
                "Rename the entry point, or remove the package that it is of."
            )
        return origins[0]

    def load(self, name: str) -> Any:
        """Import the plug-in of that name.

        Raises:
            UnknownNameError: there is none.
            ConfigError: there are several; or the plug-in can't be imported, or is of another kind.
        """
        origin = self.find(name)
        return self.take(self._opened(name, origin), name, origin.where)

    def _installed(self) -> dict[str, tuple[Origin, ...]]:
        return _entry_points(self.group, tuple(sys.path))

    def _in_file(self, name: str) -> Origin:
        file, colon, member = name.rpartition(":")
        if not colon or not member:
            raise ConfigError(
                f"{self.kind} must be path/to/file.py:{self.member} to be taken from a file; got {name!r}. Add what it "
                "is called there."
            )
        path = Path(file)
        if not path.is_file():
            raise ConfigError(
                f"{self.kind} must be in a file that exists; got {name!r}, and there is no {file} in {Path.cwd()}. "
                "Check the path, which begins in the current folder."
            )

        def open_file() -> Any:
            module = load_module(path)
            if not hasattr(module, member):
                known = [each for each in vars(module) if not each.startswith("_")]
                raise ConfigError(
                    f"{self.kind} must be defined in {file}; got {member!r}, which is not.{suggestion(member, known)}"
                )
            return getattr(module, member)

        return Origin(name, open_file)

    def _opened(self, name: str, origin: Origin) -> Any:
        try:
            return origin.open()
        except HpcdistError:
            raise
        except Exception as error:
            if origin.where == f"{self.package}.{name}":
                raise
            raise ConfigError(
                f"{self.kind} must be in a file that can be imported; got {type(error).__name__}: {error}"
                f"{_place(error)}, from {origin.where}. Mend it."
            ) from error


@cache
def _modules(package: str) -> frozenset[str]:
    """List the plug-ins in a package's folder. The package itself is not imported, which may take seconds."""
    folders = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr]
    modules = pkgutil.iter_modules(folders)
    return frozenset(m.name for m in modules if not m.ispkg and m.name != BASE and not m.name.startswith("_"))


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, tuple[Origin, ...]]:
    """List the entry points of a group, of all packages on sys.path, by name. `path` is a key of the cache."""
    origins: dict[str, tuple[Origin, ...]] = {}
    for point in importlib.metadata.entry_points(group=group):
        where = f"{point.value} of the package {point.dist.name if point.dist else 'that declares it'}"
        origins[point.name] = (*origins.get(point.name, ()), Origin(where, point.load))
    return origins


def _place(error: Exception) -> str:
    """Return the file and line in which an import failed."""
    if isinstance(error, SyntaxError):  # its text has them
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
    return f" ({last.filename}:{last.lineno})"


def installed() -> list[str]:
    """List every plug-in that other packages add, with its group and where it is; sorted."""
    return sorted(
        f"{kind.group} {name}: {point.where}"
        for kind in KINDS
        for name, points in _entry_points(kind.group, tuple(sys.path)).items()
        for point in points
    )


def label(name: str) -> str:
    """Convert a plug-in's name to a part of a file's name: `path/to/mine.py:Averaging` becomes `mine-Averaging`."""
    file, colon, member = name.rpartition(":")
    return re.sub(r"[^\w.+-]", "_", f"{Path(file).stem}-{member}" if colon else name)


# --- kinds of plug-ins ------------------------------------------------------------------------------------------------
def subclass_of(base: str) -> Take:
    """Take subclasses of `base`, given as `package.module:Class`, that are not abstract.

    From a module, take the class that is named after the plug-in; or the only one that is `final`; or the only one
    whose name does not begin with `_`.
    """

    def take(imported: Any, name: str, where: str) -> type:
        parent = pkgutil.resolve_name(base)
        if isinstance(imported, ModuleType):
            return _class_of(imported, parent, name)
        if not isinstance(imported, type) or not issubclass(imported, parent) or imported is parent:
            raise ConfigError(
                f"{where} must be a subclass of {parent.__name__}; got {imported!r}. See CONTRIBUTING.md."
            )
        if inspect.isabstract(imported):
            lacking = ", ".join(sorted(imported.__abstractmethods__))  # type: ignore[attr-defined]
            raise ConfigError(f"{where} must define what {parent.__name__} leaves open; got no {lacking}. Add it.")
        return imported

    return take


@cache
def _class_of(module: ModuleType, parent: type, name: str) -> type:
    classes = [
        value
        for value in dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
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
        "@typing.final; begin the names of others with _."
    )


def function(name: str) -> Take:
    """Take functions; from a module, the one of that name."""

    def take(imported: Any, plugin: str, where: str) -> Callable[..., Any]:
        imported = getattr(imported, name, None) if isinstance(imported, ModuleType) else imported
        if not callable(imported):
            raise ConfigError(f"{where} must be, or define, a function {name}; got none. See CONTRIBUTING.md.")
        return imported

    return take


def functions(*names: str) -> Take:
    """Take modules, or other objects, that have these functions."""

    def take(imported: Any, plugin: str, where: str) -> Any:
        lacking = [name for name in names if not callable(getattr(imported, name, None))]
        if lacking:
            raise ConfigError(f"{where} must define {' and '.join(names)}; got no {lacking[0]}. See CONTRIBUTING.md.")
        return imported

    return take


STRATEGIES = Registry(
    "strategy", "hpcdist.strategies", "hpcdist.strategies", "Class", subclass_of("hpcdist.strategies.base:Strategy")
)
COMPRESSORS = Registry(
    "strategy.compression",
    "hpcdist.compress",
    "hpcdist.compressors",
    "Class",
    subclass_of("hpcdist.compress.base:Compressor"),
)
TOPOLOGIES = Registry(
    "topology", "hpcdist.topology", "hpcdist.topologies", "Class", subclass_of("hpcdist.topology.base:Topology")
)
COLLECTIVES = Registry(
    "all-reduce algorithm",
    "hpcdist.collectives",
    "hpcdist.collectives",
    "Class",
    subclass_of("hpcdist.collectives.base:AllReduce"),
)
IMPORTERS = Registry("importer", "hpcdist.data.importers", "hpcdist.importers", "convert", function("convert"))
LOGGERS = Registry(
    "log", "hpcdist.train.loggers", "hpcdist.loggers", "Class", subclass_of("hpcdist.train.loggers.base:Logger")
)
SCHEDULES = Registry("schedule", "hpcdist.parallel.schedules", "hpcdist.schedules", "table", function("table"))
CHECKS = Registry("check", "hpcdist.tools.doctor.checks", "hpcdist.checks", "name", functions("measure", "judge"))
KINDS = (STRATEGIES, COMPRESSORS, TOPOLOGIES, COLLECTIVES, IMPORTERS, LOGGERS, SCHEDULES, CHECKS)
