"""What holds for every strategy; a new file in hpcdist/strategies is tested here without being named."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from harness import loops
from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, MismatchError, NonFiniteError, UnknownNameError
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes
every = each("name", strategies.available())
stepping = each("name", problem.stepping())


def _exchanges(cls) -> bool:
    """Whether all ranks' parameters come to depend on all ranks' samples, in a few steps or a period."""
    contract = cls.contract
    often = contract.synchronizes == "every step" or "period" in cls.Config.model_fields
    return contract.synchronous and contract.averages != "nothing" and often


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match="strategy must be one of adpsgd, allreduce, .*; got 'gosip'"):
        strategies.load("gosip")


@each("name", [name for name in strategies.available() if ":" not in name])
def test_it_says_where_it_comes_from(name):
    text = inspect.getdoc(strategies.load(name))
    assert "Reference: " in text and any(year in text for year in map(str, range(1990, 2030)))


@every
def test_it_says_what_it_does_and_what_its_options_mean(name):
    assert strategies.load(name).__doc__, "the class must have a docstring of its own: what a step does, and its bytes"
    for key, field in strategies.load(name).Config.model_fields.items():
        assert field.description, f"option {key} of {name} has no description"


@every
def test_an_unknown_option_is_refused(name):
    with pytest.raises(ConfigError, match="speling"):
        strategies.load(name).Config(speling=1)


@every
def test_maximize_of_the_negative_loss_is_the_plain_training_or_refused(name):
    def train(comm, sign):
        hd.init(comm=comm)
        model = problem.model()
        adam = problem.suited(name) is torch.optim.AdamW
        local = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.01, maximize=sign < 0)
        options = problem.PERIODS.get(name, {}) | problem.fitting(name, comm.size)
        optimizer = hd.DistributedOptimizer(local, model, strategy=name, **options)

        def backward(indices, portion=slice(None)):
            mean = sign * problem.loss(model, indices[portion])
            mean.backward()
            return mean

        for (indices,) in hd.shard(DataLoader(TensorDataset(torch.arange(30)), batch_size=4)):
            optimizer.zero_grad()
            if strategies.load(name).contract.batch == "portions":
                optimizer.step(partial(backward, indices))
            else:
                backward(indices)
                optimizer.step()
        hd.finish(model)
        return loops.vector(model)

    expected = VirtualRanks(3)(partial(train, sign=1))
    try:
        found = VirtualRanks(3)(partial(train, sign=-1))
    except ConfigError as error:
        assert "maximize of the optimiser must be False" in str(error)
    else:
        assert all(map(torch.equal, found, expected))


ALONE = [
    *((name, {}) for name in problem.stepping() if not problem.steps_itself(name)),
    *((name, problem.PERIODS[name]) for name in problem.LONG_PERIODS if not problem.steps_itself(name)),
    ("gossip_pull", {"pulls": 2, "interval": 2}),
    ("gossip_push", {"pushes": 2, "interval": 2, "include_self": False}),
    ("gossip_sync", {"pairing": "matching", "interval": 2, "order": "before"}),
    ("local_sgd", {"period": 2, "overlap": True}),
    ("local_sgd", {"period": 2, "average_optimizer_state": True}),
    ("softsync", {"splits": 30}),
]


@each("case", enumerate(ALONE))
@pytest.mark.sizes(1)
def test_on_one_rank_it_is_the_plain_optimiser_to_the_bit_and_sends_nothing(ranks, case):
    number, (name, options) = case
    optimizer = ("momentum", "adam")[number % 2]
    (run,) = ranks(lambda comm: problem.train(comm, name, options, optimizer=optimizer, samples=30))
    expected = problem.serial(1, optimizer=optimizer, samples=30)
    for params in (run.params, run.consensus):
        equal = all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
        assert equal, "on one rank the parameters must be those of the optimiser alone, to the bit"
    assert sum(record.bytes_sent for record in run.records) == 0, "one rank must send nothing"


@each("name", [n for n in problem.stepping() if "compression" in strategies.load(n).Config.model_fields])
@each("compression", ["fp16", "topk"])
@pytest.mark.sizes(1)
def test_on_one_rank_nothing_is_compressed(ranks, name, compression):
    options = {**problem.PERIODS.get(name, {}), "compression": compression}
    try:
        strategies.load(name).Config(**options)
    except ConfigError:
        return  # the strategy sends no such messages
    (run,) = ranks(lambda comm: problem.train(comm, name, options, samples=40, epochs=1))
    if not problem.steps_itself(name):
        expected = problem.serial(1, samples=40, epochs=1)
    else:
        (exact,) = ranks(
            lambda comm: problem.train(comm, name, {**options, "compression": "none"}, samples=40, epochs=1)
        )
        expected = exact.params
    same = all(torch.equal(a, b) for a, b in zip(run.params, expected, strict=True))
    assert same, "on one rank nothing is sent: with a compression parameters must be those without, to the bit"


@every
@pytest.mark.sizes(4)
def test_it_learns(ranks, name):
    """On other numbers of ranks, in a loop: tests/session/test_session.py."""
    problem.learns(ranks, name, problem.PERIODS.get(name, {}), epochs=1, below=0.95)


def _untouched(ranks, name) -> list[int]:
    """The ranks whose parameters are the same, to the bit, after training with other samples on the last rank."""

    def body(comm, shift):
        module = problem.model()
        local = problem.suited(name)(module.parameters(), lr=0.02)
        period = {"period": 2} if "period" in strategies.load(name).Config.model_fields else {}
        strategy = problem.make(comm, name, module, local, **period | problem.PERIODS.get(name, {}))
        start = 8 * comm.rank + shift * (comm.rank == comm.size - 1)
        batches = [range(start, start + 8)] * 12
        loops.by_strategy(strategy, local, batches, lambda batch: problem.loss(module, batch).backward())
        params = loops.vector(module)
        strategy.close()
        return params

    first, second = (ranks(partial(body, shift=shift)) for shift in (0, 100))
    return [rank for rank, (a, b) in enumerate(zip(first, second, strict=True)) if torch.equal(a, b)]


@each("name", [name for name in problem.stepping() if _exchanges(strategies.load(name))])
@pytest.mark.sizes(3)
def test_what_one_rank_trains_on_reaches_the_others(ranks, name):
    assert not (alone := _untouched(ranks, name)), (
        "the contract says that ranks synchronise, so what one rank trains on must reach the others; other samples on "
        f"rank {ranks.size - 1} change nothing on rank {alone[0]}"
    )


def test_a_strategy_that_sends_nothing_is_found(tmp_path):
    words = 'contract = Contract(averages="parameters", synchronizes="every step")'
    advance = "advance = lambda self, update: self.gradients.step_alone(update)"
    (tmp_path / "alone.py").write_text(
        f"from hpcdist.strategies import Contract, Strategy\nclass Alone(Strategy):\n    {words}\n    {advance}\n"
    )
    spec = f"{tmp_path / 'alone.py'}:Alone"
    assert _exchanges(strategies.load(spec)) and _untouched(VirtualRanks(3), spec) == [0, 1]


@every
@pytest.mark.sizes(1, 4)
def test_every_gradient_is_recorded_once_with_its_staleness(ranks, name):
    samples, batch, epochs = (
        50,
        4,
        2 if ranks.size > 1 else 1,
    )  # the last step is smaller, and on 4 ranks some have no sample in it
    runs = ranks(lambda comm: problem.train(comm, name, batch=batch, samples=samples, epochs=epochs))
    workers = sum(run.is_worker for run in runs)
    full, rest = divmod(samples, workers * batch)
    gradients = sum(len(record.staleness) for run in runs for record in run.records)
    assert gradients + sum(run.pending for run in runs) == epochs * (full * workers + -(-rest // batch)), (
        "records must have a staleness for each gradient, once"
    )
    for run in runs:
        steps = [record.step for record in run.records]
        assert steps == sorted(steps), f"records must be in the order of their steps; got {steps}"
        least = min((value for record in run.records for value in record.staleness), default=0)
        assert least >= 0, f"no gradient can be staler than none, as clock - its clock is from 0 on; got {least}"
        seconds = min((min(record.computing_s, record.waiting_s) for record in run.records), default=0.0)
        assert seconds >= 0, f"seconds of a record must be 0 or more; got {seconds}"


@every
@pytest.mark.sizes(3)
def test_all_ranks_start_from_rank_0(ranks, name):
    def body(comm):
        module = problem.model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(comm.rank)
        strategy = problem.make(comm, name, module)
        params = [p.clone() for p in strategy.model.params]
        strategy.close()
        return params

    expected = FlatModel(problem.model()).params
    for params in ranks(body):
        same = all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
        assert same, "once the strategy is built, all ranks must have rank 0's parameters"


@every
@pytest.mark.sizes(4)
def test_models_that_differ_are_refused_on_all_ranks(ranks, name):
    def body(comm):
        module = torch.nn.Linear(3, 3 if comm.rank < 2 else 4)
        with pytest.raises(MismatchError, match="model must be the same on every rank; rank 2's parameters") as caught:
            problem.make(comm, name, module)
        assert "rank 2's parameters or buffers, and those of rank 3, differ from rank 0's in name" in str(caught.value)
        first = "first 'weight: trainable float32 [3, 3] in group 0' on rank 0 against"
        second = "'weight: trainable float32 [4, 3] in group 0' on rank 2. Build it"
        assert f"{first} {second}" in str(caught.value)
        return True

    assert all(ranks(body))


def _with_nan(comm, name, on_nonfinite):
    """Three steps; in the second one the last rank's first bias has a NaN gradient."""
    module = problem.model()
    local = problem.suited(name)(module.parameters(), lr=0.1)
    strategy = problem.make(comm, name, module, local, on_nonfinite=on_nonfinite)

    def backward(step):
        poisons = step == 1 and comm.rank == comm.size - 1
        with problem.poisoned(module[0].bias) if poisons else nullcontext():
            problem.loss(module, range(8)).backward()

    records = loops.by_strategy(strategy, local, range(3), backward)
    params = [p.clone() for p in strategy.consensus()[0]]
    strategy.close()
    return records, params


@stepping
@pytest.mark.sizes(1, 3)
def test_a_nan_gradient_is_left_out_when_told_so(ranks, name):
    results = ranks(lambda comm: _with_nan(comm, name, "skip"))
    assert all(torch.isfinite(p).all() for _, params in results for p in params), (
        "with on_nonfinite='skip' no rank's NaN may reach the parameters"
    )
    events = [record.event for record in results[-1][0]]
    where = f"skipped: NaN or infinite gradient at step 2, rank {len(results) - 1}: 0.bias"
    assert events == [None, where, None], f"the record must tell of the skipped update; got {events}"


@stepping
@each("size", [1, 3])
def test_a_nan_gradient_ends_the_run_and_names_rank_parameter_and_step(name, size):
    where = f"gradients must be finite; got NaN or infinite gradient at step 2, rank {size - 1}: 0.bias"
    with pytest.raises(NonFiniteError, match=where):
        run_virtual(lambda comm: _with_nan(comm, name, "stop"), size)


@each("name", ["gossip_sync", "gossip_pull", "dpsgd", "local_sgd", "allreduce", "hardsync"])
@pytest.mark.sizes(2)
def test_a_mean_of_float16_may_have_a_sum_beyond_its_range(ranks, name):
    def body(comm):
        hd.init(comm=comm)
        module = torch.nn.Linear(8, 1, bias=False).half()
        module.weight.data.fill_(40_000)
        local, options = problem.local(name, module.parameters(), 2.0**-10), problem.PERIODS.get(name, {})
        optimizer = hd.DistributedOptimizer(local, module, strategy=name, **options)
        for (batch,) in hd.shard(DataLoader(TensorDataset(torch.zeros(8, 8).half()), batch_size=1)):
            optimizer.zero_grad()
            module(batch).sum().backward()
            optimizer.step()
        hd.finish(module)
        return module.weight.unique().tolist()

    assert all(found == [40_000] for found in ranks(body))
