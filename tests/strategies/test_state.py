"""What a strategy declares of its state: it comes back, and is carried over to other worlds by parameter names."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.cases import each
from harness.worlds import HeldRank
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import EpochPlan
from hpcdist.errors import CheckpointError, ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.session.resharding import SavedState
from hpcdist.session.state import ParameterLayout
from hpcdist.strategies.base import Contract, Strategy
from hpcdist.strategies.common.state import State, mean_of_ranks
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.strategies.server.channel import RequestChannel
from hpcdist.strategies.server.codec import TensorSlots
from strategies import problem


class Owner:
    """Values of a strategy of one rank."""

    def __init__(self, steps=0, size=1):
        self.model = FlatModel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        self.comm = SimpleNamespace(size=size, raise_on_all_ranks=lambda body: body())
        self.state = State(self.comm, self.model)
        self.steps = self.state.value("steps", 0, self, reshard="first")
        self.fresh = self.state.value("fresh", "new", self)
        self.rows = self.state.value("calls", list, self, "rows", reshard="max", optional=True, resets=True)
        self.named = self.state.by_parameter("named", self, optional=True)
        self.steps, self.fresh = steps, str(steps)


def test_values_come_back_as_they_were_saved():
    saved = Owner(3).state.save()
    assert saved == {"steps": 3, "fresh": "3", "calls": [], "named": {}}
    other = Owner()
    other.state.load(
        {**saved, "calls": [5], "of another version": 1, "named": {"0.bias": 1.0, "of another stage": 2.0}}
    )
    assert (other.steps, other.fresh, other.rows, other.named) == (3, "3", [5], {"0.bias": 1.0})
    assert other.state.loaded == {"steps", "fresh", "calls", "named"}


def test_a_missing_value_starts_again_or_is_refused():
    owner = Owner(0)
    owner.state.load({"steps": 3, "calls": [1]})
    assert (owner.steps, owner.fresh, owner.rows) == (3, "new", [1])
    assert owner.state.loaded == {"steps", "calls"}
    owner.state.reset()
    assert (owner.steps, owner.rows) == (3, [])
    with pytest.raises(CheckpointError, match="the strategy's state must have 'steps'; got calls, fresh. Resume"):
        owner.state.load({"fresh": "a", "calls": []})
    with pytest.raises(CheckpointError, match="the strategy's 'steps' must be of type int; got 'three'. Resume from"):
        owner.state.load({"steps": "three"})


def test_hooks_run_around_saving_and_loading_also_those_of_a_base():
    heard, owner, base = [], Owner(), Owner(7)
    base.state.before_load(lambda: heard.append(("base before", base.steps)))
    base.state.after_load(lambda: heard.append(("base after", base.steps, base.state.loaded)))
    owner.state.include("base", base.state)
    owner.state.before_save(lambda: heard.append("waits"))
    saved = owner.state.save()
    assert heard == ["waits"] and saved["base.steps"] == 7
    owner.state.load(saved | {"base.steps": 8})
    assert heard[1:] == [("base before", 7), ("base after", 8, {"steps", "fresh", "calls", "named"})]


def test_a_name_is_declared_once():
    owner = Owner()
    with pytest.raises(ValueError, match="a name of the state must be declared once; got 'steps' again. Rename"):
        owner.state.value("steps", 0, owner)


@each("name", ["entries", "state", "load_state", "take_up", "masters"])
def test_a_strategy_that_declares_its_state_by_a_method_is_refused(name):
    with pytest.raises(ConfigError, match=rf"Mine must not define '{name}', which nothing calls; write: .*self\.state"):
        type("Mine", (Strategy,), {name: lambda self: None})


def test_a_method_that_was_renamed_is_refused():
    with pytest.raises(ConfigError, match=r"Mine must not define 'settle', which nothing calls; write: def drain\("):
        type("Mine", (Strategy,), {"settle": lambda self: None})


# --- along the parameters ---------------------------------------------------------------------------------------------
class Held(Owner):
    """A strategy of one rank, with a vector along the parameters."""

    def __init__(self, vector, reshard="mean", ranges=None, size=1, steps=0):
        super().__init__(steps, size)
        self.vector = self.state.sharded("vector", tensors=vector, reshard=reshard, ranges=ranges)
        self._ranges = ranges

    def saved(self, works=True):
        layout, values = ParameterLayout(self.model), self.state.save()
        values["vector"] = layout.split("params", values["vector"], self._ranges)
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


@each("case", [("mean", 2.0), ("first", 1.0), ("worker mean", 3.0), ("divide", 6 / 4)])
def test_tensors_of_several_ranks_are_combined(case):
    reshard, factor = case
    ranks = [Held(_line(times=t), steps=t).saved(works=t > 1) for t in (1, 2, 3)]
    now = Held(_line(), reshard, size=4)
    found = now.found(ranks)
    torch.testing.assert_close(found["vector"][0], _line(times=factor)[0])
    assert found["steps"] == 1 and "fresh" not in found


@each("saved_at", [(0, 13), (0, 4, 9, 13)])
@each("now_at", [(0, 13), (0, 5, 13), (0, 6, 6, 9, 13)])
def test_shards_are_cut_anew_also_inside_a_parameter(saved_at, now_at):
    def held(borders):
        return [Held(_line(of=slice(a, b)), "first", [(a, b)]) for a, b in pairwise(borders)]

    ranks = [shard.saved() for shard in held(saved_at)]
    for shard in held(now_at):
        (found,) = shard.found(ranks)["vector"] or [torch.zeros(0)]
        assert torch.equal(found, shard.vector[0])


def test_means_of_integers_are_rounded_and_of_equal_tensors_exact():
    assert mean_of_ranks([torch.tensor([1]), torch.tensor([2])]).tolist() == [2]
    third = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert torch.equal(mean_of_ranks([third] * 7), third)


def test_tensors_start_where_no_rank_saved_them():
    owner = Owner()
    zeros = owner.state.sharded("zeros", owner.model.params)
    copies = owner.state.sharded("copies", owner.model.params, start="parameters", resets=True)
    assert not zeros[0].any() and torch.equal(copies[0], owner.model.params[0])
    for tensor in (*zeros, *copies, *owner.model.params):
        tensor.fill_(2.0)
    owner.state.load({"steps": 0, "copies": [], "named": {}})
    assert not zeros[0].any() and (copies[0] == 2).all() and owner.state.loaded == {"steps", "named"}
    owner.model.params[0].fill_(3.0)
    owner.state.reset()
    assert (copies[0] == 3).all()
    owner.state.sharded("needed", owner.model.params, reshard="mean")
    with pytest.raises(CheckpointError, match="the strategy's state must have 'needed'"):
        owner.state.load({"steps": 0})


# --- every strategy ---------------------------------------------------------------------------------------------------
def _held(value, path, seen, own=()):
    """Every tensor that a strategy and its parts hold, with where it is; what other rooms hold is theirs.

    `own`: modules of the strategy's classes, which may lie in its author's file.
    """
    if id(value) in seen or isinstance(value, (State, Mixing, RequestChannel, TensorSlots)):  # the latter hold messages
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each_value in list(value.items()):
            yield from _held(each_value, f"{path}[{key!r}]", seen, own)
    elif isinstance(value, (list, tuple)):
        for number, each_value in enumerate(value):
            yield from _held(each_value, f"{path}[{number}]", seen, own)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith(
        ("hpcdist.strategies.", "hpcdist.compress.", *own)
    ):
        for key, each_value in list(vars(value).items()):
            yield from _held(each_value, f"{path}.{key}", seen, own)


def _undeclared(strategy, saved):
    """Where a strategy holds tensors, as long as a shard of the parameters, that are neither state nor scratch."""
    model, known = strategy.model, [tensor for _, tensor in _held(saved, "", {})]
    known += [*model.params, *model.grads, *model.frozen, *model.buffers, *strategy.state.tensors]
    storages = {tensor.untyped_storage().data_ptr() for tensor in known}
    held = _held(strategy, type(strategy).__name__, {}, (type(strategy).__module__,))
    least = sum(map(len, model.params)) / (2 * strategy.comm.size)
    large = [(path, own) for path, own in held if own.numel() >= least and own.is_floating_point()]
    return [path for path, own in large if own.untyped_storage().data_ptr() not in storages]


COMPRESSED = {"name": "topk", "ratio": 0.5}
COMPRESSING = ("allreduce", "dpsgd", "hardsync", "easgd", "local_sgd", "strom")
VARIANTS = [
    *((name, {}) for name in strategies.available()),
    *((name, {"compression": COMPRESSED}) for name in COMPRESSING),
    *((name, {"overlap": True}) for name in ("local_sgd", "slowmo", "sgp")),
    *(("streaming_diloco", {"merge": merge, "compression": "e3m0"}) for merge in ("shift", "eager")),
    ("slowmo", {"base": {"name": "sgp"}}),
    ("sparta", {"delay": 2}),
    ("strom", {"topology": "ring"}),
]


@each("case", VARIANTS)
def test_tensors_as_long_as_the_parameters_are_state_or_scratch(case):
    """What is neither declared nor scratch would be lost by a checkpoint without a word."""
    name, own_options = case

    def body(comm):
        module = problem.model()
        local, options = problem.local(name, module.parameters(), lr=0.02), problem.PERIODS.get(name, {}) | own_options
        strategy = problem.make(comm, name, module, local, **options)
        strategy.records.start()
        problem.epoch(strategy, local, EpochPlan(48, len(strategy.config.workers(comm.size)), 4, seed=1), [])
        found = _undeclared(strategy, strategy.state.save())
        strategy.close()
        return found

    for found in run_virtual(body, 4):
        assert not found, (
            f"{', '.join(found)} must be declared: by self.state.sharded, or by self.state.scratch where a checkpoint "
            "may lose it"
        )


class Keeping(Strategy):
    """Keeps parameters without declaring them."""

    contract = Contract(averages="nothing", synchronizes="never")

    def advance(self, update):
        self.before, self.last_loss = [[params.clone()] for params in self.model.params], torch.zeros(1)
        return self.gradients.step_alone(update)


def test_a_strategy_of_any_file_that_keeps_what_it_does_not_declare_is_found():
    def body(comm):
        module = problem.model()
        local = torch.optim.SGD(module.parameters(), lr=0.02)
        strategy = Keeping(Keeping.Config(), comm, FlatModel(module), optimizer=local)
        strategy.before = [[params.clone()] for params in strategy.model.params]
        return _undeclared(strategy, strategy.state.save())

    assert run_virtual(body, 1) == [["Keeping.before[0][0]"]]


@each("name", strategies.available())
def test_a_state_that_one_rank_can_not_restore_is_refused_on_all(name):
    """Also where ranks send each other what they have restored."""

    def body(comm):
        module = nn.Linear(4, 2)
        optimizer = problem.local(name, module.parameters(), lr=0.1)
        options = {"compression": "fp16"} if name in ("hardsync", "parameter_server") else {}
        strategy = problem.make(comm, name, module, optimizer, **options)
        state = strategy.state.save()
        with pytest.raises(CheckpointError, match=r"the strategy's state must have 'steps'; got "):
            strategy.state.load({k: v for k, v in state.items() if k != "steps"} if comm.rank == 1 else state)
        with pytest.raises(CheckpointError, match="the strategy's 'steps' must be of type int; got 'x'") as got:
            strategy.state.load(state | {"steps": "x"} if comm.rank == 1 else state)
        strategy.state.load(state)
        comm.barrier()
        return got.value.on_other_rank

    assert run_virtual(body, 3) == [True, False, True]


def test_a_value_that_can_not_be_loaded_is_named():
    owner = Owner()
    owner.state.sharded("x", tensors=[torch.zeros(3)])
    with pytest.raises(CheckpointError, match="the strategy's 'x' must be a value that this strategy has saved"):
        owner.state.load({"steps": 0, "x": [torch.zeros(2)]})
