"""Versions: which rank of which node has another one."""

from __future__ import annotations

from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import versions

NODES = Nodes(("n1", "n2"), (0, 0, 1, 1))
OWN = {"hpcdist": "1", "torch": "2.9", "mpi": "Open MPI", "python": "3.11", "numpy": "2.1"}


def judge(*differing: dict):
    return list(versions.judge({"versions": [OWN | more for more in differing]}, NODES, Requirements()))


def test_ranks_tell_what_they_run(ranks):
    def body(comm):
        nodes = find_nodes(comm, "host")
        return list(versions.judge(versions.measure(comm, nodes, Requirements()), nodes, Requirements()))

    for (finding,) in ranks(body):
        assert finding.status == OK and "the same on all ranks: hpcdist " in finding.text and "h5py 3" in finding.text


def test_what_no_run_starts_with_is_an_error():
    (found,) = judge({}, {}, {}, {"torch": "2.8"})
    assert (found.status, found.nodes) == (ERROR, ("n2",))
    text = "torch must be the same on all ranks; got 2.8 on rank 3 (n2) and 2.9 elsewhere. Start all from the same"
    assert found.text.startswith(text)


def test_what_may_do_is_a_warning():
    torch, numpy = judge({"numpy": "1.26"}, {}, {"torch": "2.8"}, {"torch": "2.8.1"})
    assert (numpy.status, numpy.nodes) == (WARNING, ("n1",))
    assert "got 2.8, 2.8.1 on ranks 2-3 (n2) and 2.9 elsewhere" in torch.text
