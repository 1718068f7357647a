"""What servers have of the parameters: whole ones, for optimisers that look at whole tensors, or equal bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.config import JobConfig, load
from hpcdist.model.flat import FlatModel
from hpcdist.session import unsplit
from hpcdist.strategies.common.state import mean_of_ranks
from hpcdist.strategies.server.strategy import ServerStrategy
from hpcdist.train import Trainer
from hpcdist.train import resume as resuming
from strategies import problem
from train import tiny

pytestmark = pytest.mark.computes

WHOLE = {  # torch's optimisers that look at whole tensors
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05),
}
N_PARAMETERS = 4  # of `problem.model()`
EACH_EPOCH = "checkpoint.every_steps=12"  # of two workers
whole = pytest.mark.parametrize("optimizer", WHOLE)
served = pytest.mark.parametrize(
    "name", [name for name in strategies.available() if issubclass(strategies.load(name), ServerStrategy)]
)


def _train(options, size, name="hardsync", **settings):
    return run_virtual(lambda comm: problem.train(comm, name, options, **settings), size, compute=Exponential(0.1))


@whole
@pytest.mark.parametrize("servers", [1, 3, 6, "colocated"])
def test_an_optimiser_of_whole_tensors_does_on_servers_what_it_does_in_allreduce(optimizer, servers):
    size = 3 if servers == "colocated" else 3 + servers
    runs = _train({"servers": servers}, size, optimizer=WHOLE[optimizer])
    native = {"algorithm": "native", "overlap": "off"}
    (reduced, *_) = _train(native, 3, name="allreduce", optimizer=WHOLE[optimizer])
    start = FlatModel(problem.model()).params[0]
    assert (reduced.params[0] - start).abs().max() > 0.1
    for run in runs:
        torch.testing.assert_close(run.consensus[0], reduced.params[0], rtol=0, atol=1e-12)


@whole
def test_one_of_single_elements_alone_goes_with_equal_bytes(optimizer):
    """Where a border cuts a matrix, an optimiser of whole tensors does something else; AdamW doesn't."""
    options = {"servers": 3, "split_parameters": True}
    native = {"algorithm": "native", "overlap": "off"}
    for made, least, most in ((WHOLE[optimizer], 1e-3, 10), ("adam", 0, 1e-12)):
        (split, *_) = _train(options, 6, optimizer=made)
        (reduced, *_) = _train(native, 3, name="allreduce", optimizer=made)
        assert least <= (split.consensus[0] - reduced.params[0]).abs().max() <= most


@whole
@pytest.mark.sizes(3, 4)
def test_on_these_ranks_too(ranks, optimizer):
    """One server, two of them, and every rank, on as many workers."""

    def body(comm):
        part = comm.split(0 if comm.rank < 2 + servers else None)
        if part is None:
            return None
        run = problem.train(part, "hardsync", {"servers": servers}, optimizer=WHOLE[optimizer], samples=48)
        part.close()
        return run.consensus[0]

    found = []
    for servers in (1, ranks.size - 2):  # noqa: B007 (body reads it)
        found.append(ranks(body)[0])
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)


@served
def test_every_strategy_learns_with_fewer_parameters_than_servers(name):
    runs = _train({"servers": 7, **problem.PERIODS.get(name, {})}, 10, name=name, optimizer="sgd", epochs=2)
    assert all(torch.equal(run.consensus[0], runs[0].consensus[0]) for run in runs)
    module = problem.model()
    start = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, runs[0].consensus)
    assert problem.loss(module, range(problem.SAMPLES)).item() < start


@served
def test_compressed_letters_go_to_servers_without_parameters_too(name):
    density = {"name": "topk", "ratio": 0.5}
    runs = _train({"servers": 6, "compression": density}, 8, name=name, optimizer="sgd", samples=80, epochs=1)
    assert all(torch.isfinite(run.consensus[0]).all() for run in runs)


def _shards(split, servers):
    def body(comm):
        strategy = problem.make(comm, "hardsync", problem.model(), servers=servers, split_parameters=split)
        found = [strategy.place.shards[rank] for rank in range(servers)]
        slices = [(start, stop) for _, _, start, stop, _ in strategy.model.named_slices()]
        strategy.close()
        return found, slices

    return run_virtual(body, servers + 1)[0]


def test_whole_parameters_are_the_default_and_equal_bytes_an_option():
    borders = {}
    for split in (False, True):
        shards, slices = _shards(split, 3)
        lengths = [stop - start for ((start, stop),) in (shard.ranges for shard in shards)]
        borders[split] = [shard.ranges[0][0] for shard in shards]
        assert len(slices) == N_PARAMETERS
        assert (max(lengths) - min(lengths) <= 1) == split
        assert set(borders[split]) <= {start for start, _ in slices} or split


# --- checkpoints ------------------------------------------------------------------------------------------------------
plain = dataclasses.replace(
    tiny.job,
    model=lambda: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 12), torch.nn.Tanh(), torch.nn.Linear(12, 10)
    ),
)
OPTIMIZERS = {"Adafactor": "{name='Adafactor', lr=0.02}", "AdamW": "{name='AdamW', lr=0.02}"}


def _trainer(comm, folder, *overrides):
    values = load({**plain.defaults, "data": {"path": str(folder / "digits.h5")}}, None, overrides)
    return Trainer(plain, JobConfig(**values), comm, folder / "run", None)


def _resumed(folder, size, overrides, resume=None):
    """Runs on so many ranks; where the last checkpoint is, the digest of the parameters, all optimisers' states."""

    def body(comm):
        trainer = _trainer(comm, folder, *overrides)
        summary = trainer.run(resume)
        states = trainer.optimizer.attachment.local_state_dict()["state"]
        trainer.close()
        return summary.sha256, states

    found = run_virtual(body, size)
    return checkpoint.latest(folder / "run" / "checkpoints"), found[0][0], [states for _, states in found]


@pytest.mark.parametrize(("optimizer", "worlds"), [("Adafactor", (1, 2, 3)), ("AdamW", (2, 5, 1))], ids=str)
def test_a_run_goes_on_to_the_bit_on_other_numbers_of_servers(tmp_path, optimizer, worlds):
    """An epoch on each number of servers, two workers always: as three epochs on one server."""
    common = ("strategy=hardsync", f"optimizer={OPTIMIZERS[optimizer]}", EACH_EPOCH)
    (tmp_path / "whole").mkdir()
    _, expected, _ = _resumed(tmp_path / "whole", 3, (*common, "epochs=3"))
    path = None
    for epochs, servers in enumerate(worlds, 1):
        overrides = (*common, f"strategy.servers={servers}", f"epochs={epochs}")
        path, found, states = _resumed(tmp_path, servers + 2, overrides, path)
        held = [set(state) for state in states]
        assert set.union(*held) == set(range(N_PARAMETERS)), "the state of a parameter is lost"
        assert sum(map(len, held)) == N_PARAMETERS, "a rank keeps a state that it doesn't change"
    assert found == expected


def test_buffers_are_those_of_the_workers_also_where_there_were_more_servers(tmp_path):
    """Nothing goes through a server's batch-norm layers."""
    common = ("strategy=hardsync", EACH_EPOCH, "epochs=1")

    def begin(comm):
        trainer = tiny.trainer(comm, tmp_path, *common, "strategy.servers=2")
        trainer.run()
        found = [flat.clone() for flat in trainer.model.buffers]
        trainer.close()
        return found

    def resume(comm):
        trainer = tiny.trainer(comm, tmp_path, *common, "strategy.servers=1")
        trainer.run(checkpoint.latest(tmp_path / "run" / "checkpoints"))
        found = [flat.clone() for flat in trainer.model.buffers]
        trainer.close()
        return found

    _, _, *workers = run_virtual(begin, 4)
    expected = [mean_of_ranks(column) for column in zip(*workers, strict=True)]
    assert not all(torch.equal(a, b) for a, b in zip(workers[0], expected, strict=True))
    for found in run_virtual(resume, 3):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["hardsync", "downpour", "easgd"])
@pytest.mark.parametrize("change", ["strategy.servers=2", "strategy.split_parameters=true"])
def test_other_shards_on_the_same_number_of_ranks_go_on_from_the_servers_parameters(tmp_path, name, change):
    common = (f"strategy={name}", "strategy.servers=3", EACH_EPOCH)
    path, *_ = _resumed(tmp_path, 5, (*common, "epochs=1"))

    def body(comm):
        trainer = _trainer(comm, tmp_path, *common, change, "epochs=2")
        resuming.load(trainer, path)
        found = [flat.clone() for flat in trainer.strategy.consensus()[0]]
        trainer.close()
        return found

    saved = torch.cat([tensor.reshape(-1) for tensor in unsplit(path).values()])
    for (found,) in run_virtual(body, 5):
        assert torch.equal(found, saved)


@pytest.mark.parametrize("name", ["downpour", "eamsgd"])
def test_the_momentum_of_workers_is_taken_up_and_servers_hold_none(tmp_path, name):
    """On other ranks every worker begins with the first one's; resumed again it is not an older one of a server's."""
    common = (f"strategy={name}", "optimizer={name='SGD', lr=0.01, momentum=0.5}", EACH_EPOCH)
    path = None
    for epochs, servers in enumerate((2, 1, 3), 1):
        overrides = (*common, f"strategy.servers={servers}", f"epochs={epochs}")
        path, _, states = _resumed(tmp_path, servers + 2, overrides, path)
        assert [set(state) for state in states] == [set()] * servers + [set(range(N_PARAMETERS))] * 2
