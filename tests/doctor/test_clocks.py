"""Clocks of nodes: how far each is found to be off, and when that is told."""

from __future__ import annotations

import pytest

from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.tools.doctor.base import OK, WARNING, Nodes, Requirements
from hpcdist.tools.doctor.checks import clocks
from hpcdist.tools.doctor.nodes import find_nodes


def test_a_clock_that_is_off_is_measured_to_within_the_round_trip():
    ahead_s = (0.0, 0.002, -3.0)

    def body(comm):
        nodes = find_nodes(comm, f"n{comm.rank}")
        return clocks.measure(comm, nodes, Requirements(), lambda: 1e9 + comm.now() + ahead_s[comm.rank])

    found = run_virtual(body, 3, network=Network(latency_s=0.01, bandwidth_bytes_s=1e9))[0]["clocks"]
    assert found["n1"]["ahead_s"] == pytest.approx(0.002, abs=1e-5)
    assert found["n2"]["ahead_s"] == pytest.approx(-3.0, abs=1e-5)
    assert found["n1"]["error_s"] == pytest.approx(0.01, rel=0.01), "half of the round trip"


def test_ranks_of_this_machine_have_one_clock(ranks):
    def body(comm):
        nodes = find_nodes(comm, "host")
        measured = clocks.measure(comm, nodes, Requirements())
        return list(clocks.judge(measured, nodes, Requirements())) if comm.rank == 0 else None

    (finding,) = ranks(body)[0]
    assert finding.status == OK and "clock" in finding.text


# --- what is said -----------------------------------------------------------------------------------------------------
NODES = Nodes(("n1", "n2", "n3"), (0, 1, 2))


def judge(*ahead_s: float, error_s: float = 1e-4):
    names = NODES.names[1 : len(ahead_s) + 1]
    found = {name: {"ahead_s": s, "error_s": error_s} for name, s in zip(names, ahead_s)}
    return list(clocks.judge({"clocks": found}, NODES, Requirements()))


def test_clocks_that_agree():
    (finding,) = judge(0.001, -0.002)
    assert (finding.status, finding.text) == (OK, "3 clocks, all within 2.1 ms of n1's")


def test_a_clock_that_does_not():
    (finding,) = judge(0.001, -0.3)
    assert (finding.status, finding.nodes) == (WARNING, ("n3",))
    assert finding.text.startswith("n3's clock is 300 ms behind n1's, it must be within 50 ms. Tell the site")


def test_the_first_nodes_own_clock_may_be_the_one():
    (finding,) = judge(2.0, 2.001)
    assert (finding.status, finding.nodes) == (WARNING, ("n1",))
    assert finding.text.startswith("n1's clock is 2.0 s behind all others.")


def test_a_slow_network_is_no_wrong_clock():
    assert judge(0.3, 0.0, error_s=0.28)[0].status == OK
