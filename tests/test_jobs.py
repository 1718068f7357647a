"""The jobs that come with the project, and what their runs leave behind."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.data import HDF5Dataset, fetch
from hpcdist.errors import DataError
from hpcdist.records import Summary, load_run, load_summary, read_records
from hpcdist.tools.console import result
from hpcdist.train import Trainer, load_job
from hpcdist.train.runs import train
from strategies import problem

JOBS = Path(__file__).parents[1] / "jobs"
APART = ["mnist", "fashion", "transformer"]  # see below, and train/test_transformer.py
FILES = {path.stem: path for path in JOBS.glob("*.py") if "\njob = " in path.read_text() and path.stem not in APART}
FILES["regression"] = JOBS / "studies" / "regression_job.py"  # the other studies' jobs are tested with them
NAMES = sorted(FILES)
EPOCHS = 3
STALENESS = {"softsync": 2 / 3}  # on 4 ranks; 0 of all that have no servers
TRAIN_SAMPLES = {"digits": 1437, "regression": 1000}
SHOWN = ("allreduce", "softsync")  # and users' own; train/test_loop.py has all strategies
CASES = [("regression", "allreduce")]
CASES += [("digits", strategy) for strategy in problem.stepping() if strategy in SHOWN or ":" in strategy]


def run(name: str, folder: Path, size: int, *overrides: str) -> Summary:
    """A job on virtual ranks."""
    job = load_job(FILES[name])
    path = folder / f"{name}.h5"
    values = load({**job.defaults, "data": {"path": str(path)}}, None, [f"epochs={EPOCHS}", *overrides])

    def body(comm):
        trainer = Trainer(job, JobConfig(**values), comm, folder / "run", None)
        summary = trainer.run()
        trainer.close()
        return summary

    summary, *others = run_virtual(body, size, compute=Constant(0.01))
    assert all(other == summary for other in others), "all ranks must return the same summary"
    return summary


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_job_learns_and_its_summary_is_whole(name, strategy, tmp_path, capsys):
    summary = run(name, tmp_path, 4, f"strategy={strategy}", "seed=3", *problem.settings(strategy))
    workers = len(strategies.load(strategy).Config().workers(4))
    records = read_records(tmp_path / "run")
    steps = [record for of_rank in records.values() for record in of_rank if record.samples]

    assert (summary.strategy, summary.ranks, summary.workers, summary.seed) == (strategy, 4, workers, 3)
    samples = EPOCHS * TRAIN_SAMPLES[name]
    assert summary.samples == samples, f"workers must take each sample once an epoch, {samples}; got {summary.samples}"
    assert summary.metrics["loss"] > 0
    if name == "digits":
        accuracy = summary.metrics["accuracy"]
        assert accuracy > 0.85, f"the accuracy on digits must be above 0.85 after {EPOCHS} epochs; got {accuracy:.3f}"
    else:
        assert summary.metrics["rmse"] < 4.9, "the deviation of the targets: better than their mean"
    histogram = summary.staleness.histogram
    assert sum(histogram.values()) + summary.pending == len(steps), (
        f"each step's gradient must be applied (a staleness in a record) or pending; got {sum(histogram.values())} + "
        f"{summary.pending} of {len(steps)}"
    )
    assert summary.staleness.max == max(histogram) and summary.lost_ranks == []
    assert summary.dropped == 0, f"no gradient must be dropped where workers are as fast; got {summary.dropped}"
    expected = STALENESS.get(strategy, 0)
    assert summary.staleness.mean == pytest.approx(expected, abs=0.1), "(λ − 1)/c for λ workers of one speed"
    sent = (summary.bytes_per_step, summary.messages_per_step)
    assert min(sent) > 0 and summary.wall_s > 0, f"records must count the bytes and messages of steps; got {sent}"
    of_workers = [record for rank in list(records)[4 - workers :] for record in records[rank]]
    computing_s = sum(record.computing_s for record in of_workers) / summary.workers
    assert summary.seconds.computing == pytest.approx(computing_s)
    assert computing_s == pytest.approx(0.01 * len(of_workers) / workers, rel=0.05), "as the compute model has it"
    assert summary.seconds.communicating >= 0 and summary.seconds.waiting >= 0
    assert len(summary.sha256) == 64
    assert load_summary(tmp_path / "run") == summary

    result(tmp_path / "run", summary)
    measure = next(iter(load_job(FILES[name]).metrics))
    assert f"{summary.metrics[measure]:.4f}" in capsys.readouterr().out


def test_a_job_is_the_same_again(tmp_path):
    first, second = (run("digits", tmp_path / str(i), 2, "epochs=1") for i in range(2))
    assert first.sha256 == second.sha256 and first.metrics == second.metrics
    assert run("digits", tmp_path / "other", 2, "epochs=1", "seed=1").sha256 != first.sha256


def test_the_data_of_the_jobs(tmp_path):
    assert sorted(TRAIN_SAMPLES) == NAMES
    for name, samples in TRAIN_SAMPLES.items():
        load_job(FILES[name]).data(path := tmp_path / f"{name}.h5")
        with HDF5Dataset(path, "train") as train, HDF5Dataset(path, "test") as test:
            assert len(train) == samples and len(test) == pytest.approx(samples / 4, abs=1)


# --- images of 28 by 28 pixels, in small data sets of MNIST's format: nothing is downloaded ---------------------------
MNIST = JOBS / "mnist.py"
SPLITS = {"train": 96, "t10k": 20}


def _idx(name: str) -> dict[str, bytes]:
    """The files of a data set whose classes are bars at ten places, as deep as its name is long."""
    files = {}
    for split, count in SPLITS.items():
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28), np.uint8)
        for image, label in zip(images, labels):
            image[: len(name), 2 * label + 2 : 2 * label + 5] = 255
        files[f"{split}-images-idx3-ubyte"] = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.tobytes()
        files[f"{split}-labels-idx1-ubyte"] = struct.pack(">4BI", 0, 0, 8, 1, count) + labels.astype(np.uint8).tobytes()
    return files


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Data sets that no place has but the folders that `write` fills."""
    monkeypatch.chdir(tmp_path)
    for name in ("mnist", "fashion-mnist"):
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in _idx(name).items()}
        release = replace(fetch.RELEASES[name], sha256=sums, mirrors=(), package=None, installed=None)
        monkeypatch.setitem(fetch.RELEASES, name, release)


def write(name: str) -> None:
    folder = Path("data", name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in _idx(name).items():
        (folder / file).write_bytes(content)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("job", "settings"), [("mnist", ["optimizer.lr=0.003"]), ("fashion", [])])
def test_a_job_learns_from_what_is_there_and_writes_down_what_it_was(job, settings):
    write("fashion-mnist")
    settings = ["batch_size=16", "epochs=6", *settings]
    path = MNIST.with_name(f"{job}.py")
    body = lambda comm: train(comm, path, overrides=settings, output=Path("run"))[1]  # noqa: E731
    summary, other = run_virtual(body, 2, compute=Constant(0.01))
    assert summary == other and summary.samples == 6 * 96 and summary.metrics["accuracy"] > 0.5
    found = load_run("run").settings["data"]
    assert found["source"] == "IDX files fashion-mnist"
    assert job == "fashion" or found["path"] == "data/mnist-or-fashion-mnist.h5"


@pytest.mark.usefixtures("small")
def test_the_first_of_both_is_taken():
    data = load_job(MNIST).data
    write("fashion-mnist")
    write("mnist")
    data(path := Path("data/either.h5"))
    with HDF5Dataset(path, "train") as train_set:
        assert train_set.source == "IDX files mnist", "the first of both"


@pytest.mark.usefixtures("small")
def test_where_neither_can_be_had_it_says_so_of_both():
    match = "^MNIST's four files must come .*\nFashion-MNIST's four files must come from one of these places; none"
    with pytest.raises(DataError, match=match):
        load_job(MNIST).data(Path("data/images.h5"))
