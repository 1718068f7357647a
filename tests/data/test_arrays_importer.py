"""The importer of named arrays: files as h5py, MATLAB, Keras and NumPy users have them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.io import savemat

from harness.cases import each
from hpcdist.data import HDF5Dataset, describe, importers
from hpcdist.errors import ConfigError, DataError

convert = importers.load("arrays")
X = np.random.default_rng(0).integers(0, 256, (40, 6, 5, 3), np.uint8)
Y = np.arange(40) % 4
EXPECTED = X.transpose(0, 3, 1, 2) / np.float32(255)


def h5(name, **arrays):
    with h5py.File(name, "w") as file:
        for path, values in arrays.items():
            file[path.replace("__", "/")] = values


def matlab73(name, **arrays):
    """Write arrays as MATLAB 7.3 does: dimensions in reverse order, behind a block of 512 bytes."""
    with h5py.File(name, "w", userblock_size=512) as file:
        for path, values in arrays.items():
            file[path] = values.T
        file["#refs#/a"] = np.zeros(3)
    with open(name, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(116) + b"\0" * 8 + b"\0\2IM")


def compound(name):
    samples = np.zeros(40, [("image", np.uint8, (6, 5, 3)), ("label", np.uint16)])
    samples["image"], samples["label"] = X, Y
    h5(name, samples=samples)


def two_files(name):
    for part, n in (("train", 40), ("test", 8)):
        h5(f"cam_{part}_x.h5", x=X[:n])
        h5(f"cam_{part}_y.h5", y=Y[:n].reshape(-1, 1, 1, 1))


def signs(name):
    h5("train_signs.h5", train_set_x=X, train_set_y=Y, list_classes=np.arange(4))
    h5("test_signs.h5", test_set_x=X[:8], test_set_y=Y[:8])


HWCN = X.transpose(1, 2, 3, 0)
IMAGES, WHOLE = {"x": "images", "y": "labels"}, {"task": "classification"}
LAYOUTS = {  # file, how it is written, options, splits
    "plain.h5": (lambda n: h5(n, images=X, labels=Y), IMAGES, {"train": 32, "test": 8}),
    "bigendian.h5": (lambda n: h5(n, images=X, labels=Y.astype(">i2")), IMAGES, {"train": 32, "test": 8}),
    "nchw.h5": (lambda n: h5(n, X=X.transpose(0, 3, 1, 2), Y=Y), {"layout": "nchw"}, {"train": 32, "test": 8}),
    "keras.h5": (
        lambda n: h5(n, x_train=X, y_train=Y[:, None], x_test=X[:8], y_test=Y[:8, None]), {}, {"train": 40, "test": 8},
    ),
    "groups.h5": (
        lambda n: h5(n, train__x=X, train__y=Y, val__x=X[:4], val__y=Y[:4], test__x=X[:8], test__y=Y[:8]), {},
        {"train": 40, "test": 8, "val": 4},
    ),
    "val.h5": (lambda n: h5(n, train_x=X, train_y=Y, val_x=X[:4], val_y=Y[:4]), {}, {"train": 40, "test": 4}),
    "signs.h5": (
        signs, {"x": "train_signs.h5:train_set_x", "y": "train_signs.h5:train_set_y"}, {"train": 40, "test": 8},
    ),
    "cam.h5": (two_files, {"x": "cam_train_x.h5:x", "y": "cam_train_y.h5:y"}, {"train": 40, "test": 8}),
    "compound.h5": (compound, {"x": "samples/image", "y": "samples/label"}, {"train": 32, "test": 8}),
    "onehot.h5": (lambda n: h5(n, x=X, y=np.eye(4)[Y]), WHOLE, {"train": 32, "test": 8}),
    "words.h5": (
        lambda n: h5(n, x=X, y=np.array([b"abcd"[i : i + 1] for i in Y])), {}, {"train": 32, "test": 8},
    ),
    "v5.mat": (
        lambda n: savemat(n, {"images": HWCN, "labels": Y + 1.0}), {**IMAGES, **WHOLE, "layout": "HWCN"},
        {"train": 32, "test": 8},
    ),
    "v73.mat": (
        lambda n: matlab73(n, images=HWCN, labels=(Y + 1.0)[:, None]), {**IMAGES, **WHOLE, "layout": "HWCN"},
        {"train": 32, "test": 8},
    ),
    "struct.mat": (
        lambda n: savemat(n, {"data": {"images": HWCN, "about": {"labels": Y + 1.0}, "name": "a"}, "n": 3.0}),
        {"x": "data/images", "y": "data/about/labels", **WHOLE, "layout": "HWCN"}, {"train": 32, "test": 8},
    ),
    "struct73.mat": (
        lambda n: matlab73(n, **{"data/images": HWCN, "data/about/labels": (Y + 1.0)[:, None]}),
        {"x": "data/images", "y": "data/about/labels", **WHOLE, "layout": "HWCN"}, {"train": 32, "test": 8},
    ),
    "a.npz": (lambda n: np.savez(n, x_train=X, y_train=Y, x_test=X[:8], y_test=Y[:8]), {}, {"train": 40, "test": 8}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@each("name", LAYOUTS)
def test_layouts_that_people_have(name):
    write, options, sizes = LAYOUTS[name]
    write(name)
    source = {"signs.h5": "train_signs.h5", "cam.h5": "cam_train_x.h5"}.get(name, name)
    options = {"layout": "NHWC", **options}
    path = convert(source, "out.h5", **options)
    found = describe(path)
    assert {split: of["samples"] for split, of in found["splits"].items()} == sizes and len(found["classes"]) == 4
    with HDF5Dataset(convert(source, "all.h5", **{**options, "test_fraction": 0}), "train") as dataset:
        x, y = dataset.batch(range(40))
        np.testing.assert_allclose(x, EXPECTED)
        assert y.tolist() == Y.tolist()
    if name == "v73.mat":
        assert found["classes"] == ["1", "2", "3", "4"]


def test_samples_of_variable_length_are_padded_and_words_are_classes():
    with h5py.File("a.h5", "w") as file:
        tokens = file.create_dataset("tokens", (9,), h5py.vlen_dtype(np.int32))
        for number in range(9):
            tokens[number] = np.arange(1, 2 + number % 4)
        file.create_dataset("mood", data=["good", "bad", "good"] * 3, dtype=h5py.string_dtype())
    with HDF5Dataset(convert("a.h5", "o.h5", x="tokens", y="mood", test_fraction=0)) as dataset:
        x, y = dataset.batch(range(4))
        assert x.tolist() == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]
        assert dataset.classes == ("bad", "good") and y.tolist() == [1, 0, 1, 1]
    with pytest.raises(DataError, match="targets must be one number or word, .*; got lists. Pad them."):
        convert("a.h5", "o.h5", x="mood", y="tokens")


def test_grey_images_get_a_channel_and_values_are_targets():
    np.savez("a.npz", x=X[..., 0], y=Y / 7)
    with HDF5Dataset(convert("a.npz", "o.h5", layout="NHW", scale=0.5, test_fraction=0)) as dataset:
        x, y = dataset.batch([3])
        np.testing.assert_array_equal(x[0, 0], X[3, :, :, 0] / np.float32(2))
        assert dataset.task == "regression" and y.dtype.is_floating_point
    h5("m.h5", x=X.astype("f8"), y=X[..., 0] > 9)
    with HDF5Dataset(convert("m.h5", "o.h5", layout="NHWC", dtype="float64", test_fraction=0)) as dataset:
        x, y = dataset.batch([3])
        assert str(x.dtype) == "torch.float64" and y.tolist() == [(X[3, ..., 0] > 9).astype(int).tolist()], "masks"
    path = convert("m.h5", "o.h5", y="m.h5:y", x="x", classes="", test_fraction=0)
    assert describe(path)["task"] == "regression"


def test_classes_may_have_names():
    h5("a.h5", x=X, y=Y)
    assert describe(convert("a.h5", "o.h5", classes="a,b,c,d"))["classes"] == ["a", "b", "c", "d"]


def test_words_are_numbered_in_the_order_of_the_classes():
    np.savez("a.npz", x=X, y=np.array(["cat", "ant", "dog", "ant"])[Y])
    with HDF5Dataset(convert("a.npz", "o.h5", classes="cat,ant,dog", test_fraction=0)) as dataset:
        assert dataset.classes == ("cat", "ant", "dog") and dataset.batch(range(4))[1].tolist() == [0, 1, 2, 1]
    for given in ("cat,ant", "cat,ant,cow"):
        with pytest.raises(
            ConfigError, match=f"classes must name each label of y .*; got {', '.join(given.split(','))}"
        ):
            convert("a.npz", "p.h5", classes=given)


def test_rows_of_a_single_1_are_labels():
    np.savez("a.npz", x=X, y=np.eye(4, dtype=int)[Y])
    with HDF5Dataset(convert("a.npz", "o.h5", test_fraction=0)) as dataset:
        assert dataset.task == "classification" and dataset.batch(range(4))[1].tolist() == [0, 1, 2, 3]
    np.savez("a.npz", x=X, y=np.eye(4)[Y])
    with pytest.raises(ConfigError, match="targets may be one-hot classes or 4 numbers each; got none, and y"):
        convert("a.npz", "p.h5")
    assert describe(convert("a.npz", "q.h5", task="regression"))["task"] == "regression"


@each("case", [("NHWC", 1 / 65535), ("", None)])
def test_images_of_16_bits_are_read_as_0_to_1_and_tokens_as_they_are(case):
    layout, scale = case
    np.savez("a.npz", x=X.astype(np.uint16) * 257, y=Y)
    with HDF5Dataset(convert("a.npz", "o.h5", layout=layout, test_fraction=0)) as dataset:
        x, _ = dataset.batch([5])
        expected = X[5].transpose(2, 0, 1) * np.float32(257 * scale) if scale else X[5] * np.int32(257)
        np.testing.assert_allclose(x[0], expected, rtol=1e-6)


def damaged(name):
    Path(name).write_bytes(b"PK no archive")


def of_structs(name):
    """Write an array of structs and a cell as MATLAB 7.3 does: references."""
    matlab73(name, images=HWCN)
    with h5py.File(name, "r+") as file:
        file["s/labels"] = np.array([file["#refs#/a"].ref] * 2, h5py.ref_dtype)


REFUSED = {
    "x and y must be the names of arrays, or FILE:ARRAY; got data, and there are data/images .6, 5, 3, 40. uint8; ": (
        "a.mat", lambda n: savemat(n, {"data": {"images": HWCN, "y": Y}}), {"x": "data", "y": "data/y"},
    ),
    "x and y must be the names of arrays, or FILE:ARRAY; got s/images, and there are n .1, 1. .*$": (
        "a.mat", lambda n: savemat(n, {"s": np.array([(1, 2), (3, 4)], [("images", "O"), ("y", "O")]), "n": 3.0}),
        {"x": "s/images", "y": "s/y"},
    ),
    "x and y must be the names of arrays, or FILE:ARRAY; got s/labels, and there are images .6, 5, 3, 40. uint8.$": (
        "a.mat", of_structs, {"x": "images", "y": "s/labels"},
    ),
    "x and y must be the names of arrays, or FILE:ARRAY; got pictures, and there are x .40, 6, 5, 3. uint8; y": (
        "a.h5", lambda n: h5(n, x=X, y=Y), {"x": "pictures"},
    ),
    "x and y must be the names of arrays, or FILE:ARRAY; got b.h5:x, and there are ": (
        "a.h5", lambda n: h5(n, x=X, y=Y), {"x": "b.h5:x"},
    ),
    "layout must be one letter for each dimension of x, .*; got 'NHW' for x .40, 6, 5, 3. uint8": (
        "a.h5", lambda n: h5(n, x=X, y=Y), {"layout": "NHW"},
    ),
    "x and y must have as many samples; got x .40, 6, 5, 3. uint8 and y .39,. int64 of a.h5. If": (
        "a.h5", lambda n: h5(n, x=X, y=Y[:39]), {},
    ),
    "task must be given where targets may be classes or numbers, .* y .* float64 of a.h5 has 4 different ones. Pass": (
        "a.h5", lambda n: h5(n, x=X, y=Y * 1.0), {},
    ),
    "x must have finite numbers; got another in sample 7 of x .40, 6, 5, 3. float64 of a.h5": (
        "a.h5", lambda n: h5(n, x=np.where(np.arange(40)[:, None, None, None] == 7, np.nan, X), y=Y), {},
    ),
    "task must be one of classification, regression; got 'labels'": (
        "a.h5", lambda n: h5(n, x=X, y=Y), {"task": "labels"},
    ),
    "targets must be a whole number or a word each for classification, or rows of a single 1": (
        "a.h5", lambda n: h5(n, x=X, y=Y / 7), WHOLE,
    ),
    "dtype must be one of float32, float64; got 'half'": ("a.h5", lambda n: h5(n, x=X, y=Y), {"dtype": "half"}),
    "a.h5 must be an HDF5, .mat or .npz file; there is no such file. Check": ("a.h5", lambda n: None, {}),
    "a.npz must be an HDF5, .mat or .npz file; there is no such file. Check": ("a.npz", lambda n: None, {}),
    "a.h5 is not an HDF5 file .*hpcdist data import. makes such a file of other": ("a.h5", damaged, {}),
    "a.npz must be a .npz file of numbers .*. Save it again": ("a.npz", damaged, {}),
    "a.mat must be a .mat file of numbers": ("a.mat", damaged, {}),
    "o.npz must be a .npz file of numbers .*pickle": ("o.npz", lambda n: np.savez(n, x=np.array([{}]), y=Y), {}),
}  # fmt: skip


@each("message", REFUSED)
def test_what_is_refused(message):
    name, write, options = REFUSED[message]
    write(name)
    with pytest.raises((ConfigError, DataError), match=message):
        convert(name, "out.h5", **options)
    Path(name).unlink(missing_ok=True)


def test_options_follow_the_file_on_the_command_line():
    h5("a.h5", images=X, labels=Y)

    def hpcdist(*words):
        command = [sys.executable, "-m", "hpcdist", "data", "import", "arrays", "a.h5", "o.h5", *words]
        return subprocess.run(command, capture_output=True, text=True)

    done = hpcdist("--x", "images", "--y=labels", "--layout", "NHWC", "--test-fraction", "0.5")
    assert done.returncode == 0, done.stderr
    assert (
        describe("o.h5")["splits"]["test"]["samples"] == 20 and describe("o.h5")["splits"]["test"]["x"]["shape"][0] == 3
    )
    for words, message in (
        (
            ("--overwrite", "--x"),
            "options of the importer must be --NAME VALUE, behind FILE; got --x. `hpcdist datasets",
        ),
        (("--overwrite", "--z", "1"), "setting must be one of classes, .*; got 'z'."),
    ):
        done = hpcdist(*words)
        assert done.returncode == 1 and re.search(message, done.stderr), done.stderr
