"""Optuna's study of a sweep, in a journal in the sweep's folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.errors import ConfigError

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.log"
STUDY = "sweep"  # its name in the journal


def require_optuna(what: str) -> None:
    """Raise ConfigError where Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ConfigError(f"{what} must have Optuna; got no module of that name. Run: pip install 'hpcdist[sweep]'")


def open_journal(folder: Path) -> optuna.storages.JournalStorage:
    """Open the journal of a sweep, or begin it; hush Optuna's lines on each trial."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
