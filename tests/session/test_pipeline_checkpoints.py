"""Checkpoints of models in stages: the same grid goes on to the bit, another one from what the ranks stood for."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from staged import batches, difference, loss_of, make, mse, pipeline, values, whole
from torch import nn

import hpcdist as hd
from harness.cases import each
from hpcdist import checkpoint
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError
from strategies import problem

pytestmark = pytest.mark.computes
OPTIONS = {**problem.PERIODS, "downpour": {"servers": 1}}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2, "cut": (1, 2, 2, 2)}
SYNCHRONOUS = {"sgp": {}, "streaming_diloco": {}, "noloco": {"routing": "random", "seed": 2}}  # draws the same routes


class Loop:
    """A script's objects, made anew as a resumed one makes them; without stages where these are None."""

    def __init__(self, comm, stages, strategy="allreduce", rate=0.01, compression=None, **options):
        hd.init(comm=comm)
        self.model = make() if stages is None else pipeline(comm, stages, **options)
        optimizer = problem.suited(strategy, torch.optim.AdamW)(self.model.parameters(), lr=rate)
        settings = OPTIONS.get(strategy, {}) | problem.fitting(strategy, comm.size // (stages or 1))
        settings |= {} if compression is None else {"compression": compression}
        self.optimizer = hd.DistributedOptimizer(optimizer, self.model, strategy=strategy, **settings)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        replicas = comm.size // (stages or 1)
        self.loader = hd.shard(batches(replicas, shuffle=True))

    def objects(self):
        return {"optimizer": self.optimizer, "schedule": self.schedule, "loader": self.loader}

    def epoch(self, leave_at=None):
        for number, (x, y) in enumerate(self.loader):
            if isinstance(self.model, nn.Sequential):
                self.optimizer.zero_grad()
                mse(self.model(x), y).backward()
                self.optimizer.step()
            else:
                self.model.step(x, y)
            if number == leave_at:
                return
        self.schedule.step()

    def finished(self):
        hd.finish(self.model)
        return values(self.model)


def saved(folder, size, stages, strategy="allreduce", epochs=2, **options):
    """Trains an epoch and saves; what the ranks stood for, and after further epochs."""

    def body(comm):
        loop = Loop(comm, stages, strategy, **options)
        loop.epoch()
        hd.save(folder, **loop.objects(), epoch=0)
        with hd.consensus(loop.model):
            stood = values(loop.model)
        for _ in range(epochs):
            loop.epoch()
        return stood, loop.finished()

    found = run_virtual(body, size)
    return whole([stood for stood, _ in found]), whole([end for _, end in found])


def resumed(folder, size, stages, strategy="allreduce", epochs=2, **options):
    """What the ranks stand for once they have loaded, and after further epochs."""

    def body(comm):
        loop = Loop(comm, stages, strategy, rate=0.3, **options)
        assert hd.load(folder, **loop.objects())["epoch"] == 0
        rate = loop.optimizer.param_groups[0]["lr"]
        with hd.consensus(loop.model):
            stood = values(loop.model)
        for _ in range(epochs):
            loop.epoch()
        return stood, loop.finished(), rate

    found = run_virtual(body, size)
    assert {rate for *_, rate in found} == {0.005}
    return whole([stood for stood, *_ in found]), whole([end for _, end, _ in found])


@pytest.mark.sizes(4)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_the_same_grid_goes_on_to_the_bit_within_an_epoch(ranks, strategy, shared_tmp_path):
    def body(comm):
        options = SYNCHRONOUS[strategy]
        loop = Loop(comm, 2, strategy, **options)
        loop.epoch()
        loop.epoch(leave_at=2)
        hd.save(shared_tmp_path, **loop.objects())
        hd.load(shared_tmp_path, **loop.objects())  # the position in the epoch
        loop.epoch()
        loop.epoch()
        end = loop.finished()
        again = Loop(comm, 2, strategy, **options)
        hd.load(shared_tmp_path, **again.objects())
        again.epoch()
        again.epoch()
        return difference(again.finished(), end)

    assert ranks(body) == [0.0] * 4


ELSEWHERE = [  # ranks and stages that save, and those that go on
    ((4, 2, {}), [(4, 4, {}), (2, 2, {}), (2, 1, {}), (1, None, {})]),
    ((2, None, {}), [(4, 2, {}), (2, 2, {})]),
    ((2, 2, {"cut": (3, 4)}), [(2, 2, {"cut": (1, 6)}), (2, 2, INTERLEAVED)]),
]


@pytest.mark.parametrize(("grid", "others"), ELSEWHERE, ids=["stages", "whole models", "cuts"])
def test_another_grid_goes_on_as_the_saved_one_would(tmp_path, grid, others):
    """With allreduce every grid trains alike: parameters, AdamW's moments and rates are those of the saved one."""
    size, stages, options = grid
    stood, end = saved(tmp_path, size, stages, **options)
    for size, stages, options in others:
        again, after = resumed(tmp_path, size, stages, **options)
        assert difference(again, stood) == 0.0, (size, stages, options)
        assert difference(after, end) < 1e-12, (size, stages, options)


GRIDS = ((6, 2), (2, 1), (4, 4))  # more replicas; no stages; more stages


@each("numbered", list(enumerate(problem.stepping())))
def test_every_strategy_goes_on_from_what_the_ranks_stood_for(tmp_path, numbered):
    place, strategy = numbered
    folder = tmp_path / strategy.replace("/", "-")
    stood, _ = saved(folder, 4, 2, strategy, epochs=0)
    again, after = resumed(folder, *GRIDS[place % len(GRIDS)], strategy, epochs=1)
    assert difference(again, stood) < 1e-12
    assert loss_of(after) < loss_of(values(make())), "replicas learn by it"


@pytest.mark.parametrize(("strategy", "stages"), [("allreduce", None), ("easgd", 2), ("sgp", 2)])
def test_a_checkpoint_is_unsplit_and_exported_without_ranks(tmp_path, strategy, stages):
    stood, _ = saved(tmp_path / "saved", 4, stages, strategy, epochs=0)
    state = hd.unsplit(tmp_path / "saved")
    assert difference(state, stood) < 1e-12
    with pytest.raises(CheckpointError, match="optimizer must be a name passed to hpcdist.save; got 'adam', and"):
        hd.unsplit(tmp_path / "saved", "adam")
    with pytest.raises(CheckpointError, match="must be a checkpoint, or a folder of them; got none there"):
        hd.unsplit(tmp_path / "elsewhere")
    for suffix, load in ((".pt", lambda file: torch.load(file, weights_only=True)), (".safetensors", load_file)):
        file = tmp_path / suffix / f"model{suffix}"
        file.parent.mkdir()
        for _ in range(2):  # it is replaced
            checkpoint.export(hd.unsplit(checkpoint.find(tmp_path / "saved")), file)
        assert difference(load(file), state) == 0.0
        make().load_state_dict(load(file))
        assert [path.name for path in file.parent.iterdir()] == [file.name]
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "Hugging Face's libraries demand it"


class Shift(nn.Module):
    """Has a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.ones(8, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return x + self.by


def test_buffers_are_in_the_unsplit_state_where_they_are_in_a_model_s(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(6, 8), Shift(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()

    def body(comm):
        staged = pipeline(comm, 2, model)
        optimizer = hd.DistributedOptimizer(torch.optim.AdamW(staged.parameters()), staged)
        for x, y in hd.shard(batches()):
            staged.step(x, y)
        hd.save(tmp_path, optimizer=optimizer)
        return values(staged)

    found = whole(run_virtual(body, 2))
    state = hd.unsplit(tmp_path)
    model().load_state_dict(state)
    assert difference(state, found) == 0.0


def test_another_model_is_refused(tmp_path):
    def load(comm, model=make):
        model = pipeline(comm, 1, model)
        optimizer = hd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        hd.load(tmp_path, optimizer=optimizer)

    def wider():
        return nn.Sequential(nn.Linear(6, 9), *make()[1:]).double()

    def longer():
        return nn.Sequential(*make(), nn.Linear(2, 2)).double()

    saved(tmp_path, 2, 2, epochs=0)
    for model, message in (
        (wider, "got '0.weight' .* has one of 48 elements"),
        (longer, "'7.weight' .* nothing of that"),
    ):
        with pytest.raises(
            CheckpointError, match=f"model must be that of the checkpoint to resume from it; .*{message}"
        ):
            run_virtual(lambda comm, model=model: load(comm, model), 2)


# --- compression ------------------------------------------------------------------------------------------------------
COMPRESSION = {"name": "topk", "ratio": 0.1}


def unsent(optimizer):
    """What this rank's compression has not sent yet, by name; nothing on ranks that do not compress."""
    state = optimizer.strategy.state.save()
    flats = next(state[key] for key in ("link.residual", "requests.whole", "compressed.residual") if key in state)
    return {slot.name: slot.view(flats).flatten().clone() for slot in optimizer.strategy.model.slots if flats}


def totals(found):
    """The sums over all ranks that hold a parameter, and how many these are."""
    sums, counts = {}, {}
    for of_rank in found:
        for name, tensor in of_rank.items():
            sums[name] = sums.get(name, 0.0) + tensor
            counts[name] = counts.get(name, 0) + 1
    return sums, counts


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [("allreduce", "dgc"), ("local_sgd", "topk"), ("hardsync", "topk"), ("strom", "topk")],
)
def test_what_compression_has_not_sent_is_cut_anew(tmp_path, strategy, compression):
    """Each rank has the mean, so that the next updates have what the saved ranks' would; with strom the sum stays."""
    how = {"compression": COMPRESSION | {"name": compression}}

    def save(comm):
        loop = Loop(comm, 2, strategy, cut=(3, 4), **how)
        loop.epoch()
        hd.save(tmp_path, **loop.objects())
        return unsent(loop.optimizer), loop.optimizer.strategy.state.save()

    def load(comm, stages):
        options = {} if stages is None else {"cut": (2, 2, 2, 1) if stages == 4 else (4, 3)}
        loop = Loop(comm, stages, strategy, **how, **options)
        hd.load(tmp_path, **loop.objects())
        found = unsent(loop.optimizer), loop.optimizer.strategy.state.save()
        loop.epoch()
        assert all(torch.isfinite(tensor).all() for tensor in loop.finished().values())
        return found

    before = run_virtual(save, 6)
    sums, counts = totals(own for own, _ in before)
    assert max(float(total.abs().max()) for total in sums.values()) > 0
    for size, stages in ((8, 4), (2, None)):
        after = run_virtual(lambda comm, stages=stages: load(comm, stages), size)
        sums_after, counts_after = totals(own for own, _ in after)
        assert sums.keys() == sums_after.keys()
        for name, total in sums.items():
            share = 1 if strategy == "strom" else counts_after[name] / counts[name]
            torch.testing.assert_close(sums_after[name], total * share, rtol=0, atol=1e-12)
        if compression == "dgc":
            (_, saved_state), (_, state) = before[0], after[0]
            steps = [each["compressed.coders"][0]["steps"] for each in (saved_state, state)]
            assert steps[0] == steps[1] > 0
            assert state["compressed.velocity"][0].abs().max() > 0
            assert saved_state["compressed.calls"] == state["compressed.calls"] == 4
