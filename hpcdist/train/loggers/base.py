"""The base of loggers, which write a run's figures for another tool."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger writes of."""

    name: str
    folder: Path  # the logger's own, in the run's: there already where the run goes on after an interruption
    first_step: int  # the first that will be written; the tool should forget what it has of this one and later ones
    settings: Mapping[str, bool | int | float | str]  # by dotted key
    metrics: tuple[str, ...]  # names of the values that are written at evaluations

    def id(self, make: Callable[[], str]) -> str:
        """Return the name that the tool gave this run; `make` is called for it when the run begins."""
        path = self.folder / "run-id"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(make())
        return path.read_text()


class Logger(abc.ABC):
    """Write a run's figures for another tool.

    One thread of one rank constructs it before the first step, calls it, and closes it. It may take its time, and may
    raise: the run does not wait, and goes on without it.
    """

    package: ClassVar[str] = ""  # that must be installed, by the name by which it is imported

    @abc.abstractmethod
    def __init__(self, run: LoggedRun): ...

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write figures of that step, by names such as `train/loss` and `test/accuracy`."""

    def close(self) -> None:
        """Write what is left."""
