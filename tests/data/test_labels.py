"""Samples split by label: who gets which, in a loop of one's own and in jobs; what can't be split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import hpcdist as hd
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import EpochPlan
from hpcdist.data.labels import counts, dirichlet, labels_of
from hpcdist.errors import ConfigError
from hpcdist.records import load_run
from hpcdist.train.runs import train
from train import tiny

pytestmark = pytest.mark.computes

LABELS = np.repeat(np.arange(10), 60)


# --- the split --------------------------------------------------------------------------------------------------------
@each("alpha", [1e-3, 0.1, 1.0, 100.0])
@each("workers", [1, 3, 16])
def test_each_sample_goes_to_one_worker_and_all_get_as_many(alpha, workers):
    parts = dirichlet(LABELS, workers, alpha, seed=5)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    again = dirichlet(LABELS, workers, alpha, seed=5)
    assert all(map(np.array_equal, parts, again))
    if workers > 1:
        assert not all(map(np.array_equal, parts, dirichlet(LABELS, workers, alpha, seed=6)))


def test_the_smaller_alpha_the_fewer_labels_has_a_worker():
    def largest_share(alpha):
        found = [counts(LABELS, dirichlet(LABELS, 10, alpha, seed)) for seed in range(5)]
        return np.mean([max(own.values()) / sum(own.values()) for of_workers in found for own in of_workers])

    shares = [largest_share(alpha) for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.7 and shares[-1] < 0.2


def test_frequent_labels_are_frequent_everywhere_where_alpha_is_large():
    labels = np.repeat([0, 1], [900, 100])
    for own in counts(labels, dirichlet(labels, 4, 1e6)):
        assert 205 <= own["0"] <= 245


# --- an epoch ---------------------------------------------------------------------------------------------------------
@each("shuffle", [True, False])
@each("case", [(3, 7), (4, 8), (5, 600), (2, 1)])
def test_an_epoch_takes_each_workers_own_samples_once(shuffle, case):
    workers, batch = case
    parts = dirichlet(LABELS, workers, 0.1)
    plan = EpochPlan(len(LABELS), workers, batch, shuffle=shuffle, parts=parts, epoch=2)
    assert plan.steps == -(-max(map(len, parts)) // batch)
    for worker, part in enumerate(parts):
        taken = np.concatenate([plan.indices(step, worker) for step in range(plan.steps)])
        assert sorted(taken.tolist()) == part.tolist() and (np.array_equal(taken, part) != shuffle)
    for step in range(plan.steps):
        assert plan.sizes(step) == tuple(len(plan.indices(step, worker)) for worker in range(workers))
    resumed = plan.at(2, plan.position(plan.steps // 2))
    assert resumed.steps == plan.steps - plan.steps // 2
    for worker in range(workers):
        expected = plan.indices(plan.steps - 1, worker)
        assert np.array_equal(resumed.indices(resumed.steps - 1, worker), expected)
    if shuffle and batch > 1:
        assert not np.array_equal(plan.at(3).indices(0, 0), plan.indices(0, 0))


# --- a loop of one's own ----------------------------------------------------------------------------------------------
def loop(comm, loader, **options):
    """Collective. The labels of the samples of each step of two epochs, and whether each batch counts."""
    hd.init(comm=comm)
    model = torch.nn.Linear(1, 1)
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    sharded, found = hd.shard(loader, **options), []
    for _ in range(2):
        seen = []
        for x, _ in sharded:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen += [x.reshape(-1).int().tolist()] if sharded.weight else []
        found.append(seen)
    hd.finish(model)
    return found


def loader_of(labels=LABELS, **options):
    x = torch.arange(len(labels), dtype=torch.float32).reshape(-1, 1)
    return DataLoader(TensorDataset(x, torch.as_tensor(labels)), batch_size=16, **options)


@pytest.mark.sizes(1, 3)
def test_a_rank_gets_its_own_samples_in_every_epoch(ranks):
    options = {"split": "dirichlet", "alpha": 0.1, "seed": 3}
    found = ranks(lambda comm: loop(comm, loader_of(shuffle=True), **options))
    parts = dirichlet(LABELS, len(found), 0.1, seed=3)
    for (first, second), part in zip(found, parts, strict=True):
        for epoch in (first, second):
            assert sorted(index for batch in epoch for index in batch) == part.tolist()
        assert first != second


def test_labels_are_found_or_given():
    class Photos(torch.utils.data.Dataset):
        targets = LABELS.tolist()

        def __len__(self):
            return len(LABELS)

    data = TensorDataset(torch.zeros(600, 1), torch.as_tensor(LABELS))
    assert np.array_equal(labels_of(Photos()), LABELS) and np.array_equal(labels_of(data), LABELS)
    assert np.array_equal(labels_of(Subset(data, [0, 599, 61])), [0, 9, 1])
    assert np.array_equal(labels_of(data, given_labels=(LABELS + 1).tolist()), LABELS + 1)
    bare = torch.utils.data.ConcatDataset([data])
    with pytest.raises(ConfigError, match="labels must be given where .* a ConcatDataset has none .* Pass labels="):
        labels_of(bare)
    with pytest.raises(ConfigError, match="labels must be one integer for each of 600 samples; got 600 of float32"):
        labels_of(data, given_labels=torch.zeros(600))
    with pytest.raises(ConfigError, match="labels must be one integer for each of 600 samples; got 3 of int64"):
        labels_of(data, given_labels=[1, 2, 3])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@each(
    "case",
    [
        (loader_of(sampler=WeightedRandomSampler([1.0] * 600, 600)), {"split": "dirichlet"}, "got a sampler or a str"),
        (DataLoader(Stream()), {"split": "dirichlet"}, "map-style data set in order, .* got a sampler or a stream"),
        (loader_of(), {"split": "dirichlet", "alpha": 0.0}, "alpha must be a finite number above 0; got 0.0"),
        (loader_of(), {"split": "dirichlet", "alpha": "small"}, "alpha must be a finite number above 0; got 'small'"),
        (loader_of(), {"split": "dirichlet", "alpha": float("nan")}, "alpha must be a finite number above 0; got nan"),
        (loader_of(), {"split": "dirichlet", "alpha": None}, "alpha must be a finite number above 0; got None"),
        (loader_of(), {"split": "dirichlet", "seed": -1}, "seed must be at least 0; got -1"),
        (loader_of(), {"split": "dirichlet", "seed": 1.5}, "seed must be a whole number; got 1.5"),
        (loader_of([7]), {"split": "dirichlet"}, "samples must be at least 2, one for each worker, .*; got 1"),
        (loader_of(), {"split": "dirichlet", "labels": [[1, 2], [3]]}, "each of 600 samples; got 2 of object"),
        (loader_of(), {"split": "dirichlet", "labels": "abc"}, "each of 600 samples; got 1 of <U3"),
        (loader_of(), {"split": "labels"}, "split must be True, False or 'dirichlet'; got 'labels'"),
    ],
)
def test_what_cannot_be_split_is_refused(case):
    loader, options, message = case
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: loop(comm, loader, **options), 2)


# --- jobs -------------------------------------------------------------------------------------------------------------
SPLIT = ("data.split=dirichlet", "data.alpha=0.1", "epochs=2")


@pytest.mark.sizes(1, 4)
def test_a_job_trains_on_parts_and_its_record_says_which(ranks, shared_tmp_path):
    def body(comm):
        with tiny.training(comm, shared_tmp_path, *SPLIT) as trainer:
            return trainer.labels, trainer.run().samples

    found = ranks(body)
    labels, samples = found[0]
    assert all(other == (labels, samples) for other in found) and len(labels) == len(found)
    assert sum(sum(own.values()) for own in labels) * 2 == samples


@pytest.mark.sizes(4)
def test_a_resumed_run_of_parts_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    saving = (*SPLIT, "checkpoint.every_steps=3", "checkpoint.keep=100")

    def body(comm):
        whole, _ = tiny.run(comm, shared_tmp_path / "whole", *saving)
        path = shared_tmp_path / "whole" / "run" / "checkpoints" / "step-00000003"
        again, _ = tiny.run(comm, shared_tmp_path / "again", *saving, resume=path)
        return whole.sha256 == again.sha256

    assert all(ranks(body))


def test_the_record_of_a_run_has_the_split(tmp_path):
    (tmp_path / "job.py").write_text("from train.tiny import job\n")
    settings = (*SPLIT, f"data.path={tmp_path / 'digits.h5'}", "epochs=1")
    run_virtual(lambda comm: train(comm, tmp_path / "job.py", None, settings, tmp_path / "run"), 3)
    labels = load_run(tmp_path / "run").labels
    assert len(labels) == 3 and all(max(own.values()) > 0.2 * sum(own.values()) for own in labels)


def loop_of_portions(comm):
    hd.init(comm=comm)
    model = torch.nn.Linear(1, 1)
    hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy="sandblaster")
    for _ in hd.shard(loader_of(), split="dirichlet"):
        raise AssertionError("a batch of samples that are split by label")


def test_joint_batches_are_not_split(tmp_path):
    with pytest.raises(
        ConfigError, match="samples must be available to all workers with sandblaster, where all .* got a split"
    ):
        run_virtual(loop_of_portions, 3)
    with pytest.raises(ConfigError, match="samples must be available to all workers with sandblaster"):
        run_virtual(lambda comm: tiny.run(comm, tmp_path, "strategy=sandblaster", *SPLIT), 3)
