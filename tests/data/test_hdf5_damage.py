"""Data files that are missing, damaged or of another kind: each is refused with what is wrong and what to do."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hdf5_layouts import (
    CHUNK,
    N,
    contiguous,
    gzip,
    hdf5_bytes,
    one_chunk,
    sample_data,
    scattered,
    write_layout,
)

from harness.cases import each
from hpcdist.data import HDF5Dataset, Split, create, describe
from hpcdist.data.format import array_offset
from hpcdist.errors import DataError


@pytest.fixture
def path(tmp_path):
    """A good file, chunks side by side, of about 100 kB."""
    x = np.random.default_rng(0).integers(0, 255, (200, 512)).astype(np.uint8)
    splits = {"train": Split.of(x, np.arange(200) % 3)}
    return create(tmp_path / "a.h5", splits, task="classification", classes=["a", "b", "c"], chunk_samples=20)


def refused(path, match):
    """The same error from reading and from describing, which names the file."""
    for use in (HDF5Dataset, describe):
        with pytest.raises(DataError, match=match) as caught:
            use(path)
        assert str(path) in str(caught.value)


def change(path, edit):
    with h5py.File(path, "r+") as file:
        edit(file)


def test_a_file_that_is_no_whole_hdf5_file_is_refused(path, tmp_path):
    data = path.read_bytes()
    truncated = "is truncated or corrupt .*Write it again."
    for content, match in (
        (b"", r"is not an HDF5 file \(it has 0 bytes and no HDF5 signature\). `hpcdist data import`"),
        (b"\0" * 8 + data[8:], f"is not an HDF5 file .it has {len(data)} bytes"),
        (hdf5_bytes(), "is HDF5 but not in hpcdist's layout"),
        *((data[: int(len(data) * kept)], truncated) for kept in (0.01, 0.3, 0.9, 0.999)),
    ):
        path.write_bytes(content)
        refused(path, match)
    refused(
        tmp_path / "none.h5", "can't be opened .No such file or directory.. Check the path; `hpcdist data import` makes"
    )
    refused(tmp_path, "can't be opened .Is a directory")


def test_no_permission(path):
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # root may read everything
        os.seteuid(65534)
    try:
        refused(path, "can't be opened .Permission denied.")
    finally:
        os.seteuid(user)


def test_a_file_that_gets_shorter_while_it_is_read_is_refused_before_the_map_faults(path):
    with HDF5Dataset(path) as dataset:
        assert dataset.mapped and len(dataset.batch([0, 199])[0]) == 2
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DataError, match=r"a.h5 has become shorter while it was read: train/x reaches byte \d+ of"):
            dataset.batch([199])


def test_every_truncation_is_refused(path):
    """Never a wrong value, never a dead process."""
    data = path.read_bytes()
    for length in np.linspace(0, len(data) - 1, 25).astype(int):
        path.write_bytes(data[:length])
        with pytest.raises(DataError):
            HDF5Dataset(path)


@pytest.mark.parametrize("how", [contiguous, scattered, gzip], ids=lambda how: how.__name__)
def test_any_flipped_byte_is_refused_or_harmless_for_the_process(tmp_path, how):
    """Metadata that is damaged anywhere: a DataError, or a file whose values can be read (they have no checksum)."""
    x, y = sample_data("float32", (2,))
    good = write_layout(tmp_path / "good.h5", how, x, y, libver="v110").read_bytes()
    path, outcomes = tmp_path / "bad.h5", set()
    for place in np.random.default_rng(0).permutation(len(good))[:60]:
        data = bytearray(good)
        data[place] ^= 0xFF
        path.write_bytes(data)
        try:
            with HDF5Dataset(path) as dataset:
                dataset.batch(np.arange(len(dataset)))
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("how", "match"),
    [(contiguous, "is corrupt .*invalid dataset size"), (one_chunk, "is truncated: train/x should reach byte")],
)
def test_values_beyond_the_end_of_the_file(path, how, match):
    """A damaged address, though the file has its whole length: using a memory map there would kill the process."""
    write_layout(path, how, *sample_data(), libver="earliest")  # without checksums of the metadata
    with h5py.File(path) as file:
        address = array_offset(file["train/x"])
    data = path.read_bytes()
    assert data.count(address.to_bytes(8, "little")) == 1
    path.write_bytes(data.replace(address.to_bytes(8, "little"), (len(data) - 10).to_bytes(8, "little")))
    refused(path, match)


def group_in_place_of_x(file):
    del file["train/x"]
    file.create_group("train/x")


def put(name, values):
    def edit(file):
        del file[f"train/{name}"]
        file[f"train/{name}"] = values

    return edit


def scale(value):
    return lambda file: file["train/x"].attrs.create("scale", value)


BAD_SCALE = r"has a scale of dtype {}: must be finite numbers that broadcast against \(512,\)"
EDITS = [
    (lambda file: file.attrs.modify("format_version", 2), "has format version 2, this hpcdist reads 1. Update hpcdist"),
    (lambda file: file.attrs.modify("task", "cooking"), "has task 'cooking', which must be one of classification"),
    (lambda file: file.attrs.pop("classes"), "is for classification but names no classes"),
    (lambda file: file.pop("train"), "has no split 'train'. It has none."),
    (lambda file: file["train"].pop("x"), "has no dataset train/x"),
    (lambda file: file["train"].pop("y"), "has no dataset train/y"),
    (group_in_place_of_x, "has no dataset train/x"),
    (put("y", np.zeros(199, int)), "has 200 samples in train/x but 199 in train/y: must be equal"),
    (put("x", np.array([b"text"] * 200)), r"has dtype \|S4 in train/x, which must be one of uint8, "),
    (put("x", np.zeros(200, np.uint16)), "has dtype uint16 in train/x, which must be one of"),
    (put("x", np.zeros(200, complex)), "has dtype complex128 in train/x, which must be one of"),
    (put("y", np.zeros(200)), r"has labels train/y of dtype float64 and shape \(\): must be one integer each"),
    (put("y", np.zeros((200, 2), int)), r"has labels train/y of dtype int64 and shape \(2,\)"),
    (put("x", np.float32(1)), r"has shape \(\) in train/x, which must be \(samples, ...\)"),
    (put("x", np.zeros((200, 0))), r"has shape \(200, 0\) in train/x"),
    (put("x", np.zeros((0, 4))), r"has shape \(0, 4\) in train/x"),
    (scale(np.nan), BAD_SCALE.format(r"float64 and shape \(\)")),
    (scale(np.zeros(3)), BAD_SCALE.format(r"float64 and shape \(3,\)")),
    (scale(np.zeros((1, 512))), BAD_SCALE.format(r"float64 and shape \(1, 512\)")),
    (scale("one"), BAD_SCALE.format(r"<U3 and shape \(\)")),
]


@each("case", EDITS)
def test_a_file_that_breaks_a_rule_of_the_layout_is_refused(path, case):
    edit, match = case
    whole = path.read_bytes()
    change(path, edit)
    refused(path, match)
    path.write_bytes(whole)


def test_an_unknown_split_and_labels_that_are_no_classes(path):
    with pytest.raises(DataError, match="has no split 'test'. It has train."):
        HDF5Dataset(path, "test")
    change(path, lambda file: file["train/y"].__setitem__(3, 7))
    with pytest.raises(DataError, match="has labels 0 to 7 in train/y but 3 classes"):
        describe(path)


def test_damaged_compressed_values(tmp_path):
    """Opening the file does not notice."""
    x, y = sample_data()
    path = write_layout(tmp_path / "a.h5", gzip, x, y)
    with h5py.File(path) as file:
        chunk = file["train/x"].id.get_chunk_info(2)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * chunk.size)
    with HDF5Dataset(path) as dataset:
        dataset.batch([0, N - 1])
        with pytest.raises(DataError, match=rf"is corrupt in train/x\[{2 * CHUNK}:{2 * CHUNK + 2}\]"):
            dataset.batch([2 * CHUNK + 1, 0, 2 * CHUNK])
    with pytest.raises(DataError, match="a.h5 is corrupt .*Write it again."):
        describe(path)


def test_replaced_or_removed_while_in_use(path):
    dataset = HDF5Dataset(path)
    before = dataset.batch([0])[0]
    replacement = {"train": Split.of(np.zeros((9, 2)), np.zeros((9, 1)))}
    create(path, replacement, task="regression")
    assert (dataset.batch([0])[0] == before).all()  # the memory map keeps the old file
    dataset.close()
    another = HDF5Dataset(path)
    path.unlink()
    for gone in (dataset, another):
        with pytest.raises(DataError, match="was changed, replaced or removed since it was opened. Make a new"):
            gone.batch([0])


def test_what_no_memory_holds_is_refused_by_its_size(path):
    def claim(file):
        del file["train/x"], file["train/y"]
        file["train"].create_dataset("x", (1 << 50,), "u1")  # never written: it takes no room in the file
        file["train"].create_dataset("y", (1 << 50,), "i8")

    change(path, claim)
    refused(path, r"has 9007199254740992 bytes of train/y, more than this machine's memory of \d+. Divide it.")


WRITER = """
import sys, h5py
for line in sys.stdin:
    file = h5py.File(sys.argv[1], "r+", libver="latest" if line != "locked\\n" else None, locking=line != "unlocked\\n")
    if line == "swmr\\n":
        file.swmr_mode = True
    print(flush=True)
    sys.stdin.readline()
    file.close()
    print(flush=True)
"""


def test_open_for_writing_elsewhere(path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as writer:

        def tell(words):
            writer.stdin.write(f"{words}\n")
            writer.stdout.readline()

        tell("locked")
        refused(path, "is locked .*Wait for its writer to end, or pass locking=False.")
        with pytest.raises(DataError, match=re.escape(str(path))):
            HDF5Dataset(path, locking=True)
        tell("close")
        HDF5Dataset(path, locking=True).close()
        for how in ("swmr", "unlocked"):
            tell(how)
            refused(path, rf"a\.h5 is open for writing, in SWMR mode or without locks .*h5clear --status {path}\.$")
            tell("close")
        writer.stdin.close()


def test_a_file_beyond_the_address_space_is_refused(path):
    os.truncate(path, 1 << 42)  # sparse
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 41, hard))
    try:
        with pytest.raises(DataError, match="must fit into this process's address space to be mapped; got 4398046"):
            HDF5Dataset(path, "train").batch([0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
