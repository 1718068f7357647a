"""Pull gossip: random peers, the mean conserved in expectation and not exactly, nobody waits."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
from strategies import problem

NAME = "gossip_pull"


def test_peers_are_drawn_uniformly_oneself_included():
    size, steps = 4, 400

    def body(comm):
        strategy = problem.make(comm, NAME, torch.nn.Linear(1, 1), seed=3)
        drawn = []
        strategy._average_with = lambda peer, weight, published: drawn.append(peer)
        for _ in range(steps):
            strategy.step(lambda: None)
        strategy.close()
        return drawn

    for rank, drawn in enumerate(run_virtual(body, size)):
        counts = [drawn.count(peer) for peer in range(size)]
        assert counts[rank] == 0
        counts[rank] = steps - len(drawn)  # drew itself: nothing to do
        assert all(abs(count - steps / size) < 5 * (steps * 3 / 16) ** 0.5 for count in counts)


def test_a_straggler_delays_nobody():
    """All others do their steps in their own time, at no wait."""

    def body(comm):
        strategy = problem.make(comm, NAME, problem.model())
        took_s = problem.seconds(strategy, 20)
        strategy.close()
        return took_s

    network = Network(latency_s=1e-4, bandwidth_bytes_s=1e9)
    taken_s = run_virtual(body, 5, network=network, compute=Straggler(Constant(0.1), 2, 8.0))
    assert taken_s[2] > 16
    assert all(t < 20 * 0.1 * 1.1 for rank, t in enumerate(taken_s) if rank != 2)


def test_bytes_are_one_parameter_vector_per_foreign_draw():
    runs = run_virtual(lambda comm: problem.train(comm, NAME, epochs=1), 4)
    n_bytes = runs[0].params[0].nbytes
    for run in runs:
        for record in run.records:
            assert record.bytes_sent == 0
            assert record.bytes_fetched == 0 or n_bytes <= record.bytes_fetched < n_bytes + 100
        assert any(record.bytes_fetched for record in run.records)


@pytest.mark.parametrize("overtaken", [0, 1, 3])
def test_a_reading_that_was_overtaken_leaves_no_trace(overtaken):
    """Parameters are read where they lie, and the own ones come back before the next attempt."""

    def body(comm):
        strategy = problem.make(comm, NAME, torch.nn.Linear(3, 2), draw_self=False)
        (own,) = strategy.model.params
        own.copy_(torch.arange(8.0) + comm.rank)
        strategy.load_state({"steps": 0, "peers": None})
        read, left = strategy._published.use_torn, [overtaken]

        def torn(function, out, rank):
            done = read(function, out, rank)
            if left[0]:
                left[0] -= 1
                own.fill_(float("nan"))  # as much as a torn mean may do
                return done - 2
            return done

        strategy._published.use_torn = torn
        strategy._mix()
        comm.barrier()
        found = own.clone()
        strategy.close()
        return found, strategy._published.retries

    for found, retries in run_virtual(body, 2):
        assert torch.equal(found, torch.arange(8.0) + 0.5)
        assert retries == overtaken


def test_alone_nothing_is_published():
    def body(comm):
        strategy = problem.make(comm, NAME, problem.model())
        published = strategy._published.own()
        strategy.step(lambda: None)
        strategy.close()
        return [len(tensor) for tensor in published]

    assert run_virtual(body, 1) == [[0]]
