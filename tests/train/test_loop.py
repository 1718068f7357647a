"""Whole runs of a small job, on virtual and on real ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import ComputeModel, Constant, run_virtual
from hpcdist.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from hpcdist.records import digest, load_summary, read_records
from hpcdist.strategies.server.strategy import ServerStrategy
from hpcdist.train import resume as resuming
from hpcdist.train.evaluate import evaluate
from strategies import problem
from train import tiny

# What suits short runs of a small model: own periods are longer, strom's 1 % of so few elements little, and a
# step of sandblaster is of a large batch.
SUITED = {
    **{name: ["strategy.period=5"] for name in problem.LONG_PERIODS},
    "dion": ["strategy.rate=5", "optimizer.lr=0.03"],
    "qg_dsgd": ["optimizer.name=SGD", "optimizer.lr=0.1", "optimizer.momentum=0.9"],
    "sparse_loco": ["strategy.period=5", "strategy.compression.ratio=0.2"],
    "strom": ["strategy.compression.density=0.1"], "sandblaster": ["batch_size=90", "checkpoint.every_steps=3"],
}  # fmt: skip


@pytest.mark.sizes(4)
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    """Interrupted at the end of an epoch, and inside a later one."""

    def body(comm):
        ends = [tiny.run(comm, shared_tmp_path / "whole", "strategy.algorithm=ring")]
        for at in (6, 13):
            saving = (f"checkpoint.every_steps={at}", "checkpoint.keep=100", "strategy.algorithm=ring")
            folder = shared_tmp_path / f"interrupted-{at}"
            _interrupt(comm, folder, at, *saving)
            path = checkpoint.latest(folder / "run" / "checkpoints")
            assert path.name == f"step-{at:08d}"
            ends.append(tiny.run(comm, folder, *saving, resume=path))
        return ends

    expected, *ends = zip(*ranks(body))
    for end in ends:
        tiny.require_same(end, expected)


class Paces(ComputeModel):
    """Every rank has a pace of its own, so that letters arrive in one order only, whenever the clock began."""

    def sample(self, rank, generator):
        return 0.1 * (rank + 2) ** (1 / 3)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (("hardsync", "servers=2"), 4),
        (("parameter_server", "overlap=true"), 4),
        (("softsync", "splits=2"), 6),  # 5 workers, c = 2: after 5 or 7 steps of each a gradient is left
        (("softsync", "servers=colocated"), 3),
        (("softsync", "fan_in=2"), 5),
        (("ssp", "bound=2"), 4),
        (("downpour", "n_push=3", "n_fetch=4", "rate=0.003"), 3),
        (("downpour", "servers=2", "server_rule=optimizer"), 4),
        (("downpour", "warm_start=9"), 3),
        (("easgd", "period=3", "servers=colocated"), 3),
        (("eamsgd", "period=2", "servers=2"), 4),
    ],
    ids=str,
)
def test_a_resumed_run_with_servers_ends_where_the_uninterrupted_one_ends(tmp_path, options, size):
    """With what servers and workers hold between steps: sums, centres, clocks, momentum, gradients not yet applied."""
    name, *rest = options
    settings = [f"strategy={name}", *(f"strategy.{option}" for option in rest), "epochs=1", "batch_size=8"]
    settings += ["checkpoint.every_steps=5", "checkpoint.keep=100"]
    expected = run_virtual(lambda comm: tiny.run(comm, tmp_path, *settings), size, compute=Paces())
    kept, *later = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for path in later:
        shutil.rmtree(path)
    resumed = run_virtual(lambda comm: tiny.run(comm, tmp_path, *settings, resume=kept), size, compute=Paces())
    tiny.require_same(resumed, expected)
    assert all(one.staleness == other.staleness for (one, _), (other, _) in zip(resumed, expected))


SERVED = [name for name in strategies.available() if issubclass(strategies.load(name), ServerStrategy)]
WORLDS = [(1, 4, 1), (1, 1, 4), (2, 4, 3), (2, 3, 5), ("colocated", 4, 2), ("colocated", 1, 3)]
OF_SERVED = [(name, *WORLDS[n % 6]) for n, name in enumerate(SERVED)]


@pytest.mark.parametrize(("name", "servers", "before", "after"), OF_SERVED)
def test_on_another_number_of_ranks_it_goes_on_from_what_the_servers_had(tmp_path, name, servers, before, after):
    common = ("epochs=1", "batch_size=60", "checkpoint.every_steps=1")
    options = (f"strategy={name}", f"strategy.servers={servers}", *common)
    summary = run_virtual(lambda comm: tiny.run(comm, tmp_path, *options)[0], before, compute=Paces())[0]
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")

    def body(comm):
        with tiny.training(comm, tmp_path, *options) as trainer:
            resuming.load(trainer, path)
            return digest(trainer.strategy.consensus()[0])

    assert run_virtual(body, after) == [summary.sha256] * after


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("name", ["hardsync", "parameter_server", "easgd"])
def test_records_have_all_replies_of_servers(tmp_path, name, every):
    """Also those before a pause of all workers, which is here at the end of the epoch, or after each step."""
    options = (f"strategy={name}", "epochs=1", f"checkpoint.every_steps={every}")
    options += ("strategy.period=1",) if name == "easgd" else ()

    def body(comm):
        with tiny.training(comm, tmp_path, *options) as trainer:
            trainer.run()
            return sum(flat.nbytes for flat in trainer.model.params)

    n_bytes = run_virtual(body, 3, compute=Constant(0.01))[0]
    server, *workers = read_records(tmp_path / "run").values()
    steps = sum(record.samples > 0 for of_rank in workers for record in of_rank)
    sent = sum(record.bytes_sent for record in server)
    assert steps * n_bytes <= sent < (steps + 1) * (n_bytes + 100), "parameters for each step, and headers"


@pytest.mark.parametrize(
    ("name", "option"), [("local_sgd", "overlap=true"), ("diloco", "overlap=true"), ("strom", None)]
)
def test_records_have_what_is_sent_while_the_run_pauses(tmp_path, name, option):
    """An average in flight is completed before a checkpoint, which is here written after each step."""
    options = [f"strategy={name}", "epochs=2", *SUITED.get(name, ())]
    options += [f"strategy.{option}", "strategy.period=3"] if option else []

    def sent(every):
        folder = tmp_path / str(every)
        saving = f"checkpoint.every_steps={every}"
        run_virtual(lambda comm: tiny.run(comm, folder, *options, saving)[0], 4, compute=Constant(0.01))
        return [sum(record.bytes_sent for record in of_rank) for of_rank in read_records(folder / "run").values()]

    whole = sent(0)
    assert whole == sent(1) and min(whole) > 0


def _interrupt(comm, folder, step, *overrides) -> None:
    """Ends a run as if the job had been cancelled, once the checkpoint of `step` is written."""
    with tiny.training(comm, folder, *overrides) as trainer:
        steps = trainer._steps

        def interrupted(batches, first, count):
            if trainer.position.step >= step:
                raise KeyboardInterrupt
            steps(batches, first, count)

        trainer._steps = interrupted
        with pytest.raises(KeyboardInterrupt):
            trainer.run()


EVERY = [(name, *[(4, 2), (2, 5)][n % 2]) for n, name in enumerate(strategies.available())]


@pytest.mark.parametrize(("name", "before", "after"), EVERY)
def test_every_strategy_resumes_on_other_ranks_and_its_summary_tells_what_the_run_was(tmp_path, name, before, after):
    options = (f"strategy={name}", "checkpoint.every_steps=5", *SUITED.get(name, problem.settings(name)))

    def fitting(size):
        return [f"strategy.{key}={value}" for key, value in problem.fitting(name, size).items()]

    def first(comm):
        return tiny.run(comm, tmp_path, *options, *fitting(before), "epochs=1")[0]

    summary = run_virtual(first, before, compute=Constant(0.01))[0]
    records = [record for of_rank in read_records(tmp_path / "run").values() for record in of_rank]
    applied, pending, steps = (
        sum(summary.staleness.histogram.values()),
        summary.pending,
        sum(r.samples > 0 for r in records),
    )
    assert applied + pending == steps, (
        f"each step's gradient must be applied (a staleness in a record) or pending: {applied} + {pending} of {steps}"
    )
    path = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    position = checkpoint.SavedRank(path, 0).at("position")
    seen = []

    def body(comm):
        with tiny.training(comm, tmp_path, *options, *fitting(after), "epochs=2") as trainer:
            fetch, step, fetched = trainer._train.batch, trainer._step, []

            def noting(indices):
                fetched.append(indices.tolist())
                return fetch(indices)

            def counting(x, y):
                indices = fetched.pop(0)
                seen.extend(indices if trainer.model.gradients.weight else [])  # a batch of weight 0 does not count
                step(x, y)

            trainer._train.batch, trainer._step = noting, counting
            return trainer.run(path), len(trainer._train)

    (summary, n_samples), *others = run_virtual(body, after, compute=Constant(0.01))
    same = all(other == summary for other, _ in others) and load_summary(tmp_path / "run") == summary
    assert same, "resumed on other ranks, all ranks must return the summary in the file"
    assert (summary.strategy, summary.ranks, summary.seed) == (name, after, 11)
    accuracy = summary.metrics["accuracy"]
    assert accuracy > 0.3, f"resumed, accuracy on ten classes must be above 0.3; got {accuracy:.3f}"
    assert summary.wall_s > 0 and summary.seconds.computing > 0
    assert summary.bytes_per_step > 0, "records must count the bytes that ranks send; got none"
    assert summary.samples == 2 * n_samples, "steps that a start on other ranks repeats must count once"
    assert summary.workers == len(strategies.load(name).Config().workers(after)), "those of the newest start"
    if name in problem.stepping():
        rest = 2 * n_samples - position["consumed"] - position["epoch"] * n_samples
        assert len(seen) == rest, f"resumed, the run must take the {rest} samples that are left; got {len(seen)}"


@pytest.mark.computes
@pytest.mark.sizes(3)
def test_ranks_with_different_settings_are_refused(ranks, shared_tmp_path):
    message = r"configuration must be the same on every rank; rank 1 differs .*seed: 0 against 1"

    def body(comm):
        with pytest.raises(MismatchError, match=message):
            tiny.trainer(comm, shared_tmp_path, f"seed={min(comm.rank, 1)}")
        return True

    assert all(ranks(body))


def test_a_checkpoint_of_another_strategy_goes_on_and_one_of_another_model_is_refused(tmp_path, caplog):
    run_virtual(lambda comm: tiny.run(comm, tmp_path, "epochs=1", "checkpoint.every_steps=5"), 2)
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    run_virtual(lambda comm: tiny.run(comm, tmp_path, "strategy=gossip_pull", resume=path), 2)
    assert f"settings have changed since {path}: strategy.name allreduce → gossip_pull" in caplog.text
    for change, message in (
        ("optimizer=Adagrad", "optimizer must be that of the checkpoint .*, '.*'; got Adagrad. Resume with the one of"),
        ("schedule=ReduceLROnPlateau", "schedule must be that of the checkpoint .*; got ReduceLROnPlateau"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run_virtual(lambda comm, change=change: tiny.run(comm, tmp_path, change, resume=path), 2)
    with pytest.raises(CheckpointError, match="model must be that of the checkpoint"):
        run_virtual(lambda comm: tiny.run(comm, tmp_path, "model.width=13", resume=path), 2)


@pytest.mark.computes
@pytest.mark.sizes(3)
def test_what_is_evaluated_is_the_mean_and_training_goes_on_from_ones_own(ranks, shared_tmp_path):
    def body(comm):
        with tiny.training(comm, shared_tmp_path, "strategy=gossip_pull", "epochs=1") as trainer:
            trainer.run()
            before = [p.clone() for p in (*trainer.model.params, *trainer.model.buffers)]
            once, again = (evaluate(trainer.job, trainer.strategy, comm, trainer._test) for _ in range(2))
            after = (*trainer.model.params, *trainer.model.buffers)
            untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return once, again, untouched, trainer.model.module.training

    found = ranks(body)
    assert all(once == again == found[0][0] and untouched and mode for once, again, untouched, mode in found)


@pytest.mark.parametrize("name", ["allreduce", "hardsync", "gossip_sync"])
def test_batches_that_add_up_are_one_large_one(tmp_path, name):
    """To rounding, uneven last steps included; another number of them is another run."""
    plain = replace(tiny.job, model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    # Batch norm and dropout would see each batch alone.

    def body(comm, folder, *options):
        with tiny.training(comm, tmp_path / folder, f"strategy={name}", "epochs=1", *options, of=plain) as trainer:
            return trainer.run().samples, trainer.position.step, trainer.strategy.consensus()[0]

    added = run_virtual(lambda comm: body(comm, "added", "batch_size=8", "accumulation=3"), 3)[0]
    whole = run_virtual(lambda comm: body(comm, "whole", "batch_size=24"), 3)[0]
    once = run_virtual(lambda comm: body(comm, "once", "batch_size=8"), 3)[0]
    assert added[:2] == whole[:2] and once[1] > whole[1]
    torch.testing.assert_close(added[2], whole[2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(added[2][0], once[2][0], rtol=1e-3, atol=1e-3)


def test_a_jobs_accumulation_is_its_own_setting(tmp_path):
    with pytest.raises(ConfigError, match="strategy.accumulation must be omitted in a job, .*; got 3. Set"):
        run_virtual(lambda comm: tiny.trainer(comm, tmp_path, "strategy.accumulation=3"), 1)


def test_mixed_precision_learns(tmp_path):
    (summary, _), _ = run_virtual(lambda comm: tiny.run(comm, tmp_path, "amp=bf16"), 2)
    assert summary.metrics["accuracy"] > 0.5


def test_an_overflow_of_float16_is_left_out_and_halves_the_scale(tmp_path):
    def body(comm):
        with tiny.training(comm, tmp_path, "amp=fp16", "epochs=1") as trainer:
            scaler = trainer.precision.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**20})
            return trainer.run(), scaler.get_scale()

    (summary, scale), (_, other) = run_virtual(body, 2)
    assert scale == other < 2.0**20
    events = [record.event for record in read_records(tmp_path / "run")[0] if record.event]
    assert events and all(event.startswith("skipped: NaN or infinite gradient") for event in events)
    assert summary.metrics["accuracy"] > 0.2


def test_a_run_that_diverges_stops_and_says_where(tmp_path):
    diverging = ("optimizer=SGD", "optimizer.lr=1e30", "schedule=none", "clip_norm=none")
    with pytest.raises(NonFiniteError, match=r"gradients must be finite; got NaN .* rank \d: \d\.(weight|bias)"):
        run_virtual(lambda comm: tiny.run(comm, tmp_path, *diverging), 2)
