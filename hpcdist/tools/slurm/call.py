"""Executed by each rank of a submitted function: `python -m hpcdist.tools.slurm.call FOLDER`.

The folder holds the pickled call, and each rank's result or exception. Pickles can run code, so only the owner may read
or write the folder.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from hpcdist.comm.launch import task
from hpcdist.errors import ConfigError, MismatchError, RunError
from hpcdist.records import replace_durably

PYTHON = sys.version_info[:2]


class CallOutcome(NamedTuple):
    """The function's return value on a rank, or the exception that it raised, with its traceback as text."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call after a header needed to unpickle it; raise ConfigError naming a value that can't be pickled."""
    header = pickle.dumps((PYTHON, [os.path.abspath(path) for path in sys.path]))
    try:
        return header + cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # pickle raises anything
        numbered = {f"argument {number}": value for number, value in enumerate(args, 1)}
        for name, value in {"function": function, **numbered, **kwargs}.items():
            try:
                cloudpickle.dumps(value)
            except Exception:
                raise ConfigError(
                    f"{name} must be picklable by cloudpickle, for the ranks are other processes; got a "
                    f"{type(value).__name__} ({error}). Create it inside the function."
                ) from error
        raise


def run_call(folder: Path) -> Any:
    """Load a call from a folder and return its result; raise MismatchError if another Python version has pickled it."""
    with open(folder / "call.pickle", "rb") as file:
        python, module_paths = pickle.load(file)
        if python != PYTHON:
            submitted, running = (".".join(map(str, version)) for version in (python, PYTHON))
            raise MismatchError(
                f"Python must be {submitted} on the nodes, as in the submitting process; got {running}, "
                f"{sys.executable}. Name that environment in the site's profile, as venv or conda."
            )
        sys.path += [path for path in module_paths if path not in sys.path]
        function, args, kwargs = pickle.load(file)
    return function(*args, **kwargs)


def outcome_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def write_outcome(folder: Path, rank: int, outcome: CallOutcome) -> None:
    """Write a rank's outcome; raises pickle's exceptions if it can't be pickled."""
    data = cloudpickle.dumps(tuple(outcome))
    if outcome.error is not None:
        pickle.loads(data)  # an exception with custom arguments may pickle, but fail to unpickle
    replace_durably(outcome_file(folder, rank), data)


def main(folder: Path) -> None:
    """Execute the call on this rank. An exception is written to the outcome file, then ends all ranks."""
    launched = task(os.environ)
    rank = 0 if launched is None else launched.rank
    outcome_file(folder, rank).unlink(missing_ok=True)  # a requeued job finds its earlier start's
    try:
        write_outcome(folder, rank, CallOutcome(run_call(folder)))
    except Exception as error:
        text = traceback.format_exc()
        try:
            write_outcome(folder, rank, CallOutcome(error=error, traceback=text))
        except Exception:  # pickle raises anything
            replacement = RunError(f"the function must raise picklable exceptions; got {type(error).__name__}: {error}")
            write_outcome(folder, rank, CallOutcome(error=replacement, traceback=text))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
