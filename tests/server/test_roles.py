"""Who serves, who adds up, who works: every rank has one place, and every worker's way up ends at a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist import strategies
from hpcdist.errors import ConfigError
from hpcdist.strategies.server.roles import Roles, assign


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


@pytest.mark.parametrize(
    ("size", "fan_in", "aggregators", "workers"),
    [(7, 2, 2, 4), (15, 2, 6, 8), (13, 3, 3, 9), (31, 5, 5, 25), (4, 2, 1, 2)],
)
def test_as_many_ranks_work_as_can(size, fan_in, aggregators, workers):
    roles = assign(size, 1, fan_in)
    assert (len(roles.aggregators), len(roles.workers)) == (aggregators, workers)


@given(size=st.integers(2, 200))
def test_colocated_everybody_is_everything(size):
    everyone = tuple(range(size))
    assert assign(size, "colocated") == Roles(everyone, (), everyone, dict.fromkeys(everyone, everyone))


@pytest.mark.parametrize("servers", [1, 3, "colocated"])
def test_one_rank_works_alone(servers):
    assert assign(1, servers) == Roles((), (), (0,), {})


@pytest.mark.parametrize(("size", "servers"), [(2, 2), (2, 3), (4, 9)])
def test_a_rank_must_be_left_to_work(size, servers):
    with pytest.raises(ConfigError, match=f"must leave at least one rank to be a worker; got {servers} on {size} r"):
        assign(size, servers)


@pytest.mark.parametrize("name", ["hardsync", "softsync"])
@pytest.mark.parametrize("servers", [2, "colocated"])
@pytest.mark.parametrize("size", [1, 5])
def test_a_tree_has_one_root(name, servers, size):
    cls = strategies.load(name)
    with pytest.raises(ConfigError, match=f"fan_in must go with one server, .*; got strategy.servers {servers}"):
        cls.Config(servers=servers, fan_in=2).workers(size)


@pytest.mark.parametrize("servers", [0, -1, True, 1.5, "everywhere"])
def test_a_number_of_servers_that_means_nothing_is_refused(servers):
    with pytest.raises(ConfigError, match="servers"):
        strategies.load("hardsync").Config(servers=servers)


def test_a_fan_in_of_one_is_refused():
    with pytest.raises(ConfigError, match="fan_in must be"):
        strategies.load("hardsync").Config(fan_in=1)
