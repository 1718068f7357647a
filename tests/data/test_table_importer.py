"""The importer of regression tables: CSV and .npy."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.config.merge import load
from hpcdist.data import HDF5Dataset, importers
from hpcdist.errors import ConfigError, DataError

VALUES = np.random.default_rng(0).normal(3, 2, (50, 4))
NAMES = ["length", "a width", "height", "price"]
convert = importers.load("table")


@pytest.fixture
def csv(tmp_path):
    np.savetxt(tmp_path / "a.csv", VALUES, fmt="%.17g", delimiter=",", header=",".join(NAMES), comments="")
    return tmp_path / "a.csv"


def everything(path, split="train"):
    with HDF5Dataset(path, split) as dataset:
        assert dataset.task == "regression"
        return *(tensor.numpy() for tensor in dataset.batch(range(len(dataset)))), dataset.notes


@each("suffix", ["csv", "npy"])
def test_last_column_is_the_target(tmp_path, csv, suffix):
    source = tmp_path / f"a.{suffix}"
    np.save(tmp_path / "a.npy", VALUES)
    x, y, notes = everything(convert(source, tmp_path / "a.h5", test_fraction=0, dtype="float64"))
    np.testing.assert_array_equal(np.column_stack([x, y]), VALUES)
    names = NAMES if suffix == "csv" else ["0", "1", "2", "3"]
    assert (notes["features"], notes["targets"]) == (names[:3], names[3:])


def test_chosen_targets_and_float32(csv, tmp_path):
    x, y, notes = everything(convert(csv, tmp_path / "a.h5", target="price,length", test_fraction=0))
    np.testing.assert_array_equal(x, VALUES[:, [1, 2]].astype(np.float32))
    np.testing.assert_array_equal(y, VALUES[:, [3, 0]].astype(np.float32))
    assert x.dtype == y.dtype == np.float32 and notes["targets"] == ["price", "length"]


def test_other_delimiter_quotes_and_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_text('"a; b";c#\r\n"1.5";2\r\n-3e2;4\r\n', encoding="utf-8-sig", newline="")
    options = {"delimiter": ";", "test_fraction": 0, "task": "regression"}
    x, y, notes = everything(convert(tmp_path / "a.csv", tmp_path / "a.h5", **options))
    assert x.tolist() == [[1.5], [-300.0]] and y.tolist() == [[2.0], [4.0]]
    assert notes["features"] == ["a; b"] and notes["targets"] == ["c#"]


def test_split_is_exact_and_drawn_from_the_seed(csv, tmp_path):
    def rows(seed):
        path = convert(csv, tmp_path / "a.h5", test_fraction=0.3, seed=seed, dtype="float64")
        return [np.column_stack(everything(path, split)[:2]) for split in ("train", "test")]

    train, test = rows(0)
    assert len(test) == 15
    raise_on_all_ranks = np.concatenate([train, test])
    np.testing.assert_array_equal(
        raise_on_all_ranks[np.argsort(raise_on_all_ranks[:, 0])], VALUES[np.argsort(VALUES[:, 0])]
    )
    np.testing.assert_array_equal(rows(0)[1], test)
    assert (rows(1)[1] != test).any()


@each("standardise", ["none", "features", "all"])
def test_standardised_by_the_training_samples_alone(tmp_path, standardise):
    values = VALUES.copy()
    values[:, 1] = 7.0  # constant
    np.save(tmp_path / "a.npy", values)
    options = {"test_fraction": 0.4, "dtype": "float64"}
    raw = convert(tmp_path / "a.npy", tmp_path / "raw.h5", **options)
    path = convert(tmp_path / "a.npy", tmp_path / "a.h5", standardise=standardise, **options)
    for i, name in enumerate("xy"):
        train, notes = everything(path)[i], everything(path)[2]
        if name not in {"none": "", "features": "x", "all": "xy"}[standardise]:
            assert f"{name}_mean" not in notes
            np.testing.assert_array_equal(train, everything(raw)[i])
            continue
        np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(train.std(axis=0), [1, 0, 1] if name == "x" else [1], atol=1e-12)
        for split in ("train", "test"):
            restored = everything(path, split)[i] * notes[f"{name}_std"] + notes[f"{name}_mean"]
            np.testing.assert_allclose(restored, everything(raw, split)[i], rtol=1e-12)


def test_standardised_in_float64_before_it_is_rounded(tmp_path):
    values = 1e9 + VALUES  # float32 alone would lose everything but the mean
    np.save(tmp_path / "a.npy", values)
    x, _, _ = everything(convert(tmp_path / "a.npy", tmp_path / "a.h5", standardise="features", test_fraction=0))
    np.testing.assert_allclose(x, (VALUES[:, :3] - VALUES[:, :3].mean(0)) / VALUES[:, :3].std(0), atol=1e-5)


@each(
    "case",
    [
        (
            "a,b\n1,2\n\n3,x\n",
            "must have finite numbers, or words, in a column; got x in line 4, column b. Fill",
        ),
        (
            "a,b\n1,2\n3,\n",
            "must have finite numbers, or words, in a column; got an empty cell or nan in line 3, column b. Fill",
        ),
        (
            "a,b\n1,2\n3\n",
            "must have finite numbers, or words, in a column; got an empty cell or nan in line 3, column b",
        ),
        ("a,b\n#1,2\n4,5\n", "must have finite numbers, or words, in a column; got #1 in line 2, column a"),
        (
            '"a","b"\n"1\n",2\n3,4 5\n7,8\n',
            "must have finite numbers, or words, in a column; got 4 5 in line 4, column b",
        ),
        ("a,b\n1,2\n3,4,5\n", "must have as many columns in each line as in the first .*Expected 2 .* line 3, saw 3"),
        ("a,b\n1,2,3\n3,4,5\n", "must have as many columns in each line as in the first .Length of header"),
        ("a,b\n", r"must have at least 1 sample of at least 2 columns; got shape .0, 2."),
        ("", "must have as many columns in each line as in the first .No columns"),
        ("a,b,c\n1,2\n", "got an empty cell or nan in line 2, column c"),
        (
            "a,b,c\n1,red,2\n3,,4\n",
            "must have finite numbers, or words, in a column; got an empty cell or nan in line 3, column b[.]",
        ),
        ("a,a\n1,2\n", "must have a name of its own for each column; got a twice"),
        ("a\n1\n", r"must have at least 1 sample of at least 2 columns; got shape \(1, 1\)."),
        (
            "a,b\n1,2\nnan,2\n",
            "must have finite numbers, or words, in a column; got an empty cell or nan in line 3, column a. Fill",
        ),
        (
            "a,b\n1,inf\nnan,2\n",
            "must have finite numbers, or words, in a column; got inf in line 2, column b, and 1 more.",
        ),
        (",a,b\n0,1,2\n", r"must have a name for each column; got none for column 0, .*index=False"),
        ("Unnamed: 0,a,b\n0,1,2\n", "must have a name for each column; got none for column 0,"),
        ("a,Unnamed: 0.1,\n0,1,2\n", "must have a name for each column; got none for column 1, 2,"),
        ("1.5,2\n3,4\n", "must have one line of names above its numbers; got 1.5, 2 there. Add a line of names."),
        (b"\xff\xfe\x00", "must have as many columns in each line as in the first .*decode"),
        ("a,b\n1,1e39\n2,0\n", r"must have numbers within the range of float32; got 1e\+39."),
    ],
)
def test_bad_csv(tmp_path, case):
    text, match = case
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=match):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", test_fraction=0, task="regression")
    assert not (tmp_path / "a.h5").exists()


def test_decimal_commas_are_named_and_read(tmp_path):
    (tmp_path / "a.csv").write_text("a;b;c\n1,5;2;red\n-0,25;3;blue\n")
    given = {"delimiter": ";", "target": "a", "words": "leave_out", "test_fraction": 0}
    with pytest.raises(
        ConfigError, match="decimal must be .*; got '.', and column a has numbers such as 1,5. Pass decimal"
    ):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", **given)
    with HDF5Dataset(convert(tmp_path / "a.csv", tmp_path / "a.h5", decimal=",", **given)) as dataset:
        assert dataset.batch(range(2))[1].flatten().tolist() == [1.5, -0.25]
    with pytest.raises(ConfigError, match="decimal must be '.' or ',', and not the delimiter; got ','"):
        convert(tmp_path / "a.csv", tmp_path / "b.h5", decimal=",")


@each("used", [";", "\t", "|", " "])
def test_another_delimiter_is_named_with_the_option(tmp_path, used):
    (tmp_path / "a.csv").write_text(f"a{used}b{used}c\n1{used}2{used}3.5\n")
    with pytest.raises(ConfigError, match="delimiter must be what separates the columns of .*; got ','") as error:
        convert(tmp_path / "a.csv", tmp_path / "a.h5")
    (flag,) = re.findall("Pass (.*)\\.", str(error.value))  # as a flag of the command line has it
    path = convert(tmp_path / "a.csv", tmp_path / "a.h5", test_fraction=0, **load({}, None, [flag]))
    assert everything(path)[1].tolist() == [[3.5]]


def test_the_task_is_never_guessed(tmp_path):
    """Whole numbers may be classes: as labels of any numbers, or for regression."""
    labels = np.tile([7, -1, 3, 3, 3], 10)
    table = np.column_stack([VALUES, labels])
    np.save(tmp_path / "a.npy", table)
    np.savetxt(tmp_path / "a.csv", table, fmt="%.17g", delimiter=",", header="a,b,c,d,kind", comments="")
    for source in (tmp_path / "a.npy", tmp_path / "a.csv"):
        with pytest.raises(
            ConfigError,
            match="task must be given where targets may be classes or numbers.* .* has 3 different ones. Pass",
        ):
            convert(source, tmp_path / "a.h5")
        with HDF5Dataset(convert(source, tmp_path / "a.h5", task="classification", test_fraction=0)) as dataset:
            x, y = dataset.batch(range(50))
            assert (dataset.task, dataset.classes, y.dtype) == ("classification", ("-1", "3", "7"), torch.int64)
            assert [dataset.classes[label] for label in y] == list(map(str, labels))
            np.testing.assert_array_equal(x, VALUES.astype(np.float32))
        _, y, _ = everything(convert(source, tmp_path / "a.h5", task="regression", test_fraction=0))
        np.testing.assert_array_equal(y[:, 0], labels)


@each("target", ["0", "0,1"])
def test_classes_are_one_column_of_whole_numbers(tmp_path, target):
    source = tmp_path / "a.npy"
    np.save(source, VALUES)
    with pytest.raises(ConfigError, match="targets must be a whole number or a word each for classification, .*; got"):
        convert(source, tmp_path / "a.h5", target=target, task="classification")
    assert len(everything(convert(source, tmp_path / "a.h5", target=target))[0]) == 40, "no classes: nothing to say"


@each(
    "case",
    [
        (VALUES[0], r"must have real numbers of shape \(samples, columns\); got float64 of shape \(4,\)."),
        (VALUES * 1j, "must have real numbers of .*; got complex128 of"),
        (np.array([["x", "y"]]), "must have real numbers of .*; got <U1 of"),
        (np.array([[{}]]), "must be a .npy file of numbers .*pickle"),
        (VALUES[:, :1], r"must have at least 1 sample of at least 2 columns; got shape \(50, 1\)."),
    ],
)
def test_bad_arrays(tmp_path, case):
    values, match = case
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(DataError, match=match):
        convert(tmp_path / "a.npy", tmp_path / "a.h5")


@each("kept", [0, 5, 60, 400])
def test_truncated_numpy_files(tmp_path, kept):
    source = tmp_path / "a.npy"
    np.save(source, VALUES)
    source.write_bytes(source.read_bytes()[:kept])
    with pytest.raises(DataError, match="must be a .npy file of numbers .*Save it again."):
        convert(source, tmp_path / "a.h5")


def test_other_files(tmp_path):
    (tmp_path / "a.npz").touch()
    (tmp_path / "large.csv").write_text("a,b\n1,2\n")
    os.truncate(tmp_path / "large.csv", 1 << 43)
    for name, match in (
        ("none.csv", "must be the file of a table; there is no such file. Check"),
        ("a.npz", "must end in .csv, .parquet or .npy; got '.npz'. The importer arrays takes .npz."),
        ("large.csv", "large.csv has 8796093022208 bytes of text, more than this machine's memory of"),
    ):
        with pytest.raises(DataError, match=match):
            convert(tmp_path / name, tmp_path / "a.h5")


@each(
    "case",
    [
        ({"target": "cost"}, "target must be among the columns length, a width, height, price of .*; got cost."),
        ({"target": ",".join(NAMES)}, "target must leave at least 1 column of .* as a feature"),
        ({"standardise": "yes"}, "standardise must be one of none, features, all; got 'yes'."),
        ({"dtype": "int8"}, "dtype must be one of float32, float64; got 'int8'."),
        ({"task": "ranking"}, "task must be one of classification, regression; got 'ranking'."),
        ({"delimiter": ""}, "delimiter must be one character, such as ',' or ';'; got ''."),
        ({"test_fraction": 1}, "test_fraction must be at least 0 and below 1; got 1."),
    ],
)
def test_bad_options(csv, tmp_path, case):
    options, match = case
    with pytest.raises(ConfigError, match=match):
        convert(csv, tmp_path / "a.h5", **options)


def test_labels_are_not_standardised(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n" + "1.5,0\n2.5,1\n" * 10)
    with pytest.raises(ConfigError, match="must be none or features for .*; got all."):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", task="classification", standardise="all")


# --- words ------------------------------------------------------------------------------------------------------------
WORDED = "size,colour,kind\n" + "".join(
    f"{i},{('red', 'blue', 'red')[i % 3]},{('plum', 'fig')[i % 2]}\n" for i in range(12)
)


def test_words_are_classes_where_they_are_the_target(tmp_path):
    (tmp_path / "a.csv").write_text(WORDED)
    with HDF5Dataset(convert(tmp_path / "a.csv", tmp_path / "a.h5", words="onehot", test_fraction=0)) as dataset:
        x, y = dataset.batch(range(12))
        assert (dataset.task, dataset.classes) == ("classification", ("fig", "plum"))
        assert [dataset.classes[label] for label in y] == ["plum", "fig"] * 6
        assert dataset.notes["features"] == ["size", "colour=blue", "colour=red"] and x[:2].tolist() == [
            [0, 0, 1],
            [1, 1, 0],
        ]
    with HDF5Dataset(convert(tmp_path / "a.csv", tmp_path / "a.h5", words="leave_out", test_fraction=0)) as dataset:
        assert dataset.notes["features"] == ["size"]


def test_words_among_features_are_refused_until_it_is_said_what_becomes_of_them(tmp_path):
    (tmp_path / "a.csv").write_text(WORDED)
    match = (
        r"words must be onehot, .* or leave_out, .*; got '', and column colour of .* has 2 of them. .* target=colour."
    )
    with pytest.raises(ConfigError, match=match):
        convert(tmp_path / "a.csv", tmp_path / "a.h5")
    (tmp_path / "a.csv").write_text("a,b\n" + "".join(f"w{i},{i / 2}\n" for i in range(1001)))
    with pytest.raises(ConfigError, match="at most 1000 .* got 'onehot', and column a of .* has 1001 of them"):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", words="onehot")
    with pytest.raises(ConfigError, match="target must leave at least 1 column"):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", words="leave_out")
    with pytest.raises(ConfigError, match="words must be one of , onehot, leave_out; got 'codes'."):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", words="codes")
    (tmp_path / "a.csv").write_text(WORDED)
    with pytest.raises(
        ConfigError, match="targets must be .* and numbers for regression; got kind of .* for regression."
    ):
        convert(tmp_path / "a.csv", tmp_path / "a.h5", words="leave_out", task="regression")


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": [1.5, 2, 3], "flag": [True, False, True], "kind": ["x", "y", "x"]})
    frame.to_parquet(tmp_path / "a.parquet")
    with HDF5Dataset(convert(tmp_path / "a.parquet", tmp_path / "a.h5", test_fraction=0)) as dataset:
        x, y = dataset.batch(range(3))
        assert (dataset.classes, x.tolist(), y.tolist()) == (("x", "y"), [[1.5, 1], [2, 0], [3, 1]], [0, 1, 0])
    frame.assign(a=[1.0, None, 2.0]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        DataError,
        match="b.parquet must have finite .*; got an empty cell or nan in sample 1, column a[.]",
    ):
        convert(tmp_path / "b.parquet", tmp_path / "a.h5")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="c.parquet must be a Parquet file .*. Save it again."):
        convert(tmp_path / "c.parquet", tmp_path / "a.h5")
