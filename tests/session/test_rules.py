"""The table of rules: a strategy of one's own, in a file, is guarded by its contract alone."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import torch
from patterns import gradients, libraries, losses, models, optimizers, samples, schedules  # noqa: F401 (they enter themselves)
from patterns.run import PATTERNS, Together, refuses

import hpcdist
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, MismatchError
from hpcdist.session import rules
from hpcdist.strategies import Contract

MINE = '''
"""Local steps, under any contract."""
from hpcdist.strategies.base import Contract, Outcome, Strategy

class Mine(Strategy):
    """Take local steps.

    Reference: Nobody, "Mine", 2020.
    """

    class Config(Strategy.Config):
        """No options."""

        def workers(self, size):
            return tuple(range(size)) if Mine.contract.ranks == "all work" or size == 1 else tuple(range(1, size))

    contract = {contract!r}

    def advance(self, update):
        if self.model.unfrozen:
            self.model.relayout()
        return self.gradients.step_alone(update)

    def minimise(self, solve, closure):
        self.model.refresh()
        result = solve(closure)
        self.steps += 1
        self.model.gradients.done()
        return self.records.record(self.steps, Outcome(self.steps)), result
'''
# One loop for each rule that looks at the contract.
LOOPS = [
    "clip_grad_norm", "horovods_synchronize", "a_step_kept_from_before", "lbfgs", "values_changed_in_place",
    "a_layer_unfrozen_later", "a_layer_unfrozen_later_and_added_then", "sync_batch_norm_with_uneven_data",
    "state_loaded_within_an_epoch", "a_plain_loader_on_a_rank_that_serves", "consensus_in_the_loop",
    "values_loaded_on_rank_0_only_between_epochs", "gradients_scaled_on_one_rank", "averaged_by_hand_in_the_loop",
    "a_step_inside_backward",
]  # fmt: skip
FREE = Contract(averages="nothing", synchronizes="never", frozen="at any time")
WORDS = {
    field.name: list(ast.literal_eval(re.sub(r"^Literal", "", field.type))) for field in dataclasses.fields(Contract)
}
CONTRACTS = dict.fromkeys(
    [FREE, *(dataclasses.replace(FREE, **{name: word}) for name, words in WORDS.items() for word in words)]
    # What several words say together; strategies of hpcdist are tried in test_patterns.py.
    + [strategies.load(name).contract for name in ("allreduce", "hardsync", "easgd", "sgp", "sandblaster")]
)
ONE_WORD = sum(map(len, WORDS.values())) - len(WORDS)  # contracts that differ from FREE in one word; they come first


def test_every_word_of_the_contract_is_explained():
    for name, words in WORDS.items():
        assert re.search(rf"^\s+{name}: ", Contract.__doc__, re.M), name
        assert len(words) > 1, name


def test_every_rule_is_seen_somewhere_and_says_what_to_do():
    package = Path(hpcdist.__file__).parent
    files = [path for name in ("session", "hf") for path in (package / name).rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files if path.name != "rules.py")
    for pattern, rule in rules.RULES.items():
        assert f'"{pattern}"' in sources, f"no code looks for: {pattern}"
        assert (
            (rule.message.endswith(".") and "; got" in rule.message)
            or rule.error is MismatchError
            or "rank" in rule.message
        )


def test_rules_that_look_at_the_contract_each_have_a_loop_here():
    given = {rule for name in LOOPS for rule in _rules(name)}
    looking = {h for h, rule in rules.RULES.items() if len({rule.refused(contract) for contract in CONTRACTS}) > 1}
    elsewhere = {  # batches in portions: tests/session/test_lbfgs.py
        "several optimisers share a loop", "the model is in stages", "the loss is a sum",
        "a layer is frozen later",  # tests/session/test_refusals.py
        "the loader yields whole batches, or reads its own samples",
        "joint batches are split by label",  # tests/data/test_labels.py
        "micro-batches go to other replicas",  # tests/session/test_random_routing.py
        "an epoch of a stream is left for an evaluation",  # by transformers' Trainer: tests/hf
        "server ranks are called by torch.distributed",  # tests/session/test_leaves.py
        "is_main() is called before rank 0 becomes a server",  # tests/session/test_session.py
    }  # fmt: skip
    assert looking - elsewhere == given & looking


def _rules(name: str) -> list[str]:
    breaks = PATTERNS[name].breaks
    return [breaks] if isinstance(breaks, str) else list(breaks)


@each("name", LOOPS)
def test_a_strategy_in_a_file_is_guarded_by_its_contract_alone(tmp_path, name):
    """Refused by the rule's message where the table says so, for every contract; else the loop runs to its end.

    Where contracts allow the loop and differ from the first one in one word, the test tries one in three.
    """
    for number, contract in enumerate(CONTRACTS):
        refused = [rule for rule in _rules(name) if refuses(rule, contract, 2)]
        if contract.batch == "portions" or (not refused and 0 < number <= ONE_WORD and (number + len(name)) % 3):
            continue
        told = _run(tmp_path / f"mine{number}.py", contract, name)
        regex = PATTERNS[name].refusal("Mine", contract, 2)
        if refused:
            assert told is not None and re.search(regex, told), f"{contract} must refuse {name}; got {told}"
        elif not contract.replicates:  # else the checks of replicas find out that this one averages nothing
            assert told is None or re.search(regex or "x^", told), f"{contract} must allow {name}; got {told}"


def _run(file: Path, contract: Contract, name: str) -> str | None:
    """The message of the refusal of a loop on two ranks; None where it ends."""
    if not file.exists():
        file.write_text(MINE.format(contract=contract))

    def body(comm):
        torch.manual_seed(0)
        workers = 2 if contract.ranks == "all work" else 1
        way = "same" if "same" in PATTERNS[name].ways else "many"
        PATTERNS[name].loop(Together(comm, way, workers, f"{file}:Mine"))

    try:
        run_virtual(body, 2)
    except (ConfigError, MismatchError) as error:
        return str(error)
    return None
