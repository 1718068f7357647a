"""What DistributedOptimizer refuses when it is made, each with what to write instead."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hpcdist as hd
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError

FOREIGN = {
    "named_parameters": "Pass the model itself, second",
    "backward_passes_per_step": "Use accumulation=N",
    "op": "Gradients are averaged",
    "process_set": r"Pass the ranks to hpcdist.init\(comm=...\)",
    "find_unused_parameters": "Remove it",
    "bucket_cap_mb": "Use bucket_bytes=N",
}


class Compression:
    """As Horovod's: classes that are passed."""

    class fp16:
        pass


class Wrapper:
    """As schedulefree's: has an optimiser, and is none."""

    def __init__(self, base):
        self.base = base


class Insisting(torch.optim.SGD):
    """Declares that a closure may be left out, and raises an error without."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("closure required")
        return super().step(closure)


def refused(body, message):
    def alone(comm):
        hd.init(comm=comm)
        model = nn.Linear(2, 1)
        with pytest.raises(ConfigError, match=message):
            body(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return True

    assert run_virtual(alone, 1) == [True]


def made(optimizer, model, **options):
    return hd.DistributedOptimizer(optimizer, model, **options)


def started(comm, features=2, lr=0.1, **options):
    """Collective. A model and its distributed optimiser."""
    hd.init(comm=comm)
    model = nn.Linear(features, 1)
    return model, made(torch.optim.SGD(model.parameters(), lr=lr), model, **options)


def loader():
    return DataLoader(torch.ones(4, 2), batch_size=2)


def piped(**options):
    model = hd.pipeline(lambda: nn.Sequential(nn.Linear(2, 1)), nn.functional.mse_loss, stages=1)
    return made(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


# By message: what is done with a model and its optimiser.
REFUSED = {
    **{
        f"must get arguments of hpcdist's; got '{name}', which it does not have. {answer}": (
            lambda model, optimizer, name=name: made(optimizer, model, **{name: 1})
        )
        for name, answer in FOREIGN.items()
    },
    **{
        f"compression must be a name, or a dict with a name and options; got fp16. {other}write compression='fp16'": (
            lambda model, optimizer, given=given: made(optimizer, model, compression=given)
        )
        for other, given in ((".* ", Compression.fp16), (".*", Compression.fp16()))
    },
    "loss must be one of mean, sum; got 'summed'. Did you mean 'sum'": (
        lambda model, optimizer: made(optimizer, model, loss="summed")
    ),
    "loss must be mean with sandblaster, .*; got sum. Let the closure return the mean loss of its portion": (
        lambda model, optimizer: made(optimizer, model, strategy="sandblaster", loss="sum")
    ),
    "requires_grad of '.*' must stay True with sandblaster, .*; got False. Freeze it before": (
        lambda model, optimizer: (
            made(optimizer, model, strategy="sandblaster"),
            model.requires_grad_(False),
            optimizer.step(lambda: None),
        )
    ),
    "strategy.provider.op must be average with loss = 'sum', .*; got adasum. Leave it out": (
        lambda model, optimizer: made(optimizer, model, loss="sum", provider={"name": "horovod", "op": "adasum"})
    ),
    **{
        rf"n must be a finite number, at least 0; got {n}\. Count": (
            lambda model, optimizer, n=n: made(optimizer, model).set_batch_weight(n)
        )
        for n in (-1.0, float("nan"))
    },
    "the loss must be a mean over samples with hpcdist.pipeline, .*; got loss='sum'. Remove that": (
        lambda model, optimizer: piped(loss="sum")
    ),
    r"the loss must be a mean over samples with hpcdist.pipeline, .*; got .*.set_batch_weight\(\). Remove that": (
        lambda model, optimizer: piped().set_batch_weight(2)
    ),
    r"optimizer.weigh must be called by its name now; .* Write optimizer.set_batch_weight\(n\)": (
        lambda model, optimizer: made(optimizer, model).weigh(2)
    ),
    "loader.weight must not be set; got 2. Call optimizer.set_batch_weight": (
        lambda model, optimizer: setattr(hd.shard(loader()), "weight", 2)
    ),
    "model must be the torch.nn.Module that optimizer trains; got NoneType. Pass it second": (
        lambda model, optimizer: hd.DistributedOptimizer(optimizer)
    ),
    "optimizer must be a torch.optim.Optimizer; got Linear": lambda model, optimizer: made(model, optimizer),
    r"got Wrapper, which wraps one. Distribute the wrapped one, its 'base', .*: Wrapper\(hpcdist.Distrib": (
        lambda model, optimizer: made(Wrapper(optimizer), model)
    ),
    "clip_norm must be None with Insisting, which needs the exact gradient of the loss at each evaluation; got 1.0": (
        lambda model, optimizer: made(Insisting(model.parameters()), model, clip_norm=1.0)
    ),
    "closure must be passed to each step of Insisting": (
        lambda model, optimizer: made(Insisting(model.parameters()), model).step()
    ),
    "optimizer must take dense gradients, .*; got SparseAdam. Use Adam or Adagrad": (
        lambda model, optimizer: made(torch.optim.SparseAdam(model.parameters()), model)
    ),
    "must be a plain torch optimiser; got one that is distributed already": (
        lambda model, optimizer: made(made(optimizer, model), model)
    ),
    "strategy must be one of .*; got 'gossip'": lambda model, optimizer: made(optimizer, model, strategy="gossip"),
    "strategy.accumulation must be greater than or equal to 1; got 0": (
        lambda model, optimizer: made(optimizer, model, accumulation=0)
    ),
    "clip_norm must be greater than 0, or None; got -1": lambda model, optimizer: made(optimizer, model, clip_norm=-1),
    "each parameter must be in one DistributedOptimizer; got 'bias' in two": (
        lambda model, optimizer: (made(optimizer, model), made(torch.optim.SGD([model.bias], lr=0.1), model))
    ),
    "model must be a torch.nn.Module; got SGD. Pass the model": lambda model, optimizer: hd.finish(optimizer),
    "model must be trained by a DistributedOptimizer; got one that none trains, or one that ranks have": (
        lambda model, optimizer: (made(optimizer, model), hd.finish(model), hd.finish(nn.Linear(2, 1)))
    ),
    "loader must be a torch DataLoader, whose samples hpcdist.shard splits .*; got list. .* or pass split=False": (
        lambda model, optimizer: hd.shard([torch.ones(2, 2)])
    ),
    "loader must be a plain DataLoader; got one that is sharded already. Shard it once": (
        lambda model, optimizer: hd.shard(hd.shard(loader()))
    ),
    "must be iterated after hpcdist.DistributedOptimizer": lambda model, optimizer: next(iter(hd.shard(loader()))),
}


@each("message", REFUSED)
def test_what_is_given_wrongly_is_refused_with_what_to_write_instead(message):
    refused(REFUSED[message], message)


def test_a_model_of_another_wrapper_is_refused_when_it_is_given_wrapped_and_when_it_runs(tmp_path):
    def run_another(model, optimizer):
        wrapped = nn.parallel.DistributedDataParallel(model)
        hd.DistributedOptimizer(optimizer, model)
        wrapped(torch.ones(1, 2))

    def wrap_a_part(model, optimizer):
        whole = nn.Sequential(model)
        hd.DistributedOptimizer(optimizer, whole)
        whole[0] = nn.parallel.DistributedDataParallel(model)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    message = r"model must not be wrapped in DistributedDataParallel, .* Pass the model itself \(model.module\)"
    try:
        refused(
            lambda model, optimizer: hd.DistributedOptimizer(optimizer, nn.parallel.DistributedDataParallel(model)),
            message,
        )
        part = lambda model: nn.Sequential(nn.parallel.DistributedDataParallel(model))  # noqa: E731
        refused(lambda model, optimizer: hd.DistributedOptimizer(optimizer, part(model)), message)
        refused(run_another, message)
        refused(wrap_a_part, message)
    finally:
        torch.distributed.destroy_process_group()


def test_several_models_are_finished_at_once_and_their_loader_keeps_its_length():
    def alone(comm):
        models, optimizers = zip(*(started(comm) for _ in range(2)))
        shared = hd.shard(loader(), optimizers=optimizers)
        before = [len(batch) for batch in shared], len(shared)
        assert hd.finish(*models) == models
        with pytest.raises(ConfigError, match="before hpcdist.finish; got no optimiser that is distributed"):
            next(iter(shared))
        return before, len(shared), type(optimizers[0])

    assert run_virtual(alone, 2) == [(([2], 1), 1, torch.optim.SGD)] * 2


@pytest.mark.parametrize("strategy", ["allreduce", "gossip_sync", "hardsync"])
def test_a_model_and_its_optimiser_are_pickled_and_copied_as_the_plain_ones(strategy):
    def alone(comm):
        hd.init(comm=comm)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = made(adam, model, strategy=strategy, identical_batches="allow")
        for batch in hd.shard([torch.ones(2, 2), torch.eye(2)], split=False):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        assert b"hpcdist" not in file.getvalue(), "it can be read elsewhere"
        file.seek(0)
        for other, plain in (torch.load(file, weights_only=False), copy.deepcopy((model, optimizer))):
            torch.testing.assert_close(other.state_dict(), model.state_dict())
            assert all(a is b for a, b in zip(other.parameters(), plain.param_groups[0]["params"], strict=True))
            assert not other._forward_pre_hooks
            before = [p.clone() for p in model.parameters()]
            other(torch.eye(2)).sum().backward()
            plain.step()
            torch.testing.assert_close(before, list(model.parameters()), rtol=0, atol=0)
            plain = copy.deepcopy(optimizer)
            assert type(plain) is torch.optim.Adam
            found = plain.state_dict()
            assert found["param_groups"] == optimizer.state_dict()["param_groups"]
            torch.testing.assert_close(found["state"], optimizer.state_dict()["state"])
        return True

    assert all(run_virtual(alone, 2))


def test_a_model_that_has_been_finished_stays_as_it_is():
    def body(comm):
        model, optimizer = started(comm)
        assert hd.finish(model) is model  # as a Trainer's end does
        with hd.consensus(model):
            values = copy.deepcopy(model.state_dict())
        assert hd.finish(model) is model and type(optimizer) is torch.optim.SGD
        torch.testing.assert_close(model.state_dict(), values)
        model.weight.data += 1.0  # as loading the best checkpoint does
        hd.finish(model)
        model.weight.data += comm.rank
        with pytest.raises(ConfigError, match="one that ranks have changed since its end"):
            hd.finish(model)
        return True

    assert all(run_virtual(body, 2))


def test_loops_of_strategies_with_other_workers_are_refused():
    def body(comm):
        for strategy in ("allreduce", "hardsync"):
            started(comm, strategy=strategy)
        message = r"optimizers of one loop must have the same workers; got ranks \(0, 1\) and \(1,\)"
        with pytest.raises(ConfigError, match=message):
            next(iter(hd.shard(loader())))
        return True

    assert all(run_virtual(body, 2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of loaders that end with their rank
@each("strategy", ["dpsgd", "sgp"])
def test_parameters_that_are_sent_between_steps_must_not_be_changed_there(strategy):
    def body(comm):
        model, optimizer = started(comm, strategy=strategy, overlap=True)
        for x in hd.shard(DataLoader(torch.ones(12, 2), batch_size=2)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.clamp_(-0.01, 0.01)

    with pytest.raises(ConfigError, match="which replace them in steps, or send them between steps"):
        run_virtual(body, 2)


@each("servers", [2, 1])
def test_a_state_that_is_in_parts_is_warned_of(servers):
    """A checkpoint of one's own would have a part of it; hpcdist.save has all."""

    def body(comm):
        model, optimizer = started(comm, strategy="hardsync", servers=servers)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.state_dict()
        hd.finish(model)
        return [str(warning.message) for warning in found]

    told = run_virtual(body, 4)[0]
    start = "The optimiser's state is divided among the servers, ranks (0, 1); this is the part of rank 0"
    assert [text.startswith(start) for text in told] == [True] * (servers - 1)


class Again(torch.utils.data.Sampler):
    """Draws again and again what another sampler draws, as of loaders that keep their workers over epochs."""

    def __init__(self, sampler, length=None):
        self.sampler, self.length = sampler, length

    def __iter__(self):
        while True:
            yield from self.sampler

    def __len__(self):
        return len(self.sampler) if self.length is None else self.length


class WithoutLength:
    __iter__ = Again.__iter__

    def __init__(self, sampler):
        self.sampler = sampler


ENDLESS = {
    "samples": {"sampler": Again(range(48)), "batch_size": 4},
    "batches": {"batch_sampler": Again(torch.utils.data.BatchSampler(range(48), 4, False))},
    "without a length": {"batch_sampler": WithoutLength([[0, 1], [2]])},
    "of any length": {"sampler": Again(range(48), 1 << 62), "batch_size": None},
}


@each("name", ENDLESS)
@each("ranks", [1, 2])
@each("training", [True, False])
def test_a_sampler_that_never_ends_is_refused_on_all_ranks(name, ranks, training):
    def body(comm):
        model, _ = started(comm, 1)
        loader = DataLoader(torch.arange(48.0).reshape(48, 1), **ENDLESS[name])
        with pytest.raises(ConfigError, match="sampler must end in each epoch .*; got .*, which continues after 48"):
            next(iter(hd.shard(loader, training=training)))
        hd.finish(model)
        return True

    assert all(run_virtual(body, ranks))


def test_a_long_epoch_of_a_small_data_set_is_drawn():
    def body(comm):
        started(comm, 1, lr=0.0, strategy="gossip_pull")
        sampler = torch.utils.data.WeightedRandomSampler([1.0, 1.0], 100)
        loader = DataLoader(torch.arange(2.0).reshape(2, 1), batch_size=5, sampler=sampler)
        return sum(len(x) for x in hd.shard(loader))

    assert sum(run_virtual(body, 2)) == 100


def test_an_epoch_left_early_goes_on_where_it_was_left_once_it_is_loaded():
    def body(comm):
        started(comm, 1, lr=0.0, strategy="gossip_pull")
        data = DataLoader(torch.arange(20.0).reshape(20, 1), batch_size=2)
        first, other = hd.shard(data), hd.shard(data)
        seen = []
        for step, x in enumerate(first):
            seen += x.flatten().tolist()
            if step == 1:
                break
        state = first.state_dict()
        other.load_state_dict(state)
        rest = [value for x in other for value in x.flatten().tolist()]
        again = [value for x in other for value in x.flatten().tolist()]
        return seen, rest, again

    found = run_virtual(body, 2)
    assert sorted(sum((seen for seen, _, _ in found), [])) == list(range(8))
    assert sorted(sum((rest for _, rest, _ in found), [])) == list(range(8, 20))
    assert sorted(sum((again for _, _, again in found), [])) == list(range(20))
