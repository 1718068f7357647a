"""The runner under all benchmarks: rounds, rows, what a row is beside others."""

from __future__ import annotations

import pytest
import torch

from benchmarks.runner import Side, beside, count_bytes, measure, table, timed, warm_up
from hpcdist.comm.virtual import Constant, Straggler, run_virtual

pytestmark = pytest.mark.computes


def test_rows_have_the_median_of_the_slowest_rank(ranks):
    """Each rank's median of the rounds, and then the largest of the ranks, for every figure."""

    def body(comm):
        seconds = iter([[1.0, 9.0, 3.0], [4.0, 2.0, 5.0]][comm.rank % 2])
        closed = []
        sides = [
            Side("figures", lambda steps: {"median_s": next(seconds), "rank": comm.rank}, {"bytes": 8}),
            Side("told late", lambda steps: float(steps), lambda: {"bytes": len(closed)}, lambda: closed.append(1)),
        ]
        return measure(comm, sides, 3, {"figures": 1, "told late": 7}), closed

    for rows, closed in ranks(body):
        assert rows[0] == {
            "name": "figures",
            "ranks": ranks.size,
            "median_s": 3.0 if ranks.size == 1 else 4.0,
            "rank": ranks.size - 1,
            "bytes": 8,
        }
        assert rows[1] == {"name": "told late", "ranks": ranks.size, "median_s": 7.0, "bytes": 0}
        assert closed == [1]


def test_calls_are_timed_by_the_communicators_clock_and_begin_together():
    def body(comm):
        sides = [Side("compute", timed(comm, comm.compute)), Side("nothing", timed(comm, lambda: None))]
        once_s = warm_up(comm, sides, 1, 3)
        return once_s, [row["median_s"] for row in measure(comm, sides, 3, steps=5)]

    for once_s, medians in run_virtual(body, 4, compute=Straggler(Constant(1e-3), 2, 4.0)):
        assert once_s == {"compute": pytest.approx(4e-3), "nothing": pytest.approx(0.0)}
        assert medians == [pytest.approx(4e-3), pytest.approx(0.0)]


def test_every_round_has_every_side_in_another_order_alike_on_all_ranks():
    def body(comm):
        order: list[str] = []
        sides = [Side(name, lambda steps, name=name: float(bool(order.append(name)))) for name in "abc"]
        measure(comm, sides, 8)
        return ["".join(order[start : start + 3]) for start in range(0, 24, 3)]

    first, second = run_virtual(body, 2)
    assert first == second and len(set(first)) > 3
    assert all(sorted(done) == ["a", "b", "c"] for done in first)


def test_bytes_of_the_busiest_rank_are_counted(ranks):
    def body(comm):
        def call():
            if comm.rank == comm.size - 1:
                comm.isend(torch.zeros(3), 0).wait()
            if comm.rank == 0:
                comm.irecv(torch.zeros(3), comm.size - 1).wait()

        return count_bytes(comm, call)

    assert ranks(body) == [12] * ranks.size


def test_rows_beside_the_fastest_of_others():
    rows = [{"name": "a", "median_s": 1.0}, {"name": "b", "median_s": 2.0}, {"name": "c", "median_s": 4.0}]
    found = beside(rows, ["b", "c"], speedup="speedup", copies="multiple", over="overhead_s", by="slowdown_percent")
    assert [row["speedup"] for row in found] == [2.0, 1.0, 0.5]
    assert [row["copies"] for row in found] == [0.5, 1.0, 2.0]
    assert [row["over"] for row in found] == [-1.0, 0.0, 2.0]
    assert [row["by"] for row in found] == [-50.0, 0.0, 100.0]
    assert beside([{"name": "copy", "median_s": 0.0}], ["copy"], copies="multiple")[0]["copies"] is None
    assert table(found[:1], ("speedup", "name", "bytes")) == [{"speedup": 2.0, "name": "a", "bytes": None}]
