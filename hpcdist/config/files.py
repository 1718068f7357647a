"""The user's Python files: as modules, which may import from their folder, and their git commit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import symtable
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeGuard

from hpcdist import log
from hpcdist.errors import ConfigError, place, suggestion

_neighbours: dict[str, tuple[ModuleType, Path]] = {}  # imported neighbours by name, each with its folder
_loaded: dict[Path, tuple[ModuleType, int]] = {}  # by file: the module, and the file's checksum when it ran
_known: frozenset[str] = frozenset()  # names of modules, see _known_modules
_running: list[tuple[int, str]] = []  # the process in which code runs that must not end it, and the message
_open = Counter[str]()  # contexts of `neighbours` that have not ended, by folder: one for each virtual rank
_inserted = Counter[str]()  # entries of sys.path that these have added
_exit = os._exit


def is_class(value: object) -> TypeGuard[type]:
    """Return whether a value is a class; `list[int]` is none, although Python 3.10 calls it an instance of `type`."""
    return issubclass(type(value), type)


@contextmanager
def neighbours(path: Path) -> Iterator[None]:
    """Import modules from the folder of the file `path` first, within the context.

    Modules from other files' folders are removed from sys.modules, so that `import helpers` imports the one next to
    `path`. At the end of an inner context the outer one's modules come back.
    """
    folder = path.resolve().parent
    hidden = {}  # modules of the outer context
    for name, (module, its_folder) in list(_neighbours.items()):
        if its_folder != folder:
            del _neighbours[name]
            if sys.modules.get(name) is module:
                del sys.modules[name]
                if str(its_folder) in sys.path:
                    hidden[name] = module, its_folder
    known_before, entry = _known_modules(), str(folder)
    _open[entry] += 1
    if not _inserted[entry] or sys.path[:1] != [entry]:
        sys.path.insert(0, entry)
        _inserted[entry] += 1
    try:
        yield
    finally:
        _open[entry] -= 1
        if _inserted[entry] > _open[entry]:
            _inserted[entry] -= 1
            if entry in sys.path:
                sys.path.remove(entry)
        for name in sys.modules.keys() - known_before:
            top = name.partition(".")[0]
            if top not in known_before and name in sys.modules and _is_in_folder(sys.modules.get(top), folder):
                _neighbours[name] = sys.modules[name], folder
        _neighbours.update(hidden)
        sys.modules.update({name: module for name, (module, _) in hidden.items()})


def _known_modules() -> frozenset[str]:
    """Return the names of all imported modules: the same object until one is imported, as the set takes 130 KiB."""
    global _known
    if _known != sys.modules.keys():
        _known = frozenset(sys.modules)
    return _known


def imported_from_same_folder(path: Path) -> list[Path]:
    """List the files in the folder of `path`, or in packages there, that have been imported; sorted."""
    folder, files = path.resolve().parent, set()
    for name, module in sys.modules.copy().items():  # threads may import meanwhile
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top not in ("__main__", "hpcdist") and file and _is_in_folder(sys.modules.get(top), folder):
            files.add(Path(file).resolve())
    return sorted(files - {path.resolve()})


def _is_in_folder(module: Any, folder: Path) -> bool:
    """Return whether a module, or a package, lies directly in the folder."""
    file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    where = next(iter(folders), None) if folders is not None else file
    location = None if where is None else Path(where).resolve()
    # `exists`, because torch creates modules without a file.
    return location is not None and location.parent == folder and location.exists()


def binds(text: str, name: str) -> bool:
    """Return whether Python code assigns or imports a name at its top level, without running it."""
    symbols = symtable.symtable(text, "code", "exec").get_symbols()
    return any(symbol.get_name() == name and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols)


def load_file(path: Path) -> ModuleType:
    """Run a file, each time anew, and return its module; raise ConfigError where its name does not end in .py."""
    spec = importlib.util.spec_from_file_location(f"hpcdist_job_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"a Python file must have a name that ends in .py; got {path}. Rename it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look for it there
    checksum = _checksum(path)
    advice = 'Put what only a script does under `if __name__ == "__main__":`.'
    with neighbours(path), not_ending(path, "while it is imported", advice):
        try:
            spec.loader.exec_module(module)
        except ConfigError as error:  # of a declaration, such as a strategy's contract
            raise ConfigError(f"{error}{place(error)}") from error
    _loaded[path.resolve()] = module, checksum
    return module


@contextmanager
def not_ending(path: Path, when: str, advice: str) -> Iterator[None]:
    """Run code of the file `path` that must not end the process: with status 0 the job would seem to have ended well.

    Raises:
        ConfigError: it has called sys.exit, or raised Exit of typer or click. After `os._exit(0)` the status is 1.
    """
    rule = f"{path} must not end the process {when}; got %s. {advice}"
    _running.append((os.getpid(), rule % "os._exit(0)"))
    os._exit = _exit_with_a_word  # processes that this one forks end as they like
    try:
        yield
    except (SystemExit, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error).__name__ != "Exit":
            raise
        status = getattr(error, "exit_code", getattr(error, "code", 0))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        got = f"sys.exit({status!r}) at {frame.filename}:{frame.lineno}"
        raise ConfigError(rule % got) from None
    finally:
        _running.pop()


def _exit_with_a_word(status: int) -> NoReturn:
    # In place of os._exit: within `not_ending` log the message, and turn the status 0 into 1.
    if status == 0 and _running and _running[-1][0] == os.getpid():
        status = 1
        log.before_end(_running[-1][1])
    _exit(status)


def loaded_files() -> dict[str, list[int]]:
    """Return by file name the checksums of the user's files: loaded by path, or imported from the same folders.

    Not by path, because nodes may have them in different folders.
    """
    checksums = {path: checksum for path, (_, checksum) in _loaded.items()}
    siblings = [Path(module.__file__) for module, _ in _neighbours.values() if module.__file__]
    checksums |= {path: _checksum(path) for path in siblings}
    names = sorted({path.name for path in checksums})
    return {name: sorted(checksum for path, checksum in checksums.items() if path.name == name) for name in names}


def _checksum(path: str | Path, start: int = 0) -> int:
    with open(path, "rb", buffering=0) as file:
        return zlib.crc32(file.read(), start)


def package_checksum() -> int:
    """Return a checksum of this package's source files: an edited copy has the same version. It takes 8 ms."""
    checksum = 0
    for folder, inner, names in os.walk(Path(__file__).parents[1]):
        inner.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            checksum = _checksum(os.path.join(folder, name), checksum)
    return checksum


def load_module(path: Path) -> ModuleType:
    """Return the module of a file, which runs again only if it has changed."""
    module, checksum = _loaded.get(path.resolve(), (None, 0))
    return load_file(path) if module is None or checksum != _checksum(path) else module


def split_reference(reference: str, setting: str, member: str) -> tuple[Path, str]:
    """Return the file and the name of `path/to/file.py:name`; raise ConfigError if there is no such file."""
    file, colon, name = reference.rpartition(":")
    if not colon or not name:
        raise ConfigError(
            f"{setting} must be path/to/file.py:{member} to be loaded from a file; got {reference!r}. Add a colon and "
            "its name there."
        )
    if not Path(file).is_file():
        raise ConfigError(
            f"{setting} must be in a file that exists; got {reference!r}, and there is no {file} in {Path.cwd()}. "
            "Check the path, which is relative to the current folder."
        )
    return Path(file), name


def load_member(path: Path, name: str, setting: str, fits: Callable[[Any], bool]) -> Any:
    """Return a member of a file's module; raise ConfigError, with the file's own members that fit, if it has none."""
    module = load_module(path)
    if not hasattr(module, name):
        own = {known: value for known, value in vars(module).items() if not known.startswith("_")}
        fitting = [k for k, v in own.items() if getattr(v, "__module__", None) == module.__name__ and fits(v)]
        raise ConfigError(
            f"{setting} must be defined in {path}, which has {', '.join(fitting) or 'none'}; got {name!r}."
            f"{suggestion(name, fitting)}"
        )
    return getattr(module, name)


def load_function(reference: str, where: str) -> Callable[..., Any]:
    """Load the function `path/to/file.py:name`; raise ConfigError, naming the setting `where`, if it is missing."""
    path, name = split_reference(reference, where, "function")
    function = load_member(path, name, where, callable)
    if not callable(function):
        raise ConfigError(f"{where} must be a function of {path}; got {name!r}, which is none.")
    return function


def git_commit(folder: Path | None = None) -> tuple[str | None, bool]:
    """Return the commit of a folder (default: current one), and whether tracked files differ; (None, False): no git."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        output = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return None, False
    commit = re.search(r"^# branch.oid ([0-9a-f]+)$", output, re.M)
    return (commit[1], re.search("^[^#]", output, re.M) is not None) if commit else (None, False)
