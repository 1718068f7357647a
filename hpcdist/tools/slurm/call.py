"""What each rank of a submitted function runs: `python -m hpcdist.tools.slurm.call FOLDER`.

The folder holds the call, and gets what each rank returned or raised. Its files are pickles, so only its owner may
read or write it.
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
    """What the function returned on a rank, or the exception that it raised, with its traceback as text."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Write a call down: first what reading the rest needs, the version of Python and the folders of modules.

    Raises:
        ConfigError: the function or an argument can't be pickled.
    """
    head = pickle.dumps((PYTHON, [os.path.abspath(place) for place in sys.path]))
    try:
        return head + cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # pickle raises anything
        numbered = {f"argument {number}": value for number, value in enumerate(args, 1)}
        for name, value in {"function": function, **numbered, **kwargs}.items():
            try:
                cloudpickle.dumps(value)
            except Exception:
                raise ConfigError(
                    f"{name} must be what cloudpickle can pickle, for the ranks are other processes; got a "
                    f"{type(value).__name__} ({error}). Make it on the ranks, in the function."
                ) from error
        raise


def make_call(folder: Path) -> Any:
    """Make the call that a folder holds, and return what the function returns.

    Raises:
        MismatchError: this Python is another version than the one that submitted the function.
    """
    with open(folder / "call.pickle", "rb") as file:
        python, places = pickle.load(file)
        if python != PYTHON:
            theirs, ours = (".".join(map(str, version)) for version in (python, PYTHON))
            raise MismatchError(
                f"Python must be {theirs} on the nodes, as where the function was submitted; got {ours}, "
                f"{sys.executable}. Name that environment in the site's profile, as venv or conda."
            )
        sys.path += [place for place in places if place not in sys.path]
        function, args, kwargs = pickle.load(file)
    return function(*args, **kwargs)


def outcome_file(folder: Path, rank: int) -> Path:
    """Name the file of what a rank returned or raised."""
    return folder / f"rank-{rank}.pickle"


def write_outcome(folder: Path, rank: int, outcome: CallOutcome) -> None:
    """Write down what a rank returned or raised. Raises what pickle raises where it can't be pickled."""
    data = cloudpickle.dumps(tuple(outcome))
    if outcome.error is not None:
        pickle.loads(data)  # an exception with arguments of its own may be written, and not be read again
    replace_durably(outcome_file(folder, rank), data)


def main(folder: Path) -> None:
    """Make the call on this rank. An exception is written down, and then ends this rank, and with it the others."""
    place = task(os.environ)
    rank = 0 if place is None else place.rank
    outcome_file(folder, rank).unlink(missing_ok=True)  # of a job that has been started again
    try:
        write_outcome(folder, rank, CallOutcome(make_call(folder)))
    except Exception as error:
        told = traceback.format_exc()
        try:
            write_outcome(folder, rank, CallOutcome(error=error, traceback=told))
        except Exception:  # pickle raises anything
            named = RunError(f"the function must raise what can be pickled; got {type(error).__name__}: {error}")
            write_outcome(folder, rank, CallOutcome(error=named, traceback=told))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
