"""Jobs whose model is in stages, on virtual and on real ranks: they end where one process does."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.data import hdf5, importers
from hpcdist.data.hdf5 import StoredRows
from hpcdist.records import load_summary, read_evaluations, read_records
from train import staged, tiny

pytestmark = pytest.mark.computes
TWO = ("parallel.stages=2", "parallel.micro_batches=4")


def _require_close(own, whole):
    assert own, "no parameter on this rank"
    for name, value in own.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    "options",
    [
        ("parallel.schedule=gpipe", "parallel.recompute=true", "parallel.cut=[3,5]"),
        ("parallel.schedule=interleaved", "parallel.chunks=2", "accumulation=3"),
        ("parallel.schedule=zero_bubble", "parallel.recompute=true", "clip_norm=0.5"),
    ],
    ids=str,
)
def test_a_pipeline_ends_where_one_process_does(ranks, shared_tmp_path, options):
    def body(comm):
        whole = [option for option in options if not option.startswith("parallel.")]
        return staged.run(comm, shared_tmp_path, *TWO, *options), staged.alone(comm, shared_tmp_path, *whole)

    for (summary, own), (expected, whole) in ranks(body):
        _require_close(own, whole)
        assert summary.metrics == pytest.approx(expected.metrics, abs=1e-12)
        assert (summary.samples, summary.workers, summary.stages) == (expected.samples, 1, 2)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("routing", ["straight", "random"])
def test_a_grid_ends_where_one_process_with_the_batch_of_all_replicas_does(ranks, shared_tmp_path, routing):
    options = ("optimizer.scale=linear", "optimizer.reference_batch=32", "epochs=1", "budget.steps=none")

    def body(comm):
        found = staged.run(comm, shared_tmp_path, *TWO, *options, f"parallel.routing={routing}")
        return found, staged.alone(comm, shared_tmp_path, *options, "batch_size=32")

    found = ranks(body)
    for (summary, own), (expected, whole) in found:
        _require_close(own, whole)
        assert summary.samples == expected.samples and summary.workers == 2
    records = read_records(shared_tmp_path / "run")
    assert [sum(r.samples for r in records[rank]) > 0 for rank in range(4)] == [False, True, False, True]
    assert all(r.loss is None and r.staleness == () for rank in (0, 2) for r in records[rank])
    assert all(0 < r.stage_bytes < r.bytes_sent for of_rank in records.values() for r in of_rank)
    summary = load_summary(shared_tmp_path / "run")
    assert sum(summary.staleness.histogram.values()) == sum(r.samples > 0 for rank in (1, 3) for r in records[rank])


@pytest.mark.sizes(6)
@pytest.mark.parametrize("strategy", ["softsync:splits=2", "sgp"])
def test_replicas_train_by_any_strategy(ranks, shared_tmp_path, strategy):
    """Three replicas of two stages: the strategy's own counts are those of three ranks with whole models."""
    name, _, option = strategy.partition(":")
    options = (f"strategy={name}", *([f"strategy.{option}"] if option else []), "budget.steps=none", "epochs=2")
    found = ranks(lambda comm: staged.run(comm, shared_tmp_path, *TWO, *options), compute=Constant(0.01))
    summary = found[0][0]
    assert all(other == summary for other, _ in found)
    assert summary.workers == len(strategies.load(name).Config().workers(3))
    records = read_records(shared_tmp_path / "run")
    assert sum(summary.staleness.histogram.values()) + summary.pending == sum(
        record.samples > 0 for of_rank in records.values() for record in of_rank
    )
    assert summary.metrics["accuracy"] > 0.2
    assert all(0 < bubble < 0.8 for bubble in summary.bubbles)


def test_the_bubble_is_in_the_summary(tmp_path):
    settings = ("parallel.stages=4", "parallel.micro_batches=8", "budget.steps=12")
    summary, _ = run_virtual(lambda comm: staged.run(comm, tmp_path, *settings), 4, compute=Constant(1.0))[0]
    assert summary.bubbles == pytest.approx([3 / 11] * 4, rel=0.1)
    assert summary.seconds.computing == pytest.approx(12 / 4)


def test_schedules_and_numbers_of_stages_end_on_the_same_bits(tmp_path):
    """With layers that change with chance and batch: a stage's dropout draws the same masks by any schedule."""

    def sha(stages, *options, job=tiny.job):
        settings = (f"parallel.stages={stages}", "parallel.micro_batches=4", "budget.steps=5", *options)
        folder = tmp_path / "-".join([str(stages), *options])
        return run_virtual(lambda comm: staged.run(comm, folder, *settings, job=job)[0].sha256, stages)[0]

    assert sha(2, "parallel.schedule=gpipe") == sha(2) == sha(2, "parallel.recompute=true")
    assert sha(2, job=staged.job) == sha(4, job=staged.job), "the checksum is that of the whole model"
    assert len({sha(stages, "optimizer.lr=0.0", job=staged.job) for stages in (1, 2)}) == 1, "so are initial values"


def test_progress_and_evaluations_are_those_of_replicas(tmp_path):
    seen = []

    def body(comm):
        options = (*TWO, "eval_every_samples=160", "log_every=2")
        tiny.run(comm, tmp_path, *options, of=staged.job, report=seen.append)

    run_virtual(body, 4)
    assert all(progress.loss is not None for progress in seen) and seen[-1].ended
    assert {progress.samples for progress in seen} >= {64, 128, 359}
    assert [one.samples for one in read_evaluations(tmp_path / "run")] == [160, 320, 359]


def test_an_overflow_in_one_stage_is_left_out_in_all(tmp_path):
    def body(comm):
        with tiny.training(comm, tmp_path, *TWO, "amp=fp16", "epochs=1") as made:
            scaler = made.precision.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**20})
            return made.run(), scaler.get_scale()

    found = run_virtual(body, 4)
    assert len({scale for _, scale in found}) == 1 and found[0][1] < 2.0**20
    records = read_records(tmp_path / "run")
    skipped = [[record.step for record in records[rank] if record.event] for rank in range(4)]
    assert skipped[0] and all(steps == skipped[0] for steps in skipped)
    assert found[0][0].skipped == 2 * len(skipped[0]), "counted once for each replica"


# --- resuming ---------------------------------------------------------------------------------------------------------
@pytest.mark.sizes(4)
def test_a_resumed_pipeline_ends_on_the_same_bits(ranks, shared_tmp_path):
    """With dropout and batch norm, whose random numbers and statistics are each stage's own."""
    options = (*TWO, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.routing=random")
    options += ("strategy.algorithm=ring", "epochs=1")

    def body(comm):
        expected, whole = staged.run(comm, shared_tmp_path / "a", *options, job=tiny.job)
        saving = ("checkpoint.every_steps=5", "checkpoint.keep=9")
        staged.run(comm, shared_tmp_path / "b", *options, *saving, job=tiny.job)
        path = shared_tmp_path / "b/run/checkpoints/step-00000005"
        resumed, own = staged.run(comm, shared_tmp_path / "b", *options, job=tiny.job, resume=path)
        assert all(torch.equal(own[name], value) for name, value in whole.items())
        return expected, resumed

    for expected, resumed in ranks(body):
        assert (resumed.sha256, resumed.metrics) == (expected.sha256, expected.metrics)
        assert resumed.samples == expected.samples, "steps were recorded twice or not at all"


def test_a_run_goes_on_on_other_stages_as_if_nothing_had_happened(tmp_path):
    """Saved by one, two and four stages in turn, and taken up by two, four, one: momentum, schedule, averages too."""
    settings = ("average_iterates=true", "schedule={name='StepLR', step_size=3, per='step'}")

    def part(stages, steps, resume=None):
        folder = tmp_path / f"{stages}-{steps}-{resume is None}"
        cut = (f"parallel.stages={stages}", "parallel.micro_batches=4", f"budget.steps={steps}")
        cut += ("checkpoint.every_steps=3",)
        run_virtual(lambda comm: staged.run(comm, folder, *settings, *cut, resume=resume), stages)
        return folder / "run" / "checkpoints" / f"step-{steps:08d}", load_summary(folder / "run")

    path, _ = part(1, 3)
    path, _ = part(2, 6, path)
    path, _ = part(4, 9, path)
    path, summary = part(1, 12, path)
    _, expected = part(1, 12)
    assert summary.metrics == pytest.approx(expected.metrics, abs=1e-12)


# --- data: the first stage reads x, the last one y --------------------------------------------------------------------
# Compressed: all that is read goes through `StoredRows`. Read on the rank's own thread.
COMPRESSED = replace(staged.job, data=lambda path: importers.load("digits")(None, path, compression="gzip"))
READING = ("data.prefetch=0", "budget.steps=5")


@pytest.fixture
def counted(monkeypatch):
    """Counts the bytes that each thread reads of each column; a rank is a thread, or a process."""
    read: Counter[tuple[int, str]] = Counter()
    take = StoredRows.take

    def counting(self, indices):
        values = take(self, indices)
        read[threading.get_ident(), self._column.name.rpartition("/")[2]] += values.nbytes
        return values

    def uncounted(function):
        def call(*given):
            before = read.copy()
            found = function(*given)
            for name in "xy":
                read[threading.get_ident(), name] = before[threading.get_ident(), name]
            return found

        return call

    monkeypatch.setattr(StoredRows, "take", counting)
    # All ranks compare a checksum of all data, of which it reads a part; those with a whole model check all labels.
    monkeypatch.setattr(hdf5, "_checksum", uncounted(hdf5._checksum))
    monkeypatch.setattr(hdf5.HDF5Dataset, "stored_labels", uncounted(hdf5.HDF5Dataset.stored_labels))
    return read


@pytest.mark.sizes(4)
@pytest.mark.parametrize("stages", [2, 4])
def test_each_rank_reads_what_its_stages_need(ranks, shared_tmp_path, counted, stages):
    replicas = 4 // stages

    def body(comm):
        def read():
            return {name: counted[threading.get_ident(), name] for name in "xy"}

        staged.run(comm, shared_tmp_path, *READING, f"parallel.stages={stages}", job=COMPRESSED)
        own = read()
        staged.alone(comm, shared_tmp_path, *READING, f"batch_size={16 * replicas}", job=COMPRESSED)
        return own, {name: number - own[name] for name, number in read().items()}

    found = ranks(body)
    whole = found[0][1]
    assert whole["x"] == 8 * whole["y"] > 0, "64 pixels of a byte, and a class of 8 bytes"
    first, last = range(0, 4, stages), range(stages - 1, 4, stages)
    for name, needed in (("x", first), ("y", last)):
        of_ranks = [own[name] for own, _ in found]
        assert sum(of_ranks) == whole[name], "by all replicas together, once"
        assert [rank for rank, number in enumerate(of_ranks) if number] == list(needed)
