"""Which of several ranks that fail together speaks."""

from __future__ import annotations

import subprocess
import sys

FAILS = """
import sys
from hpcdist.faults import reporter
reporter.FIRST_S, reporter.SILENT_S = 0.0, 0.0
print(reporter.is_reporter(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def _fail(*ranks: int) -> list[str]:
    """What ranks of one node find, none of which ends before the last has had its turn."""
    command = [sys.executable, "-c", FAILS]
    started = [subprocess.Popen([*command, str(rank)], stdin=-1, stdout=-1, text=True) for rank in ranks]
    found = [process.stdout.readline().strip() for process in started]
    for process in started:
        process.communicate()
    return found


def test_one_rank_of_a_node_speaks_however_slow_the_machine_is():
    assert sorted(_fail(1, 1, 1)) == ["False", "False", "True"]  # of a node that is so busy that turns come together


def test_the_next_one_speaks_where_the_first_has_ended():
    assert _fail(1) == ["True"] == _fail(2)
