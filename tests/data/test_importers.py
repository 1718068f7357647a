"""The importers on small files in the true formats, whole and damaged."""

from __future__ import annotations

import gzip
import inspect
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import get_type_hints

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from harness.cases import each
from hpcdist.data import HDF5Dataset, describe, importers
from hpcdist.errors import ConfigError, DataError, UnknownNameError

RNG = np.random.default_rng(0)


def everything(path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All samples of a split as loaded, in the order of the file."""
    with HDF5Dataset(path, split) as dataset:
        x, y = dataset.batch(range(len(dataset)))
        return x.numpy(), y.numpy()


# --- the catalogue ------------------------------------------------------------------------------------------------
@each("name", importers.available())
def test_options_have_a_type_a_default_and_a_description(name):
    convert = importers.load(name)
    source, destination, *options = inspect.signature(convert).parameters.values()
    hints = get_type_hints(convert)
    assert (source.name, destination.name) == ("source", "destination") and hints["return"] is Path
    for option in options:
        assert option.kind is option.KEYWORD_ONLY and option.default is not option.empty
        assert hints[option.name] in (int, float, str, str | None)
        assert f"{option.name}" in convert.__doc__.split("Args:")[1]


def test_an_importer_has_its_data_sets_name_and_an_unknown_one_lists_them():
    assert importers.load("fashion-mnist") is importers.load("fashion_mnist")
    with pytest.raises(UnknownNameError, match="importer must be one of arrays, cifar10, datasets, .*; got 'cats'."):
        importers.load("cats")


# --- splitting ----------------------------------------------------------------------------------------------------
def test_split_is_whole_even_per_class_and_drawn_from_the_seed():
    labels = np.repeat([0, 1, 2], [50, 100, 30])
    splits = importers.random_splits(180, 0.2, 3, labels)
    assert np.sort(np.concatenate([splits["train"], splits["test"]])).tolist() == list(range(180))
    assert np.bincount(labels[splits["test"]]).tolist() == [10, 20, 6]
    assert (importers.random_splits(180, 0.2, 3, labels)["test"] == splits["test"]).all()
    assert (importers.random_splits(180, 0.2, 4, labels)["test"] != splits["test"]).any()
    assert {name: len(part) for name, part in importers.random_splits(5, 0, 0).items()} == {"train": 5}


def test_splits_that_cannot_be_drawn_are_refused():
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"test_fraction must be at least 0 and below 1; got {fraction}."):
            importers.random_splits(10, fraction, 0)
    for samples, labels in ((1, None), (3, [0, 0, 1])):
        with pytest.raises(DataError, match=f"{samples} samples can't be split with test_fraction 0.5 .* Take another"):
            importers.random_splits(samples, 0.5, 0, labels)


# --- digits -------------------------------------------------------------------------------------------------------
def test_digits(tmp_path):
    convert = importers.load("digits")
    path = convert(None, tmp_path / "a.h5", seed=1, compression="gzip")
    (train_x, train_y), (test_x, test_y) = everything(path, "train"), everything(path, "test")
    assert train_x.shape == (1437, 1, 8, 8) and test_x.shape == (360, 1, 8, 8)
    assert train_x.dtype == np.float32 and train_x.min() == 0 and train_x.max() == 1 and train_y.dtype == np.int64
    assert np.abs(np.bincount(test_y) / np.bincount(train_y) - 0.25).max() < 0.02
    original = load_digits()
    found = np.concatenate([np.column_stack([x.reshape(len(x), 64) * 16, y]) for x, y in
                            ((train_x, train_y), (test_x, test_y))])  # fmt: skip
    expected = np.column_stack([original.data, original.target])
    np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])
    stored = describe(path)
    assert stored["classes"] == list("0123456789")
    assert [stored["splits"]["train"]["x"][key] for key in ("dtype", "compression")] == ["uint8", "gzip"]
    a, b, c = (everything(convert(None, tmp_path / "b.h5", seed=seed), "test")[0] for seed in (0, 1, 0))
    assert (a == c).all() and (a != b).any()
    assert list(describe(convert("sklearn", tmp_path / "b.h5", test_fraction=0))["splits"]) == ["train"]
    with pytest.raises(ConfigError, match="source must be 'sklearn': these data come with scikit-learn; got '/data'."):
        convert(Path("/data"), tmp_path / "a.h5")


# --- MNIST --------------------------------------------------------------------------------------------------------
def idx(values: np.ndarray, kind: int = 0x08) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """A folder with the four files, and what is in them. More images to train on than are read at once."""
    arrays = {}
    for prefix, n in (("train", 5000), ("t10k", 30)):
        arrays[prefix] = RNG.integers(0, 256, (n, 31, 30), np.uint8), RNG.integers(0, 10, n, np.uint8)
        for kind, values in zip(("images-idx3", "labels-idx1"), arrays[prefix]):
            (tmp_path / f"{prefix}-{kind}-ubyte").write_bytes(idx(values))
    return tmp_path, arrays


def assert_is_mnist(path, arrays):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        x, y = everything(path, split)
        np.testing.assert_array_equal(x, arrays[prefix][0][:, None] * np.float32(1 / 255))
        np.testing.assert_array_equal(y, arrays[prefix][1])
        assert y.dtype == np.int64


def test_mnist_as_it_is_and_gzipped_and_with_dots(mnist):
    folder, arrays = mnist
    assert_is_mnist(importers.load("mnist")(folder, folder / "a.h5"), arrays)
    for path in folder.glob("t10k-*"):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for path in folder.glob("train-*"):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    classes = "top,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,boot"
    path = importers.load("mnist")(folder, folder / "b.h5", classes=classes, compression="lzf")
    assert_is_mnist(path, arrays)
    assert describe(path)["classes"] == classes.split(",")


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HUGE = struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1) + b"\0" * 100
MNIST_DAMAGES = [  # a file, what becomes of its bytes (None: it is removed), the message
    (IMAGES, None, "must have one of the files train-images-idx3-ubyte, .*; it has none. Download it again."),
    (IMAGES, lambda data: idx(np.zeros(5000, np.uint8)), "IDX magic number 00000803 .*; got 00000801. Download it"),
    (IMAGES, lambda data: idx(np.zeros((4, 2, 2), ">f4"), 0x0D), r"00000803 \(unsigned bytes, 3 dim.*; got 00000d03."),
    (IMAGES, lambda data: data[:-7], "is truncated: 7 bytes are missing."),
    (IMAGES, lambda data: data[:9], "is truncated: 7 bytes are missing."),
    (IMAGES, lambda data: idx(np.zeros((5000, 0, 4), np.uint8)), r"1 of each; got uint8 of shape \(5000, 1, 0, 4\)."),
    (IMAGES, lambda data: HUGE, r"is truncated: \d+ bytes are missing."),
    (IMAGES, lambda data: data + b"\0", "images-idx3-ubyte must end after 5000 samples but goes on."),
    (LABELS, lambda data: data + b"\0", "labels-idx1-ubyte must end after 5000 samples but goes on."),
    (LABELS, lambda data: idx(np.zeros(4999, np.uint8)), "has 5000 images but .* has 4999 labels. Take both from the"),
    (LABELS, lambda data: idx(np.full(5000, 10, np.uint8)), r"one integer in 0\.\.9 per sample; got .* 10 to 10."),
    (IMAGES + ".gz", lambda data: gzip.compress(data)[:-20], "must be a whole gzip file .*. Download it again."),
    (IMAGES + ".gz", lambda data: gzip.compress(data + b"\0"), "-ubyte.gz must end after 5000 samples but"),
    (IMAGES + ".gz", lambda data: gzip.compress(data[:4] + b"\xff" * 4 + data[8:]), r"is truncated: \d+ bytes are"),
    (IMAGES + ".gz", lambda data: data, "must be a whole gzip file .*. Download it again."),
    (IMAGES + ".gz", lambda data: flipped(gzip.compress(data)), "must be a whole gzip file .*. Download it again."),
]


def flipped(data):
    return data[:50] + b"\xff" * 50 + data[100:]


@each("damage", MNIST_DAMAGES)
def test_damaged_mnist(mnist, damage):
    folder, _ = mnist
    name, edit, match = damage
    path = folder / name.removesuffix(".gz")
    whole = path.read_bytes()
    path.unlink()
    if edit is not None:
        (folder / name).write_bytes(edit(whole))
    with pytest.raises(DataError, match=match):
        importers.load("mnist")(folder, folder / "out" / "a.h5")
    assert not [*folder.glob("out/*"), *folder.glob("out/.*")]
    (folder / name).unlink(missing_ok=True)
    path.write_bytes(whole)


def test_source_must_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for name in ("mnist", "cifar10"):
        for source, what in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is a file")):
            with pytest.raises(DataError, match=f"{source} must be a folder; it {what}."):
                importers.load(name)(source, tmp_path / "a.h5")


# --- CIFAR-10 -----------------------------------------------------------------------------------------------------
@pytest.fixture
def cifar10(tmp_path):
    """Two files to train on, one of them with more records than are read at once, and one to test on."""
    arrays = {}
    for name, n in (("data_batch_1", 1500), ("data_batch_2", 10), ("test_batch", 20)):
        arrays[name] = RNG.integers(0, 256, (n, 3, 32, 32), np.uint8), RNG.integers(0, 10, n, np.uint8)
        x, y = arrays[name]
        (tmp_path / f"{name}.bin").write_bytes(np.column_stack([y, x.reshape(n, -1)]).tobytes())
    return tmp_path, arrays


def test_cifar10(cifar10):
    folder, arrays = cifar10
    path = importers.load("cifar10")(folder, folder / "a.h5")
    for split, names in (("train", ("data_batch_1", "data_batch_2")), ("test", ("test_batch",))):
        x, y = everything(path, split)
        np.testing.assert_array_equal(x, np.concatenate([arrays[n][0] for n in names]) * np.float32(1 / 255))
        np.testing.assert_array_equal(y, np.concatenate([arrays[n][1] for n in names]))
    assert describe(path)["classes"][3] == "cat"


CIFAR10_DAMAGES = [
    ("data_batch_1.bin", lambda data: data[:-1], "data_batch_1.bin must have a whole number of records of 3073"),
    ("test_batch.bin", lambda data: b"", "test_batch.bin must have .* at least 1; got 0 bytes. Unpack cifar-10"),
    ("data_batch_2.bin", lambda data: b"\x0a" + data[1:], r"data_batch_2.bin must have labels in 0\.\.9; got 10."),
    ("test_batch.bin", None, "must have the file test_batch.bin; it has none. Unpack cifar-10-binary.tar.gz"),
    ("data_batch_*.bin", None, r"must have the file data_batch_\*.bin; it has none."),
]


@each("damage", CIFAR10_DAMAGES)
def test_damaged_cifar10(cifar10, damage):
    folder, _ = cifar10
    name, edit, match = damage
    whole = {path: path.read_bytes() for path in folder.glob(name)}
    for path, data in whole.items():
        path.write_bytes(edit(data)) if edit else path.unlink()
    with pytest.raises(DataError, match=match):
        importers.load("cifar10")(folder, folder / "out" / "a.h5")
    assert not [*folder.glob("out/*"), *folder.glob("out/.*")]
    for path, data in whole.items():
        path.write_bytes(data)


# --- folders of images --------------------------------------------------------------------------------------------
def paint(path: Path, color, size=(9, 7), mode: str = "RGB", **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path, **options)


@pytest.fixture
def images(tmp_path):
    """Ten red "a" and twenty blue "b", of several formats and sizes."""
    for name, color, n in (("b", (0, 0, 255), 20), ("a", (255, 0, 0), 10)):
        for i in range(n):
            paint(tmp_path / "images" / name / f"{i}{('.png', '.bmp', '.PNG')[i % 3]}", color, (5 + i, 30 - i))
    (tmp_path / "images" / ".hidden").write_text("left out")
    (tmp_path / "images" / "a" / ".DS_Store").write_text("left out")
    return tmp_path / "images"


def test_images(images, tmp_path):
    path = importers.load("images")(images, tmp_path / "a.h5", height=6, width=4, test_fraction=0.3)
    for split, counts in (("train", [7, 14]), ("test", [3, 6])):
        x, y = everything(path, split)
        assert x.shape == (sum(counts), 3, 6, 4) and x.dtype == np.float32 and np.bincount(y).tolist() == counts
        red, blue = (np.array(color, np.float32).reshape(3, 1, 1) for color in ((1, 0, 0), (0, 0, 1)))
        np.testing.assert_allclose(x[y == 0], np.broadcast_to(red, x[y == 0].shape))
        np.testing.assert_allclose(x[y == 1], np.broadcast_to(blue, x[y == 1].shape))
    assert describe(path)["classes"] == ["a", "b"]


def test_images_keep_their_pixels_where_the_size_is_right_and_stand_upright(tmp_path):
    pixels = RNG.integers(0, 256, (6, 5, 3), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # by 90 degrees
    for name in ("upright", "turned"):
        (tmp_path / "in" / name).mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in/upright/0.png")
    Image.fromarray(np.rot90(pixels).copy()).save(tmp_path / "in/turned/1.png", exif=turned)
    path = importers.load("images")(tmp_path / "in", tmp_path / "a.h5", height=6, width=5, test_fraction=0)
    for found in everything(path, "train")[0]:
        np.testing.assert_allclose(found * 255, pixels.transpose(2, 0, 1), rtol=1e-6)


def test_images_with_their_own_test_folder_in_grey(images, tmp_path):
    source = tmp_path / "both"
    source.mkdir()
    images.rename(source / "train")
    for name in "ab":
        paint(source / "test" / name / "x.jpg", 128, mode="L")
    path = importers.load("images")(source, tmp_path / "a.h5", height=2, width=2, mode="L")
    assert everything(path, "train")[0].shape == (30, 1, 2, 2)
    np.testing.assert_allclose(everything(path, "test")[0], 128 / 255, atol=0.01)
    assert everything(path, "test")[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("a/3.png", lambda path: path.write_bytes(path.read_bytes()[:-30]), "a/3.png can't be read as an image"),
        ("a/0.png", lambda path: path.write_bytes(b"no image"), "a/0.png can't be read as an image .cannot identify"),
        ("a/0.png", lambda path: path.write_bytes(b""), "a/0.png can't be read as an image .*Replace or remove it."),
        ("a/0.png", lambda path: paint(path, 300, mode="I;16"), "a/0.png can't .*it has mode I;16, more than the 8"),
        ("c/0.png", lambda path: paint(path, 0), "31 samples can't be split .*least populated class"),
    ],
)
def test_damaged_images(images, tmp_path, name, edit, match):
    edit(images / name)
    with pytest.raises(DataError, match=match):
        importers.load("images")(images, tmp_path / "out" / "a.h5")
    assert not [*tmp_path.glob("out/*"), *tmp_path.glob("out/.*")]


@each("others", ["test", "val", "validation", "both"])
def test_images_with_a_folder_to_train_on_and_one_for_validation(tmp_path, others):
    source = tmp_path / others
    for part in ("train", *(("test", "val") if others == "both" else (others,))):
        for number, name in enumerate("ab"):
            paint(source / part / name / "x.png", (100 * number, 0, 0))
    (source / "readme.md").write_text("left out")
    path = importers.load("images")(source, tmp_path / "a.h5", height=4, width=4)
    assert list(describe(path)["splits"]) == (
        ["train", "test", "validation"] if others == "both" else ["train", "test"]
    )
    assert everything(path, "test")[1].tolist() == [0, 1]


def test_folders_that_are_none_of_classes(tmp_path):
    (tmp_path / "empty").mkdir()
    paint(tmp_path / "one" / "a" / "x.png", (0, 0, 0))
    paint(tmp_path / "only" / "test" / "a" / "x.png", (0, 0, 0))
    for options, source, error, match in (
        ({}, "none", DataError, "none must be a file or a folder; there is none. A data set on the Hub is hub:NAME."),
        ({}, "empty", DataError, "empty must be what Hugging Face's datasets reads; got EmptyDatasetError"),
        ({}, "one", DataError, "one must have a folder of images for each class, and two or more; got no classes."),
        ({}, "only", DataError, "only must have a split train; got test. Rename its files or folders."),
        ({"mode": "CMYK"}, "one", ConfigError, "mode must be one of RGB, L; got 'CMYK'."),
        ({"height": 0}, "one", ConfigError, "height and width must be at least 1; got 0 and 64."),
    ):
        with pytest.raises(error, match=match):
            importers.load("images")(tmp_path / source, tmp_path / "a.h5", **options)
        assert not (tmp_path / "a.h5").exists()


# --- what Hugging Face's datasets reads -------------------------------------------------------------------------------
@pytest.fixture
def others(tmp_path, monkeypatch):
    """Files of pandas, of json and of tarfile: twelve samples each."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": "ab" * (i % 3) or "z", "tokens": list(range(1, 2 + i % 4)), "a": i / 2, "b": i, "label": "xy"[i % 2]}
        for i in range(12)
    ]
    frame = pandas.DataFrame(rows)
    frame.to_parquet("a.parquet")
    frame.drop(columns="tokens").to_csv("a.csv", index=False)
    Path("a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    datasets.Dataset.from_pandas(frame).save_to_disk("saved")
    Path("shards").mkdir()
    for part in ("train", "test"):
        with tarfile.open(Path("shards", f"{part}-0000.tar"), "w") as tar:
            for i in range(12):
                Image.new("RGB", (5, 4), (20 * i, 0, 0)).save(png := io.BytesIO(), "PNG")
                for suffix, content in (("png", png.getvalue()), ("cls", b"%d" % (i % 3)), ("json", b'{"n": %d}' % i)):
                    (member := tarfile.TarInfo(f"{i:03d}.{suffix}")).size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return importers.load("datasets")


@each("source", ["a.parquet", "a.jsonl", "a.csv", "saved"])
def test_columns_of_numbers_lists_and_texts(others, source):
    def read(x, y="label", **options):
        path = others(source, "out.h5", x=x, y=y, test_fraction=0, **options)
        return (*everything(path, "train"), describe(path))

    x, y, found = read("a,b")
    assert x.tolist() == [[i / 2, i] for i in range(12)] and x.dtype == np.float32
    assert found["classes"] == ["x", "y"] and y.tolist() == [0, 1] * 6
    x, y, found = read("text", "a")
    assert x[:3].tolist() == [[122, 0, 0, 0], [97, 98, 0, 0], [97, 98, 97, 98]] and x.dtype == np.int64
    assert found["task"] == "regression" and y.tolist() == [i / 2 for i in range(12)]
    if source != "a.csv":
        assert read("tokens", "b", task="regression")[0][:3].tolist() == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0]]
    with pytest.raises(ConfigError, match="x and y of .* must be one of .*text.*; got 'c'."):
        read("c,a", "d")
    with pytest.raises(ConfigError, match="must be one of .*text.*; got 'lable'. Did you mean 'label'?"):
        read("text", "lable")
    with pytest.raises(DataError, match="x must be an image, a text, or numbers .* got .0.0, .z.. in a, text .*Fill"):
        read("a,text")


def test_large_labels_stay_different_classes(others):
    """The columns are uint64, int64 and float64; float32 can't tell their labels apart."""
    first = {"hash": 2**63 + 5, "number": 2**53, "float": 2.0**24}
    table = pandas.DataFrame({name: pandas.Series([value, value + 1] * 6) for name, value in first.items()})
    table.assign(x=1).to_parquet("large.parquet")
    for name, value in first.items():
        path = others("large.parquet", "out.h5", x="x", y=name, task="classification", test_fraction=0)
        assert describe(path)["classes"] == [str(int(value)), str(int(value) + 1)]
        assert everything(path, "train")[1].tolist() == [0, 1] * 6


def test_bytes_of_images_are_images_whether_the_file_says_so_or_not(others):
    encoded = []
    for i in range(12):
        Image.new("RGB", (5, 4), (20 * i, 0, 0)).save(png := io.BytesIO(), "PNG")
        encoded.append(png.getvalue())
    structs = [{"bytes": value, "path": None if i % 2 else f"{i}.png"} for i, value in enumerate(encoded)]
    for name, column in (("bytes", encoded), ("structs", structs)):
        table = pandas.DataFrame({"image": column, "label": [i % 2 for i in range(12)]})
        table.to_parquet(f"{name}.parquet")
        path = others(f"{name}.parquet", "out.h5", height=4, width=5, test_fraction=0)
        x, y = everything(path, "train")
        np.testing.assert_allclose(x[:, 0, 0, 0] * 255, 20 * np.arange(12), rtol=1e-6)
        assert x.shape == (12, 3, 4, 5) and y.tolist() == [0, 1] * 6
    pandas.DataFrame({"image": [b"no image"] * 4, "label": [0, 1] * 2}).to_parquet("no.parquet")
    with pytest.raises(DataError, match="bytes of x can't be read as an image .cannot identify"):
        others("no.parquet", "out.h5", test_fraction=0)


def test_images_have_a_description_and_options_of_their_own():
    own = importers.load("images")
    assert "folder of images for each class" in inspect.getdoc(own) and "Parquet" not in inspect.getdoc(own)
    assert not {"x", "y", "task"} & {*inspect.signature(own).parameters}


def test_shards_of_webdataset(others):
    path = others("shards", "out.h5", x="png", y="cls", height=4, width=5)
    for split in ("train", "test"):
        x, y = everything(path, split)
        np.testing.assert_allclose(x[:, 0, 0, 0] * 255, 20 * np.arange(12), rtol=1e-6)
        assert x.shape == (12, 3, 4, 5) and y.tolist() == [i % 3 for i in range(12)]
    path = others("shards/train-0000.tar", "out.h5", x="png", y="json.n", task="regression", test_fraction=0.5)
    assert len(everything(path, "test")[1]) == 6 and sorted(Path().glob(".import-*")) == []


def test_files_that_the_library_does_not_read_and_the_hub_without_a_network(others):
    Path("a.xyz").write_text("?")
    Path("b.jsonl").write_text("{no json")
    for source in ("a.xyz", "b.jsonl"):
        with pytest.raises(DataError, match=f"{source} must be what Hugging Face's datasets reads; got "):
            others(source, "out.h5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match="hub:nobody/nothing must be what Hugging Face's datasets reads; got "):
            others("hub:nobody/nothing", "out.h5")
