"""What a strategy declares of its state: it comes back, and is carried over to other worlds by parameter names."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.cases import each
from harness.worlds import HeldRank
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CheckpointError
from hpcdist.model.flat import FlatModel
from hpcdist.session.resharding import SavedState
from hpcdist.session.state import ParameterLayout
from hpcdist.strategies.common.state import (
    Along,
    Entry,
    attribute,
    dropped,
    first,
    held_tensors,
    load_entries,
    mean_of_ranks,
    mean_of_workers,
    save_entries,
    spread,
    zeros,
)
from strategies import problem


def _declare(owner):
    fresh = Entry("fresh", lambda: owner.fresh, lambda value: setattr(owner, "fresh", value), dropped("new"))
    return [attribute(owner, "steps"), fresh, replace(attribute(owner, "calls", max), optional=True)]


def _owner(steps):
    return SimpleNamespace(steps=steps, fresh=str(steps), calls=0)


def test_entries_come_back_as_they_were_saved():
    saved = save_entries(_declare(_owner(3)))
    assert saved == {"steps": 3, "fresh": "3", "calls": 0}
    other = _owner(0)
    load_entries(_declare(other), {**saved, "calls": 5, "of another version": 1})
    assert (other.steps, other.fresh, other.calls) == (3, "3", 5)


def test_a_missing_entry_begins_anew_or_stays_or_is_refused():
    owner = _owner(0)
    load_entries(_declare(owner), {"steps": 3})
    assert (owner.steps, owner.fresh, owner.calls) == (3, "new", 0)
    with pytest.raises(CheckpointError, match="the strategy's state must have 'steps'; got calls, fresh. Resume"):
        load_entries(_declare(owner), {"fresh": "a", "calls": 1})
    with pytest.raises(CheckpointError, match="the strategy's 'steps' must be of type int; got 'three'. Resume from"):
        load_entries(_declare(owner), {"steps": "three"})


# --- along the parameters ---------------------------------------------------------------------------------------------
class Held:
    """A strategy of one rank, with a vector along the parameters."""

    def __init__(self, vector, combine=mean_of_ranks, ranges=None, size=1, **of_rank):
        self.model = FlatModel(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
        self.vector, self.comm = vector, SimpleNamespace(size=size)
        self._ranges, self._combine, self.of_rank = ranges, combine, of_rank

    def entries(self):
        owner = _owner(self.of_rank.get("steps", 0))
        return [*_declare(owner), held_tensors("vector", self.vector, self._combine, self._ranges)]

    def saved(self, works=True):
        layout, ranges = ParameterLayout(self.model), self._ranges
        values = save_entries(self.entries()) | {"vector": layout.split("params", self.vector, ranges)}
        values = {"strategy": values, "works": works, "about": {"strategy": "held", **layout.about()}}
        return HeldRank(values | {"masters": layout.split("params", self.model.params)})

    def found(self, ranks):
        state = SavedState(ranks, 1, "folder").reshard_strategy(self)["strategy"]
        return state | {"vector": ParameterLayout(self.model).join(state["vector"], self._ranges)}


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr("hpcdist.session.resharding.name_of", lambda strategy: "held")


def _line(*, times=1.0, of=slice(None)):
    return [(torch.arange(13.0) * times)[of].clone()]


@each("case", [(mean_of_ranks, 2.0), (first, 1.0), (mean_of_workers, 3.0), (spread, 6 / 4)])
def test_tensors_of_several_ranks_are_combined(case):
    combine, factor = case
    ranks = [Held(_line(times=t), steps=t).saved(works=t > 1) for t in (1, 2, 3)]
    now = Held(_line(), combine, size=4)
    found = now.found(ranks)
    torch.testing.assert_close(found["vector"][0], _line(times=factor)[0])
    assert found["steps"] == 1 and "fresh" not in found


@each("saved_at", [(0, 13), (0, 4, 9, 13)])
@each("now_at", [(0, 13), (0, 5, 13), (0, 6, 6, 9, 13)])
def test_shards_are_cut_anew_also_inside_a_parameter(saved_at, now_at):
    def held(borders):
        return [Held(_line(of=slice(a, b)), first, [(a, b)]) for a, b in pairwise(borders)]

    ranks = [shard.saved() for shard in held(saved_at)]
    for shard in held(now_at):
        (found,) = shard.found(ranks)["vector"] or [torch.zeros(0)]
        assert torch.equal(found, shard.vector[0])


def test_means_of_integers_are_rounded_and_of_equal_tensors_exact():
    assert mean_of_ranks([torch.tensor([1]), torch.tensor([2])]).tolist() == [2]
    third = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert torch.equal(mean_of_ranks([third] * 7), third)


def test_what_begins_anew_does_so_though_no_rank_saved_it():
    velocity = [torch.ones(2), torch.ones(3)]
    load_entries([held_tensors("velocity", velocity, zeros(velocity)), Along("centre", list, print)], {})
    assert not any(tensor.any() for tensor in velocity)


@each("name", strategies.available())
def test_a_state_that_one_rank_can_not_restore_is_refused_on_all(name):
    """Also where ranks send each other what they have restored."""

    def body(comm):
        module = nn.Linear(4, 2)
        optimizer = problem.local(name, module.parameters(), lr=0.1)
        options = {"compression": "fp16"} if name in ("hardsync", "parameter_server") else {}
        strategy = problem.make(comm, name, module, optimizer, **options)
        state = strategy.state()
        with pytest.raises(CheckpointError, match=r"the strategy's state must have 'steps'; got "):
            strategy.load_state({k: v for k, v in state.items() if k != "steps"} if comm.rank == 1 else state)
        with pytest.raises(CheckpointError, match="the strategy's 'steps' must be of type int; got 'x'") as got:
            strategy.load_state(state | {"steps": "x"} if comm.rank == 1 else state)
        strategy.load_state(state)
        comm.barrier()
        return got.value.elsewhere

    assert run_virtual(body, 3) == [True, False, True]


def test_a_value_that_an_entry_can_not_take_is_named():
    short = Entry("x", list, lambda saved: torch.zeros(3).copy_(saved))
    with pytest.raises(CheckpointError, match="the strategy's 'x' must be what such a strategy has saved"):
        load_entries([short], {"x": torch.zeros(2)})
