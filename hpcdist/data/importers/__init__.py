"""Make hpcdist's data files from other formats: one module each, found by its name.

Every module has one function `convert(source, destination, **options) -> Path`, whose keyword-only arguments are the
options: their types and defaults are in its signature, their meaning in its docstring. A new format is one new file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.data.format import TASKS
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
def random_splits(
    samples: int, test_fraction: float, seed: int, labels: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Draw the samples for training and for testing, and return their sorted indices as "train" and "test".

    With labels, each class has the same fraction of test samples. Without test samples there is no "test".
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


def as_targets(
    task: str, where: str, splits: Sequence[np.ndarray], classes: Sequence[str] = ()
) -> tuple[list[np.ndarray], list[str]]:
    """Return each split's targets, and the classes' names: int64 labels, or without names the targets of a regression.

    Labels are integers or words, one for each sample, or integers in rows of a single 1 among zeros; with task
    "classification" also whole numbers of a floating-point type. `where` is the targets' source, for messages;
    `classes` are names in the order of the labels.
    """
    if task and task not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}; got {task!r}.")
    values = np.concatenate(splits)
    if values.dtype.kind in "OSU":
        values = np.array([_word(value) for value in values])
    textual, floating = values.dtype.kind == "U", values.dtype.kind == "f"
    kind = f"one-hot classes or {values.shape[1]} numbers each" if values.ndim > 1 else "classes or numbers, all whole"
    if values.ndim == 2 and not textual and ((values != 0).sum(axis=1) == 1).all() and (values.max(axis=1) == 1).all():
        values = values.argmax(axis=1).astype(values.dtype)  # one-hot
    may_be_labels = values.ndim == 1 and (textual or not floating or bool((values == np.round(values)).all()))
    if may_be_labels and floating and not task:
        raise ConfigError(
            f"task must be given where targets may be {kind}; got none, and {where} has "
            f"{len(np.unique(values))} different ones. Pass task (--task): classification or regression."
        )
    if (not may_be_labels and task == "classification") or (textual and task == "regression"):
        raise ConfigError(
            f"targets must be a whole number or a word each for classification, or rows of a single 1, and numbers for "
            f"regression; got {where} for {task}."
        )
    if not may_be_labels or task == "regression":
        return [values.astype("float32") if values.ndim == 1 and not floating else values for values in splits], []
    distinct, labels = np.unique(values, return_inverse=True)
    names = [str(name) if textual else f"{name:{'.0f' if floating else 'd'}}" for name in distinct]
    if classes:
        if len(classes) != len(names) or (textual and {*classes} != {*names}):
            raise ConfigError(
                f"classes must name each label of {where} once; got {', '.join(classes)}, and there are "
                f"{', '.join(names[:20])}. Words must be the same."
            )
        if textual:
            labels = np.array([classes.index(name) for name in names])[labels]
        names = [*classes]
    return np.split(labels.astype(np.int64), np.cumsum([len(split) for split in splits])[:-1]), names


def _word(value: Any) -> str:
    if isinstance(value, np.ndarray):  # a cell of MATLAB's, or of variable length
        if value.size != 1:
            raise DataError(
                "targets must be one number or word, or as many numbers, for each sample; got lists. Pad them."
            )
        value = value.reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else str(value)


def padded(samples: Sequence[np.ndarray], longest: int) -> np.ndarray:
    """Return samples of different lengths as rows, with zeros behind each."""
    rows = np.zeros((len(samples), longest, *samples[0].shape[1:]), samples[0].dtype)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample
    return rows


def need_folder(source: str | Path, advice: str) -> Path:
    """Return `source` as a path; raise DataError unless it is a folder."""
    path = Path(source)
    if not path.is_dir():
        raise DataError(f"{path} must be a folder; it {'is a file' if path.exists() else 'does not exist'}. {advice}")
    return path
