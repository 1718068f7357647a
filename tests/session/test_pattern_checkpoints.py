"""Checkpoints of a loop of one's own: it goes on to the bit, or from what the ranks stood for together."""

from __future__ import annotations

import pytest
import torch
from patterns.groups import GOSSIPS, SERVED, SERVERLESS, SYNCHRONOUS
from patterns.optimizers import Averaging
from patterns.run import copied, data, difference, mse, net, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Adam, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import hpcdist as hd
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError
from hpcdist.session.world import current
from strategies import problem


def options_of(strategy, size):
    return problem.PERIODS.get(strategy, {}) | problem.fitting(strategy, size)


# Files that real ranks share; one of each family.
REAL = ("allreduce", "hardsync", "hardsync 2", "dpsgd", "easgd", "easgd 2", "gossip_pull")


def with_each(argument, names):
    """Parametrises with strategies, of which real ranks try a few."""
    marks = {name: () if name in REAL else pytest.mark.virtual for name in names}
    return pytest.mark.parametrize(argument, [pytest.param(name, marks=marks[name]) for name in names])


class Loop:
    """A whole script's objects, made anew as a resumed one makes them."""

    def __init__(self, strategy):
        self.model = net(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = problem.local(strategy, self.model.parameters(), lr=0.01, momentum=0.5)
        options = options_of(strategy, current().comm.size)
        self.optimizer = hd.DistributedOptimizer(optimizer, self.model, strategy=strategy, **options)
        self.schedule = lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = hd.shard(DataLoader(data(42), batch_size=4, shuffle=True))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.best = 9.0

    def objects(self):
        named = ("optimizer", "schedule", "loader", "scaler", "ema")
        return {name: getattr(self, name) for name in named}

    def epoch(self, at=None, do=None):
        for i, (x, y) in enumerate(self.loader):
            self.optimizer.zero_grad()
            self.scaler.scale(mse(self.model(x), y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.ema.update_parameters(self.model)
            if at == i:
                do()
        self.schedule.step()

    def finished(self):
        local = copied(self.model)
        hd.finish(self.model)
        return copied(self.model), local, copied(self.ema), self.scaler.state_dict(), self.schedule.state_dict()


def _same(one, other):
    declare = "resumed, parameters differ: all state must be declared by self.state, as by self.state.value"
    assert all(difference(a, b) == 0.0 for a, b in zip(one[:3], other[:3])), declare
    assert one[3:] == other[3:], declare


@pytest.mark.sizes(3)
@with_each("strategy", SYNCHRONOUS)
def test_on_the_same_ranks_it_goes_on_to_the_bit(ranks, strategy, shared_tmp_path):
    """Between epochs; and within one, but where some ranks serve."""
    between, within = shared_tmp_path / "between", shared_tmp_path / "within"

    def body(comm):
        hd.init(comm=comm)
        torch.manual_seed(comm.rank)
        loop = Loop(strategy)
        loop.epoch()
        hd.save(between, **loop.objects(), epoch=0, best=7.5)
        loop.epoch(at=2, do=lambda: hd.save(within, **loop.objects()) if strategy in SERVERLESS else None)
        loop.epoch()
        whole = loop.finished()
        torch.manual_seed(99)
        for folder, values in ((between, {"epoch": 0, "best": 7.5}), (within, {})):
            if folder == between or strategy in SERVERLESS:
                again = Loop(strategy)
                got = hd.load(folder, **again.objects())
                assert values.items() <= got.items(), f"hd.load must return what was saved, {values}; got {got}"
                again.epoch()
                again.epoch()
                _same(again.finished(), whole)
        return True

    assert all(ranks(body))


@pytest.mark.virtual
@pytest.mark.sizes(3)
@each("strategy", ["allreduce", "hardsync", "local_sgd", "dpsgd"])
def test_in_inference_mode_it_goes_on_as_elsewhere(ranks, strategy, tmp_path):
    def body(comm):
        hd.init(comm=comm)
        loop, again = Loop(strategy), Loop(strategy)
        loop.epoch()
        with torch.inference_mode():
            hd.save(tmp_path / strategy, optimizer=loop.optimizer)
            hd.load(tmp_path / strategy, optimizer=again.optimizer)
            hd.finish(loop.model)
        again.epoch()
        with torch.inference_mode():
            hd.finish(again.model)
        for model, optimizer in ((loop.model, loop.optimizer), (again.model, again.optimizer)):
            mse(model(torch.ones(2, 5, dtype=torch.float64)), torch.ones(2, 1)).backward()
            optimizer.step()
        return all(torch.isfinite(tensor).all() for tensor in copied(again.model).values())

    assert all(ranks(body))


@pytest.mark.virtual
@pytest.mark.sizes(3)
@pytest.mark.parametrize(("place", "strategy"), [*enumerate(problem.stepping())])
def test_on_another_number_of_ranks_it_goes_on_from_what_they_stood_for(ranks, place, strategy, tmp_path):
    """On fewer ranks or on more, by turns."""
    size = (2, 4)[place % 2]

    def saving(comm):
        hd.init(comm=comm)
        loop = Loop(strategy)
        loop.epoch()
        loop.epoch()
        hd.save(tmp_path, **loop.objects(), epoch=1, step=7)
        return loop.finished()[0], loop.schedule.get_last_lr()

    def loading(comm):
        hd.init(comm=comm)
        loop = Loop(strategy)
        assert hd.load(tmp_path, **loop.objects()) == {"epoch": 1, "step": 7}
        rates = loop.schedule.get_last_lr(), [group["lr"] for group in loop.optimizer.param_groups]
        with hd.consensus(loop.model):
            started = copied(loop.model)
        loop.epoch()
        epoch = loop.loader.state_dict()["epoch"]
        assert epoch == 2, f"resumed after 1 epoch, and trained for one more, the loader must be at 2; got {epoch}"
        return started, rates, loop.finished()[0]

    saved = ranks(saving)
    loaded = run_virtual(loading, size)
    for started, (last, own), ended in loaded:
        assert difference(started, saved[0][0]) <= 1e-12, "resumed, parameters must be the consensus of those saved"
        assert last == own == saved[0][1], f"resumed, rates must be those saved, {saved[0][1]}; got {last} and {own}"
        same = difference(ended, loaded[0][2]) == 0.0 and all(t.isfinite().all() for t in ended.values())
        assert same, "resumed and trained, all ranks must have the same finite model"


@each("strategy", ["allreduce", "softsync", "gossip_pull", "easgd"])
def test_another_strategy_takes_up_parameters_and_the_optimisers_state(strategy, tmp_path):
    def body(comm, strategy, loads):
        hd.init(comm=comm)
        loop = Loop(strategy)
        if loads:
            hd.load(tmp_path, **loop.objects())
        else:
            loop.epoch()
            hd.save(tmp_path, **loop.objects())
        with hd.consensus(loop.model):
            found = copied(loop.model)
        loop.epoch()
        return found

    saved = run_virtual(lambda comm: body(comm, "hardsync", False), 3)[0]
    for size in (1, 2):
        assert difference(run_virtual(lambda comm: body(comm, strategy, True), size)[0], saved) <= 1e-12


@pytest.mark.sizes(3)
@with_each("strategy", [name for name in problem.stepping() if name not in SYNCHRONOUS])
def test_strategies_that_are_not_synchronous_go_on_between_epochs(ranks, strategy, shared_tmp_path):
    """What is loaded is what was saved, and trains on."""

    def body(comm):
        hd.init(comm=comm)
        loop = Loop(strategy)
        loop.epoch()
        hd.save(shared_tmp_path, **loop.objects(), epoch=0)
        saved = loop.finished()
        again = Loop(strategy)
        assert hd.load(shared_tmp_path, **again.objects())["epoch"] == 0
        found = copied(again.model), copied(again.ema), again.scaler.state_dict(), again.schedule.state_dict()
        if again.optimizer.strategy.is_worker:
            apart = difference(found[0], saved[1])
            assert apart == 0.0, (
                f"loaded, each worker must have the parameters that it saved; they differ by {apart:.3g}"
            )
        assert difference(found[1], saved[2]) == 0.0 and found[2:] == saved[3:], (
            "loaded, each rank's averages, scaler and schedule must be those that it saved"
        )
        again.epoch()
        return again.finished()[0]

    found = ranks(body)
    apart = max(difference(model, found[0]) for model in found)
    assert apart == 0.0, f"hd.finish must leave all ranks the same model; got ones that differ by {apart:.3g}"


def test_counts_that_steps_change_in_param_groups_go_on_as_in_one_process(tmp_path):
    """The server has them; workers, whose rates count, take no steps by themselves."""

    def body(comm, started=None, batch=8, strategy="hardsync", save=None):
        hd.init(comm=comm)
        model = net()
        optimizer = hd.DistributedOptimizer(Averaging(model.parameters(), lr=0.1), model, strategy=strategy)
        loader = hd.shard(DataLoader(data(48), batch_size=batch))
        if started is None:
            train(None, model, optimizer, loader, 1)
        else:
            hd.load(started, optimizer=optimizer)
        if save is not None:
            hd.save(save, optimizer=optimizer)
        train(None, model, optimizer, loader, 1)
        hd.finish(model)
        return copied(model), optimizer.param_groups[0]["k"]

    def rank_0(size, **given):
        return run_virtual(lambda comm: body(comm, **given), size)[0]

    expected, count = rank_0(1, batch=16, strategy="allreduce")
    whole = rank_0(3, save=tmp_path)
    for found, own in (whole, rank_0(3, started=tmp_path), rank_0(2, started=tmp_path, batch=16)):
        assert difference(found, expected) <= 1e-12
        assert own == count == 6


def _compiled(model):
    model[0] = torch.compile(model[0], backend="eager")
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [_compiled, lambda model: nn.Sequential(*map(checkpoint_wrapper, model))])
def test_a_checkpoint_of_a_wrapped_model_is_one_of_the_plain_one(tmp_path, wrap):
    def loop(comm, make, rate):
        hd.init(comm=comm)
        model = make(net(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        optimizer, ema = Adam(model.parameters(), lr=rate), AveragedModel(model)
        optimizer = hd.DistributedOptimizer(optimizer, model, buffers={"1.running_*": "mean"})
        found = hd.load(tmp_path, optimizer=optimizer, ema=ema)
        train(None, model, optimizer, hd.shard(DataLoader(data(), batch_size=4)), 1)
        ema.update_parameters(model)
        hd.save(tmp_path, optimizer=optimizer, ema=ema, epoch=1)
        plain = net(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        plain.load_state_dict(hd.unsplit(tmp_path))
        assert all(map(torch.equal, plain.state_dict().values(), hd.finish(model).state_dict().values()))
        return found

    for i, make in enumerate([wrap, lambda model: model, wrap]):
        assert run_virtual(lambda comm: loop(comm, make, 0.01), 2) == [{"step": 4 * i, "epoch": 1} if i else None] * 2


def test_the_first_difference_of_another_model_is_named(tmp_path):
    def loop(comm, width):
        hd.init(comm=comm)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
        optimizer = hd.DistributedOptimizer(Adam(model.parameters()), model)
        hd.load(tmp_path, optimizer=optimizer)
        hd.save(tmp_path, optimizer=optimizer)

    run_virtual(lambda comm: loop(comm, 1), 1)
    difference = r"got another one than in .*: '1.weight: .*\[3, 2\].* here .*\[1, 2\].* there"
    with pytest.raises(CheckpointError, match=difference):
        run_virtual(lambda comm: loop(comm, 3), 1)


@pytest.mark.sizes(2)
def test_torch_saves_what_finish_leaves(ranks, tmp_path):
    def body(comm):
        hd.init(comm=comm)
        model = net()
        optimizer = hd.DistributedOptimizer(Adam(model.parameters(), lr=0.01), model)
        train(None, model, optimizer, hd.shard(DataLoader(data(), batch_size=4)), 1)
        hd.finish(model)
        path = tmp_path / f"{comm.rank}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved, part = torch.load(path, weights_only=True), tmp_path / f"part{comm.rank}.pt"
        torch.save(model[-1].state_dict(), part)
        assert part.stat().st_size < 2500, "memory of its own, and not that of the whole model"
        fresh = net()
        fresh.load_state_dict(saved["model"])
        plain = Adam(fresh.parameters(), lr=0.01)
        plain.load_state_dict(saved["optimizer"])
        assert type(optimizer) is Adam and type(plain) is Adam
        assert sum(t.numel() for t in saved["model"].values()) == sum(p.numel() for p in model.parameters())
        return copied(fresh)

    found = ranks(body)
    assert difference(found[0], found[1]) == 0.0


def test_strategies_are_sorted_as_they_are_known_to_be():
    assert {"allreduce", "gossip_sync", "dpsgd", "sgp", "local_sgd", "diloco", "streaming_diloco", "sparse_loco"} <= {
        *SERVERLESS
    }
    assert {"gossip_pull", "gossip_push", "adpsgd", "strom"} <= {*GOSSIPS}
    assert {"hardsync", "softsync", "ssp", "parameter_server", "downpour", "easgd", "eamsgd"} <= {*SERVED}
    assert "hardsync" in SYNCHRONOUS


SERVERS = dict.fromkeys(["hardsync", "easgd", "softsync"], 2)  # others are on the ranks that work


@pytest.mark.sizes(3)
@with_each("name", [*(f"{name} {SERVERS.get(name, 'colocated')}" for name in SERVED), *SERVERLESS, *GOSSIPS])
def test_training_goes_on_from_values_that_the_loop_loads(ranks, name):
    """With a learning rate of 0 they stay, but for what is under way: momentum, changes that are not sent yet."""
    in_flight = (
        "eamsgd", "strom", "diloco", "streaming_diloco", "sparse_loco", "noloco", "slowmo", "async_diloco",
    )  # fmt: skip
    before = name.split()[0] in in_flight  # the first epoch; else between epochs

    def body(comm):
        hd.init(comm=comm)
        strategy, *servers = name.split()
        model = net()
        loaded = {key: value + 1.0 for key, value in model.state_dict().items()}
        options = options_of(strategy, comm.size)
        if servers:
            options["servers"] = servers[0] if servers[0] == "colocated" else int(servers[0])
        rate = 0.0 if before else 0.01
        optimizer = problem.local(strategy, model.parameters(), lr=rate)
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy=strategy, **options)
        loader = hd.shard(DataLoader(data(48), batch_size=4))
        for epoch in range(2):
            if epoch == (not before):
                model.load_state_dict(loaded)
                optimizer.param_groups[0]["lr"] = 0.0
            train(None, model, optimizer, loader, 1)
        hd.finish(model)
        return difference(copied(model), loaded)

    assert max(ranks(body)) <= 1e-12, "values that the loop loads change: state of before is declared with resets=True"
