"""The table of patterns and strategies: a loop of one's own trains as in one process, works, or is refused by name."""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

import pytest
import torch
from patterns import gradients, groups, libraries, losses, models, optimizers, samples, schedules, splits  # noqa: F401 (they enter themselves)
from patterns.run import PATTERNS, Alone, Together, copied, difference

from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist import strategies
from hpcdist.errors import ConfigError, MismatchError
from hpcdist.strategies.base import name_of
from strategies import problem

ROOT = Path(__file__).parents[2]
# By strategy and way. joint: workers' batches together are one process's. one: one worker, and a server. same: all
# workers get the same batches. many: each its own, where nothing in one process is the same.
JOINT = {"allreduce": {}, "hardsync": {}, "hardsync colocated": {"servers": "colocated"}}
ONE = {
    "parameter_server": {}, "softsync": {}, "ssp": {}, "downpour": {"server_rule": "optimizer"},
    "easgd": {"beta": 0.0}, "hardsync": {},
}  # fmt: skip
SAME = {
    "gossip_sync": {}, "sgp": {}, "dpsgd": {},
    "local_sgd": {"period": 2}, "diloco": {"period": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
    "streaming_diloco": {
        "period": 2, "fragment_layers": None, "delay": 0, "blend": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0,
    },
    "sparse_loco": {"period": 2, "compression": {"name": "chunk_topk", "ratio": 1.0, "values": "fp64"}},
    "slowmo": {"period": 2, "slow_momentum": 0.0}, "sparta": {"share": 0.5},
    "noloco": {"period": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
}  # fmt: skip
MANY = {
    **{name: problem.PERIODS.get(name, {}) for name in problem.stepping()},
    "streaming_diloco": {"period": 4, "fragment_layers": 2},
    "downpour": {"rate": 0.02},
}  # fmt: skip
del MANY["allreduce"], MANY["hardsync"]
# Where one rank raises the others are ended, and loops that they are in.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
pytestmark = [pytest.mark.computes, pytest.mark.filterwarnings("ignore:The optimiser's state is divided")]
SIZES = {"joint": 3, "one": 2, "same": 3, "many": 3}
TABLE = {"joint": JOINT, "one": ONE, "same": SAME, "many": MANY}
EVERYWHERE = {way: [*options] for way, options in TABLE.items()}  # not what is added for some patterns below


def family(strategy):
    """Strategies that deal with loops alike; of a user's own file, a family of one."""
    for members in (["allreduce"], ["hardsync"], groups.SERVED, groups.SERVERLESS, groups.GOSSIPS):
        if strategy in members and ":" not in strategy:
            return tuple(members)
    return strategy


def cells(name, count):
    """The ways and strategies with which a pattern is tried: of each family's outcome, so many.

    And all with the plain loop, and those of allreduce.
    """
    pattern, of_family = PATTERNS[name], {}
    for way in pattern.ways:
        for strategy in EVERYWHERE[way]:
            plain = strategy.split()[0]
            if not pattern.where or plain in pattern.where:
                refused = pattern.refusal(plain, contract(way, strategy, SIZES[way]), SIZES[way])
                of_family.setdefault((family(plain), refused), []).append((way, strategy))
    for key, found in of_family.items():
        first = zlib.crc32(f"{name} {key}".encode())
        chosen = {(first + number) % len(found) for number in range(count)}
        for number, (way, strategy) in enumerate(found):
            if number in chosen or name == "plain_loop" or strategy == "allreduce":
                yield way, strategy


def options_of(way, strategy, size):
    """The options of a strategy in this way, on so many ranks."""
    return TABLE[way][strategy] | problem.fitting(strategy.split()[0], size)


def trained(ranks, way, name, strategy):
    """What the pattern came to on each rank: its models, what they were before `finish`, and rates of updates."""
    pattern, options = PATTERNS[name], options_of(way, strategy, ranks.size)
    strategy = strategy.split()[0]
    config = strategies.load(strategy).Config.from_mapping(options, "strategy")
    workers = config.workers(ranks.size)

    def body(comm):
        run = Together(comm, way, len(workers), strategy, **options)
        model = pattern.loop(run)
        return copied(model), run.before, run.rates, getattr(run, "same", None)

    return ranks(body), workers


@functools.cache  # what one process comes to is compared with the ranks of many strategies
def alone(name, joint):
    run = Alone(joint)
    torch.manual_seed(0)
    model = PATTERNS[name].loop(run)
    return copied(model), run.before, run.rates


@functools.cache
def contract(way, strategy, size):
    """The contract of a strategy with the options of this way, on so many ranks."""
    cls = strategies.load(strategy.split()[0])
    return cls.Config.from_mapping(options_of(way, strategy, size), "strategy").narrow(cls.contract, size)


def examine(ranks, way, name, strategy):
    """One cell: returns exact, works or refused, or raises."""
    pattern = PATTERNS[name]
    if pattern.needs:
        pytest.importorskip(pattern.needs)
    plain = strategy.split()[0]
    message = pattern.refusal(plain, contract(way, strategy, ranks.size), ranks.size)
    title = name_of(strategies.load(plain))
    other_optimizer = rf"optimiser (of {title} )?must be"  # its rule goes with others than this pattern's
    if message is not None:
        message = message if problem.suited(plain, None) is None else f"{message}|{other_optimizer}"
        with pytest.raises((ConfigError, MismatchError), match=message):
            trained(ranks, way, name, strategy)
        return "refused"
    try:
        found, workers = trained(ranks, way, name, strategy)
    except ConfigError as error:
        if problem.suited(plain, None) is None or not re.search(other_optimizer, str(error)):
            raise
        return "refused"
    trained_models = [model for model, *_ in found]
    first = trained_models[0]
    bad = [key for key, t in first.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    assert not bad, f"the trained model must be finite; got NaN or infinity in {', '.join(bad)}"
    assert all(difference(model, first) == 0.0 for model in trained_models), "ranks end with different models"
    assert len({same for *_, same in found}) == 1, "ranks differ in what must be the same"
    if plain == "allreduce":
        assert all(difference(b, a) == 0.0 for _, before, *_ in found for b, a in zip(before, found[0][1]))
    if not pattern.exact or way == "many" or {plain, strategy} & set(pattern.inexact) or problem.steps_itself(plain):
        return "works"
    expected, before, rates = alone(name, len(workers) if way == "joint" else 1)
    rounds = plain in ("slowmo", "sparta")  # means of equal parameters, which loops that diverge magnify
    tolerance = pattern.tolerance if way == "joint" else max(pattern.tolerance, 1e-9 if rounds else 1e-10)
    if plain == "easgd":  # the centre stays where it is
        found = found[::-1]
        assert all(difference(a, b) <= tolerance for a, b in zip(found[0][1], before, strict=True))
    else:
        apart = difference(first, expected)
        assert apart <= tolerance, (
            f"the loop must train as one process does, up to {tolerance:g}; got parameters that differ by {apart:.3g}"
        )
    if pattern.breaks == optimizers.METHOD and contract(way, strategy, ranks.size).updates == "on servers":
        pairs = [pair for _, seen, *_ in found for pair in zip(seen, before, strict=True)]
        assert all(difference(a, b) <= tolerance for a, b in pairs), "a rank sees another model than the servers have"
    made = found[0]  # a server, where there is one
    assert [numbers for numbers in made[2]] == [pytest.approx(numbers) for numbers in rates], "updates at other rates"
    return "exact"


CASES = [(name, "ours") for name in PATTERNS]
CASES += [(name, own) for name, pattern in PATTERNS.items() if "many" in pattern.ways for own in MANY if ":" in own]


@quiet
@pytest.mark.parametrize(("name", "of"), CASES)
def test_a_loop_trains_as_in_one_process_or_works_or_is_refused(request, name, of):
    """Tries one strategy of each family, two with --all; where a user's file gives a strategy, that one."""
    for way, strategy in cells(name, 1 + request.config.getoption("--all")):
        if of != (strategy if ":" in strategy else "ours"):
            continue
        try:
            examine(VirtualRanks(SIZES[way]), way, name, strategy)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"{name} with {strategy}, {way}") from error


# --- buckets that are averaged while the backward pass computes the rest, on real ranks too ---------------------------
BESIDE = (
    "plain_loop", "clip_grad_norm_with_uneven_data", "gradients_replaced", "horovods_synchronize",
    "grad_scaler_with_clipping", "accumulation_with_uneven_data", "accumulation_with_no_sync",
    "several_losses_one_of_which_reaches_a_part", "a_branch_taken_in_some_steps", "a_branch_taken_on_some_ranks",
    "a_layer_frozen_later", "a_layer_unfrozen_later", "two_optimizers_on_one_model", "gan", "tied_weights",
    "activation_checkpointing_reentrant", "never_zeroed", "hooks_on_accumulated_gradients",
    "sync_batch_norm_with_uneven_data", "lbfgs",
    "sparse_gradients", "sums_of_several_batches", "means_over_tokens_of_several_batches",
)  # fmt: skip
JOINT["allreduce beside"] = {"overlap": "on"}
JOINT["allreduce at times"] = {"overlap": "auto"}


@quiet
@pytest.mark.sizes(4)
@each("name", BESIDE)
def test_overlap_changes_nothing(ranks, name):
    examine(ranks, "joint", name, "allreduce beside")


@quiet
@pytest.mark.sizes(4)
@each("name", ["accumulation_with_uneven_data", "a_branch_taken_in_some_steps", "lbfgs"])
def test_overlap_at_times_changes_nothing(ranks, name):
    examine(ranks, "joint", name, "allreduce at times")


# --- and other strategies there ---------------------------------------------------------------------------------------
ONE_OF_EACH = ["hardsync", "softsync", "easgd", "dpsgd", "local_sgd", "gossip_pull"]
ELSEWHERE = {  # which are enough for what a loop does beside its steps
    "plain_loop": ["hardsync", *MANY],
    "a_layer_frozen_later": ONE_OF_EACH,
    "one_cycle_per_step_with_momentum": ONE_OF_EACH,
    "uneven_data": ONE_OF_EACH,
    "gan": ONE_OF_EACH,
    "figures_shared_in_the_loop": ONE_OF_EACH,
}


@quiet
@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_same_on_real_ranks(ranks, name):
    for strategy in ELSEWHERE[name]:
        examine(ranks, "joint" if strategy == "hardsync" else "many", name, strategy)


# --- the table --------------------------------------------------------------------------------------------------------
def outcome(name: str, strategy: str) -> str:
    """What the tests above hold a pattern to with a strategy: exact, works or refused; - where it is not looked at."""
    pattern = PATTERNS[name]
    found = set()
    for way in pattern.ways:
        if strategy in TABLE[way] and (not pattern.where or strategy in pattern.where):
            if pattern.refusal(strategy, contract(way, strategy, SIZES[way]), SIZES[way]) is not None:
                found.add("refused")
            else:
                found.add("works" if not pattern.exact or way == "many" or strategy in pattern.inexact else "exact")
    return next((word for word in ("refused", "exact", "works") if word in found), "-")


def table() -> str:
    """Markdown: `python -c "import test_patterns; print(test_patterns.table())"` in this folder, tests/ on the path."""
    columns = ["allreduce", "hardsync", *MANY]
    lines = ["| pattern | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in PATTERNS:
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(outcome(name, s) for s in columns) + " |")
    return "\n".join(lines)


def test_the_readme_tells_how_many_patterns_there_are():
    """In tens, so that one more needs no new number."""
    (told,) = re.findall(r"more than (\d+) \[patterns of loops\]", (ROOT / "README.md").read_text())
    assert int(told) == (len(PATTERNS) - 1) // 10 * 10


def test_the_table_says_what_every_strategy_does_in_the_plain_loop():
    assert {strategy: outcome("plain_loop", strategy) for strategy in problem.stepping()} == {
        **dict.fromkeys(problem.stepping(), "works"), **dict.fromkeys(["allreduce", *ONE, *SAME], "exact"),
    }  # fmt: skip
