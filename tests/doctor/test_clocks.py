"""Clocks of nodes: how far each is found to be off, and when that is told."""

from __future__ import annotations

import pytest

from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.tools.doctor.base import OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import clocks


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
@pytest.mark.parametrize(
    ("ahead_s", "error_s", "status", "nodes", "text"),
    [
        ((0.001, -0.002), 1e-4, OK, (), "3 clocks, all within 2.1 ms of n1's"),
        ((0.001, -0.3), 1e-4, WARNING, ("n3",), "n3's clock is 300 ms behind n1's, it must be within 50 ms. Tell the"),
        ((2.0, 2.001), 1e-4, WARNING, ("n1",), "n1's clock is 2.0 s behind all others."),
        ((0.3, 0.0), 0.28, OK, (), "3 clocks"),  # a slow network is no wrong clock
    ],
)
def test_what_is_said_of_clocks(ahead_s, error_s, status, nodes, text):
    found = {name: {"ahead_s": s, "error_s": error_s} for name, s in zip(("n2", "n3"), ahead_s)}
    (finding,) = clocks.judge({"clocks": found}, Nodes(("n1", "n2", "n3"), (0, 1, 2)), Requirements())
    assert (finding.status, finding.nodes) == (status, nodes) and finding.text.startswith(text)
