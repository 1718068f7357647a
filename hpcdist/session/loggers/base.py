"""The interface of loggers, which write a run's metrics for another tool."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class LoggedRun:
    """A run as seen by loggers."""

    name: str
    folder: Path  # for the logger's files, inside the run's folder; exists already if the run was resumed
    first_step: int  # the tool should forget metrics of this step and later ones
    settings: Mapping[str, bool | int | float | str]  # by dotted key
    metrics: tuple[str, ...]  # names of the metrics of evaluations

    def id(self, create: Callable[[], str]) -> str:
        """Return the tool's id of this run, which `create` returns when the run starts."""
        path = self.folder / "run-id"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(create())
        return path.read_text()


class Logger(abc.ABC):
    """Writes a run's metrics for another tool.

    A thread of one rank creates it before the first step, calls it and closes it. It may be slow and may raise: the run
    does not wait for it, and continues without it.

    Example:
        >>> from hpcdist.session.loggers import Logger
        >>> class Print(Logger):
        ...     def __init__(self, run): self.name = run.name
        ...     def write(self, step, values): print(self.name, step, values)
    """

    package: ClassVar[str] = ""  # to import; it must be installed

    @abc.abstractmethod
    def __init__(self, run: LoggedRun): ...

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of a step, by names such as `train/loss` and `test/accuracy`."""

    def close(self) -> None:
        """Write pending metrics."""
