"""The start-up check: who is there, and which pairs reach each other; and how findings name those that do not."""

from __future__ import annotations

import itertools

import pytest

from hpcdist.tools.doctor.base import ERROR, WARNING, Nodes
from hpcdist.tools.doctor.startup.check import ALL_PAIRS, Result, check, pairs_to_try
from hpcdist.tools.doctor.startup.findings import absent_nodes, absent_ranks, unreachable_pairs


def test_the_nodes_that_do_not_answer_are_named_where_they_are_known():
    hosts = {0: "n1.cluster", 1: "n1.cluster", 4: "n3.cluster"}
    found = absent_ranks(hosts, [2, 3, 5], ["n1", "n2", "n3", "n4"], 10)
    assert [(f.status, f.nodes) for f in found] == [(ERROR, ("n2",)), (ERROR, ("n4",))]
    text = "every rank must answer; got nothing from ranks 2-3, 5 within 10 s, nor from any rank on n2. It has ended"
    assert found[0].text.startswith(text)


@pytest.mark.parametrize(("hosts", "expected"), [({0: "n1"}, []), ({0: "n1"}, ["n1"]), ({3: "n1"}, ["n1", "n2"])])
def test_elsewhere_the_ranks_are(hosts, expected):
    (found,) = absent_ranks(hosts, [2], expected, 10)
    assert found.nodes == ()
    assert found.text.startswith("every rank must answer; got nothing from rank 2 within 10 s. It has ended")


def test_pairs_of_nodes_that_pass_nothing_are_told_by_node():
    nodes = Nodes(("n1", "n2", "n3", "n4", "n5"), (0, 1, 2, 3, 4))
    (link,) = unreachable_pairs([(1, 2)], nodes, "it did not come")
    assert (link.status, link.nodes, link.weight) == (ERROR, ("n2", "n3"), 1)
    assert link.text.startswith("the link n2-n3 passes nothing: it did not come, though all reach n1. Leave one of the")
    node, rest = unreachable_pairs([(1, 2), (2, 3), (2, 4), (1, 4)], nodes, "it did not come")
    assert (node.nodes, node.weight, rest.nodes) == (("n3",), 3, ("n2", "n5"))
    assert node.text.startswith("the links from n3 to n2, n4, n5 pass nothing: it did not come, though all reach n1.")


def test_all_pairs_are_tried_or_of_many_nodes_some_with_each():
    assert pairs_to_try(1) == [] and pairs_to_try(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    count = ALL_PAIRS + 3
    pairs = pairs_to_try(count)
    assert {(0, 1), (0, 2), (0, 4), (0, 64), (0, 128), (0, count - 1)} <= set(pairs) and (0, 5) not in pairs
    assert all(0 <= a < b < count for a, b in pairs) and len(pairs) <= count * 8


def test_a_node_that_does_not_come_is_named():
    (found,) = absent_nodes(["n3"], "n1", 8)
    assert (found.status, found.nodes) == (WARNING, ("n3",))
    assert found.text == "n3 must come to n1 by TCP; it did not within 8 s: it hangs, or can't reach n1"


class Scripted:
    """Member `rank` of three; `replies` are what it hears, `failed` the pairs that it finds to pass nothing."""

    answer_s, reach_s, size = 8.0, 2.0, 3

    def __init__(self, rank: int, replies: list[dict[int, str]], failed: list[tuple[int, int]]):
        self.rank, self.replies, self.failed, self.calls = rank, replies, failed, []

    def exchange(self, text, limit_s, members):
        self.calls.append((text, limit_s, [*members]))
        return self.replies.pop(0)

    def unreachable(self, pairs, texts):
        return [pair for pair in pairs if pair in self.failed]


def test_what_members_find_out_is_put_together():
    came = {0: "a", 2: "c", 1: "b"}
    member = Scripted(1, [came, {0: "[]", 1: "[[1, 2]]", 2: "[[1, 2], [0, 2]]"}], [(1, 2), (0, 1)])
    found = check(member, "b", lambda came: [(1, 2), (0, 2)])
    assert found == Result(came, (), ((0, 2), (1, 2)))
    assert member.calls == [("b", 8.0, [0, 1, 2]), ("[[1, 2]]", 4.0, [0, 2, 1])]


def test_members_that_do_not_come_are_absent_and_the_others_are_tried():
    member = Scripted(0, [{0: "a", 2: "c"}, {0: "[[0, 2]]"}], [(0, 2)])
    assert check(member, "a", lambda came: [tuple(came)]) == Result({0: "a", 2: "c"}, (1,), ((0, 2),))
    assert check(Scripted(0, [{0: "a"}], []), "a", lambda came: []) == Result({0: "a"}, (1, 2))


def test_without_a_reply_the_first_member_is_absent():
    assert check(Scripted(2, [{2: "c"}], []), "c", lambda came: [(1, 2)]) == Result({2: "c"}, absent=(0,))


@pytest.mark.mpi(min_size=2)
def test_real_ranks_reach_each_other(ranks):
    def body(comm):
        from hpcdist.comm.mpi.first_messages import FirstMessages

        transport = FirstMessages()
        transport.answer_s, transport.reach_s = 20, 10
        return check(transport, f"I am {comm.rank}", lambda came: itertools.combinations(came, 2))

    said = {rank: f"I am {rank}" for rank in range(ranks.size)}
    assert ranks(body) == [Result(said)] * ranks.size
