"""What servers have of the parameters: whole ones, for optimisers that look at whole tensors, or equal bytes."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from harness.cases import each
from hpcdist import checkpoint, strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
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
whole = each("optimizer", WHOLE)
served = each("name", [name for name in strategies.available() if issubclass(strategies.load(name), ServerStrategy)])


NATIVE = {"algorithm": "native", "overlap": "off"}
_train = partial(problem.virtual, name="hardsync", compute=Exponential(0.1))


@whole
@each("servers", [3, 6, "colocated"])
def test_an_optimiser_of_whole_tensors_does_on_servers_what_it_does_in_allreduce(optimizer, servers):
    size = 3 if servers == "colocated" else 3 + servers
    given = {"optimizer": WHOLE[optimizer], "epochs": 1}
    runs = _train({"servers": servers}, size, **given)
    (reduced, *_) = _train(NATIVE, 3, name="allreduce", **given)
    start = FlatModel(problem.model()).params[0]
    assert (reduced.params[0] - start).abs().max() > 0.1
    for run in runs:
        torch.testing.assert_close(run.consensus[0], reduced.params[0], rtol=0, atol=1e-12)


@whole
def test_one_of_single_elements_alone_goes_with_equal_bytes(optimizer):
    """Where a border cuts a matrix, an optimiser of whole tensors does something else; AdamW doesn't."""
    options = {"servers": 3, "split_parameters": True}
    for made, least, most in ((WHOLE[optimizer], 1e-3, 10), ("adam", 0, 1e-12)):
        (split, *_) = _train(options, 6, optimizer=made, epochs=1)
        (reduced, *_) = _train(NATIVE, 3, name="allreduce", optimizer=made, epochs=1)
        assert least <= (split.consensus[0] - reduced.params[0]).abs().max() <= most


@served
def test_every_strategy_learns_with_fewer_parameters_than_servers_compressed_too(name):
    options = {"servers": 6, "compression": {"name": "topk", "ratio": 0.5}, **problem.PERIODS.get(name, {})}
    runs = _train(options, 8, name=name, optimizer="sgd", samples=120, epochs=1)
    assert all(torch.equal(run.consensus[0], runs[0].consensus[0]) for run in runs)
    module = problem.model()
    start = problem.loss(module, range(problem.SAMPLES)).item()
    problem.load(module, runs[0].consensus)
    assert problem.loss(module, range(problem.SAMPLES)).item() < start


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


@pytest.mark.parametrize(("optimizer", "worlds"), [("Adafactor", (1, 3)), ("AdamW", (2, 5, 1))], ids=str)
def test_a_run_goes_on_to_the_bit_on_other_numbers_of_servers(tmp_path, optimizer, worlds):
    """An epoch on each number of servers, two workers always: as three epochs on one server."""
    common = ("strategy=hardsync", f"optimizer={OPTIMIZERS[optimizer]}", EACH_EPOCH)
    (tmp_path / "whole").mkdir()
    _, expected, _ = _resumed(tmp_path / "whole", 3, (*common, f"epochs={len(worlds)}"))
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

    def buffers(comm, servers, path=None):
        with tiny.training(comm, tmp_path, *common, f"strategy.servers={servers}") as trainer:
            trainer.run(path)
            return [flat.clone() for flat in trainer.model.buffers]

    _, _, *workers = run_virtual(lambda comm: buffers(comm, 2), 4)
    expected = [mean_of_ranks(column) for column in zip(*workers, strict=True)]
    assert not all(torch.equal(a, b) for a, b in zip(workers[0], expected, strict=True))
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    for found in run_virtual(lambda comm: buffers(comm, 1, path), 3):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_shards_on_the_same_number_of_ranks_go_on_from_the_servers_parameters(tmp_path):
    common = ("strategy=downpour", "strategy.servers=3", EACH_EPOCH)
    path, *_ = _resumed(tmp_path, 5, (*common, "epochs=1"))

    def body(comm, change):
        trainer = _trainer(comm, tmp_path, *common, change, "epochs=2")
        resuming.load(trainer, path)
        found = [flat.clone() for flat in trainer.strategy.consensus()[0]]
        trainer.close()
        return found

    saved = torch.cat([tensor.reshape(-1) for tensor in unsplit(path).values()])
    for change in ("strategy.servers=2", "strategy.split_parameters=true"):
        for (found,) in run_virtual(lambda comm, change=change: body(comm, change), 5):
            assert torch.equal(found, saved)


@pytest.mark.parametrize("name", ["downpour", "eamsgd"])
def test_the_momentum_of_workers_is_taken_up_and_servers_hold_none(tmp_path, name):
    """On other ranks every worker begins with the first one's; resumed again it is not an older one of a server's."""
    common = (f"strategy={name}", "optimizer={name='SGD', lr=0.01, momentum=0.5}", EACH_EPOCH)
    path = None
    for epochs, servers in enumerate((2, 3), 1):
        overrides = (*common, f"strategy.servers={servers}", f"epochs={epochs}")
        path, _, states = _resumed(tmp_path, servers + 2, overrides, path)
        assert [set(state) for state in states] == [set()] * servers + [set(range(N_PARAMETERS))] * 2
