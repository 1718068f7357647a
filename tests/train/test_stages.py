"""Jobs whose model is in stages, on virtual and on real ranks: they end where one process does."""

from __future__ import annotations

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.records import load_summary, read_evaluations, read_records
from train import staged, tiny

TWO = ("parallel.stages=2", "parallel.micro_batches=4")


def _require_close(own, whole):
    assert own, "no parameter on this rank"
    for name, value in own.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)


@pytest.mark.computes
@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("parallel.schedule=gpipe", "parallel.recompute=true", "parallel.cut=[3,5]"),
        ("parallel.schedule=interleaved", "parallel.chunks=2", "accumulation=3"),
        ("parallel.schedule=zero_bubble", "clip_norm=0.5"),
        ("parallel.schedule=zero_bubble", "parallel.recompute=true"),
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


@pytest.mark.computes
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


@pytest.mark.computes
@pytest.mark.sizes(6)
@pytest.mark.parametrize(
    "strategy",
    ["softsync:splits=2", "hardsync", "gossip_pull", "local_sgd:period=3", "adpsgd", "sgp"],
)
def test_replicas_train_by_any_strategy(ranks, shared_tmp_path, strategy):
    """Three replicas of two stages: the strategy's own counts are those of three ranks with whole models."""
    name, _, option = strategy.partition(":")
    options = (f"strategy={name}", *([f"strategy.{option}"] if option else []), "budget.steps=none", "epochs=3")
    found = ranks(lambda comm: staged.run(comm, shared_tmp_path, *TWO, *options), compute=Constant(0.01))
    summary = found[0][0]
    assert all(other == summary for other, _ in found)
    cls = strategies.load(name)
    config = cls.Config.from_mapping({}) if not option else tiny_config(cls, option)
    assert summary.workers == len(config.workers(3))
    records = read_records(shared_tmp_path / "run")
    assert sum(summary.staleness.histogram.values()) + summary.pending == sum(
        record.samples > 0 for of_rank in records.values() for record in of_rank
    )
    assert summary.metrics["accuracy"] > 0.2
    assert all(0 < bubble < 0.8 for bubble in summary.bubbles)


def tiny_config(cls, option):
    key, _, value = option.partition("=")
    return cls.Config.from_mapping({key: int(value) if value.isdigit() else value})


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_the_bubble_is_in_the_summary(tmp_path, stages, micro_batches):
    settings = (f"parallel.stages={stages}", f"parallel.micro_batches={micro_batches}", "budget.steps=12")
    found = run_virtual(lambda comm: staged.run(comm, tmp_path, *settings), stages, compute=Constant(1.0))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert found[0][0].bubbles == pytest.approx([bubble] * stages, rel=0.1)
    assert found[0][0].seconds.computing == pytest.approx(12 / stages)


def test_schedules_and_numbers_of_stages_end_on_the_same_bits(tmp_path):
    """With layers that change with chance and batch: a stage's dropout draws the same masks by any schedule."""

    def sha(stages, *options, job=tiny.job):
        settings = (f"parallel.stages={stages}", "parallel.micro_batches=4", "epochs=1", *options)
        folder = tmp_path / "-".join([str(stages), *options])
        return run_virtual(lambda comm: staged.run(comm, folder, *settings, job=job)[0].sha256, stages)[0]

    assert sha(2, "parallel.schedule=gpipe") == sha(2) == sha(2, "parallel.recompute=true")
    plain = [sha(stages, "budget.steps=5", job=staged.job) for stages in (2, 4)]
    plain.append(sha(2, "budget.steps=5", "parallel.schedule=interleaved", "parallel.chunks=2", job=staged.job))
    assert len(set(plain)) == 1, "the checksum is that of the whole model, wherever its layers are"
    still = ("optimizer.lr=0.0", "budget.steps=1")
    assert len({sha(stages, *still, job=staged.job) for stages in (1, 2, 4)}) == 1, "and so are the initial values"


def test_progress_and_evaluations_are_those_of_replicas(tmp_path):
    seen = []

    def body(comm):
        options = (*TWO, "eval_every_samples=160", "log_every=2")
        tiny.run(comm, tmp_path, *options, of=staged.job, report=seen.append)

    run_virtual(body, 4)
    assert all(progress.loss is not None for progress in seen) and seen[-1].ended
    assert {progress.samples for progress in seen} >= {64, 128, 359}
    assert [one.samples for one in read_evaluations(tmp_path / "run")] == [160, 320, 359]


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_learns_in_stages(tmp_path, amp):
    settings = (*TWO, f"amp={amp}", "epochs=3")
    found = run_virtual(lambda comm: staged.run(comm, tmp_path, *settings, job=tiny.job)[0], 2)
    assert found[0].metrics["accuracy"] > 0.5
    again = (*settings, "parallel.recompute=true")  # within the same autocast
    assert run_virtual(lambda comm: staged.run(comm, tmp_path / "again", *again, job=tiny.job)[0], 2)[0].sha256 == (
        found[0].sha256
    )


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


def test_iterates_are_averaged_in_all_stages_of_one_replica(tmp_path):
    settings = ("average_iterates=true",)

    def body(comm):
        return staged.run(comm, tmp_path, *TWO, *settings)[0], staged.alone(comm, tmp_path, *settings)[0]

    summary, whole = run_virtual(body, 2)[0]
    assert summary.metrics == pytest.approx(whole.metrics, abs=1e-12)


# --- resuming ---------------------------------------------------------------------------------------------------------
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(
    "more", [(), ("parallel.schedule=interleaved", "parallel.chunks=2"), ("parallel.routing=random",)], ids=str
)
def test_a_resumed_pipeline_ends_on_the_same_bits(ranks, shared_tmp_path, more):
    """With dropout and batch norm, whose random numbers and statistics are each stage's own."""
    options = (*TWO, *more, "strategy.algorithm=ring", "epochs=1")

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


@pytest.mark.parametrize("average", ["false", "true"])
def test_a_run_goes_on_on_other_stages_as_if_nothing_had_happened(tmp_path, average):
    """Saved by one, two and four stages in turn, and taken up by two, four, one: momentum, schedule, averages too."""
    settings = (f"average_iterates={average}", "schedule={name='StepLR', step_size=3, per='step'}")

    def part(stages, steps, resume=None):
        folder = tmp_path / f"{stages}-{steps}-{resume is None}"
        cut = (f"parallel.stages={stages}", "parallel.micro_batches=4", f"budget.steps={steps}")
        run_virtual(
            lambda comm: staged.run(comm, folder, *settings, *cut, "checkpoint.every_steps=3", resume=resume), stages
        )
        return folder / "run" / "checkpoints" / f"step-{steps:08d}", load_summary(folder / "run")

    path, _ = part(1, 3)
    path, _ = part(2, 6, path)
    path, _ = part(4, 9, path)
    path, summary = part(1, 12, path)
    _, expected = part(1, 12)
    assert summary.metrics == pytest.approx(expected.metrics, abs=1e-12)


@pytest.mark.parametrize("strategy", ["gossip_pull", "softsync", pytest.param("local_sgd", marks=pytest.mark.extended)])
def test_a_run_goes_on_on_another_number_of_replicas(tmp_path, strategy):
    """Saved by 3 replicas of 2 stages, taken up by 2 of 2 and by 2 of 4, and read to the epoch's end."""
    settings = (
        f"strategy={strategy}",
        "epochs=2",
        "budget.steps=none",
        "checkpoint.every_steps=4",
        "checkpoint.keep=9",
    )

    def part(folder, stages, replicas, resume=None):
        cut = (f"parallel.stages={stages}", "parallel.micro_batches=4")
        run_virtual(lambda comm: staged.run(comm, tmp_path / folder, *settings, *cut, resume=resume), stages * replicas)
        return load_summary(tmp_path / folder / "run")

    part("saved", 2, 3)
    path = tmp_path / "saved/run/checkpoints/step-00000004"
    for folder, stages in (("fewer", 2), ("deeper", 4)):
        summary = part(folder, stages, 2, path)
        workers = 1 if strategy == "softsync" else 2
        read = 4 * 16 * (2 if strategy == "softsync" else 3)
        assert summary.workers == workers and summary.samples == 2 * 359 - read
        assert summary.metrics["accuracy"] > 0.2
