"""Windows while their owner computes: measured on real ranks, and what is said of it."""

from __future__ import annotations

import pytest

from hpcdist.tools.doctor.base import OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import progress

NODES = Nodes(("n1", "n2"), (0, 1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", [None, "tcp"])
def test_real_ranks_are_measured(ranks, way):
    def body(comm):
        place = comm.apart(way) if way else comm.split(0)
        found = progress.measure(place, find_nodes(place, "host"), Requirements())
        place.close()
        return found

    found = ranks(body)[0]
    assert found["internode"] == way and found["asker"] == 1
    assert 0 < found["mpi_s"] < 10 and 0 < found["window_s"] < 10


def test_one_rank_waits_for_nobody(ranks):
    def body(comm):
        alone = comm.split(comm.rank)
        nodes = find_nodes(alone, "host")
        return list(progress.judge(progress.measure(alone, nodes, Requirements()), nodes, Requirements()))

    assert all(finding.text == "one rank: nobody to wait for" for (finding,) in ranks(body))


def say(mpi_s: float, window_s: float, internode: str | None = "tcp"):
    measured = {"asker": 1, "internode": internode, "mpi_s": mpi_s, "window_s": window_s, "library": "Open MPI v5"}
    (finding,) = progress.judge(measured, NODES, Requirements())
    return finding.status, finding.text


def test_an_mpi_that_waits_is_no_trouble_as_long_as_ours_does_not():
    status, text = say(0.39, 0.004)
    assert status == OK
    assert text == (
        "Open MPI v5: one-sided calls to another node wait for an owner that computes (worst 390 ms); "
        "windows go by tcp, worst 4 ms"
    )
    text = "within the node progress while the owner computes (worst 1 ms); windows go by shared memory"
    assert text in say(1e-3, 1e-4, None)[1]


def test_a_window_that_waits_is():
    status, text = say(0.39, 0.39, "rma")
    assert status == WARNING and "windows go by rma, worst 390 ms. Leave a core free on each node" in text
