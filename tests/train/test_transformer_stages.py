"""The language model of jobs/transformer.py in stages: it trains as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.records import read_records
from hpcdist.train.runs import train

JOB = Path(__file__).parents[2] / "jobs" / "transformer.py"
TINY = ("model.width=16", "model.blocks=2", "model.heads=2", "optimizer.lr=0.01")

pytestmark = pytest.mark.computes


def losses(comm, folder: Path, *settings: str) -> list[float]:
    """Collective. The loss of each step of a run: the mean over its replicas."""
    overrides = [f"data.path='{folder.parent / 'reference.h5'}'", *TINY, *settings]
    train(comm, JOB, overrides=overrides, output=folder)
    comm.barrier()
    of_ranks = [[record.loss for record in records] for records in read_records(folder).values()]
    trained = [found for found in of_ranks if None not in found]
    return [sum(of_step) / len(of_step) for of_step in zip(*trained)]


def alone(folder: Path, *settings: str) -> list[float]:
    """The same of one process."""
    folder.mkdir()
    return run_virtual(lambda comm: losses(comm, folder / "run", *settings), 1)[0]


@pytest.mark.sizes(2, 4)
def test_the_losses_of_a_pipeline_are_those_of_one_process(ranks, shared_tmp_path, tmp_path):
    tied = str(ranks.size == 4).lower()  # the weights of the first stage and of the last
    settings = (f"model.tied={tied}", "budget.steps=6", "clip_norm=1.0")
    staged = f"parallel.stages={ranks.size}"
    found = ranks(lambda comm: losses(comm, shared_tmp_path / "run", staged, *settings))
    expected = alone(tmp_path / "alone", *settings)
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.5
    assert all(own == pytest.approx(expected, rel=1e-5) for own in found)


@pytest.mark.sizes(4)
def test_the_losses_of_a_grid_are_those_of_one_process_with_both_replicas_batches(ranks, shared_tmp_path, tmp_path):
    settings = ("budget.steps=5", "model.tied=true")
    found = ranks(lambda comm: losses(comm, shared_tmp_path / "run", "parallel.stages=2", "batch_size=8", *settings))
    expected = alone(tmp_path / "alone", *settings)
    assert all(own == pytest.approx(expected, rel=1e-5) for own in found)


@pytest.mark.sizes(4)
def test_replicas_that_gossip_learn(ranks, shared_tmp_path):
    settings = ("parallel.stages=2", "strategy=gossip_pull", "budget.steps=25", "batch_size=8")
    found = ranks(lambda comm: losses(comm, shared_tmp_path / "run", *settings), compute=Constant(0.01))
    assert all(own[-1] < own[0] - 1.5 for own in found)
