"""strom: compressed updates to all, or along a tree; nothing is lost, and nobody waits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from harness.cases import each
from harness.worlds import saved, take_up
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Jitter, Network, run_virtual
from hpcdist.model.flat import FlatModel
from hpcdist.session.state import restore_strategy
from hpcdist.strategies.strom import spanning_tree
from hpcdist.topology import load as topology
from strategies import problem

pytestmark = pytest.mark.computes

Strom = strategies.load("strom")
COMPRESSIONS = [
    {"name": "threshold", "density": 0.1},
    {"name": "threshold", "tau": 0.01},
    {"name": "none"},
    {"name": "threshold", "density": 0.1, "warmup_steps": 4},
    {"name": "threshold", "density": 0.1, "warmup_steps": 4, "warmup_ranks": 1},
]


class Trainer:
    """A strategy with its model, taking steps on random batches; notes what the local optimiser has done in all."""

    def __init__(self, comm, **options):
        self.module = problem.model()
        self.local = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.strategy = Strom(Strom.Config(**options), comm.split(0), FlatModel(self.module))
        self.start = self.params.clone()
        self.changes = torch.zeros_like(self.start)

    @property
    def params(self) -> torch.Tensor:
        return self.strategy.model.params[0]

    def step(self, first: int) -> None:
        def update():
            before = self.params.clone()
            self.local.step()
            self.changes += self.params - before

        self.strategy.comm.compute()
        self.local.zero_grad()
        problem.loss(self.module, [(first + i) % problem.SAMPLES for i in range(4)]).backward()
        self.strategy.step(update)

    def steps(self, count: int, first: int = 0) -> None:
        for step in range(first, first + count):
            self.step(step * 37 + self.strategy.comm.rank * 11)
        self.strategy.pause()

    @property
    def residuals(self) -> dict[int, torch.Tensor]:
        """What has not been sent yet, by the first rank that waits for it."""
        return {link.peers[0]: link.feedbacks[0].residual.clone() for link in self.strategy._links}


def _together(comm, options, steps=9):
    trainer = Trainer(comm, **options)
    trainer.steps(steps)
    found = trainer.params.clone(), trainer.changes, trainer.residuals, trainer.start
    trainer.strategy.close()
    return found


@pytest.mark.sizes(3)
@each("compression", COMPRESSIONS)
@each("add_up", [False, True])
def test_parameters_and_residuals_together_have_every_update(ranks, compression, add_up):
    """Also where messages arrive some steps later."""
    slow = {"network": Network(latency_s=0.5, bandwidth_bytes_s=1e6), "compute": Jitter(0.1, 0.3)} if add_up else {}
    found = ranks(lambda comm: _together(comm, {"compression": compression, "add_up": add_up}), **slow)
    start = found[0][3]
    weight = 1.0 if add_up else 1 / len(found)
    warm = compression.get("warmup_ranks")
    for params, _, _, _ in found:
        torch.testing.assert_close(params, found[0][0], rtol=0, atol=1e-12)
        if warm is None:  # else the others' first updates count for nothing
            held = sum(next(iter(residuals.values())) for _, _, residuals, _ in found)
            wanted = start + weight * sum(changes for _, changes, _, _ in found)
            torch.testing.assert_close(params + held, wanted, rtol=0, atol=1e-12)


@pytest.mark.sizes(4)
@each("graph", ["ring", "exponential"])
def test_along_a_tree_what_a_rank_lacks_is_held_by_the_links_towards_it(ranks, graph):
    options = {"compression": {"name": "threshold", "density": 0.1}, "topology": graph}
    found = ranks(lambda comm: _together(comm, options))
    size = len(found)
    tree = spanning_tree(topology(graph)(size))
    wanted = found[0][3] + sum(changes for _, changes, _, _ in found) / size
    for rank, (params, _, _, _) in enumerate(found):
        whole, waiting = params.clone(), [(peer, rank) for peer in tree[rank]]
        while waiting:  # walks away from this rank; each link's residual is on its way here
            source, towards = waiting.pop()
            whole += found[source][2][towards]
            waiting += [(peer, source) for peer in tree[source] if peer != towards]
        torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-12)


def test_a_spanning_tree_goes_round_ranks_that_are_left_out():
    tree = spanning_tree(topology("ring")(6), [0, 2, 3, 5])
    assert tree == [[2, 5], [], [0, 3], [2], [], [0]]


@each("graph", ["ring", "torus", "exponential", "one_peer_exponential", "random_permutation"])
@each("size", [1, 12])
def test_a_spanning_tree_reaches_every_rank_once(graph, size):
    tree = spanning_tree(topology(graph)(size))
    assert sum(map(len, tree)) == 2 * (size - 1)
    reached, waiting = {0}, [0]
    while waiting:
        for peer in tree[waiting.pop()]:
            if peer not in reached:
                reached.add(peer)
                waiting.append(peer)
    assert reached == set(range(size))
    assert all(rank in tree[peer] for rank, peers in enumerate(tree) for peer in peers)


def test_along_a_tree_every_rank_sends_one_message_per_neighbour():
    def body(comm):
        run = problem.train(comm, "strom", {"topology": "ring", "compression": "none"}, epochs=1)
        return {record.messages_sent for record in run.records}, sum(r.bytes_sent for r in run.records)

    found = run_virtual(body, 5)
    n_bytes = sum(p.nbytes for p in FlatModel(problem.model()).params)
    tree = spanning_tree(topology("ring")(5))
    for (messages, sent), peers in zip(found, tree, strict=True):
        assert messages == {len(peers)}
        assert sent == 12 * len(peers) * n_bytes


@each("graph", ["complete", "ring"])
def test_a_saved_state_goes_on_to_the_same_parameters(graph):
    """Where every message arrives in the step after it was sent, but for the order of additions."""
    cluster = {"network": Network(latency_s=1e-3, bandwidth_bytes_s=1e12), "compute": Constant(0.1)}
    options = {"compression": {"name": "threshold", "density": 0.1}, "topology": graph}

    def whole(comm):
        trainer = Trainer(comm, **options)
        trainer.steps(6)
        kept = trainer.params.clone(), saved(trainer.strategy)
        momentum = deepcopy(trainer.local.state_dict())
        trainer.steps(6, first=6)
        return kept, momentum, trainer.params.clone()

    first = run_virtual(whole, 3, **cluster)

    def rest(comm):
        (params, kept), momentum, _ = first[comm.rank]
        trainer = Trainer(comm, **options)
        trainer.params.copy_(params)
        trainer.local.load_state_dict(momentum)
        restore_strategy(trainer.strategy, kept.at("strategy"))
        trainer.steps(6, first=6)
        return trainer.params.clone()

    for (_, _, expected), found in zip(first, run_virtual(rest, 3, **cluster), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_another_number_of_ranks_takes_up_all_that_was_not_sent():
    def save(comm):
        trainer = Trainer(comm)
        trainer.steps(6)
        return saved(trainer.strategy)

    states = run_virtual(save, 4)

    def load(comm):
        trainer = Trainer(comm)
        take_up(trainer.strategy, states)
        return next(iter(trainer.residuals.values()))

    residuals = [state.at("strategy", "link.residual").values() for state in states]
    held = sum(torch.cat([chunk.tensor.view(-1) for chunk in own]) for own in residuals)
    for size in (2, 3, 5):
        torch.testing.assert_close(sum(run_virtual(load, size)), held, rtol=0, atol=1e-14)
    run_virtual(lambda comm: take_up(Trainer(comm).strategy, states), 1)  # which sends nothing
