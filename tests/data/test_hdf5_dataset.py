"""HDF5Dataset: any indices, any layout of the bytes, any process."""

from __future__ import annotations

import pickle
import threading

import h5py
import numpy as np
import pytest
import torch
from hdf5_layouts import MAPPED, READ, N, contiguous, gzip, hole, sample_data, scattered, write_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from harness.cases import each
from hpcdist.data import EpochPlan, HDF5Dataset, ShardedBatchSampler, Split, create, hdf5
from hpcdist.data.format import DTYPES, array_offset
from hpcdist.errors import ConfigError

CLASSES = [str(i) for i in range(7)]
INDICES = st.lists(st.integers(-N, N - 1), max_size=3 * N)
LAYOUTS = [*MAPPED, *READ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Layout -> (its file, x, y), written once."""
    folder, made = tmp_path_factory.mktemp("layouts"), {}
    for how in LAYOUTS:
        x, y = sample_data()
        made[how] = write_layout(folder / f"{how.__name__}.h5", how, x, y), x, y
    return made


@pytest.fixture
def plain(tmp_path):
    """A file as `create` writes it: path, x, y."""
    x, y = sample_data("uint8", (1, 4, 4))
    path = create(tmp_path / "plain.h5", {"train": Split.of(x, y)}, task="classification", classes=CLASSES, scale=0.5)
    return path, x, y


def assert_equals(batch, x, y):
    """Same values, same dtype, writable, apart from the file."""
    np.testing.assert_array_equal(batch[0].numpy(), x)
    np.testing.assert_array_equal(batch[1].numpy(), y)
    assert batch[0].numpy().dtype == x.dtype.newbyteorder("=") and batch[1].dtype == torch.int64


@pytest.mark.parametrize("how", LAYOUTS, ids=lambda how: how.__name__)
@settings(max_examples=10, deadline=None)
@given(indices=INDICES)
def test_batch_equals_numpys_fancy_indexing(files, how, indices):
    path, x, y = files[how]
    with HDF5Dataset(path) as dataset:
        assert_equals(dataset.batch(indices), x[np.array(indices, int)], y[np.array(indices, int)])


def test_a_checksum_is_that_of_the_samples_in_whatever_file(files):
    paths = [path for how, (path, *_) in files.items() if how is not hole]  # some of whose samples are 0
    assert len({HDF5Dataset(path, memory_map=mapped).checksum for path in paths for mapped in (True, False)}) == 1


@pytest.mark.parametrize("checked", [hdf5.CHECKED_BYTES, 200, 1])
def test_a_checksum_tells_other_samples(tmp_path, monkeypatch, checked):
    """Whole columns, stretches of them, or two samples."""
    monkeypatch.setattr(hdf5, "CHECKED_BYTES", checked)
    x, y = sample_data("uint8", (1, 4, 4))

    def checksum(x, y, **options):
        options = {"task": "classification", "classes": CLASSES} | options
        return HDF5Dataset(create(tmp_path / "a.h5", {"train": Split.of(x, y)}, **options)).checksum

    last, label = x.copy(), y.copy()
    last[-1, 0, 3, 3] += 1
    label[0] = (label[0] + 1) % 7
    others = [(last, y), (x, label), (x[::-1], y), (x[:-1], y[:-1]), (x.reshape(-1, 16), y), (x.view(np.int8), y)]
    found = [checksum(*each) for each in ((x, y), *others)]
    found += [checksum(x, y, scale=0.5), checksum(x, y, classes=[*CLASSES, "8"])]
    assert len(set(found)) == len(found) and checksum(x, y, compression="gzip") == found[0]


@each("how", LAYOUTS)
def test_a_layout_is_mapped_or_read_and_the_same_without_a_map(files, how):
    path, x, y = files[how]
    for memory_map in (True, False):
        with HDF5Dataset(path, memory_map=memory_map) as dataset:
            assert dataset.mapped == (memory_map and how in MAPPED)
            assert_equals(dataset.batch(np.arange(N)[::-1]), x[::-1], y[::-1])
            for index in (N, -N - 1, 10**12):
                with pytest.raises(IndexError, match="out of bounds"):
                    dataset.batch([0, index])


@each("dtype", DTYPES)
@each("how", [contiguous, scattered, gzip])
def test_every_dtype(tmp_path, how, dtype):
    for shape in ((3,), ()):  # 3 bytes a sample in the smallest: nothing is aligned
        x, y = sample_data(dtype, shape)
        with HDF5Dataset(write_layout(tmp_path / "a.h5", how, x, y)) as dataset:
            assert dataset.x_dtype == torch.from_numpy(x).dtype and dataset.x_shape == shape
            assert_equals(dataset.batch([5, 0, 52, 0]), x[[5, 0, 52, 0]], y[[5, 0, 52, 0]])


def test_a_user_block_is_no_obstacle(tmp_path):
    x, y = sample_data()
    with HDF5Dataset(write_layout(tmp_path / "a.h5", contiguous, x, y, userblock_size=512)) as dataset:
        assert_equals(dataset.batch([3, 1]), x[[3, 1]], y[[3, 1]])


@each("indices", [[2, 0], (2, 0), range(4), np.array([2, 0]), np.array([2, 0], np.uint8), torch.tensor([2, 0]), []])
def test_every_kind_of_index_list(plain, indices):
    path, x, y = plain
    chosen = np.array([int(i) for i in indices], int)
    with HDF5Dataset(path) as dataset:
        assert_equals(dataset.batch(indices), x[chosen] * np.float32(0.5), y[chosen])
        for other in ([True, False], [0.5], [[1, 2]], 3, np.zeros((2, 2), int)):
            with pytest.raises(IndexError, match="indices must be a list of integers; got"):
                dataset.batch(other)


def test_items_and_length(plain):
    path, x, y = plain
    with HDF5Dataset(path) as dataset:
        assert (len(dataset), dataset.task, dataset.classes, dataset.notes) == (N, "classification", tuple(CLASSES), {})
        assert (dataset.x_shape, dataset.x_dtype) == ((1, 4, 4), torch.float32)
        assert (dataset.y_shape, dataset.y_dtype) == ((), torch.int64)
        for index in (0, N - 1, -1, np.int64(3)):
            sample, label = dataset[index]
            assert sample.shape == (1, 4, 4) and label.shape == ()
            np.testing.assert_array_equal(sample, x[index] * np.float32(0.5))
            assert label == y[index]
        assert_equals(dataset[[1, 2]], x[1:3] * np.float32(0.5), y[1:3])
        assert [int(label) for _, label in dataset.__getitems__([4, 3])] == [4, 3]
        assert len(list(dataset)) == N  # Python's protocol for a sequence: until IndexError


def test_a_batch_is_writable_and_apart_from_the_file(plain):
    path, x, _ = plain
    before = path.read_bytes()
    with HDF5Dataset(path) as dataset:
        dataset.batch([0])[0].fill_(9)
        dataset.batch([0])[1].fill_(9)
        np.testing.assert_array_equal(dataset[0][0], x[0] * np.float32(0.5))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("stored", "scale", "offset", "loaded"),
    [
        ("uint8", 1 / 255, None, torch.float32),
        ("uint8", None, -1, torch.float32),
        ("int16", np.array([[1.0], [2.0], [3.0]]), np.arange(5.0), torch.float32),
        ("float64", 2.0, 1.0, torch.float64),
        ("float32", 2.0, None, torch.float32),
        ("uint8", None, None, torch.uint8),
    ],
)
def test_scale_and_offset(tmp_path, stored, scale, offset, loaded):
    x, y = sample_data(stored)
    options = {"task": "classification", "classes": CLASSES, "scale": scale, "offset": offset}
    with HDF5Dataset(create(tmp_path / "a.h5", {"train": Split.of(x, y)}, **options)) as dataset:
        assert dataset.x_dtype == loaded
        got, _ = dataset.batch([7, 0])
        expected = x[[7, 0]] * (1.0 if scale is None else scale) + (0.0 if offset is None else offset)
        assert got.dtype == loaded
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_mapped_file_is_not_held_open_by_hdf5(plain):
    dataset = HDF5Dataset(plain[0], locking=True)
    dataset.batch([0])
    with h5py.File(plain[0], "r+", locking=True):  # would be refused while another handle has the lock
        pass


def test_every_kind_of_locking(files):
    for locking in (True, False, "best-effort", None):
        with HDF5Dataset(files[gzip][0], locking=locking) as dataset:
            assert len(dataset.batch([0, 1])[0]) == 2
    with pytest.raises(ConfigError, match="locking must be one of True, False, 'best-effort', None; got 'yes'."):
        HDF5Dataset(files[gzip][0], locking="yes")


@each("how", [contiguous, scattered, gzip])
def test_pickled_before_and_after_use_and_used_again_once_closed(files, how):
    path, x, y = files[how]
    dataset = HDF5Dataset(path)
    for _ in range(2):
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert_equals(copy.batch([3, 3, 1]), x[[3, 3, 1]], y[[3, 3, 1]])
        assert_equals(dataset.batch([1, 2]), x[1:3], y[1:3])
    for _ in range(2):
        dataset.close()
    assert_equals(dataset.batch([1, 2]), x[1:3], y[1:3])
    dataset.close()


@each("how", [contiguous, gzip])
def test_threads_share_a_dataset(files, how):
    path, x, _ = files[how]
    wrong = []
    with HDF5Dataset(path) as dataset:

        def read(seed):
            for _ in range(25):
                indices = np.random.default_rng(seed).integers(0, N, 10)
                if not np.array_equal(dataset.batch(indices)[0], x[indices]):
                    wrong.append(seed)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # said by Python 3.12 and later
def test_dataloader_with_two_workers(files):
    path, x, y = files[gzip]  # tests/data/test_samples.py has workers that map a file
    plan = EpochPlan(N, 2, 8, seed=3)
    with HDF5Dataset(path) as dataset:
        dataset.batch([0])  # open in this process already
        loader = DataLoader(
            dataset, batch_sampler=ShardedBatchSampler(plan, 0), num_workers=2, multiprocessing_context="fork"
        )
        batches = list(loader)
        assert len(batches) == plan.steps
        for step, batch in enumerate(batches):
            indices = plan.indices(step, 0)
            assert_equals(batch, x[indices], y[indices])
        assert_equals(dataset.batch([1]), x[[1]], y[[1]])


def test_created_chunks_lie_side_by_side_in_the_file(tmp_path):
    """The fast way: the samples are one array in the file."""
    x = np.arange(3000 * 300, dtype=np.uint16).view(np.int16).reshape(3000, 300)
    path = create(tmp_path / "a.h5", {"train": Split.of(x, np.zeros((3000, 1)))}, task="regression")
    with h5py.File(path) as file:
        offset = array_offset(file["train/x"])
        assert file["train/x"].id.get_num_chunks() > 3 and offset is not None
    np.testing.assert_array_equal(np.fromfile(path, np.int16, x.size, offset=offset).reshape(x.shape), x)


@each("how", LAYOUTS)
def test_a_column_that_is_not_read_is_zeros_without_memory(files, how):
    path, x, y = files[how]
    with HDF5Dataset(path, columns=["x"]) as dataset:
        first, zeros = dataset.batch([3, 0, -1])
        np.testing.assert_array_equal(first.numpy(), x[[3, 0, -1]])
        assert zeros.shape == (3, *y.shape[1:]) and zeros.dtype == torch.int64 and not zeros.any()
        assert zeros.untyped_storage().nbytes() == zeros.element_size()
    with HDF5Dataset(path, columns=["y"]) as dataset:
        zeros, last = dataset.batch([3, 0, -1])
        np.testing.assert_array_equal(last.numpy(), y[[3, 0, -1]])
        assert zeros.shape == (3, *x.shape[1:]) and zeros.dtype == first.dtype and not zeros.any()
        assert zeros.untyped_storage().nbytes() == zeros.element_size()


def test_an_unknown_column_is_refused(plain):
    with pytest.raises(ConfigError, match="columns must be of x and y; got 'z'"):
        HDF5Dataset(plain[0], columns=["x", "z"])
