"""Models of DTensors: fully_shard and tensor parallelism inside a replica, strategies across."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd
from hpcdist.errors import CheckpointError, ConfigError, NonFiniteError
from hpcdist.session.world import init
from hpcdist.strategies.common.state import copy_all

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.sizes(4)]
FEATURES, HIDDEN, CLASSES, BATCH, STEPS = 6, 10, 5, 8, 5


def make() -> nn.Sequential:
    """A model with parameters that two ranks can't halve, and some that tensor parallelism leaves whole."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 9), nn.LayerNorm(9), nn.Linear(9, CLASSES)]
    return nn.Sequential(*layers).double()


def halved(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def replicated(model: nn.Sequential, mesh: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def session(comm: Any) -> Iterator[None]:
    init(comm=comm)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Training:
    """Collective. The model, shared out by `share` on two ranks, in training with the other replica."""

    def __init__(self, comm: Any, share: Callable[..., nn.Module], strategy: str, **options: Any):
        mesh = hd.device_mesh(2)
        self.model, self.parts = share(make(), mesh), 1 if share is parallel else 2
        self.shards = hd.local_shards(self.model)
        self.place, self.replica = mesh.get_local_rank() if self.parts == 2 else 0, comm.rank // 2
        optimizer = torch.optim.AdamW(self.shards.parameters(), lr=0.02)
        self.optimizer = hd.DistributedOptimizer(optimizer, self.shards, strategy, **options)

    def backward(self, step: int, factor: float = 1.0) -> None:
        x, y = (t.chunk(2)[self.replica].chunk(self.parts)[self.place] for t in batch(step))
        (factor * nn.functional.cross_entropy(self.model(x), y)).backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [whole(parameter) for parameter in self.model.parameters()]


def alone(clip_norm: float | None = None) -> list[torch.Tensor]:
    """The same training in one process."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(ours, theirs, strict=True))


# --- equal to one process ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "share, clip_norm, passes, overlap",
    [(halved, None, 2, "auto"), (halved, None, 1, "on"), (parallel, 0.2, 1, "off"), (replicated, 0.2, 1, "on")],
)
def test_training_equals_one_process(ranks, share, clip_norm, passes, overlap):
    """By one backward pass a step, or by several that add up."""

    def body(comm):
        with session(comm):
            options = {"clip_norm": clip_norm, "overlap": overlap, "accumulation": passes}
            training = Training(comm, share, "allreduce", **options)
            for step in range(STEPS):
                training.optimizer.zero_grad()
                for _ in range(passes):
                    training.backward(step, 1 / passes)
                training.optimizer.step()
                if step == 2:  # a forward pass that no backward pass follows leaves nothing old behind
                    with torch.no_grad():
                        training.model(batch(step)[0][:2])
            assert close(training.values(), alone(clip_norm))
            state = get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True))
            assert close(list(state.values()), alone(clip_norm))
            flat = training.optimizer.strategy.model.params[0]
            locals_ = [p._local_tensor if isinstance(p, DTensor) else p for p in training.model.parameters()]
            assert {p.untyped_storage().data_ptr() for p in locals_} == {flat.untyped_storage().data_ptr()}

    ranks(body)


class Branches(nn.Module):
    """Adds one of two layers, by the sign of the sum of the first column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, CLASSES).double() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[int(x[:, 0].sum() > 0)](x)


def test_ddp_inside_with_passes_that_are_not_averaged_and_layers_that_some_ranks_use(ranks):
    def body(comm):
        with session(comm):
            mesh = hd.device_mesh(2)
            options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
            model = DistributedDataParallel(Branches(), process_group=mesh.get_group(), **options)
            shards, expected = hd.local_shards(model), Branches()
            optimizer = torch.optim.SGD(shards.parameters(), lr=0.1, momentum=0.9)
            optimizer = hd.DistributedOptimizer(optimizer, shards, "allreduce")
            by_one = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
            for step in range(STEPS):
                (x, y), (first, last) = batch(step), (slice(0, 1), slice(1, 2))
                parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
                rows = [(u[part], v[part]) for u, v in parts for part in (first, last)]
                by_one.zero_grad()
                (sum(nn.functional.cross_entropy(expected(u), v) for u, v in rows) / 4).backward()
                by_one.step()
                u, v = parts[comm.rank]
                optimizer.zero_grad()
                with model.no_sync():
                    nn.functional.cross_entropy(model(u[first]), v[first]).backward()
                nn.functional.cross_entropy(model(u[last]), v[last]).backward()
                optimizer.step()
            assert close([one.detach() for one in model.parameters()], [one.detach() for one in expected.parameters()])

    ranks(body)


def test_ddp_on_other_ranks_is_refused(ranks):
    def body(comm):
        with session(comm):
            hd.device_mesh(2)
            (own, *_) = [dist.new_group([rank]) for rank in range(2)][dist.get_rank() :]
            with pytest.raises(ConfigError, match="must be on the 2 ranks of a replica; got a process group of 1"):
                hd.local_shards(DistributedDataParallel(make(), process_group=own))
            plain = make()
            with pytest.raises(ConfigError, match="local_shards, on the mesh of .*device_mesh, .* got Sequential"):
                hd.DistributedOptimizer(torch.optim.SGD(plain.parameters()), plain)

    ranks(body)


# --- strategies that let replicas differ ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "share, strategy",
    [(halved, "gossip_pull"), (parallel, "dpsgd"), (replicated, "gossip_pull")],
)
def test_ranks_of_a_replica_hold_one_model(ranks, share, strategy):
    """Whole parameters are equal on them after each step; and the model is the consensus inside the context."""

    def body(comm):
        with session(comm):
            training = Training(comm, share, strategy)
            for step in range(STEPS):
                training.step(step)
            own = training.values()
            with hd.consensus(training.shards):
                mean = training.values()
            training.model(batch(0)[0])
            assert close(training.values(), own)
            hd.finish(training.shards)
            assert close(training.values(), mean)
            return [value.tolist() for value in own], [value.tolist() for value in mean]

    results = ranks(body)
    for first in (0, 2):
        assert results[first] == results[first + 1]
    for one, other, mean in zip(results[0][0], results[2][0], results[0][1], strict=True):
        assert torch.allclose((torch.tensor(one) + torch.tensor(other)) / 2, torch.tensor(mean), atol=1e-6)


# --- gradients that are not finite ------------------------------------------------------------------------------------
def test_a_gradient_that_is_not_finite_counts_in_all_shards_or_stops_all(ranks):
    def body(comm):
        with session(comm):
            training = Training(comm, parallel, "gossip_pull", on_nonfinite="skip")
            training.step(0)
            training.optimizer.zero_grad()
            training.backward(1)
            if comm.rank == 1:
                training.shards.get_parameter("shard1of2.0.weight").grad[0, 0] = torch.nan
            training.optimizer.step()
            event = training.optimizer.record.event or ""
            hd.finish(training.shards)
        with session(comm):
            training = Training(comm, parallel, "allreduce")
            if comm.rank == 1:
                weight = training.model[0].weight
                weight.register_hook(lambda grad: grad * torch.inf)
            with pytest.raises(NonFiniteError, match="replica 0: shard"):
                training.step(0)
        return event

    events = ranks(body)
    assert all(event.startswith("skipped: NaN or infinite gradient") for event in events[:2]) and not any(events[2:])


# --- checkpoints ------------------------------------------------------------------------------------------------------
def test_training_is_resumed_to_the_bit(ranks, shared_tmp_path):
    def body(comm):
        with session(comm):
            training = Training(comm, halved, "allreduce")
            for step in range(3):
                training.step(step)
            hd.save(shared_tmp_path, optimizer=training.optimizer)
            for step in range(3, STEPS):
                training.step(step)
            expected = training.values()
            hd.finish(training.shards)
            resumed = Training(comm, halved, "allreduce")
            hd.load(shared_tmp_path, optimizer=resumed.optimizer)
            for step in range(3, STEPS):
                resumed.step(step)
            assert all(torch.equal(a, b) for a, b in zip(resumed.values(), expected, strict=True))
            hd.finish(resumed.shards)

    ranks(body)


@pytest.mark.parametrize(
    "share, strategy", [(halved, "gossip_sync"), (parallel, "allreduce"), (replicated, "gossip_sync")]
)
def test_a_checkpoint_is_the_whole_model_for_one_process(ranks, share, strategy, shared_tmp_path):
    def body(comm):
        with session(comm):
            training = Training(comm, share, strategy)
            for step in range(3):
                training.step(step)
            hd.save(shared_tmp_path, optimizer=training.optimizer)
            with hd.consensus(training.shards):
                training.shards._follow()
                expected = training.values()
            model = make()
            model.load_state_dict(hd.unsplit(shared_tmp_path))
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))
            hd.finish(training.shards)

    ranks(body)


# --- checkpoints on another mesh --------------------------------------------------------------------------------------
class Shared:
    """Collective. One model on all ranks of a communicator, shared out by `share`; whole where that is None.

    Args:
        share: shares a model out; returns it, into how many parts it wants batches divided, and this rank's part.
    """

    def __init__(self, share: Callable[[nn.Module], tuple[nn.Module, int, int]] | None, kind: Any = torch.optim.AdamW):
        self.model, self.parts, self.place = (make(), 1, 0) if share is None else share(make())
        self.trained = self.model if share is None else hd.local_shards(self.model)
        self.optimizer = hd.DistributedOptimizer(kind(self.trained.parameters(), lr=0.02), self.trained)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, y = (t.chunk(self.parts)[self.place] for t in batch(step))
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        """Return the whole parameters, and the whole of AdamW's moments, gathered by torch."""
        self.model.state_dict()  # before which the model takes up what has been loaded
        state = [whole(parameter) for parameter in self.model.parameters()]
        for like, own in zip(self.model.parameters(), self.trained.parameters(), strict=True):
            moments = self.optimizer.state[own]
            assert moments["step"] == 3
            for key in ("exp_avg", "exp_avg_sq"):
                moment = moments[key]
                if isinstance(like, DTensor):
                    local = moment[tuple(map(slice, like._local_tensor.shape))]  # without padding
                    mesh, placements = like.device_mesh, like.placements
                    moment = DTensor.from_local(local, mesh, placements, shape=like.shape, stride=like.stride())
                state.append(whole(moment))
        return state


def quartered(model: nn.Sequential) -> tuple[nn.Module, int, int]:
    mesh = hd.device_mesh(4)
    return halved(model, mesh), 4, mesh.get_local_rank()


def hybrid(model: nn.Sequential) -> tuple[nn.Module, int, int]:
    """Two copies of two parts."""
    mesh = hd.device_mesh(2, 2, names=("replicate", "shard"))
    return halved(model, mesh), 4, dist.get_rank()


def crossed(model: nn.Sequential) -> tuple[nn.Module, int, int]:
    """Tensor parallelism, and fully_shard of what that has left to each rank."""
    mesh = hd.device_mesh(2, 2, names=("data", "tensor"))
    return fully_shard(parallel(model, mesh["tensor"]), mesh=mesh["data"]), 2, mesh.get_local_rank("data")


def in_two(model: nn.Sequential) -> tuple[nn.Module, int, int]:
    mesh = hd.device_mesh(2)
    return halved(model, mesh), 2, mesh.get_local_rank()


def parallel_in_two(model: nn.Sequential) -> tuple[nn.Module, int, int]:
    return parallel(model, hd.device_mesh(2)), 1, 0


@pytest.mark.parametrize("share", [hybrid, crossed])
def test_training_goes_on_on_another_mesh_and_on_one_process(ranks, share, shared_tmp_path):
    """Parameters and moments are the saved ones to the bit: on two ranks, on one, and from there on four again."""

    def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

    def body(comm):
        with session(comm):
            training = Shared(share)
            training.train(0, 3)
            saved = training.state()
            hd.save(shared_tmp_path / "four", optimizer=training.optimizer)
            hd.finish(training.trained)
        for size, others in ((2, (in_two, parallel_in_two)), (1, (None,)), (4, (quartered, crossed))):
            group = comm.split(comm.rank // size)
            for other in others:
                with session(group):
                    resumed = Shared(other)
                    hd.load(shared_tmp_path / ("one" if size == 4 else "four"), optimizer=resumed.optimizer)
                    assert equal(resumed.state(), saved)
                    if size == 1 and comm.rank == 0:
                        hd.save(shared_tmp_path / "one", optimizer=resumed.optimizer)
                    resumed.train(3, STEPS)
                    assert close([whole(p) for p in resumed.model.parameters()], alone())
                    hd.finish(resumed.trained)
            comm.barrier()
            group.close()

    ranks(body)


def test_replicas_go_on_as_others(ranks, shared_tmp_path):
    """Two replicas of two ranks become one of four; what a strategy keeps along the parameters is cut as these are."""

    def body(comm):
        with session(comm):
            saved = {}
            for strategy, options in (("allreduce", {}), ("diloco", {"period": 4})):
                training = Training(comm, halved, strategy, **options)
                for step in range(3):
                    training.step(step)
                hd.save(shared_tmp_path / strategy, optimizer=training.optimizer)
                saved[strategy] = training.values()
                hd.finish(training.shards)
        with session(comm):
            resumed = Shared(quartered)
            hd.load(shared_tmp_path / "allreduce", optimizer=resumed.optimizer)
            assert all(torch.equal(*pair) for pair in zip(resumed.state(), saved["allreduce"]))
            resumed.train(3, STEPS)
            assert close([whole(p) for p in resumed.model.parameters()], alone())
            hd.finish(resumed.trained)
        with session(comm):
            resumed = Training(comm, parallel, "diloco", period=4)
            for flat in resumed.optimizer.strategy.common:
                flat.zero_()
            hd.load(shared_tmp_path / "diloco", optimizer=resumed.optimizer)
            copy_all(resumed.optimizer.strategy.model.params, resumed.optimizer.strategy.common)
            resumed.model.state_dict()  # before which the model takes them up
            assert all(torch.equal(*pair) for pair in zip(resumed.values(), make().parameters(), strict=True))
            hd.finish(resumed.shards)

    ranks(body)


def test_shards_become_stages_and_stages_shards(ranks, shared_tmp_path):
    def body(comm):
        with session(comm):
            training = Shared(crossed)
            training.train(0, 3)
            saved = training.state()
            hd.save(shared_tmp_path / "shards", optimizer=training.optimizer)
            hd.finish(training.trained)
        with session(comm):
            model = hd.pipeline(make, nn.functional.cross_entropy, stages=2)
            optimizer = hd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
            hd.load(shared_tmp_path / "shards", optimizer=optimizer)
            whole_state = dict(zip(make().state_dict(), saved, strict=False))
            assert all(torch.equal(tensor, whole_state[name]) for name, tensor in model.named_parameters())
            hd.save(shared_tmp_path / "stages", optimizer=optimizer)
            hd.finish(model)
        with session(comm):
            resumed = Shared(hybrid)
            hd.load(shared_tmp_path / "stages", optimizer=resumed.optimizer)
            assert all(torch.equal(*pair) for pair in zip(resumed.state(), saved, strict=True))
            hd.finish(resumed.trained)

    ranks(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_state_that_cannot_be_cut_is_refused(ranks, shared_tmp_path):
    def body(comm):
        pair = comm.split(comm.rank // 2)
        folder = shared_tmp_path / str(comm.rank // 2)
        with session(pair):
            training = Shared(in_two, torch.optim.Adafactor)
            training.train(0, 1)
            hd.save(folder, optimizer=training.optimizer)
            hd.finish(training.trained)
        with session(pair):
            resumed = Shared(parallel_in_two, torch.optim.Adafactor)
            with pytest.raises(
                CheckpointError, match="the optimiser's state must lie along parameters .* got 'row_var'"
            ):
                hd.load(folder, optimizer=resumed.optimizer)
            hd.finish(resumed.trained)
        with session(pair):
            model = nn.Sequential(nn.Linear(FEATURES, HIDDEN + 2)).double()
            shards = hd.local_shards(parallelize_module(model, hd.device_mesh(2), {"0": ColwiseParallel()}))
            optimizer = hd.DistributedOptimizer(torch.optim.Adafactor(shards.parameters()), shards)
            with pytest.raises(CheckpointError, match="model must be that of the checkpoint .* has one of 60 elements"):
                hd.load(folder, optimizer=optimizer)
            hd.finish(shards)
        pair.close()

    ranks(body)
