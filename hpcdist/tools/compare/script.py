"""Scripts and functions with their own training loop: recognize them, and run them on a rank."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.config.files import binds, load_function, neighbours
from hpcdist.config.merge import load
from hpcdist.errors import ConfigError, RunError
from hpcdist.session.run import PlannedLoop
from hpcdist.session.world import start_planned

PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
OF_EVERY_RUN = ("seed", "strategy", "run")  # allowed as {NAME} in ARGS, or as a function's parameters


def file_of(job: str) -> Path:
    """Return the file of a job, of a script, or of a function `path/to/file.py:name`."""
    return Path(job.rpartition(":")[0] if ".py:" in job else job)


def read_job(
    job: str | Path | Callable[..., Any], arguments: Sequence[str] | None
) -> tuple[str, Path, tuple[str, ...] | None, bool]:
    """Parse what the user wants to train.

    Returns:
        The job as text (`Experiment.job`), its file, a script's arguments or None, and whether its seeds may differ.

    Raises:
        ConfigError: it is no job, script or importable function, or a job is given ARGS.
    """
    text = _reference(job)
    if _is_script(text):
        script_arguments = tuple(arguments or ())
        return text, file_of(text), script_arguments, "seed" in placeholders(text, script_arguments)
    if arguments:
        raise ConfigError(
            f"ARGS must be omitted with a file that defines a job; got {' '.join(arguments)}. A job's settings "
            "are given by --set."
        )
    return text, file_of(text), None, True


def _reference(job: str | Path | Callable[..., Any]) -> str:
    """Return a job as text (a function as path/to/file.py:name); raise ConfigError if ranks can't import a function."""
    if isinstance(job, (str, Path)):
        return str(job)
    file, name = inspect.getsourcefile(job) if inspect.isfunction(job) else None, getattr(job, "__qualname__", "")
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ConfigError(
            "job must be the path of a Python file that defines `job`, or of a script, or a function at the top level "
            f"of a file; got a {type(job).__name__}. The ranks are other processes, which read the file: write one."
        )
    return f"{file}:{name}"


def _is_script(job: str) -> bool:
    """Return whether `job` is a script or function, without running it.

    A file that binds the name `job` at its top level is a job, otherwise one that mentions hpcdist is a script. Raises
    ConfigError for any other file.
    """
    path = file_of(job)
    if ".py:" in job or not path.is_file():
        return ".py:" in job  # a missing file is reported when it is loaded
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        if binds(text, "job"):
            return False
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"job must be a file of Python; got {job}: {error}.") from None
    if not re.search(r"\bhpcdist\b", text):
        raise ConfigError(
            f"job must be a file that defines `job`, or a script that imports hpcdist; got {job}, which is neither."
        )
    return True


def placeholders(job: str, arguments: Sequence[str]) -> set[str]:
    """Return the names in a script's ARGS, as {NAME}, or of a function's parameters."""
    if ".py:" in job:
        return set(inspect.signature(load_function(job, "job")).parameters)
    return {name for argument in arguments for name in PLACEHOLDER.findall(argument)}


class ScriptCall:
    """Execute a run of a script or function on one rank: in this process, or in the thread of a virtual rank.

    Args:
        job: see `Experiment.job`.
        settings: KEY=VALUE settings of the run: strategy, seed, and those of a sweep.
        folder: of the run.
    """

    def __init__(self, job: str, arguments: Sequence[str], settings: Sequence[str], folder: Path):
        self._job, self._file = job, file_of(job)
        values = load({"strategy": {"name": "allreduce"}}, None, settings)
        options = values.pop("strategy")
        name = options.pop("name")
        self._planned = PlannedLoop(str(self._file), str(folder), name, options)
        # A script's arguments are texts, a function's parsed values.
        text_by_name = dict(setting.split("=", 1) for setting in settings) | {"run": str(folder)}
        self._arguments = [PLACEHOLDER.sub(lambda match: text_by_name[match[1]], argument) for argument in arguments]
        value_by_name = {**values, "strategy": name, "run": str(folder)}
        self._kwargs = {key: value_by_name[key] for key in placeholders(job, ()) & value_by_name.keys()}

    def __call__(self, comm: Communicator | None = None) -> None:
        """Run the script to its end on this rank, of MPI or, with `comm`, of a simulation."""
        start_planned(comm, self._planned)
        if ".py:" in self._job:
            with neighbours(self._file):
                load_function(self._job, "job")(**self._kwargs)
            return
        sys.argv, sys.path[0] = [str(self._file), *self._arguments], str(self._file.resolve().parent)
        module = types.ModuleType("__main__")  # separate globals for each virtual rank
        module.__file__ = str(self._file)
        sys.modules["__main__"] = module
        try:
            exec(compile(self._file.read_bytes(), self._file, "exec"), module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RunError(f"{self._file} must end with status 0; got sys.exit({end.code!r}).") from None
