"""Settings of strategies: defaults as they were published; what has no meaning, or breaks a rule, is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import hpcdist as hd
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.strategies.base import Contract, Strategy
from strategies import mixed, problem

pytestmark = pytest.mark.computes

DEFAULTS = {
    "diloco": {"period": 500, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    "noloco": {"group": 2},
    "slowmo": {"period": 48, "slow_lr": 1.0, "slow_momentum": 0.5},
    "sparta": {"share": 0.005, "selection": "random", "delay": 0},
}
BITS = {"values": "2bit", "decay": 0.95}
WARM = {"name": "topk", "warmup_steps": 3, "warmup_ranks": 1}
UNFED = {"name": "topk", "error_feedback": False}
FEEDS_BACK = "compression of dpsgd must be with error_feedback and without warmup_ranks"
SERVERS = [name for name in strategies.available() if "learner_deadline_s" in strategies.load(name).Config.model_fields]
MERGING = ("streaming_diloco", "sparta")
HALF = "compression must be none, fp16 or bf16 where ranks send .*; got topk"
VOTES = "name must be a compressor whose messages are averaged.*; got signsgd. Use"
BY_THEMSELVES = [
    (
        "allreduce",
        {"overlap": "on", "compression": "fp16"},
        "overlap must be off or auto with .*compr.*; got on",
    ),
    ("adpsgd", {"compression": "fp16"}, "must be one of on_nonfinite, seed, topology; got 'compression'"),
    ("async_diloco", {"spread": 0.1, "rule": "buffered"}, "spread must be 0 with strategy.rule buffered, .* got 0.1"),
    ("async_diloco", {"grace_s": 1.0, "servers": "colocated"}, "strategy.grace_s must be 0 where .* 'colocated'"),
    ("dpsgd", {"compression": UNFED}, FEEDS_BACK),
    ("dpsgd", {"compression": WARM}, FEEDS_BACK),
    ("dpsgd", {"compression": "terngrad"}, "compression of dpsgd must be with .*got terngrad with False"),
    ("downpour", {"servers": "colocated", "server_rule": "optimizer"}, "must be 'adagrad' where .* is 'colocated'"),
    ("eamsgd", {"momentum": 1.0}, "momentum must be"),
    ("eamsgd", {"momentum": -0.1}, "momentum must be"),
    ("easgd", {"beta": 2.0}, "beta must be"),
    ("easgd", {"beta": -0.1}, "beta must be"),
    (
        "gossip_sync",
        {"pairing": "matching", "include_self": False},
        "include_self must be true with .*pairing 'matching'",
    ),
    *(
        (name, {"compression": kwargs}, message)
        for name in ("gossip_pull", "gossip_push", "gossip_sync", "sgp")
        for kwargs, message in (
            ("topk", HALF),
            ({"name": "fp16", "warmup_steps": 4}, "must be without warmup_steps and error_feedback = false"),
        )
    ),
    ("hardsync", {"fan_in": 1}, "fan_in must be"),
    *(("hardsync", {"servers": servers}, "servers") for servers in (0, -1, True, 1.5, "everywhere")),
    ("local_sgd", {"period": 4, "node_period": 4}, r"node_period must be less than strategy.period, 4; got 4\. Avera"),
    ("local_sgd", {"overlap": True, "average_optimizer_state": True}, "average_optimizer_state must be false where"),
    ("sandblaster", {"c1": 0.4, "c2": 0.3}, "strategy.c1 must be less than strategy.c2; got 0.4 and 0.3"),
    ("sandblaster", {"on_nonfinite": "ignore"}, "on_nonfinite must be stop or skip with sandblaster, .*; got ignore"),
    ("sandblaster", {"overlap": 0.6}, "overlap"),
    ("slowmo", {"base": "adpsgd"}, "base must be one of local, dpsgd, sgp, sparta; got adpsgd. Take one of them."),
    ("slowmo", {"base": {"name": "local", "topology": "ring"}}, "base must have no options with local; got topol"),
    ("slowmo", {"base": "dpsgd", "overlap": True}, "overlap must be false, and strategy.base without compression"),
    ("slowmo", {"base": {"name": "dpsgd", "compression": "topk"}}, "strategy.base without compression, with dpsgd"),
    ("slowmo", {"base": {"name": "dpsgd", "topolgy": "ring"}}, "base setting must be one of .* got 'topolgy'"),
    (
        "slowmo",
        {"period": 3, "base": {"name": "sparta", "delay": 3}},
        "base.delay must be less than .*period, 3",
    ),
    ("slowmo", {"slow_lr": float("nan")}, "slow_lr must be a finite number; got nan"),
    ("sparse_loco", {"compression": "none"}, "compression of sparse_loco must be a compressor; got none"),
    (
        "sparse_loco",
        {"compression": "powersgd", "combine": "senders"},
        "combine must be ranks .* with powersgd",
    ),
    ("sparse_loco", {"compression": "qsgd", "combine": "senders"}, "senders with qsgd, of which each .* Take chunk"),
    ("sparse_loco", {"compression": {"error_feedback": False, "decay": 0.9}}, "decay must be omitted .*; got 0.9"),
    ("sparse_loco", {"outer_lr": float("inf")}, "outer_lr must be a finite number; got inf. Step of the common param"),
    ("streaming_diloco", {"period": 3, "delay": 3}, "delay must be less than strategy.period, 3, .* got 3"),
    *((n, {"take_up": "shift"}, "take_up must be given as strategy.merge, .* got 'shift'") for n in MERGING),
    ("streaming_diloco", {"merge": "delayed", "delay": 2}, "delay must not be given where .* is delayed, .* got 2"),
    ("streaming_diloco", {"merge": "eager", "delay": 2}, "delay must not be given where .* is eager, .* got 2"),
    ("streaming_diloco", {"outer_lr": float("inf")}, "outer_lr must be a finite number; got inf"),
    ("streaming_diloco", {"compression": "dgc"}, "compression of streaming_diloco must remember nothing .* got dgc"),
    (
        "strom",
        {"topology": "ring", "compression": UNFED},
        "error_feedback must be true where .* is not complete",
    ),
    *(
        (name, {"servers": "colocated", "learner_deadline_s": 1.0}, "learner_deadline_s must be none where .*colocated")
        for name in SERVERS
    ),
    *((name, {"compression": "signsgd"}, VOTES) for name in ("hardsync", "easgd", "local_sgd", "dpsgd", "strom")),
]


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, **options)


def half():
    return problem.model().half()


def nothing(parameters):
    """No optimiser."""


STOCHASTIC = "topology of {} must be symmetric and doubly stochastic; got {}. Take ring, .* strategy sgp"
ADAMW = "the optimiser of onebit_adam must be torch.optim.AdamW, .*; got SGD"
LOSES = "compression must lose less than there is where differences"
QSGD = {"name": "qsgd", "levels": 1, "error_feedback": False}
COUNT = "strategy.{} must be at most the number of ranks to draw from, {}; got {}"
NO_NAME = r"strategy.others must name parameters, .* none of 0.weight, 0.bias, 2.weight"
# Name, options, number of ranks, message; and how the optimiser or the model is made, where that matters.
IN_A_WORLD = [
    ("adpsgd", {"topology": "ring"}, 5, r"topology must have no odd cycle; got (\d)(-\d){4}-\1, of 5 ranks. Take one"),
    ("adpsgd", {"topology": "complete"}, 5, r"topology must have no odd cycle; got (\d)-\d-\d-\1, of 3 ranks"),
    ("adpsgd", {"topology": "exponential"}, 5, "must be symmetric and the same at every step; got exponential"),
    ("adpsgd", {"topology": "hierarchical"}, 5, "must be symmetric and the same at every step; got hierarchical"),
    ("async_diloco", {"spread": 0.4}, 4, r"spread must be at most 1/3, that a momentum acts once; got 0.4"),
    ("d2", {"topology": "exponential"}, 4, "topology of d2 must be symmetric, .* got exponential"),
    ("d2", {"lazy": False}, 4, r"no eigenvalue of −1/3 or less in W; got ring of 4 ranks, with -0\.333\. Set"),
    ("demo", {}, 1, "momentum of the optimiser must be 0 with demo, which makes the .*; got 0.9", sgd(momentum=0.9)),
    ("demo", {}, 1, "momentum of the optimiser must be 0", sgd(momentum=0.9, nesterov=True)),
    ("demo", {}, 1, "maximize of the optimiser must be False with demo", sgd(maximize=True)),
    ("demo", {}, 1, "the optimiser of demo must be torch.optim.SGD .*; got AdamW. Take that.", adamw()),
    ("demo", {}, 1, "the optimiser of demo must be .*; got none", nothing),
    (
        *("demo", {}, 1, "parameters must be real with demo, .*; got 'weight', which is complex"),
        *(sgd(), lambda: nn.Linear(2, 2, dtype=torch.complex64)),
    ),
    ("dion", {}, 1, "the optimiser of dion must be one of torch's, .*; got none", nothing),
    ("dion", {"others": ("head.weight",)}, 2, NO_NAME),
    ("dion", {"others": ("*.weight", "embed*")}, 2, NO_NAME),
    *(
        ("dpsgd", {"topology": name}, 4, STOCHASTIC.format("dpsgd", name))
        for name in ("exponential", "one_peer_exponential", "random_permutation", "digraph")
    ),
    ("dpsgd", {"compression": "fp16", "topology": "hierarchical"}, 4, "must have the same neighbours .* with .*compr"),
    ("downpour", {"compression": WARM}, 2, "compression.warmup_ranks must be none with downpour, whose"),
    ("eamsgd", {"compression": WARM}, 2, "compression.warmup_ranks must be none with eamsgd, whose"),
    ("easgd", {"compression": WARM}, 2, "compression.warmup_ranks must be none with easgd, whose"),
    ("easgd", {"compression": "terngrad"}, 2, LOSES + ".* got terngrad"),
    ("gossip_pull", {"pulls": 4}, 3, COUNT.format("pulls", 3, 4)),
    ("gossip_push", {"pushes": 3, "include_self": False}, 3, COUNT.format("pushes", 2, 3)),
    *(
        (name, {"topology": "digraph"}, 4, f"strategy.topology of {name} must be doubly stochastic; got digraph")
        for name in ("gradient_tracking", "qg_dsgd")
    ),
    ("hardsync", {"compression": "terngrad"}, 2, LOSES + ".* got terngrad"),
    ("hardsync", {"compression": QSGD}, 2, LOSES + " of par"),
    ("local_sgd", {"period": 1, "average_optimizer_state": True}, 2, "must be the local .*average_opt", nothing),
    ("noloco", {"group": 2}, 3, "group must divide the number of ranks, 3; got 2"),
    ("noloco", {"group": 3}, 4, "group must divide the number of ranks, 4; got 3"),
    ("onebit_adam", {}, 1, ADAMW),
    ("onebit_adam", {}, 1, "amsgrad of the optimiser must be False with onebit_adam", adamw(amsgrad=True)),
    (
        *("onebit_adam", {}, 1, "weight_decay of the optimiser must be 0 with .*; got 0.1"),
        lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1),
    ),
    # Adam's eps is 0 there: an element without a gradient would become 0/0.
    ("onebit_adam", {}, 2, "or bfloat16 with onebit_adam; got '.*' in float16, which holds", adamw(), half),
    ("zero_one_adam", {}, 2, "or bfloat16 with zero_one_adam; got '.*' in float16, which holds", adamw(), half),
    ("qg_dsgd", {}, 2, "optimiser of qg_dsgd must be torch.optim.SGD without dampening; got Adam", adamw()),
    ("sandblaster", {"servers": 2}, 3, "must leave a rank for the coordinator and at least one .*; got 2 on 3 ranks"),
    ("slowmo", {"period": 1, "inner_state": "reset"}, 2, "optimizer must be the local .* strategy.inner_st", nothing),
    ("softsync", {"splits": 4}, 4, "strategy.splits must be at most the number of workers, 3; got 4"),
    ("softsync", {"splits": 3, "servers": "colocated"}, 2, "splits must be at most the number of workers, 2; got 3"),
    ("softsync", {"fan_in": 2, "modulation": "plus-one"}, 7, "fan_in must go with .* got modulation plus-one"),
    ("softsync", {"fan_in": 2, "max_staleness": 3}, 7, "fan_in must go with .* max_staleness 3. Leave fan_in out"),
    ("softsync", {"fan_in": 2, "servers": 2}, 7, "fan_in must go with one server, .*; got strategy.servers 2"),
    ("softsync", {"overlap": True, "servers": "colocated"}, 3, "strategy.overlap must be false where .*; got true"),
    ("hardsync", {"fan_in": 2, "servers": "colocated"}, 5, "fan_in must go with one server, .*; got .* colocated"),
    ("hardsync", {"fan_in": 2, "servers": 2}, 1, "fan_in must go with one server, .*; got strategy.servers 2"),
    ("streaming_diloco", {"period": 1, "delay": 0, "fragment_layers": 1}, 2, "be at least the number of .* 2; got 1"),
]  # fmt: skip


@each("name", DEFAULTS)
def test_defaults_are_those_of_the_paper_or_of_its_code(name):
    config = strategies.load(name).Config()
    assert {key: getattr(config, key) for key in DEFAULTS[name]} == DEFAULTS[name]


def test_an_option_of_a_compressor_leaves_the_papers_others():
    cls = strategies.load("sparse_loco")
    for kwargs in ({"ratio": 0.1}, "chunk_topk", {}):
        options = cls.Config(compression=kwargs).compression
        assert options.name == "chunk_topk" and BITS.items() <= options.options.items()
    assert cls.Config(compression={"name": "topk"}).compression.options == {}
    assert cls.Config(compression={"error_feedback": False}).compression.options == {"values": "2bit"}, "nothing fades"


@each("case", BY_THEMSELVES)
def test_settings_that_mean_nothing_or_contradict_each_other_are_refused(case):
    name, options, message = case
    with pytest.raises(ConfigError, match=message):
        strategies.load(name).Config(**options)


@each("case", IN_A_WORLD)
def test_settings_that_do_not_suit_ranks_model_or_optimiser_are_refused(case, tmp_path):
    name, options, size, message, *makers = case
    make, model = [*makers, *(sgd(), problem.model)[len(makers) :]]
    if "topology" in options:
        options = options | {"topology": mixed.option(options["topology"], size, tmp_path)}

    def body(comm):
        module = model()
        local = make(module.parameters())
        strategy = problem.make(comm, name, module, local, **options)
        problem.loss(module, range(4)).backward()
        strategy.step(local.step if local else partial(int))

    with pytest.raises(ConfigError, match=message):
        run_virtual(body, size, network=mixed.NODES)


def test_settings_like_those_that_are_refused_are_not():
    strategies.load("strom").Config(compression=UNFED)
    assert not strategies.load("allreduce").Config(compression={"name": "signsgd"}).compression.error_feedback
    problem.virtual({"compression": QSGD, "compress_replies": False}, 2, "hardsync", epochs=1)


class Whole(Strategy):
    """A strategy of a user's, which lacks nothing."""

    contract = Contract(averages="nothing", synchronizes="never")

    def advance(self, update):
        return self.gradients.step_alone(update)


class NoOutcome(Whole):
    def advance(self, update):
        self.gradients.step_alone(update)


class FewArguments(Whole):
    def __init__(self, config, comm, model):
        super().__init__(config, comm, model)


class NotInitialised(Whole):
    def __init__(self, config, comm, model, **kwargs):
        self.config = config


class OtherConfig(Whole):
    class Config:
        interval = 1


class NoContract(Strategy):
    def advance(self, update):
        return self.gradients.step_alone(update)


MISTAKES = {
    "NoContract": "NoContract must declare a contract",
    "NoOutcome": r"advance\(\) of NoOutcome must return the outcome",
    "FewArguments": r"__init__ of \S*FewArguments must take the arguments of Strategy's; got \(.*'optimizer'. Write",
    "NotInitialised": r"__init__ of NotInitialised must call that of Strategy; got .*Write super\(\)",
    "OtherConfig": "Config of .*OtherConfig must be a subclass of Strategy.Config; got .*object'>. Write class",
}


@each("mistake", MISTAKES)
def test_what_an_author_forgot_is_said(mistake):
    def body(comm):
        hd.init(comm=comm)
        model = torch.nn.Linear(2, 1)
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hd.DistributedOptimizer(local, model, strategy=f"{__file__}:{mistake}")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=MISTAKES[mistake]):
        run_virtual(body, 2)


def test_a_word_that_a_contract_does_not_know_is_refused():
    message = r"averages of a Contract must be one of gradients, nothing, parameters; got 'gradient'\. Did you mean"
    with pytest.raises(UnknownNameError, match=message):
        Contract(averages="gradient", synchronizes="never")
    with pytest.raises(
        UnknownNameError, match="deaths of a Contract must be one of end all, others continue; got 'None'"
    ):
        Contract(averages="gradients", synchronizes="never", deaths=None)
    with pytest.raises(ConfigError, match="Contract must not be given 'meets', .* write synchronizes="):
        Contract(averages="gradients", meets="never")
