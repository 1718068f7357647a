"""Ranks that are killed while they gossip: the others go on without them, whoever they were and wherever they died."""

from __future__ import annotations

import pytest

from faults.deaths import events, go_on, job, survivable
from hpcdist import strategies
from hpcdist.records import load_summary

pytestmark = survivable
NAMES = [
    name
    for name in strategies.available()
    if (cls := strategies.load(name)).contract.deaths == "others continue" and "servers" not in cls.Config.model_fields
]


STEPS = 23  # in an epoch of 4 ranks; in the last of them ranks 0 and 1 have samples


def check_lost(tmp_path, done, *ranks: int) -> None:
    """The others went on without these ranks, and learned."""
    assert done.returncode == 0, done.stderr
    for rank in {*range(4)} - {*ranks}:
        assert events(tmp_path, rank) == [f"goes on without rank {rank}: it has died" for rank in ranks]
    summary = load_summary(tmp_path / "run")
    assert summary.lost_ranks == list(ranks)
    assert summary.metrics["accuracy"] > 0.5


@pytest.mark.parametrize("name", NAMES[::2])
def test_ranks_that_die_one_after_the_other_are_gone_on_without(tmp_path, name):
    """One in mid-epoch, the next in the first step after; as many as are left go on from their checkpoint."""
    options = [f"strategy={name}", "checkpoint.every_steps=40"]
    done = job(tmp_path, 4, *options, deaths={3: 10, 1: STEPS + 1})
    check_lost(tmp_path, done, 3, 1)
    latest = max((tmp_path / "run" / "checkpoints").iterdir())
    go_on(tmp_path, 2, latest, *options, "epochs=4")
    summary = load_summary(tmp_path / "run")
    assert summary.ranks == 2 and summary.lost_ranks == []
    assert summary.metrics["accuracy"] > 0.5


@pytest.mark.parametrize("name", NAMES[1::2])
def test_rank_0_may_die_in_the_first_step_on_another_node(tmp_path, name):
    done = job(tmp_path, 4, f"strategy={name}", "epochs=2", deaths={0: 1}, apart=True)
    check_lost(tmp_path, done, 0)


@pytest.mark.parametrize("name", ["adpsgd", "gossip_sync"])
def test_a_rank_may_die_in_the_last_step_while_the_others_wait_for_it(tmp_path, name):
    done = job(tmp_path, 4, f"strategy={name}", "epochs=1", deaths={1: STEPS}, nap_s=0.5)
    check_lost(tmp_path, done, 1)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("gossip_pull", "strategy._published._header.put"),  # begins to publish
        ("gossip_push", "strategy._counts.fetch_add"),  # has written, but not counted
        ("gossip_sync", "strategy.comm.isend"),  # has begun to receive
    ],
)
def test_a_rank_may_die_within_a_transfer(tmp_path, name, inside):
    """Pulls and pushes between nodes, pairs inside one."""
    apart = name != "gossip_sync"
    done = job(tmp_path, 4, f"strategy={name}", "epochs=2", deaths={1: 5}, inside=inside, apart=apart, hidden=1000)
    check_lost(tmp_path, done, 1)
