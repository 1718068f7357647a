"""Optuna's study of a sweep, in a journal in the sweep's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcdist.errors import DataError, HpcdistError
from hpcdist.records import read_bounded
from hpcdist.records.files import Count, faults_of

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.log"
STUDY = "sweep"  # the study's name in the journal
LOCK = f"{JOURNAL}.lock"  # Optuna's lock while it appends


class _Line(BaseModel):
    """A line of the journal, checked more strictly than Optuna does."""

    model_config = ConfigDict(strict=True)  # Optuna would ignore an id of a wrong type

    op_code: Count
    worker_id: str
    study_id: Count = 0
    trial_id: Count = 0
    step: Count = 0
    param_name: str = ""
    user_attr: dict[str, Any] = {}
    system_attr: dict[str, Any] = {}
    values: list[float] | None = None
    intermediate_value: float = 0.0
    param_value_internal: float = 0.0


@contextmanager
def journal_errors(folder: Path) -> Iterator[None]:
    """Turn the errors that Optuna raises on a damaged journal into DataError."""
    try:
        yield
    except HpcdistError:
        raise
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = faults_of(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error!s:.200}"
        raise DataError(
            f"{folder / JOURNAL} must be a journal of `hpcdist sweep`; got {reason}. Restore it from a copy, or give "
            "another folder."
        ) from error


def open_journal(folder: Path) -> optuna.storages.JournalStorage:
    """Open or create the journal of a sweep, and silence Optuna's log lines; raise DataError if it is damaged."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = (folder / JOURNAL).absolute()  # absolute: Optuna's lock is a symbolic link to it
    with journal_errors(folder):
        for line in read_bounded(path).split(b"\n")[:-1] if path.exists() else ():  # the last may be incomplete
            _Line.model_validate_json(line)
        return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
