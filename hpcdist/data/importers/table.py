"""A table of numbers: CSV with a header, or NumPy arrays."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdist.data.format import TASKS, require_memory
from hpcdist.data.importers import draw_splits
from hpcdist.data.writer import Split, create
from hpcdist.errors import ConfigError, DataError, HpcdistError
from hpcdist.records import open_regular

STANDARDISE = ("none", "features", "all")
DTYPES = ("float32", "float64")
NUMBER = re.compile(r"[-+]?\.?\d[\d.e+-]*", re.IGNORECASE)
DELIMITERS = ",;\t|: "
INDEX = re.compile(r"|Unnamed: [\d.]+")  # the name of pandas' index, and once it has been read and written again


@dataclass(frozen=True)
class Table:
    """Named columns of float64 numbers: features x (n, f) and targets y (n, t)."""

    x: np.ndarray
    y: np.ndarray
    features: list[str]
    targets: list[str]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    target: str = "",
    task: str = "",
    delimiter: str = ",",
    standardise: str = "none",
    dtype: str = "float32",
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write a table of numbers: x (features,) and y (targets,) of `dtype`; for classification y is an int64 label.

    Standardised columns are (value - mean) / deviation, computed in float64; the constants are those of the training
    samples alone and are stored as x_mean, x_std, y_mean and y_std. A constant column keeps deviation 1.

    Args:
        source: A .csv file with a header; a .npy file with an array (samples, columns), whose columns are called 0,
            1, and so on; or a .npz file with one such array, or with two called x and y.
        destination: The file to write.
        target: The column or columns to predict, with commas between; by default the last one.
        task: "regression" or "classification", to be said where there is one target of whole numbers, which may be
            either; other targets are for regression. Classes are the numbers that are there, in ascending order.
        delimiter: Separator of the columns of a .csv file.
        standardise: "none", "features", or "all" for the targets as well.
        dtype: "float32" or "float64".
        test_fraction: Part of the samples that is kept for testing.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    given = {"standardise": (standardise, STANDARDISE), "dtype": (dtype, DTYPES), "task": (task or TASKS[0], TASKS)}
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
    if len(delimiter) != 1:
        raise ConfigError(f"delimiter must be one character, such as ',' or ';'; got {delimiter!r}.")
    path = Path(source)
    table = _read(path, target, delimiter)
    classes, labels = _classes(path, table, task)
    if classes and standardise == "all":
        raise ConfigError("standardise must be none or features for classification, whose targets are labels; got all.")
    splits = draw_splits(len(table.x), test_fraction, seed, labels)
    notes: dict = {"features": table.features, "targets": table.targets, "test_fraction": test_fraction, "seed": seed}
    columns = {"x": table.x, "y": table.y}
    for name in {"none": "", "features": "x", "all": "xy"}[standardise]:
        values = columns[name]
        mean, std = values[splits["train"]].mean(axis=0), values[splits["train"]].std(axis=0)
        std[std == 0] = 1
        columns[name] = (values - mean) / std
        notes |= {f"{name}_mean": mean, f"{name}_std": std}
    x, y = (_cast(path, values, dtype) for values in columns.values())
    y = y if labels is None else labels
    return create(
        destination,
        {name: Split.of(x[own], y[own]) for name, own in splits.items()},
        task="classification" if classes else "regression",
        source=f"table {path.name}",
        classes=classes,
        notes=notes,
        compression=compression,
    )


def _classes(path: Path, table: Table, task: str) -> tuple[list[str], np.ndarray | None]:
    """Return the classes' names and each sample's label; nothing for regression."""
    whole = table.y.shape[1] == 1 and (table.y == np.round(table.y)).all()
    if whole and not task:
        raise ConfigError(
            f"task must be given where targets are whole numbers, classes or not; got none, and {path} has "
            f"{len(np.unique(table.y))} of them in {table.targets[0]}. Say task=classification, or task=regression."
        )
    if task != "classification":
        return [], None
    if not whole:
        got = ", ".join(table.targets)
        raise ConfigError(f"target must be one column of whole numbers for classification; got {got} of {path}.")
    numbers, labels = np.unique(table.y[:, 0], return_inverse=True)
    return [f"{number:.0f}" for number in numbers], labels.astype(np.int64)


def _read(path: Path, target: str, delimiter: str) -> Table:
    if not path.is_file():
        raise DataError(f"{path} must be a .csv, .npy or .npz file; there is no such file.")
    if path.suffix == ".csv":
        names, values = _read_csv(path, delimiter)
    elif path.suffix in (".npy", ".npz"):
        arrays = _read_numpy(path)
        if arrays.keys() == {"x", "y"}:
            return _from_pair(path, arrays["x"], arrays["y"], target)
        if len(arrays) != 1:
            raise DataError(f"{path} must have one array, or two called x and y; got {', '.join(arrays) or 'none'}.")
        (values,) = arrays.values()
        names = [str(i) for i in range(values.shape[-1] if values.ndim else 0)]
    else:
        raise DataError(f"{path} must end in .csv, .npy or .npz; got {path.suffix!r}.")
    if values.ndim != 2 or values.shape[0] < 1 or values.shape[1] < 2:
        raise DataError(f"{path} must have at least 1 sample of at least 2 columns; got shape {values.shape}.")
    _check_finite(path, values, names)
    return _choose_target(path, names, values, target)


def _read_csv(path: Path, delimiter: str) -> tuple[list[str], np.ndarray]:
    try:
        require_memory(path, path.stat().st_size, "text")
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as file:
            names = [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]
            lines = file.readlines()
        _check_header(path, names, delimiter)
        values = np.loadtxt(lines or ["0"], delimiter=delimiter, quotechar='"', comments=None, ndmin=2)
    except (ValueError, TypeError) as error:
        if isinstance(error, HpcdistError):
            raise
        raise DataError(f"{path} must have numbers only, below one line of names ({error}).") from error
    if not lines or values.shape[1] != len(names) or len(set(names)) != len(names):
        raise DataError(
            f"{path} must have a sample or more, and one name of its own for each column; "
            f"got {len(lines)} samples of {values.shape[1]} columns, named {', '.join(names)}."
        )
    return names, values


def _check_header(path: Path, names: list[str], delimiter: str) -> None:
    if len(names) == 1 and (other := max(DELIMITERS, key=names[0].count)) in names[0]:
        raise ConfigError(
            f"delimiter must be what separates the columns of {path}; got {delimiter!r}, and its first line has "
            f"{names[0].count(other)} of {other!r}. Pass delimiter={json.dumps(other)}."
        )
    if unnamed := [str(i) for i, name in enumerate(names) if INDEX.fullmatch(name)]:
        raise DataError(
            f"{path} must have a name for each column; got none for column {', '.join(unnamed)}, as pandas writes its "
            "index, which would be a feature. Write it by to_csv(index=False), or name the column."
        )
    if names != [str(i) for i in range(len(names))] and names and all(map(NUMBER.fullmatch, names)):
        raise DataError(
            f"{path} must have one line of names above its numbers; got {', '.join(names)} there. Add a line of names."
        )


def _read_numpy(path: Path) -> dict[str, np.ndarray]:
    try:
        with open_regular(path) as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                require_memory(path, sum(member.file_size for member in loaded.zip.infolist()), "arrays")
            arrays = {"table": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # whatever the readers of archives, of headers and of zlib's streams raise
        if isinstance(error, HpcdistError):
            raise
        raise DataError(f"{path} must be a NumPy file of numbers ({error}). Save it again.") from error
    for name, values in arrays.items():
        if values.dtype.kind not in "biuf":
            raise DataError(f"{path} must have real numbers; got {values.dtype} in {name}. Save it again.")
    return {name: values.astype(np.float64) for name, values in arrays.items()}


def _from_pair(path: Path, x: np.ndarray, y: np.ndarray, target: str) -> Table:
    if target:
        raise ConfigError(f"target must be left out where {path} has arrays x and y; got {target!r}.")
    y = y[:, np.newaxis] if y.ndim == 1 else y
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or 0 in x.shape + y.shape:
        rule = "x of shape (samples, features) and y of shape (samples, targets)"
        raise DataError(f"{path} must have {rule}; got {x.shape} and {y.shape}.")
    features, targets = ([f"{name}{i}" for i in range(values.shape[1])] for name, values in (("x", x), ("y", y)))
    _check_finite(path, x, features)
    _check_finite(path, y, targets)
    return Table(x, y, features, targets)


def _choose_target(path: Path, names: list[str], values: np.ndarray, target: str) -> Table:
    targets = target.split(",") if target else names[-1:]
    if unknown := [name for name in targets if name not in names]:
        raise ConfigError(f"target must be among the columns {', '.join(names)} of {path}; got {', '.join(unknown)}.")
    features = [name for name in names if name not in targets]
    if not features:
        raise ConfigError(f"target must leave at least 1 column of {path} as a feature; got {target}.")
    column = {name: i for i, name in enumerate(names)}
    x, y = (values[:, [column[name] for name in chosen]] for chosen in (features, targets))
    return Table(x, y, features, targets)


def _check_finite(path: Path, values: np.ndarray, names: list[str]) -> None:
    rows, columns = np.nonzero(~np.isfinite(values))
    if len(rows):
        raise DataError(
            f"{path} must have finite numbers only; got {values[rows[0], columns[0]]} in sample {rows[0]}, "
            f"column {names[columns[0]]}, and {len(rows) - 1} more. Fill or remove them."
        )


def _cast(path: Path, values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all():
        raise DataError(f"{path} must have numbers within the range of {dtype}; got {np.abs(values).max():.3g}.")
    return cast
