"""Make hpcdist's data files from other formats: one module each, found by its name.

Every module has one function `convert(source, destination, **options) -> Path`, whose keyword-only arguments are the
options: their types and defaults are in its signature, their meaning in its docstring. A new format is one new file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist.errors import ConfigError, DataError, UnknownNameError
from hpcdist.registry import catalogue


def available() -> list[str]:
    """List the names of all importers, sorted; with hyphens, as data sets are written."""
    return [name.replace("_", "-") for name in catalogue("importers").available()]


def load(name: str) -> Callable[..., Path]:
    """Return the function `convert` of an importer, by its name or as `path/to/file.py:convert`."""
    known = available()
    if ":" not in name and name.replace("_", "-") not in known:
        raise UnknownNameError("importer", name, known)
    return catalogue("importers").load(name if ":" in name else name.replace("-", "_"))


# --- for several importers --------------------------------------------------------------------------------------------
def draw_splits(
    samples: int, test_fraction: float, seed: int, labels: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Draw the samples for training and for testing, and return their sorted indices as "train" and "test".

    With labels, each class has the same fraction of test samples. Without test samples there is no "test".

    Raises:
        ConfigError: test_fraction is not in [0, 1).
        DataError: there are too few samples, or too few of a class, to have some in both splits.
    """
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction must be at least 0 and below 1; got {test_fraction}.")
    everything = np.arange(samples)
    if test_fraction == 0:
        return {"train": everything}
    from sklearn.model_selection import train_test_split  # takes seconds, and most importers need none

    try:
        train, test = train_test_split(everything, test_size=test_fraction, random_state=seed, stratify=labels)
    except ValueError as error:
        raise DataError(
            f"{samples} samples can't be split with test_fraction {test_fraction} ({error}). "
            "Take another fraction, or 0 for no test split."
        ) from error
    return {"train": np.sort(train), "test": np.sort(test)}


def need_folder(source: str | Path, advice: str) -> Path:
    """Return `source` as a path; raise DataError unless it is a folder."""
    path = Path(source)
    if not path.is_dir():
        raise DataError(f"{path} must be a folder; it {'is a file' if path.exists() else 'does not exist'}. {advice}")
    return path
