"""Studies: cells with settings and seeds, whose runs are each made once; what they show, and the files that say so."""

from hpcdist.tools.compare.cells import TUNING, CellRuns, EndedRun, at_rate, declare_cell
from hpcdist.tools.compare.loop import OwnRun
from hpcdist.tools.statistics import Interval, difference, interval, ratio
from hpcdist.tools.study.claims import Claim
from hpcdist.tools.study.output import Study, start

__all__ = [
    "TUNING",
    "CellRuns",
    "Claim",
    "EndedRun",
    "Interval",
    "OwnRun",
    "Study",
    "at_rate",
    "declare_cell",
    "difference",
    "interval",
    "ratio",
    "start",
]
