"""Which nodes are left out: the worst first, never more nor fewer than there are to spare."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.errors import ConfigError
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding
from hpcdist.tools.doctor.report import choose_exclusion as choose
from hpcdist.tools.doctor.report import describe_exclusion as describe

NAMES = ("n1", "n2", "n3", "n4", "n5")


@st.composite
def findings(draw):
    def whose():
        return tuple(draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)))

    return [Finding(draw(st.sampled_from([OK, WARNING, ERROR])), "x", whose()) for _ in range(draw(st.integers(0, 8)))]


@given(findings(), st.integers(0, 4))
def test_exactly_so_many_are_left_out(found, spare):
    choice = choose(NAMES, found, spare)
    assert len(choice.excluded) == spare and list(choice.excluded) == [
        name for name in NAMES if name in choice.excluded
    ]
    assert set(choice.healthy) <= set(choice.excluded)
    stays = [f for f in found if f.status == ERROR and not set(f.nodes) & set(choice.excluded)]
    assert list(choice.errors) == stays


@given(findings(), st.integers(0, 4))
def test_no_node_with_an_error_stays_where_one_without_leaves(found, spare):
    choice = choose(NAMES, found, spare)
    if choice.healthy:
        assert not any(f.nodes for f in choice.errors), "an error of a node stays, and a healthy node leaves"


@given(st.sets(st.sampled_from(NAMES), max_size=4), st.sets(st.sampled_from(NAMES), max_size=4), st.integers(0, 4))
def test_errors_leave_before_warnings_and_these_before_the_healthy(broken, slow, spare):
    found = [Finding(WARNING, "x", (name,)) for name in sorted(slow)]
    found += [Finding(ERROR, "x", (name,)) for name in sorted(broken)]
    out = set(choose(NAMES, found, spare).excluded)
    slow = slow - broken
    assert out <= broken or broken <= out
    assert out <= broken | slow or broken | slow <= out


def test_of_two_slow_nodes_the_slower_one_leaves():
    found = [Finding(WARNING, "slow", ("n2",), weight=80), Finding(WARNING, "slow", ("n5",), weight=2.1)]
    assert choose(NAMES, found, 1).excluded == ("n2",)


def test_an_error_of_a_link_is_settled_by_either_end():
    found = [Finding(ERROR, "link", ("n2", "n3")), Finding(WARNING, "slow", ("n3",))]
    choice = choose(NAMES, found, 1)
    assert choice.excluded == ("n3",) and choice.errors == ()


def test_an_error_that_is_nobodys_stays():
    found = [Finding(ERROR, "no room")]
    assert choose(NAMES, found, 2).errors == tuple(found)


def test_what_is_said():
    sick = [Finding(WARNING, "slow", ("n2",))]
    assert describe(choose(NAMES, sick, 1), NAMES).text == "excludes n2; 4 remain: n1, n3, n4, n5"
    text = describe(choose(NAMES, sick, 2), NAMES).text
    assert text == "excludes n2 and n5 (healthy); 3 remain: n1, n3, n4"
    assert describe(choose(NAMES, [], 1), NAMES).text.startswith("excludes n5 (healthy); 4 remain")
    assert describe(choose(NAMES, [], 0), NAMES).text.startswith("excludes no node; 5 remain")


@pytest.mark.parametrize("spare", [5, 6])
def test_some_node_must_remain(spare):
    message = re.escape(f"spare must be at least 0 and below the number of nodes, 5; got {spare}.")
    with pytest.raises(ConfigError, match=message):
        choose(NAMES, [], spare)
