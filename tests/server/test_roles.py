"""Who serves, who adds up, who works: every rank has one place, and every worker's way up ends at a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.errors import ConfigError
from hpcdist.strategies.server.placement import Roles, assign


def _height(roles, rank):
    """Count the requests from a rank up to a server."""
    height = 0
    while rank not in roles.servers:
        (rank,) = roles.parents[rank]
        height += 1
    return height


@given(servers=st.integers(1, 12), workers=st.integers(1, 190))
def test_without_a_tree_every_worker_posts_to_every_server(servers, workers):
    roles = assign(servers + workers, servers)
    assert roles.servers == tuple(range(servers)) and roles.aggregators == ()
    assert roles.workers == tuple(range(servers, servers + workers))
    assert roles.parents == dict.fromkeys(roles.workers, roles.servers)
    assert all(roles.children(server) == roles.workers for server in roles.servers)


@given(size=st.integers(2, 200), fan_in=st.integers(2, 8))
def test_in_a_tree_every_rank_has_one_place_and_nobody_more_children_than_it_may(size, fan_in):
    roles = assign(size, 1, fan_in)
    assert (*roles.servers, *roles.aggregators, *roles.workers) == tuple(range(size))
    assert set(roles.parents) == {*roles.aggregators, *roles.workers} and roles.workers
    assert all(1 <= len(roles.children(rank)) <= fan_in for rank in (*roles.servers, *roles.aggregators))
    assert all(len(parents) == 1 for parents in roles.parents.values())
    assert len({_height(roles, worker) for worker in roles.workers}) == 1
    assert all(roles.children(worker) == () for worker in roles.workers)
    siblings = [len(roles.children(parent)) for parent in {roles.parents[worker][0] for worker in roles.workers}]
    assert max(siblings) - min(siblings) <= 1


@given(workers=st.integers(1, 8), fan_in=st.integers(2, 8))
def test_few_workers_need_no_aggregators(workers, fan_in):
    if workers <= fan_in:
        assert assign(workers + 1, 1, fan_in) == assign(workers + 1, 1)


@each("case", [(7, 2, 2, 4), (15, 2, 6, 8), (13, 3, 3, 9), (31, 5, 5, 25), (4, 2, 1, 2)])
def test_as_many_ranks_work_as_can(case):
    size, fan_in, *expected = case
    roles = assign(size, 1, fan_in)
    assert [len(roles.aggregators), len(roles.workers)] == expected


@given(size=st.integers(2, 200))
def test_colocated_everybody_is_everything(size):
    everyone = tuple(range(size))
    assert assign(size, "colocated") == Roles(everyone, (), everyone, dict.fromkeys(everyone, everyone))


@each("servers", [1, 3, "colocated"])
def test_one_rank_works_alone(servers):
    assert assign(1, servers) == Roles((), (), (0,), {})


@each("case", [(2, 2), (2, 3), (4, 9)])
def test_a_rank_must_be_left_to_work(case):
    size, servers = case
    with pytest.raises(ConfigError, match=f"must leave at least one rank to be a worker; got {servers} on {size} r"):
        assign(size, servers)
