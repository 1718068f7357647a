"""Small values of all ranks, and work that succeeds on all of them or fails alike on all."""

from __future__ import annotations

import math

import pytest

from hpcdist.comm.alone import Alone
from hpcdist.errors import CheckpointError, ConfigError, UnknownNameError


def test_values_arrive_in_rank_order(ranks):
    def body(comm):
        values = comm.gather({"rank": comm.rank, "list": [1, 2.5, None, "é"], "best": math.inf})
        return values, comm.gather(None if comm.rank else "only rank 0")

    for values, words in ranks(body):
        assert values == [{"rank": r, "list": [1, 2.5, None, "é"], "best": math.inf} for r in range(ranks.size)]
        assert words == ["only rank 0"] + [None] * (ranks.size - 1)


def test_work_that_succeeds_everywhere_returns_each_ranks_result(ranks):
    assert ranks(lambda comm: comm.together(lambda: comm.rank + 7)) == [rank + 7 for rank in range(ranks.size)]


@pytest.mark.sizes(3, 4)
def test_where_it_fails_all_fail_alike_and_the_first_is_named(ranks):
    def body(comm):
        def work():
            if comm.rank > 0:
                raise CheckpointError(f"the file of rank {comm.rank} is damaged")

        with pytest.raises(CheckpointError) as caught:
            comm.together(work)
        comm.barrier()  # nobody is left waiting
        return str(caught.value)

    first, *others = ranks(body)
    assert first == "on rank 1: the file of rank 1 is damaged"
    assert others == [f"the file of rank {rank} is damaged" for rank in range(1, ranks.size)]


@pytest.mark.sizes(2, 3)
def test_an_error_that_is_made_of_more_than_a_message_is_told_as_its_kind(ranks):
    def body(comm):
        def work():
            if comm.rank == 0:
                raise UnknownNameError("colour", "blau", ["blue"])

        with pytest.raises(ConfigError, match=r"colour must be one of blue; got 'blau'") as caught:
            comm.together(work)
        return str(caught.value).startswith("on rank 0: ")

    assert ranks(body) == [False] + [True] * (ranks.size - 1)


def test_one_rank_alone():
    comm = Alone()
    assert comm.gather([1]) == [[1]] and comm.together(lambda: 3) == 3


def test_settings_are_members_of_every_communicator(ranks):
    def body(comm):
        comm.failures.deadline_s = 30.0
        part = comm.split(0)
        found = part.failures.deadline_s, part.memory.internode, part.memory.device_aware
        part.close()
        return found

    assert set(ranks(body)) == {(30.0, None, False)}
