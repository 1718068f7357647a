"""What loops do between the passes and the step of a model in stages: it comes to the same as in one process."""

from __future__ import annotations

import pytest
import torch
from staged import FEATURES, SAMPLES, batches, data, difference, make, mse, pipeline, sgd, values, whole
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import hpcdist as hd
from harness.cases import each
from hpcdist.errors import ConfigError, MismatchError, NonFiniteError

pytestmark = pytest.mark.computes


class Alone:
    """A model in one process, with the calls of one in stages."""

    def __init__(self, model=make):
        self.model = model()

    def parameters(self):
        return self.model.parameters()

    def named_parameters(self):
        return self.model.named_parameters()

    def optimizer(self, optimizer, **_):
        return optimizer

    def loader(self, samples=SAMPLES):
        return batches(1, samples)

    def forward_backward(self, x, y, scaled=lambda loss: loss):
        loss = mse(self.model(x), y)
        scaled(loss).backward()
        return loss.detach()

    def clip_grad_norm_(self, largest):
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def finish(self):
        return values(self.model)


class Staged:
    """The same model on a grid."""

    def __init__(self, comm, stages=2, model=make, strategy="allreduce", **options):
        self.model = pipeline(comm, stages, model, **options)
        self.strategy = strategy
        for name in ("parameters", "named_parameters", "forward_backward", "clip_grad_norm_"):
            setattr(self, name, getattr(self.model, name))

    def optimizer(self, optimizer, **options):
        return hd.DistributedOptimizer(optimizer, self.model, self.strategy, **options)

    def loader(self, samples=SAMPLES):
        return hd.shard(batches(self.model.grid.replicas, samples))

    def finish(self):
        return values(hd.finish(self.model))


def equal(ranks, loop, *, model=make, tolerance=1e-12, **options):
    """Check that a loop on a grid comes to the same as alone."""
    found = ranks(lambda comm: loop(Staged(comm, model=model, **options)))
    assert difference(whole(found), loop(Alone(model))) <= tolerance


class Head(nn.Module):
    """Multiplies by the weights of another layer."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)[:, :2]


def tied():
    torch.manual_seed(0)
    first = nn.Linear(FEATURES, FEATURES, bias=False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh(), Head(first)).double()


@pytest.mark.sizes(4)
@each("model", [make, tied])
def test_accumulated_scaled_clipped_and_scheduled(ranks, model):
    """Tied weights are summed once for each batch."""

    def loop(run):
        optimizer = run.optimizer(sgd(run.parameters(), lr=0.2))
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        norms = []
        for _ in range(3):
            for number, (x, y) in enumerate(run.loader(80)):
                run.forward_backward(x, y, scaled=scaler.scale)
                if number % 2:
                    scaler.unscale_(optimizer)
                    norms.append(run.clip_grad_norm_(0.1).item())
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    schedule.step()
        assert max(norms) > 0.1
        return run.finish()

    equal(ranks, loop, model=model)


@pytest.mark.sizes(4)
@each("stages", [2, 4])
def test_clipped_by_the_optimizer_and_uneven(ranks, stages):
    """By the norm of the mean gradient of all stages; the last batch is of 1 sample, or none on a replica."""

    def loop(run):
        optimizer = run.optimizer(sgd(run.parameters(), lr=0.2), clip_norm=0.1)
        for _ in range(2):
            for x, y in run.loader(33):
                optimizer.zero_grad()
                run.forward_backward(x, y)
                if isinstance(run, Alone):
                    run.clip_grad_norm_(0.1)
                optimizer.step()
        return run.finish()

    equal(ranks, loop, stages=stages)


@pytest.mark.sizes(4)
def test_several_optimizers_groups_and_a_frozen_layer(ranks):
    def loop(run):
        named = dict(run.named_parameters())
        for name, parameter in named.items():
            parameter.requires_grad_(not name.startswith("2."))
        biases = [p for name, p in named.items() if name.endswith("bias")]
        first = [p for name, p in named.items() if name.endswith("weight") and name < "4"]
        last = [p for name, p in named.items() if name.endswith("weight") and name >= "4"]
        groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.02}]  # of which a stage has one
        optimizers = [run.optimizer(sgd(groups)), run.optimizer(torch.optim.AdamW(biases, lr=0.01))]
        for x, y in run.loader():
            for optimizer in optimizers:
                optimizer.zero_grad()
            run.forward_backward(x, y)
            for optimizer in optimizers:
                optimizer.step()
        return run.finish()

    equal(ranks, loop)


@pytest.mark.sizes(4)
def test_a_moving_average_of_torch_is_of_each_stage(ranks):
    def body(comm):
        run = Staged(comm)
        run.optimizer(sgd(run.parameters()))
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for x, y in run.loader():
            run.model.step(x, y)
            average.update_parameters(run.model)
        with torch.no_grad():
            outputs = average.eval()(data(5).tensors[0])
        return values(average.module), outputs

    found = ranks(body)
    model = make()
    optimizer, average = sgd(model.parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for x, y in batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    assert difference(whole([state for state, _ in found]), values(average.module)) < 1e-12
    torch.testing.assert_close(found[3][1], average(data(5).tensors[0]).detach(), rtol=0, atol=1e-12)
    assert found[2][1] is None


@pytest.mark.sizes(4)
@each("strategy", ["gossip_pull", "easgd", "softsync", "dpsgd"])
def test_tied_weights_stay_equal_with_every_kind_of_strategy(ranks, strategy):
    def body(comm):
        run = Staged(comm, model=tied, strategy=strategy)
        run.optimizer(sgd(run.parameters()))
        for x, y in run.loader():
            run.model.step(x, y)
        with hd.consensus(run.model):
            stood = values(run.model)
        return stood, run.finish()

    found = ranks(body)
    for first, last in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(first, last, strict=True):
            assert torch.equal(one["0.weight"], other["4.weight"])


# --- mixed precision, and gradients that are not finite ---------------------------------------------------------------
@pytest.mark.sizes(4)
@each("strategy", ["allreduce", "gossip_sync"])
def test_an_overflow_in_one_stage_leaves_the_step_out_in_all_stages(ranks, strategy):
    def body(comm):
        run = Staged(comm, strategy=strategy)
        optimizer = run.optimizer(sgd(run.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        poison = comm.rank == 0  # replica 0, stage 0
        found = []
        for number, (x, y) in enumerate(run.loader()):
            own = next(run.parameters())
            hook = own.register_hook(lambda grad: grad * torch.inf) if poison and number == 1 else None
            loss = run.model.step(x, y, scaler=scaler)
            assert 0 < loss < 2, "the loss is scaled"
            if hook is not None:
                hook.remove()
            found.append((optimizer.record.event is not None, scaler.get_scale()))
        return found

    found = ranks(body)
    skipped = [(False, 8.0), (True, 4.0), (False, 4.0)]
    assert found[0] == found[1] == skipped
    assert (
        found[2] == found[3] == (skipped if strategy == "allreduce" else [(False, 8.0), (False, 16.0), (False, 16.0)])
    )


@pytest.mark.sizes(4)
@each("strategy", ["allreduce", "gossip_sync", "hardsync"])
def test_gradients_that_are_not_finite_in_one_stage_count_so_in_all(ranks, strategy):
    def body(comm):
        run = Staged(comm, strategy=strategy)
        optimizer = run.optimizer(sgd(run.parameters()), on_nonfinite="skip")
        events = []
        poison = comm.rank == 3  # replica 1, stage 1
        for number, (x, y) in enumerate(run.loader()):
            hook = next(run.parameters()).register_hook(lambda g: g * torch.nan) if poison and number == 1 else None
            run.model.step(x, y)
            if hook is not None:
                hook.remove()
            events.append(optimizer.record.event)
        state = run.finish()
        assert all(torch.isfinite(tensor).all() for tensor in state.values())
        return events

    found = ranks(body)
    assert found[2] == found[3] and found[2][0] is found[2][2] is None
    assert "skipped: NaN or infinite gradient at step 2, replica 1: 4.weight" in found[2][1]
    assert found[0] == found[1] == (found[2] if strategy == "allreduce" else [None] * len(found[0]))


@pytest.mark.sizes(4)
def test_by_default_they_end_the_run_on_all_ranks_of_the_replica(ranks):
    def body(comm):
        model = pipeline(comm, 2)
        optimized(model)
        x, y = data(4).tensors
        model.step(x * torch.nan, y)

    refused(ranks, "gradients must be finite; got NaN or infinite gradient at step 1", body, NonFiniteError)


# --- samples ----------------------------------------------------------------------------------------------------------
class Noisy(TensorDataset):
    """Adds noise as it is read."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y, index


class Stream(IterableDataset):
    """Draws samples: of each replica its own, or the same everywhere."""

    def __init__(self, of=None, length=20):
        self.of, self.length = of, length

    def __iter__(self):
        for number in range(self.length):
            yield torch.randn(FEATURES) + (0 if self.of is None else self.of()), number


def loaders(model):
    own = Noisy(*data(30).tensors)
    weights = WeightedRandomSampler([1.0] * 30, 21)
    replica = lambda: model.grid.replica  # noqa: E731
    return {
        "plain": (DataLoader(own, batch_size=4), {}),
        "shuffled": (DataLoader(own, batch_size=4, shuffle=True), {}),
        "weighted sampler": (DataLoader(own, batch_size=4, sampler=weights), {}),
        "worker process": (DataLoader(own, batch_size=8, num_workers=1), {}),
        "stream": (DataLoader(Stream(), batch_size=4), {}),
        "stream by replica": (DataLoader(Stream(replica, 16), batch_size=4), {}),
        "own samples": (DataLoader(Stream(replica), batch_size=4), {"split": False}),
        "own samples, uneven": (
            DataLoader(Stream(replica, 8 + 4 * model.grid.replica), batch_size=4),
            {"split": False},
        ),
        "evaluation": (DataLoader(own, batch_size=4), {"training": False}),
    }


@pytest.mark.virtual
@pytest.mark.sizes(4)
@each("strategy", ["allreduce", "softsync"])
def test_ranks_of_a_replica_get_the_same_batches(ranks, strategy):
    """Whatever they are drawn by, also from random states that differ."""

    def body(comm):
        run = Staged(comm, strategy=strategy)
        run.optimizer(sgd(run.parameters()))
        torch.manual_seed(comm.rank)
        found = {}
        for name, (loader, options) in loaders(run.model).items():
            if strategy == "softsync" and name == "worker process":
                continue
            sharded, seen = hd.shard(loader, **options), []
            for _ in range(2):
                for x, *rest in sharded:
                    seen.append((x, rest[-1].tolist(), sharded.weight))
                    if options.get("training", True):
                        run.model.step(x.double(), torch.zeros(len(x), 2, dtype=torch.float64))
                    else:
                        assert run.model.eval()(x) is None or run.model.is_last
                        run.model.train()
            found[name] = seen
        return found

    found = ranks(body)
    for name in found[2]:
        for first, last in ((found[0], found[1]), (found[2], found[3])):
            assert len(first[name]) == len(last[name])
            for (x, labels, weight), (other, others_labels, others_weight) in zip(first[name], last[name], strict=True):
                assert torch.equal(x, other) and labels == others_labels and weight == others_weight, name
        if strategy == "allreduce" and name not in ("stream", "own samples"):
            assert not torch.equal(found[0][name][0][0], found[2][name][0][0]), (
                f"replicas have the same samples: {name}"
            )
    for name in ("plain", "shuffled", "evaluation"):
        counted = [i for own in found[::2] for _, labels, weight in own[name] if weight for i in labels]
        assert sorted(counted) == sorted([*range(30)] * 2), f"not every sample once an epoch: {name}"


@pytest.mark.sizes(4)
def test_a_loader_that_asks_for_the_rank_is_refused(ranks):
    def body(comm):
        optimized(pipeline(comm, 2))
        next(iter(hd.shard(DataLoader(Stream(hd.rank), batch_size=4), split=False)))

    message = "batches must be the same on all ranks of a replica; ranks . and . have read different ones"
    refused(ranks, message, body, MismatchError)


@pytest.mark.sizes(4)
@each("strategy", ["allreduce", "hardsync"])
def test_values_are_exchanged_among_all_ranks_that_work(ranks, strategy):
    def body(comm):
        run = Staged(comm, strategy=strategy)
        run.optimizer(sgd(run.parameters()))
        found = []
        for x, y in run.loader():
            loss = run.model.step(x, y).item()
            found.append((hd.allgather([comm.rank]), hd.metric(loss, len(x)), hd.broadcast(comm.rank, 3)))
        before = values(run.model)
        hd.broadcast(run.model)
        with torch.no_grad():
            assert (run.model.eval()(data(5).tensors[0]) is None) == (comm.rank % 2 == 0)
        return found, hd.rank(), hd.size(), difference(before, values(run.model))

    found = ranks(body)
    workers = [0, 1, 2, 3] if strategy == "allreduce" else [2, 3]
    for rank in workers:
        assert all(gathered == [[w] for w in workers] and last == 3 for gathered, _, last in found[rank][0])
        assert len({repr([m for _, m, _ in found[r][0]]) for r in workers}) == 1
    assert [(rank, size) for _, rank, size, _ in found] == [(r, 4) for r in range(4)]


# --- refusals ---------------------------------------------------------------------------------------------------------
def refused(ranks, message, body, error=ConfigError):
    def on_rank(comm):
        hd.init(comm=comm)
        with pytest.raises(error, match=message):
            body(comm)
        return True

    assert all(ranks(on_rank))


def optimized(model, optimizer=sgd, **options):
    return hd.DistributedOptimizer(optimizer(model.parameters()), model, **options)


REFUSALS = {
    "model must be the result of hpcdist.pipeline if 2 ranks hold one model together; got Linear": lambda comm: (
        pipeline(comm, 2), optimized(nn.Linear(2, 1)),
    ),
    "optimizer must have parameters of this rank's stages; got 8 others": lambda comm: (
        hd.DistributedOptimizer(sgd(make().parameters()), pipeline(comm, 2)),
    ),
    "optimizer must handle each stage separately .*; got LBFGS": lambda comm: optimized(
        pipeline(comm, 2), torch.optim.LBFGS
    ),
    "strategy must handle each stage separately .*; got sandblaster, whose directions": lambda comm: optimized(
        pipeline(comm, 2), strategy="sandblaster"
    ),
    "stages must be the same for all models that are trained at the same time, 2; got 4": lambda comm: (
        optimized(pipeline(comm, 2)), pipeline(comm, 4),
    ),
    "strategy.servers must be a number of ranks of their own with softsync and several stages": lambda comm: optimized(
        pipeline(comm, 2), strategy="softsync", servers="colocated"
    ),
    "model.step must be called once a DistributedOptimizer trains the model": lambda comm: pipeline(comm, 2).step(
        *data(4).tensors
    ),
}  # fmt: skip


@pytest.mark.virtual
@pytest.mark.sizes(4)
@each("message", REFUSALS)
def test_refused_by_name(ranks, message):
    refused(ranks, message, REFUSALS[message])


@pytest.mark.virtual
@pytest.mark.sizes(6)
def test_servers_of_one_stage_cannot_clip_by_all(ranks):
    message = "clip_norm must be None with hardsync and several stages"
    refused(ranks, message, lambda comm: optimized(pipeline(comm, 2), strategy="hardsync", clip_norm=1.0))


@pytest.mark.virtual
@pytest.mark.sizes(2)
def test_models_that_are_in_stages_or_distributed_already_are_refused(ranks):
    def twice(comm):
        hd.pipeline(pipeline(comm, 2), mse, stages=2)

    def after(comm):
        model = make()
        optimized(model)
        hd.pipeline(model, mse, stages=2)

    def elsewhere(comm):
        model = pipeline(comm, 2)
        hd.init(comm=comm.split(0))
        hd.pipeline(make, mse, stages=1)
        optimized(model)

    refused(ranks, "model must not be in stages already; got what hpcdist.pipeline returned", twice)
    refused(ranks, "model must be cut into stages before a DistributedOptimizer trains it", after)
    refused(ranks, "model must be cut by hpcdist.pipeline in this session; got one of another grid", elsewhere)


@pytest.mark.sizes(4)
def test_groups_must_be_those_of_the_same_stage(ranks):
    def body(comm):
        model = pipeline(comm, 2)
        hd.DistributedOptimizer(sgd(model.parameters(), lr=0.1 * (1 + comm.rank // 2)), model)

    refused(ranks, r"param_groups of a stage must be the same on every rank; rank [23] differs", body, MismatchError)
