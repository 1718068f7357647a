"""Sandblaster L-BFGS: sums that don't depend on who computes, SciPy's minimum, few numbers between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from faults.deaths import events, job, survivable
from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import ComputeModel, Constant, Straggler, run_virtual
from hpcdist.errors import ConfigError, NonFiniteError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.records import load_summary
from hpcdist.strategies.lbfgs.algorithm import Lbfgs
from hpcdist.strategies.lbfgs.portions import JointBatch
from hpcdist.strategies.lbfgs.vectors import GRADIENT, KEPT, PAIRS
from hpcdist.strategies.server.channel import PAUSE
from hpcdist.train import resume as resuming
from strategies import problem
from train import tiny

pytestmark = pytest.mark.computes


class Loop:
    """Steps on the first `samples` of the problem's samples, or on those that `batches` give."""

    def __init__(self, comm, samples=problem.SAMPLES, module=None, loss=problem.loss, **options):
        self.comm, self.samples, self.loss = comm, samples, loss
        self.module = problem.model() if module is None else module
        cls = strategies.load("sandblaster")
        given = {"on_record": self.note}
        self.records, self.computed = [], []
        self.strategy = cls(cls.Config(**options), comm.split(0), FlatModel(self.module), **given)

    def note(self, record):
        self.records.append(record)

    def steps(self, count, batches=None):
        """Collective. A period of so many steps; returns the losses at their beginnings."""
        strategy, losses = self.strategy, []
        if not strategy.is_worker:
            strategy.serve(None)
            return losses
        for step in range(count):
            indices, joint = (np.arange(self.samples), None) if batches is None else batches[step]
            strategy.joint = joint or JointBatch(self.samples, whole=True)
            record, loss = strategy.minimise(None, lambda portion: self.evaluate(indices[portion], portion))
            self.records.append(record)
            losses.append(loss.item())
        strategy.pause()
        return losses

    def evaluate(self, indices, portion):
        self.comm.compute()
        loss = self.loss(self.module, indices)
        loss.backward()
        self.computed.append((portion.start, self.comm.now()))
        return loss

    def params(self):
        return torch.cat([p.detach().reshape(-1) for p in self.strategy.consensus()[0]])

    def gradient(self):
        """Collective. The sum that the shards have at X, for comparison."""
        comm, found = self.comm, [torch.zeros_like(flat) for flat in self.strategy.model.params]
        for rank, shard in self.strategy.point.shards.items():
            for part, own in zip(
                shard.of(found), self.strategy.shard.vectors[GRADIENT] if comm.rank == rank else found
            ):
                if comm.rank == rank:
                    part.copy_(own)
                comm.broadcast(part, rank)
        return torch.cat(found)

    def close(self):
        self.strategy.close()
        self.strategy.comm.close()


def _pairs(loop):
    """The coordinator's pairs; None on other ranks."""
    return loop.strategy.coordinator.state()["pairs"] if loop.strategy.coordinates else None


def _full(params, samples=problem.SAMPLES):
    module = problem.model()
    problem.load(module, [params])
    loss = problem.loss(module, range(samples))
    loss.backward()
    return loss.item(), torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def _train(comm, steps=6, **options):
    loop = Loop(comm, **options)
    losses = loop.steps(steps)
    found = loop.params(), loop.gradient(), losses, loop.records, loop.computed
    loop.close()
    return found


# --- the sum of gradients ---------------------------------------------------------------------------------------------
@pytest.mark.sizes(1, 2, 3, 4, 6)
@pytest.mark.parametrize("servers", [1, 2])
def test_the_gradient_is_that_of_the_full_batch(ranks, servers):
    servers = servers if ranks.size > servers + 1 else 1
    for params, gradient, losses, records, _ in ranks(lambda comm: _train(comm, servers=servers)):
        loss, expected = _full(params)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
        assert losses == sorted(losses, reverse=True) and all(loss < before for before in losses)
        assert all(record.staleness in ((0,), ()) and record.event is None for record in records)


def test_who_computes_and_how_often_changes_no_bit():
    """One worker of five is so slow that its portions are all computed twice; or another one is."""
    found = [
        run_virtual(_train, 7, compute=compute)
        for compute in (Constant(0.1), Straggler(Constant(0.1), 3, 40.0), Straggler(Constant(0.1), 6, 7.0))
    ]
    alike, slow, _ = ([starts for *_, computed in run for starts in computed] for run in found)
    assert len(slow) > len({*slow}) or len(slow) != len(alike), "no portion was computed twice: the test shows nothing"
    for run in found:
        assert all(torch.equal(params, found[0][0][0]) for params, *_ in run)
        assert all(torch.equal(gradient, found[0][0][1]) for _, gradient, *_ in run)


@survivable
def test_a_killed_worker_changes_no_bit(tmp_path):
    """Killed within a portion, on real ranks: the others compute it, and end where a run without a death does."""
    settings = ("strategy=sandblaster", "epochs=1", "batch_size=48")
    for name, deaths in (("dies", {3: 15}), ("lives", {})):
        (tmp_path / name).mkdir()
        done = job(tmp_path / name, 4, *settings, deaths=deaths)
        assert done.returncode == 0, done.stderr
    assert events(tmp_path / "dies", 0) == ["goes on without rank 3: it has died"]
    died, lived = (load_summary(tmp_path / name / "run") for name in ("dies", "lives"))
    assert died.lost_ranks == [3] and died.sha256 == lived.sha256 and died.metrics["accuracy"] > 0.5


def test_a_worker_that_dies_in_the_middle_leaves_the_sum_as_it_is():
    """It pushes to one of the shards, and to no other; the portion is given to another worker."""

    def body(comm, dies):
        loop = Loop(comm, servers=2)
        strategy, asked = loop.strategy, 0
        dead = comm.size - 1
        strategy.comm.failures.failed = lambda: (dead,) if dies and comm.now() > 1.0 else ()
        strategy.comm.failures.tolerant = True
        if dies and comm.rank == dead:
            strategy.joint = JointBatch(loop.samples, whole=True)
            real = strategy.comm.memory.put_all

            def to_one_shard(puts):
                nonlocal asked
                asked += 1
                puts = list(puts)
                if asked < 8:  # two for each request, the second of which announces it
                    return real(puts)
                real([put for put in puts if put.rank == 1])
                raise KeyError("dead")

            strategy.comm.memory.put_all = to_one_shard
            with pytest.raises(KeyError):
                strategy.minimise(None, lambda portion: loop.evaluate(np.arange(loop.samples)[portion], portion))
        else:
            loop.steps(4)
        found = [window.local.clone() for window in strategy.point._windows], [record.event for record in loop.records]
        comm.barrier()
        return found

    dies = run_virtual(lambda comm: body(comm, True), 6, compute=Constant(0.3))
    lives = run_virtual(lambda comm: body(comm, False), 6, compute=Constant(0.3))
    assert [event for event in dies[0][1] if event] == ["goes on without rank 5: it has died"]
    for mine, theirs in zip(dies[:3], lives[:3]):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))


@pytest.mark.parametrize("says_so_before", [True, False], ids=["after its last message", "before it"])
def test_a_worker_that_dies_at_the_end_of_an_epoch_is_left_behind(says_so_before):
    def body(comm, dies, gone):
        loop = Loop(comm)
        strategy, dead = loop.strategy, comm.size - 1
        strategy.comm.failures.failed = lambda: tuple(gone)
        strategy.comm.failures.tolerant = True
        if dies and comm.rank == dead:
            strategy.joint = JointBatch(loop.samples, whole=True)
            for _ in range(3):
                strategy.minimise(None, lambda portion: loop.evaluate(np.arange(loop.samples)[portion], portion))
            if says_so_before:
                strategy.work.client.push(PAUSE)
            gone.append(dead)
        else:
            loop.steps(3)
            loop.steps(2)
        found = [window.local.clone() for window in strategy.point._windows], [record.event for record in loop.records]
        comm.barrier()
        return found

    dies, lives = (
        run_virtual(lambda comm, dies=dies, gone=gone: body(comm, dies, gone), 5, compute=Constant(0.3))
        for dies, gone in ((True, []), (False, []))
    )
    assert [event for event in dies[0][1] if event] == ["goes on without rank 4: it has died"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(dies[1][0], lives[1][0], strict=True))


# --- the algorithm ----------------------------------------------------------------------------------------------------
def _logistic():
    x = problem.X
    y = (problem.Y[:, 0] + 0.3 * torch.randn(len(x), generator=torch.Generator().manual_seed(2)) > 0).double()

    def loss(module, indices):
        weights = module.weight.reshape(-1)
        logits = x[indices] @ weights + module.bias
        return nn.functional.binary_cross_entropy_with_logits(logits, y[indices]) + 0.01 * weights.square().sum()

    def scipys(values):
        module = nn.Linear(problem.FEATURES, 1).double()
        problem.load(module, [torch.from_numpy(values)])
        value = loss(module, slice(None))
        value.backward()
        return value.item(), np.concatenate([module.weight.grad.numpy().ravel(), module.bias.grad.numpy()])

    return loss, scipys


@pytest.mark.sizes(1, 3, 4)
def test_it_ends_at_scipys_minimum_of_logistic_regression(ranks):
    loss, scipys = _logistic()

    def body(comm):
        module = nn.Linear(problem.FEATURES, 1).double()
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
        loop = Loop(comm, module=module, loss=loss)
        losses = loop.steps(25)
        params = loop.params()
        loop.close()
        return params, losses

    expected = minimize(scipys, np.zeros(problem.FEATURES + 1), jac=True, method="L-BFGS-B", options={"ftol": 1e-15})
    for params, losses in ranks(body):
        value, gradient = scipys(params.numpy())
        assert value == pytest.approx(expected.fun, abs=1e-8) and np.abs(gradient).max() < 1e-5
        assert all(after <= before + 1e-14 for before, after in pairwise(losses))


def test_a_quadratic_ends_in_d_and_one_steps_on_shards():
    d = 8
    scales, end = torch.linspace(1, 9, d, dtype=torch.float64), torch.arange(d, dtype=torch.float64)

    def body(comm):
        module = nn.Linear(d, 1, bias=False).double()
        nn.init.zeros_(module.weight)

        def loss(module, indices):  # of every sample the same
            return 0.5 * (scales * (module.weight.reshape(-1) - end).square()).sum()

        loop = Loop(comm, module=module, loss=loss, servers=2, c1=1e-10, c2=1e-9, max_evaluations=40)
        loop.steps(d + 1)
        params = loop.params()
        loop.close()
        return params

    for params in run_virtual(body, 5):
        torch.testing.assert_close(params, end, rtol=0, atol=1e-7)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.sizes(1, 4)
def test_batches_that_change_are_learnt_from(ranks, overlap):
    problem.learns(ranks, "sandblaster", {"overlap": overlap, "portions": 2}, epochs=1)


def test_with_overlap_y_is_of_the_samples_that_two_batches_share():
    batches = [
        (np.arange(0, 60), JointBatch(60, head=0, tail=20)),
        (np.arange(40, 120), JointBatch(80, head=20, tail=20)),
        (np.arange(100, 160), JointBatch(60, head=20, tail=0)),
    ]

    def body(comm):
        loop = Loop(comm)
        points, pairs = [problem.model()], []
        for batch in batches:
            loop.steps(1, [batch])
            points.append(loop.params())
            vectors = loop.strategy.shard.vectors if loop.strategy.has_shard else None
            kept = comm.gather(_pairs(loop))[0]
            places = [PAIRS + 2 * int(place) for place, *_ in kept] if vectors else []
            pairs.append([[vectors[s][0].clone(), vectors[s + 1][0].clone()] for s in places])
            assert vectors is None or vectors[KEPT][0].abs().sum() > 0
        loop.close()
        return points[1:], pairs

    points, pairs = run_virtual(body, 3)[1]
    start = FlatModel(problem.model()).params[0].clone()

    def gradient(params, indices):
        module = problem.model()
        problem.load(module, [params])
        problem.loss(module, indices).backward()
        return torch.cat([p.grad.reshape(-1) for p in module.parameters()])

    assert [len(found) for found in pairs] == [0, 1, 3], "the first two after their successor's first evaluation"
    ends = [start, *points]
    for step, shared in enumerate((range(40, 60), range(100, 120))):
        s, y = pairs[2][step]
        torch.testing.assert_close(s, ends[step + 1] - ends[step], rtol=0, atol=1e-12)
        expected = gradient(ends[step + 1], shared) - gradient(ends[step], shared)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    own = range(100, 160)
    torch.testing.assert_close(pairs[2][2][1], gradient(ends[3], own) - gradient(ends[2], own), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("head", "added"), [(20, 1), (12, 0), (0, 0)])
def test_no_pair_is_made_of_other_shared_samples_than_were_foreseen(head, added):
    batches = [
        (np.arange(0, 60), JointBatch(60, head=0, tail=20)),
        (np.arange(60 - head, 120), JointBatch(60 + head, head=head, tail=20)),
    ]

    def body(comm):
        loop = Loop(comm)
        loop.steps(2, batches)
        return len(_pairs(loop) or ())

    assert run_virtual(body, 3)[0] == added


# --- what it costs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("servers", [1, 2])
def test_coordinator_and_shards_exchange_a_few_numbers_whatever_the_models_length(servers):
    history, steps = 4, 12

    def body(comm, width):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(problem.FEATURES, width), nn.Tanh(), nn.Linear(width, 2)).double()
        loop = Loop(comm, module=module, servers=servers, history=history)
        sent, sums = [], loop.strategy.sums
        push, reply = sums.client.push, sums.inbox.reply

        def counted_push(*request, values=(), **more):
            sent[-1] += len(values)
            push(*request, values=values, **more)

        def counted_reply(*replies):
            sent[-1] += sum(numbers.numel() for each in replies for numbers in each.tensors)
            reply(*replies)

        sums.client.push, sums.inbox.reply = counted_push, counted_reply
        for _ in range(steps):
            sent.append(0)
            loop.steps(1)
        evaluations = loop.strategy.coordinator.evaluations if loop.strategy.coordinates else 0
        return sent, evaluations

    for width in (3, 300):
        found = run_virtual(lambda comm, width=width: body(comm, width), servers + 2)
        sent, evaluations = found[0]
        words = 5 * (4 * history + 10) + 2 * history + 25 * math.ceil(evaluations / steps + 2)
        assert max(sent) <= words, "5 words for each operation"
        back = max(found[1][0])
        assert back <= 2 * history + 8 + 2 * (evaluations / steps + 2)


@dataclass(frozen=True)
class Sudden(ComputeModel):
    """Steps of 1 s; from its step `first` to the one before `last` a rank needs `factor` seconds."""

    rank: int
    factor: float
    first: int = 1
    last: float = math.inf
    drawn: list[int] = field(default_factory=list)

    def draw(self, rank, generator):
        self.drawn.append(rank)
        return self.factor if rank == self.rank and self.first <= self.drawn.count(rank) < self.last else 1.0


def _step_times(workers, portions, compute, *, slow=None):
    """The seconds of each of five steps, by the clock of the first worker that is through and is not the slow one."""

    def body(comm):
        loop, ends = Loop(comm, portions=portions), []
        if not loop.strategy.is_worker:
            loop.strategy.serve(None)
        else:
            loop.strategy.joint = JointBatch(loop.samples, whole=True)
            for _ in range(5):
                loop.strategy.minimise(None, lambda portion: loop.evaluate(np.arange(loop.samples)[portion], portion))
                ends.append(comm.now())
            loop.strategy.pause()
        return ends

    found = run_virtual(body, workers + 2, compute=compute)
    return np.diff([min(ends) for ends in zip(*(found[r] for r in range(2, workers + 2) if r != slow))], prepend=0.0)


def _epoch_times(workers, portions, compute):
    """The seconds of each of ten epochs whose one batch is the whole data set, and at whose ends all ranks meet."""

    def body(comm):
        loop, ends = Loop(comm, portions=portions), []
        for _ in range(10):
            if loop.strategy.is_worker:
                loop.strategy.joint = JointBatch(loop.samples, whole=True)
                loop.strategy.minimise(None, lambda part: loop.evaluate(np.arange(loop.samples)[part], part))
                loop.strategy.pause()
            else:
                loop.strategy.serve(None)
            comm.barrier()
            ends.append(comm.now())
        return ends

    return np.diff(run_virtual(body, workers + 2, compute=compute)[0], prepend=0.0)


@cache
def _even_times(workers, portions):
    return _step_times(workers, portions, Constant(1.0))


SURELY = 1e-5  # seconds: a portion is late, of others that end at the same time, a millionth of its time later


@pytest.mark.parametrize("factor", [1.25, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_that_is_slow_does_not_delay_the_others(factor, workers):
    """Portions of 1 s; beside so many workers one that is slower, with the same number of portions for all together."""
    without = _even_times(workers, workers + 1)
    slow = workers + 2
    slowed = _step_times(workers + 1, workers, Straggler(Constant(1.0), slow, factor), slow=slow)
    assert without.min() >= workers + 1 and (slowed <= without + SURELY).all()


def test_a_very_slow_worker_does_not_hold_up_the_ends_of_epochs():
    without = _epoch_times(4, 5, Constant(1.0))
    slowed = _epoch_times(5, 4, Straggler(Constant(1.0), 6, 40.0))
    assert slowed[0] >= 40, "before its first portion nobody knows how slow it is"
    assert (slowed[1:] <= without[1:] + SURELY).all()


@pytest.mark.parametrize(("first", "factor"), [(1, 4.0), (2, 1.5), (5, 4.0), (8, 1.5), (9, 4.0)])
def test_a_worker_that_becomes_slow_delays_no_step_by_more_than_a_portion(first, factor):
    """From one of its portions on, or in this one alone: the first of an evaluation or the last one."""
    without = _even_times(4, 5)
    for last in (first + 1, math.inf):
        slowed = _step_times(5, 4, Sudden(6, factor, first, last), slow=6)
        assert (slowed <= without + 1 + SURELY).all()


@pytest.mark.parametrize("factor", [4.0, 20.0])
def test_a_slow_worker_delays_an_evaluation_by_at_most_a_portion(factor):
    """20 portions of 1 s each, 4 workers, and a slow one: it delays none."""

    def body(comm, portions):
        loop = Loop(comm, portions=portions)
        loop.steps(6)
        evaluations = loop.strategy.coordinator.evaluations if loop.strategy.coordinates else 0
        return evaluations, loop.computed

    (evaluations, _), *_ = without = run_virtual(lambda comm: body(comm, 5), 6, compute=Constant(1.0))
    slowed = run_virtual(lambda comm: body(comm, 4), 7, compute=Straggler(Constant(1.0), 6, factor))
    ended_s, later_s = (max(done for _, mine in run[2:6] for _, done in mine) for run in (without, slowed))
    assert ended_s == pytest.approx(5 * evaluations) and slowed[0][0] == evaluations
    assert later_s <= ended_s + SURELY


# --- periods, checkpoints ---------------------------------------------------------------------------------------------
def _run(comm, folder, *overrides, resume=None):
    trainer = tiny.trainer(comm, folder, "strategy=sandblaster", *overrides)
    summary = trainer.run(resume)
    trainer.close()
    return summary


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, []),
        (5, ["strategy.servers=2"]),
        (4, ["strategy.overlap=0.25"]),
        (2, ["batch_size=2000"]),
        (4, ["checkpoint.every_steps=3"]),  # the one checkpoint is of the end
    ],
    ids=str,
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends(tmp_path, size, settings):
    settings = ("checkpoint.every_steps=2", "checkpoint.keep=9", "batch_size=60", "epochs=1", *settings)
    if "batch_size=2000" in settings:
        settings = ("checkpoint.every_steps=3", "checkpoint.keep=9", "epochs=5", "batch_size=2000")
    whole = run_virtual(lambda comm: _run(comm, tmp_path / "whole", *settings), size)[0]
    first = min((tmp_path / "whole" / "run" / "checkpoints").iterdir())
    again = run_virtual(lambda comm: _run(comm, tmp_path / "again", *settings, resume=first), size)
    assert all(summary.sha256 == whole.sha256 for summary in again)
    assert again[0].metrics == whole.metrics and again[0].workers == whole.workers


@pytest.mark.parametrize(("after", "added"), [(4, 1), (3, 0), (6, 0)])
def test_a_pair_that_waits_for_its_y_is_dropped_where_fewer_or_more_samples_are_shared(
    tmp_path, monkeypatch, after, added
):
    """Two workers of batches of 30 samples share 15 of them with the next batch; one worker shares 8, four share 30."""
    options = ("batch_size=30", "epochs=1", "strategy.overlap=0.25", "checkpoint.every_steps=2", "checkpoint.keep=9")
    run_virtual(lambda comm: _run(comm, tmp_path / "before", *options), 4)
    first = min((tmp_path / "before" / "run" / "checkpoints").iterdir())
    pairs, real = [], Lbfgs._add_pair_on_overlap

    def adding(algorithm, batch):
        before = algorithm.state()["pairs"]
        real(algorithm, batch)
        pairs.append((before, algorithm.state()["pairs"]))

    monkeypatch.setattr(Lbfgs, "_add_pair_on_overlap", adding)
    run_virtual(lambda comm: _run(comm, tmp_path / "after", *options, resume=first), after)
    (loaded, next_ones), *later = pairs
    assert len(loaded) == 1 and len(next_ones) == 1 + added and len(later[-1][1]) > len(next_ones)


@pytest.mark.parametrize(("before", "after"), [((1, 1), (4, 2)), ((4, 2), (3, 1)), ((5, 2), (2, 1)), ((3, 1), (6, 3))])
def test_on_another_number_of_ranks_it_goes_on_with_its_history(tmp_path, before, after):
    options = ("epochs=1", "checkpoint.every_steps=1", "batch_size=2000")
    run_virtual(lambda comm: _run(comm, tmp_path, *options, f"strategy.servers={before[1]}", "epochs=4"), before[0])
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")

    def body(comm, servers):
        trainer = tiny.trainer(comm, tmp_path, "strategy=sandblaster", *options, f"strategy.servers={servers}")
        resuming.load(trainer, path)
        strategy = trainer.strategy
        whole = [strategy.consensus()[0][0]]
        for number in range(1, 20):
            flat = torch.zeros_like(whole[0])
            for rank, shard in strategy.point.shards.items():
                (part,) = shard.of([flat])
                if rank == comm.rank and number in strategy.shard.vectors.numbers:
                    part.copy_(strategy.shard.vectors[number][0])
                comm.broadcast(part, rank)
            whole.append(flat)
        state = strategy.coordinator.state() if strategy.coordinates else None
        trainer.close()
        return whole, state

    saved, state = run_virtual(lambda comm: body(comm, before[1]), before[0])[0]
    loaded, its = run_virtual(lambda comm: body(comm, after[1]), after[0])[0]
    assert its == state and len(state["pairs"]) >= 2
    for number, (mine, theirs) in enumerate(zip(loaded, saved, strict=True)):
        assert torch.equal(mine, theirs) or number in (3, 4, 5, 6), "directions and sums are of one step"


@pytest.mark.sizes(1, 2, 3, 4)
def test_a_loop_of_ones_own_gives_it_portions(ranks):
    """Uneven batches; values that the loop loads between epochs; the same model on all ranks in the end."""

    def body(comm):
        hd.init(comm=comm)
        module = problem.model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = hd.DistributedOptimizer(optimizer, module, strategy="sandblaster", overlap=0.2)
        loader = hd.shard(DataLoader(TensorDataset(problem.X, problem.Y), batch_size=16, shuffle=True))
        losses = []
        for epoch in range(3):
            if epoch == 1:
                module.load_state_dict(problem.model().state_dict())
            for x, y in loader:

                def closure(portion):
                    loss = nn.functional.mse_loss(module(x[portion]), y[portion])
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure).item())
        length, worker = len(loader), optimizer.strategy.is_worker
        hd.finish(module)
        return losses, length, worker, torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    for losses, length, worker, params in (found := ranks(body)):
        assert torch.equal(params, found[0][3]) and _full(params)[0] < 0.15 * _full(_start())[0]
        assert len(losses) == (3 * length if worker else 0)
        assert not worker or (losses[length] > losses[length - 1] and losses[-1] < losses[0])


def _start():
    return FlatModel(problem.model()).params[0]


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"c1": 0.4, "c2": 0.3}, "strategy.c1 must be less than strategy.c2; got 0.4 and 0.3"),
        ({"on_nonfinite": "ignore"}, "strategy.on_nonfinite must be stop or skip with sandblaster, .*; got ignore"),
        ({"overlap": 0.6}, "overlap"),
    ],
)
def test_settings_that_do_not_suit_it_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        strategies.load("sandblaster").Config(**options)


def test_too_many_servers_are_refused():
    message = "strategy.servers must leave a rank for the coordinator and at least one to be a worker; got 2 on 3 ranks"
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: Loop(comm, servers=2), 3)


def test_steps_without_a_closure_or_a_joint_batch_are_refused():
    loop = run_virtual(Loop, 1)[0]
    with pytest.raises(ConfigError, match=r"closure must be given to each step with sandblaster, .*; got none"):
        loop.strategy.step(lambda: None)
    with pytest.raises(ConfigError, match=r"a step with sandblaster must be of a batch that is known .*hpcdist.shard"):
        loop.strategy.minimise(None, lambda portion: 0.0)


def test_loops_that_do_not_suit_it_are_refused(tmp_path):
    def body(comm):
        hd.init(comm=comm)
        module, other = problem.model(), problem.model()
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module, "sandblaster")
        with pytest.raises(ConfigError, match="closure must be given to each step of SGD, which evaluates"):
            optimizer.step()
        batches = DataLoader(TensorDataset(problem.X), batch_size=None)
        with pytest.raises(ConfigError, match="loader must deal out single samples of a map-style data set with a"):
            next(iter(hd.shard(batches)))
        hd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other, "sandblaster")
        with pytest.raises(ConfigError, match="evaluates portions of its batches must have one optimizer; got 2. Give"):
            next(iter(hd.shard(DataLoader(TensorDataset(problem.X)))))
        return True

    assert run_virtual(body, 1) == [True]
    with pytest.raises(ConfigError, match="amp must be off or bf16 with sandblaster, .*; got fp16. Use bf16"):
        run_virtual(lambda comm: tiny.trainer(comm, tmp_path, "strategy=sandblaster", "amp=fp16"), 1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_that_is_not_finite_where_a_step_begins_ends_the_run_or_is_left_out(size):
    def body(comm, on_nonfinite):
        calls = []

        def loss(module, indices):
            calls.append(1)
            poisons = comm.rank == comm.size - 1 and len(calls) == 1
            return problem.loss(module, indices) * (math.nan if poisons else 1.0)

        loop = Loop(comm, loss=loss, on_nonfinite=on_nonfinite)
        loop.steps(3)
        return [record.event for record in loop.records if record.event], loop.params()

    message = "loss and gradients must be finite where a step begins; got NaN or infinite loss or gradient at step 1"
    with pytest.raises(NonFiniteError, match=message):
        run_virtual(lambda comm: body(comm, "stop"), size)
    events_of, params = run_virtual(lambda comm: body(comm, "skip"), size)[0]
    assert events_of == ["skipped: NaN or infinite loss or gradient at step 1"]
    assert _full(params)[0] < 0.7 * _full(_start())[0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("which", ["loss", "gradient"])
def test_where_a_portion_is_not_finite_the_step_is_shorter(size, which):
    """The first portion's loss, or its gradient alone, beyond a distance."""
    start = _start()

    def loss(module, indices):
        value, weight = problem.loss(module, indices), next(module.parameters())
        distance = (torch.cat([p.detach().reshape(-1) for p in module.parameters()]) - start).norm()
        if indices[0] > 0 or distance < 0.1:
            return value
        return value * math.nan if which == "loss" else value + (weight - weight.detach()).sqrt().sum()

    def body(comm):
        loop = Loop(comm, loss=loss)
        losses = loop.steps(1)
        return loop.params(), losses, [record.event for record in loop.records if record.event]

    found = run_virtual(body, size)
    params, losses, _ = found[-1]
    assert 0 < (params - start).norm() < 0.1 and _full(params)[0] < losses[0]
    assert not any(events_of for *_, events_of in found)


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_along_which_the_gradient_stays_leaves_no_pair(size):
    """s·y = 0: H would be infinite."""

    def body(comm):
        loop = Loop(comm, loss=lambda module, indices: sum(p.sum() for p in module.parameters()), max_evaluations=3)
        losses = loop.steps(3)
        return losses, _pairs(loop)

    found = run_virtual(body, size)
    losses, pairs = found[-1][0], found[0][1]
    assert pairs == [] and losses == sorted(losses, reverse=True) and losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_direction_without_a_lower_point_is_left_and_said(size):
    def body(comm):
        loop = Loop(comm, loss=lambda module, indices: _rising(module), max_evaluations=3)
        loop.steps(2)
        return [record.event for record in loop.records], loop.params()

    def _rising(module):
        """Its gradient points the wrong way."""
        value = sum(p.sum() for p in module.parameters())
        return value - 2 * value.detach()

    events_of, params = run_virtual(body, size)[0]
    assert [event for event in events_of if event] == ["no step: 3 evaluations along the direction found none"] * 2
    assert torch.equal(params, _start())


def test_a_shard_that_dies_ends_the_run():
    def body(comm):
        loop = Loop(comm)
        loop.strategy.comm.failures.failed = lambda: (1,)
        loop.strategy.comm.failures.tolerant = True
        if comm.rank == 1:
            comm.barrier()
            return True
        try:
            with pytest.raises(
                RankFailedError,
                match="server rank 1 has died, and its part of the parameters and of the optimiser's state",
            ):
                loop.steps(1)
        finally:
            comm.barrier()
        return True

    assert run_virtual(body, 3) == [True] * 3
