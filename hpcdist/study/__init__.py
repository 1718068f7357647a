"""Studies: cells with settings and seeds, whose runs are each made once; what they show, and the files that say so."""

from hpcdist.study.claims import Claim
from hpcdist.study.comparison.cells import TUNING, CellRuns, EndedRun, at_rate, declare_cell
from hpcdist.study.comparison.loop import OwnRun
from hpcdist.study.output import Study, start
from hpcdist.study.statistics import Interval, difference, interval, ratio

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
