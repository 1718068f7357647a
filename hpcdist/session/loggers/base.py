"""The interface of loggers, which write a run's figures for another tool."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class LoggedRun:
    """A run, as loggers see it."""

    name: str
    folder: Path  # the logger's own, in the run's folder; exists already if the run was resumed
    first_step: int  # the tool should forget what it has of this step and later ones
    settings: Mapping[str, bool | int | float | str]  # by dotted key
    metrics: tuple[str, ...]  # names of the values of evaluations

    def id(self, make: Callable[[], str]) -> str:
        """Return the tool's name of this run, which `make` makes when the run begins."""
        path = self.folder / "run-id"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(make())
        return path.read_text()


class Logger(abc.ABC):
    """Writes a run's figures for another tool.

    One thread of one rank makes it before the first step, calls it and closes it. It may be slow and may raise: the run
    does not wait for it, and goes on without it.
    """

    package: ClassVar[str] = ""  # that must be installed, as it is imported

    @abc.abstractmethod
    def __init__(self, run: LoggedRun): ...

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write figures of a step, by names such as `train/loss` and `test/accuracy`."""

    def close(self) -> None:
        """Write what is left."""
