"""A table: CSV with a header, Parquet, or a NumPy array."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from hpcdist.data.format import require_memory
from hpcdist.data.importers import as_targets, random_splits
from hpcdist.data.importers.arrays import loaded
from hpcdist.data.writer import Split, create
from hpcdist.errors import ConfigError, DataError, HpcdistError, require_packages
from hpcdist.records import open_regular

STANDARDISE = ("none", "features", "all")
DTYPES = ("float32", "float64")
WORDS = ("", "onehot", "leave_out")
MOST = 1000  # different words in a column that becomes as many
NUMBER = re.compile(r"[-+]?\.?\d[\d.e+-]*", re.IGNORECASE)
DELIMITERS = ",;\t|: "
COMMA = r"\s*[-+]?\d*,\d+\s*"  # a number with a decimal comma
INDEX = re.compile(r"|Unnamed: [\d.]+")  # the name of pandas' index, and once it has been read and written again


@dataclass(frozen=True)
class Table:
    """Named columns of float64 numbers: features x (n, f) and targets y (n, t); or words y (n, 1)."""

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
    decimal: str = ".",
    words: str = "",
    standardise: str = "none",
    dtype: str = "float32",
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write a table: x (features,) and y (targets,) of `dtype`; for classification y is an int64 label.

    Standardised columns are (value - mean) / deviation, computed in float64; the constants are those of the training
    samples alone and are stored as x_mean, x_std, y_mean and y_std. A constant column keeps deviation 1.

    Args:
        source: A .csv file with a header; a .parquet file; or a .npy file with an array (samples, columns), whose
            columns are called 0, 1, and so on.
        destination: The file to write.
        target: The column or columns to predict, with commas between; by default the last one.
        task: "regression" or "classification", to be said where there is one target of whole numbers, which may be
            either. Words are classes; other targets are for regression. Classes are in ascending order.
        delimiter: Separator of the columns of a .csv file.
        decimal: What stands before the decimal places in a .csv file: "." or ",".
        words: "onehot" makes a feature, 0 or 1, of each word of a column of words; "leave_out" leaves such columns out.
            By default they are refused.
        standardise: "none", "features", or "all" for the targets as well.
        dtype: "float32" or "float64".
        test_fraction: Part of the samples that is kept for testing.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    given = {"standardise": (standardise, STANDARDISE), "dtype": (dtype, DTYPES), "words": (words, WORDS)}
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
    if decimal not in (".", ",") or decimal == delimiter:
        raise ConfigError(f"decimal must be '.' or ',', and not the delimiter; got {decimal!r}.")
    if len(delimiter) != 1:
        raise ConfigError(f"delimiter must be one character, such as ',' or ';'; got {delimiter!r}.")
    path = Path(source)
    table = _read(path, target, delimiter, words, decimal)
    y = table.y[:, 0] if table.y.shape[1] == 1 else table.y
    (labels,), classes = as_targets(task, f"{', '.join(table.targets)} of {path}", [y])
    if classes and standardise == "all":
        raise ConfigError("standardise must be none or features for classification, whose targets are labels; got all.")
    splits = random_splits(len(table.x), test_fraction, seed, labels if classes else None)
    notes: dict = {"features": table.features, "targets": table.targets, "test_fraction": test_fraction, "seed": seed}
    columns = {"x": table.x} if classes else {"x": table.x, "y": table.y}
    for name in {"none": "", "features": "x", "all": "xy"}[standardise]:
        values = columns[name]
        mean, std = values[splits["train"]].mean(axis=0), values[splits["train"]].std(axis=0)
        std[std == 0] = 1
        columns[name] = (values - mean) / std
        notes |= {f"{name}_mean": mean, f"{name}_std": std}
    written = {"y": labels, **{name: _cast(path, values, dtype) for name, values in columns.items()}}
    return create(
        destination,
        {name: Split.of(written["x"][own], written["y"][own]) for name, own in splits.items()},
        task="classification" if classes else "regression",
        source=f"table {path.name}",
        classes=classes,
        notes=notes,
        compression=compression,
    )


def _read(path: Path, target: str, delimiter: str, words: str, decimal: str) -> Table:
    if not path.is_file():
        raise DataError(f"{path} must be the file of a table; there is no such file. Check the path.")
    if path.suffix == ".csv":
        frame = _read_csv(path, delimiter, decimal)
    elif path.suffix == ".parquet":
        frame = _read_parquet(path)
    elif path.suffix == ".npy":
        frame = _read_numpy(path)
    else:
        raise DataError(
            f"{path} must end in .csv, .parquet or .npy; got {path.suffix!r}. The importer arrays takes .npz."
        )
    if frame.shape[0] < 1 or frame.shape[1] < 2:
        raise DataError(f"{path} must have at least 1 sample of at least 2 columns; got shape {frame.shape}.")
    return _choose_target(path, frame, target, delimiter, words)


def _read_csv(path: Path, delimiter: str, decimal: str) -> pd.DataFrame:
    try:
        require_memory(path, path.stat().st_size, "text")
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as file, warnings.catch_warnings():
            names = [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]
            _check_header(path, names, delimiter)
            file.seek(0)
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of a line with more fields than names
            frame = pd.read_csv(
                file, sep=delimiter, header=0, index_col=False, float_precision="round_trip", keep_default_na=False,
                decimal=decimal, na_values=["", "nan", "NaN"], low_memory=False,
            )  # fmt: skip
    except (ValueError, TypeError, pd.errors.ParserWarning) as error:
        if isinstance(error, HpcdistError):
            raise
        raise DataError(f"{path} must have as many columns in each line as in the first ({error}).") from error
    frame.columns = pd.Index(names)
    for name in frame.select_dtypes(object) if len(frame) else ():
        if frame[name].dropna().astype(str).str.fullmatch(COMMA).all():
            raise ConfigError(
                f"decimal must be what stands before the decimal places in {path}; got {decimal!r}, and column {name} "
                f"has numbers such as {frame[name].iloc[0]}. Pass decimal=','."
            )
    return frame


def _read_parquet(path: Path) -> pd.DataFrame:
    require_packages("a .parquet file", "datasets", "pyarrow")
    try:
        return pd.read_parquet(path).rename(columns=str)
    except Exception as error:  # pyarrow's own
        raise DataError(f"{path} must be a Parquet file ({error}). Save it again.") from error


def _checked(path: Path, frame: pd.DataFrame, delimiter: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with numbers as float64, and the names of its columns of words, which contain no number.

    Raises DataError if a value is missing, or not a finite number.
    """
    numbers = frame.apply(pd.to_numeric, errors="coerce").astype(np.float64)
    words = [name for name in frame if frame[name].dtype == object and numbers[name].isna().all()]
    is_bad = pd.DataFrame(~np.isfinite(numbers), columns=frame.columns)
    is_bad[words] = frame[words].isna()
    rows, columns = np.nonzero(is_bad)
    if len(rows):
        location = f"line {_line(path, delimiter, rows[0])}" if path.suffix == ".csv" else f"sample {rows[0]}"
        got = "an empty cell or nan" if pd.isna(value := frame.iat[rows[0], columns[0]]) else value
        more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
        raise DataError(
            f"{path} must have finite numbers, or words, in a column; got {got} in {location}, "
            f"column {frame.columns[columns[0]]}{more}. Fill or remove such cells."
        )
    numbers[words] = frame[words]
    return numbers, words


def _line(path: Path, delimiter: str, row: int) -> int:
    """Return the number, from 1, of the line in which sample `row` ends; empty lines and quoted line breaks count."""
    with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        return next(islice((reader.line_num for fields in reader if fields), row + 1, None))


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
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path} must have a name of its own for each column; got {twice[0]} twice. Rename one.")
    if names != [str(i) for i in range(len(names))] and names and all(map(NUMBER.fullmatch, names)):
        raise DataError(
            f"{path} must have one line of names above its numbers; got {', '.join(names)} there. Add a line of names."
        )


def _read_numpy(path: Path) -> pd.DataFrame:
    values = loaded(path).get("table", np.empty(0))
    if values.ndim != 2 or values.dtype.kind not in "biuf":
        got = f"{values.dtype} of shape {values.shape}"
        raise DataError(f"{path} must have real numbers of shape (samples, columns); got {got}. Save it again.")
    return pd.DataFrame(values.astype(np.float64)).rename(columns=str)


def _choose_target(path: Path, frame: pd.DataFrame, target: str, delimiter: str, words: str) -> Table:
    """Divide the columns into features and targets, and apply the option `words` to features of words."""
    names = list(frame.columns)
    targets = target.split(",") if target else names[-1:]
    if unknown := [name for name in targets if name not in names]:
        raise ConfigError(f"target must be among the columns {', '.join(names)} of {path}; got {', '.join(unknown)}.")
    frame, word_columns = _checked(path, frame, delimiter)
    features_frame = frame.drop(columns=targets)
    if features := [name for name in word_columns if name not in targets]:
        sizes = features_frame[features].nunique()
        if not words or (words == "onehot" and sizes.max() > MOST):
            raise ConfigError(
                f"words must be onehot, for columns of at most {MOST} different words, or leave_out, where features "
                f"are words; got {words!r}, and column {sizes.idxmax()} of {path} has {sizes.max()} of them. One to be "
                f"predicted is the target, such as target={features[0]}."
            )
        if words == "onehot":
            features_frame = pd.get_dummies(features_frame, columns=features, prefix_sep="=", dtype=float)
        else:
            features_frame = features_frame.drop(columns=features)
    if not len(features_frame.columns):
        raise ConfigError(f"target must leave at least 1 column of {path} as a feature; got {target or targets[0]}.")
    return Table(features_frame.to_numpy(), frame[targets].to_numpy(), list(map(str, features_frame.columns)), targets)


def _cast(path: Path, values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all():
        raise DataError(f"{path} must have numbers within the range of {dtype}; got {np.abs(values).max():.3g}.")
    return cast
