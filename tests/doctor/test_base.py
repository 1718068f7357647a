"""What the doctor's checks share: gathering through rank 0, calls that may hang, names and numbers in a line."""

from __future__ import annotations

import re
import time

import pytest

from hpcdist.errors import DeadlineError
from hpcdist.tools.doctor import checks
from hpcdist.tools.doctor.base import Nodes, counted, gather, listed, within


def test_every_rank_gets_every_ranks_value(ranks):
    def body(comm):
        return [gather(comm, {"rank": comm.rank, "text": "ä" * 1000 * comm.rank}) for _ in range(3)]

    wanted = [{"rank": r, "text": "ä" * 1000 * r} for r in range(ranks.size)]
    assert ranks(body) == [[wanted] * 3] * ranks.size


def test_nodes_know_their_ranks():
    nodes = Nodes(("a", "b"), (0, 1, 0, 1))
    assert nodes.ranks(1) == [1, 3] and nodes.leaders == [0, 1] and nodes.name(3) == "b" and str(nodes) == "a, b"


def test_what_hangs_is_left_behind():
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=re.escape("a sleep did not end within 0.1 s.")):
        within(0.1, "a sleep", lambda: time.sleep(20))
    assert time.monotonic() - start < 10


def test_what_does_not_hang_returns_or_raises():
    assert within(5, "a sum", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        within(5, "a division", lambda: 1 / 0)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5, 1, 2, 5], "1-2, 5"), ([4, 6], "4, 6")]
)
def test_numbers_in_a_line(numbers, text):
    assert counted(numbers) == text


def test_many_names_in_a_line():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"n{i}" for i in range(20)], most=3) == "n0, n1, 18 more"
    assert listed([f"n{i}" for i in range(3)], most=3) == "n0, n1, n2"


def test_checks_are_found_by_their_files_names():
    assert {"clocks", "files", "gpus", "links", "progress", "versions"} <= set(checks.available())
    for name in checks.available():
        check = checks.load(name)
        assert check.__doc__ and callable(check.measure) and callable(check.judge)
