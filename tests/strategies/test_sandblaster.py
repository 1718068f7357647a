"""Sandblaster L-BFGS: sums that don't depend on who computes, SciPy's minimum, few numbers between ranks."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from faults.deaths import events, go_on, job, survivable
from harness.cases import each
from hpcdist import checkpoint
from hpcdist.comm.virtual import Constant, Straggler, run_virtual
from hpcdist.errors import ConfigError, NonFiniteError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.records import load_summary
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
        self.records, self.computed = [], []
        self.strategy = problem.make(comm, "sandblaster", self.module, **options)
        self.strategy.records.write = self.records.append

    def steps(self, count, batches=None, after=lambda: None):
        """Collective. A period of so many steps; returns the losses at their beginnings."""
        if not self.strategy.is_worker:
            self.strategy.serve(None)
            return []
        losses = self.minimise(count, batches, after)
        self.strategy.pause()
        return losses

    def minimise(self, count, batches=None, after=lambda: None):
        """A worker's part of that, but for the end of the period."""
        strategy, losses = self.strategy, []
        for step in range(count):
            indices, joint = (np.arange(self.samples), None) if batches is None else batches[step]
            strategy.joint = joint or JointBatch(self.samples, whole=True)
            record, loss = strategy.minimise(None, lambda portion: self.evaluate(indices[portion], portion))
            self.records.append(record)
            losses.append(loss.item())
            after()
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
        vectors = self.strategy.shard.vectors if self.comm.rank in self.strategy.point.shards else None
        return _whole(self.comm, self.strategy, vectors and vectors[GRADIENT][0])

    def close(self):
        self.strategy.close()
        self.strategy.comm.close()


def _whole(comm, strategy, part):
    """Collective. A vector of which each shard has its part."""
    found = torch.zeros_like(strategy.model.params[0])
    for rank, shard in strategy.point.shards.items():
        (own,) = shard.of([found])
        if rank == comm.rank and part is not None:
            own.copy_(part)
        comm.broadcast(own, rank)
    return found


def _pairs(loop):
    """The coordinator's pairs; None on other ranks."""
    return loop.strategy.coordinator.state_dict()["pairs"] if loop.strategy.coordinates else None


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
@pytest.mark.sizes(1, 3, 4)
def test_the_gradient_is_that_of_the_full_batch(ranks):
    servers = 2 if ranks.size > 3 else 1
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
def test_the_others_do_the_part_of_a_killed_worker(tmp_path):
    """Killed within a portion, on real ranks; they end where virtual ones end without a death."""
    settings = ("strategy=sandblaster", "epochs=1", "batch_size=48")
    for name in ("dies", "lives"):
        (tmp_path / name).mkdir()
    done = job(tmp_path / "dies", 4, *settings, deaths={3: 15})
    assert done.returncode == 0, done.stderr
    go_on(tmp_path / "lives", 4, None, *settings)
    assert events(tmp_path / "dies", 0) == ["goes on without rank 3: it has died"]
    died, lived = (load_summary(tmp_path / name / "run") for name in ("dies", "lives"))
    assert died.lost_ranks == [3] and lived.metrics["accuracy"] > 0.5
    assert died.metrics["accuracy"] == pytest.approx(lived.metrics["accuracy"], abs=0.03)


def _windows_and_events(comm, loop):
    found = [window.local.clone() for window in loop.strategy.point._windows], [r.event for r in loop.records]
    comm.barrier()
    return found


def test_a_worker_that_dies_in_the_middle_leaves_the_sum_as_it_is():
    """It pushes to one of the shards, and to no other; the portion is given to another worker."""

    def body(comm, dies):
        loop = Loop(comm, servers=2)
        strategy, asked = loop.strategy, 0
        dead = comm.size - 1
        strategy.comm.failures.failed = lambda: (dead,) if dies and comm.now() > 1.0 else ()
        strategy.comm.failures.tolerant = True
        if dies and comm.rank == dead:
            real = strategy.comm.put_all

            def to_one_shard(puts):
                nonlocal asked
                asked += 1
                puts = list(puts)
                if asked < 8:  # two for each request, the second of which announces it
                    return real(puts)
                real([put for put in puts if put.rank == 1])
                raise KeyError("dead")

            strategy.comm.put_all = to_one_shard
            with pytest.raises(KeyError):
                loop.minimise(1)
        else:
            loop.steps(4)
        return _windows_and_events(comm, loop)

    dies = run_virtual(lambda comm: body(comm, True), 6, compute=Constant(0.3))
    lives = run_virtual(lambda comm: body(comm, False), 6, compute=Constant(0.3))
    assert [event for event in dies[0][1] if event] == ["goes on without rank 5: it has died"]
    for mine, theirs in zip(dies[:3], lives[:3]):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))


@each("says_so_before", [True, False])
def test_a_worker_that_dies_at_the_end_of_an_epoch_is_left_behind(says_so_before):
    """After its last message, or before it."""

    def body(comm, dies, gone):
        loop = Loop(comm)
        strategy, dead = loop.strategy, comm.size - 1
        strategy.comm.failures.failed = lambda: tuple(gone)
        strategy.comm.failures.tolerant = True
        if dies and comm.rank == dead:
            loop.minimise(3)
            if says_so_before:
                strategy.work.client.push(PAUSE)
            gone.append(dead)
        else:
            loop.steps(3)
            loop.steps(2)
        return _windows_and_events(comm, loop)

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


@pytest.mark.sizes(1, 4)
def test_it_ends_at_scipys_minimum_of_logistic_regression(ranks):
    loss, scipys = _logistic()

    def body(comm):
        module = nn.Linear(problem.FEATURES, 1).double()
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
        loop = Loop(comm, module=module, loss=loss, servers=2 if comm.size > 3 else 1)
        losses = loop.steps(25)
        params = loop.params()
        loop.close()
        return params, losses

    expected = minimize(scipys, np.zeros(problem.FEATURES + 1), jac=True, method="L-BFGS-B", options={"ftol": 1e-15})
    for params, losses in ranks(body):
        value, gradient = scipys(params.numpy())
        assert value == pytest.approx(expected.fun, abs=1e-8) and np.abs(gradient).max() < 1e-5
        assert all(after <= before + 1e-14 for before, after in pairwise(losses))


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


@each("case", [(20, 1), (12, 0), (0, 0)])
def test_no_pair_is_made_of_other_shared_samples_than_were_foreseen(case):
    head, added = case
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
@each("servers", [1, 2])
def test_the_coordinator_sends_a_few_numbers_whatever_the_models_length(servers):
    """5 words for each operation on the shards; and portions to workers."""
    history, steps = 4, 8

    def body(comm, width):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(problem.FEATURES, width), nn.Tanh(), nn.Linear(width, 2)).double()
        loop = Loop(comm, module=module, servers=servers, history=history)
        sent, push = 0, loop.strategy.sums.client.push

        def counted(*request, values=(), **more):
            nonlocal sent
            sent += len(values)
            push(*request, values=values, **more)

        loop.strategy.sums.client.push = counted
        before = loop.strategy.comm.trace.traffic.bytes_sent
        loop.steps(steps)
        evaluations = loop.strategy.coordinator.evaluations if loop.strategy.coordinates else 0
        return sent, loop.strategy.comm.trace.traffic.bytes_sent - before, evaluations

    for width in (3, 300):
        sent, n_bytes, evaluations = run_virtual(lambda comm, width=width: body(comm, width), servers + 2)[0]
        words = steps * (5 * (4 * history + 10) + 2 * history) + 25 * (evaluations + 2 * steps)
        assert 0 < sent <= words and n_bytes < 8 * servers * words + 600 * evaluations


def _step_times(workers, portions, compute, *, slow=None):
    """The seconds of each of five steps, by the clock of the first worker that is through and is not the slow one."""

    def body(comm):
        loop, ends = Loop(comm, portions=portions), []
        loop.steps(5, after=lambda: ends.append(comm.now()))
        return ends

    found = run_virtual(body, workers + 2, compute=compute)
    return np.diff([min(ends) for ends in zip(*(found[r] for r in range(2, workers + 2) if r != slow))], prepend=0.0)


def _epoch_times(workers, portions, compute):
    """The seconds of each of six epochs whose one batch is the whole data set, and at whose ends all ranks meet."""

    def body(comm):
        loop, ends = Loop(comm, portions=portions), []
        for _ in range(6):
            loop.steps(1)
            comm.barrier()
            ends.append(comm.now())
        return ends

    return np.diff(run_virtual(body, workers + 2, compute=compute)[0], prepend=0.0)


@cache
def _even_times(workers, portions):
    return _step_times(workers, portions, Constant(1.0))


SURELY = 1e-5  # seconds: a portion is late, of others that end at the same time, a millionth of its time later


@each("case", [(1.25, 4), (2.0, 2), (4.0, 4), (20.0, 2)])
def test_a_worker_that_is_slow_does_not_delay_the_others(case):
    """Portions of 1 s; beside so many workers one that is slower, with the same number of portions for all together."""
    factor, workers = case
    without = _even_times(workers, workers + 1)
    slow = workers + 2
    slowed = _step_times(workers + 1, workers, Straggler(Constant(1.0), slow, factor), slow=slow)
    assert without.min() >= workers + 1 and (slowed <= without + SURELY).all()


def test_a_very_slow_worker_does_not_hold_up_the_ends_of_epochs():
    without = _epoch_times(4, 5, Constant(1.0))
    slowed = _epoch_times(5, 4, Straggler(Constant(1.0), 6, 40.0))
    assert slowed[0] >= 40, "before its first portion nobody knows how slow it is"
    assert (slowed[1:] <= without[1:] + SURELY).all()


# --- periods, checkpoints ---------------------------------------------------------------------------------------------
def _run(comm, folder, *overrides, resume=None):
    return tiny.run(comm, folder, "strategy=sandblaster", *overrides, resume=resume)[0]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, []),
        (5, ["strategy.servers=2"]),
        (4, ["strategy.overlap=0.25"]),
        (4, ["checkpoint.every_steps=3"]),  # the one checkpoint is of the end
    ],
    ids=str,
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends(tmp_path, size, settings):
    settings = ("checkpoint.every_steps=2", "checkpoint.keep=9", "batch_size=60", "epochs=1", *settings)
    whole = run_virtual(lambda comm: _run(comm, tmp_path / "whole", *settings), size)[0]
    first = min((tmp_path / "whole" / "run" / "checkpoints").iterdir())
    again = run_virtual(lambda comm: _run(comm, tmp_path / "again", *settings, resume=first), size)
    assert all(summary.sha256 == whole.sha256 for summary in again)
    assert again[0].metrics == whole.metrics and again[0].workers == whole.workers


@pytest.mark.parametrize(("before", "after"), [((1, 1), (4, 2)), ((5, 2), (3, 1))])
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
            has = comm.rank in strategy.point.shards
            whole.append(_whole(comm, strategy, strategy.shard.vectors[number][0] if has else None))
        state = strategy.coordinator.state_dict() if strategy.coordinates else None
        trainer.close()
        return whole, state

    saved, state = run_virtual(lambda comm: body(comm, before[1]), before[0])[0]
    loaded, its = run_virtual(lambda comm: body(comm, after[1]), after[0])[0]
    assert its == state and len(state["pairs"]) >= 2
    for number, (mine, theirs) in enumerate(zip(loaded, saved, strict=True)):
        assert torch.equal(mine, theirs) or number in (3, 4, 5, 6), "directions and sums are of one step"


@pytest.mark.sizes(1, 4)
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
        with pytest.raises(ConfigError, match="closure must be passed to each step of SGD, which evaluates"):
            optimizer.step()
        batches = DataLoader(TensorDataset(problem.X), batch_size=None)
        with pytest.raises(ConfigError, match="loader must read single samples of a map-style data set with a"):
            next(iter(hd.shard(batches)))
        hd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other, "sandblaster")
        with pytest.raises(ConfigError, match="evaluates portions of its batches must have one optimizer; got 2. Give"):
            next(iter(hd.shard(DataLoader(TensorDataset(problem.X)))))
        return True

    assert run_virtual(body, 1) == [True]
    with pytest.raises(ConfigError, match="amp must be off or bf16 with sandblaster, .*; got fp16. Use bf16"):
        run_virtual(lambda comm: tiny.trainer(comm, tmp_path, "strategy=sandblaster", "amp=fp16"), 1)


@each("size", [1, 3])
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


@each("size", [1, 3])
@each("which", ["loss", "gradient"])
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


@each("size", [1, 3])
def test_a_direction_without_a_lower_point_is_left_and_said(size):
    def body(comm):
        loop = Loop(comm, loss=lambda module, indices: _sparkline(module), max_evaluations=3)
        loop.steps(2)
        return [record.event for record in loop.records], loop.params()

    def _sparkline(module):
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
