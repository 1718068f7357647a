"""Timing several sides in one run."""

from __future__ import annotations

import pytest
import torch

from hpcdist.collectives.tuning.timing import calls_within, interleaved, slowest
from hpcdist.comm.virtual import Constant, Straggler, run_virtual


def test_the_slowest_rank_counts_and_all_know_it(ranks):
    found = ranks(lambda comm: slowest(comm, [float(comm.rank), -float(comm.rank), 7.0]))
    assert found == [[ranks.size - 1.0, 0.0, 7.0]] * ranks.size
    assert ranks(lambda comm: slowest(comm, [])) == [[]] * ranks.size


def test_interleaved_gives_seconds_per_call_of_the_slowest_rank():
    def body(comm):
        sides = {"compute": lambda tensor: comm.compute(), "nothing": lambda tensor: None}
        return interleaved(comm, sides, torch.zeros(1), rounds=3, calls={"compute": 5, "nothing": 2})

    found = run_virtual(body, 4, compute=Straggler(Constant(1e-3), 2, 4.0))
    for times in found:
        assert times == {"compute": pytest.approx([4e-3] * 3), "nothing": pytest.approx([0.0] * 3)}


def test_every_round_runs_every_side_in_another_order_alike_on_all_ranks():
    def body(comm):
        order = []
        sides = {name: lambda tensor, name=name: order.append(2 * name) for name in "abc"}
        interleaved(comm, sides, torch.zeros(1), rounds=8, calls=dict.fromkeys("abc", 2))
        return ["".join(order[start : start + 6]) for start in range(0, 48, 6)]

    first, second = run_virtual(body, 2)
    assert first == second
    assert all(sorted(done[::4]) == ["a", "b", "c"] for done in first)
    assert len(set(first)) > 3


def test_a_timing_covers_more_calls_of_what_is_short():
    found = calls_within(1e-3, {"short": 1e-5, "shorter": 1e-6, "long": 1.0, "nothing": 0.0}, 20)
    assert found == {"short": 20, "shorter": 20, "long": 1, "nothing": 1}
    assert calls_within(1e-3, {"short": 3e-4}, 20) == {"short": 3}
