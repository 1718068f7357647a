"""Stochastic gradient push: what push-sum conserves, where z goes, and the recursion on every topology."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import strategies, topology
from hpcdist.comm.virtual import run_virtual
from strategies import mixed, problem

pytestmark = pytest.mark.computes

NAME = "sgp"
overlapping = each("overlap", [True, False])


@each("name", [name for name in topology.available() if name != "random_groups"])
@pytest.mark.sizes(3, 4)
def test_it_is_the_recursion(ranks, shared_tmp_path, name):
    overlap = ranks.size == 3

    def recursion(matrix):
        w, x = torch.ones(ranks.size, 1, dtype=torch.float64), None

        def step(z, updates, number):
            nonlocal w, x
            x = z.clone() if x is None else x
            p = matrix(number)
            if overlap:  # the gradient is that at z of before the messages
                x, w = p @ x, p @ w
                z = x / w
            x = x + torch.stack([update(row) for update, row in zip(updates, z, strict=True)]) - z
            if not overlap:
                x, w = p @ x, p @ w
            return x / w

        return step, lambda z: x.mean(dim=0)

    mixed.is_recursion(ranks, shared_tmp_path, NAME, name, overlap, recursion)


# --- messages ---------------------------------------------------------------------------------------------------------
def test_the_weight_is_sent_only_where_it_is_not_1(tmp_path):
    def sent(option: dict) -> set[tuple[int, int]]:
        runs = run_virtual(lambda comm: problem.train(comm, NAME, {"topology": option}, tells=False), 4)
        n_bytes = runs[0].params[0].nbytes
        per_peer = 2 if "path" in option else 1
        found = [(record.bytes_sent, record.messages_sent) for run in runs for record in run.records]
        return {(sent - n_bytes * (messages // per_peer), messages) for sent, messages in found}

    assert sent({"name": "one_peer_exponential"}) == {(0, 1)}
    assert sent(mixed.option("digraph", 4, tmp_path)) == {(8, 2), (24, 6)}, "rank 0 sends to three, the others to one"


@overlapping
def test_parameters_that_the_loop_sets_between_epochs_are_what_is_mixed(shared_tmp_path, overlap):
    """Along a digraph, where x and w are kept apart from what the model holds, and what is under way is dropped."""

    def body(comm):
        chosen = mixed.option("digraph", comm.size, shared_tmp_path)
        strategy, fresh = (mixed.linear(comm, NAME, topology=chosen, overlap=overlap) for _ in range(2))
        for _ in range(3):
            strategy.step(lambda: strategy.model.params[0].add_(comm.rank))
        strategy.pause()
        for one in (strategy, fresh):
            one.model.params[0].fill_(2.0)
            one.reset_from_model()
            one.step(lambda one=one: one.model.params[0].add_(comm.rank))
        return torch.equal(strategy.model.params[0], fresh.model.params[0])

    assert all(run_virtual(body, 3))


def test_the_loop_may_not_change_parameters_that_are_sent_meanwhile_or_made_of_x():
    for options, parameters, sends in (
        ({}, "kept", "within steps"),
        ({"overlap": True}, "kept", "between steps"),
        ({"topology": {"name": "digraph", "path": "edges"}}, "replaced", "within steps"),
    ):
        cls = strategies.load(NAME)
        contract = cls.Config.from_mapping(options, "strategy").narrow(cls.contract, 2)
        assert (contract.parameters, contract.sends) == (parameters, sends)
