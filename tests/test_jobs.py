"""The jobs that come with the project, and what their runs leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.config import JobConfig, load
from hpcdist.data import HDF5Dataset
from hpcdist.records import Summary, load_summary, read_records
from hpcdist.tools.console import result
from hpcdist.train import Trainer, load_job
from strategies import problem

JOBS = Path(__file__).parents[1] / "jobs"
APART = ["mnist", "fashion", "transformer"]  # see test_mnist.py and train/test_transformer.py
FILES = {path.stem: path for path in JOBS.glob("*.py") if "\njob = " in path.read_text() and path.stem not in APART}
FILES["regression"] = JOBS / "studies" / "regression_job.py"  # the other studies' jobs are tested with them
NAMES = sorted(FILES)
EPOCHS = 3
STALENESS = {"parameter_server": 2, "downpour": 2, "ssp": 2, "softsync": 2 / 3}  # on 4 ranks
STALENESS |= {"hardsync": 0, "easgd": 0, "eamsgd": 0}  # as of all that have no servers
PERIODS = {name: ["strategy.period=40"] for name in problem.LONG_PERIODS}  # as long as these runs
PERIODS["sparse_loco"] = ["strategy.period=40", "strategy.compression.ratio=0.2"]
PERIODS["demo"] = ["optimizer.name=SGD", "optimizer.lr=0.005"]
PERIODS["zero_one_adam"] = ["optimizer.eps=1e-4"]
PERIODS["dion"] = ["strategy.rate=3", "optimizer.lr=0.05"]
PERIODS["async_diloco"] = ["strategy.period=5", "strategy.outer_momentum=0.5"]  # few rounds of pushes
PERIODS["qg_dsgd"] = ["optimizer.name=SGD", "optimizer.lr=0.05", "optimizer.momentum=0.9"]
TRAIN_SAMPLES = {"digits": 1437, "regression": 1000}
SHOWN = ("allreduce", "parameter_server", "gossip_pull", "local_sgd")  # of the kinds of strategies one each
CASES = [
    pytest.param(name, strategy, marks=() if strategy in SHOWN else pytest.mark.extended)
    for name in NAMES
    for strategy in problem.stepping()
]


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
    assert all(other == summary for other in others)
    return summary


def test_the_jobs_are_known():
    assert sorted(TRAIN_SAMPLES) == NAMES


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_job_learns_and_its_summary_is_whole(name, strategy, tmp_path, capsys):
    summary = run(name, tmp_path, 4, f"strategy={strategy}", *PERIODS.get(strategy, []), "seed=3")
    workers = len(strategies.load(strategy).Config().workers(4))
    records = read_records(tmp_path / "run")
    steps = [record for of_rank in records.values() for record in of_rank if record.samples]

    assert (summary.strategy, summary.ranks, summary.workers, summary.seed) == (strategy, 4, workers, 3)
    assert summary.samples == EPOCHS * TRAIN_SAMPLES[name]
    assert summary.metrics["loss"] > 0
    if name == "digits":
        assert summary.metrics["accuracy"] > 0.85
    else:
        assert summary.metrics["rmse"] < 4.9, "the deviation of the targets: better than their mean"
    histogram = summary.staleness.histogram
    assert sum(histogram.values()) + summary.pending == len(steps)
    assert summary.staleness.max == max(histogram) and summary.dropped == 0 and summary.lost_ranks == []
    if strategy in STALENESS or "servers" not in strategies.load(strategy).Config.model_fields:
        expected = STALENESS.get(strategy, 0)
        assert summary.staleness.mean == pytest.approx(expected, abs=0.1), "(λ − 1)/c for λ workers of one speed"
    assert summary.bytes_per_step > 0 and summary.messages_per_step > 0 and summary.wall_s > 0
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


@pytest.mark.parametrize("name", NAMES)
def test_a_job_is_the_same_again(name, tmp_path):
    first, second = (run(name, tmp_path / str(i), 2, "epochs=1") for i in range(2))
    assert first.sha256 == second.sha256 and first.metrics == second.metrics
    assert run(name, tmp_path / "other", 2, "epochs=1", "seed=1").sha256 != first.sha256


def test_the_data_of_the_jobs(tmp_path):
    for name, samples in TRAIN_SAMPLES.items():
        load_job(FILES[name]).data(path := tmp_path / f"{name}.h5")
        with HDF5Dataset(path, "train") as train, HDF5Dataset(path, "test") as test:
            assert len(train) == samples and len(test) == pytest.approx(samples / 4, abs=1)
