"""Studies: many runs of which each is made once, and what their spread allows to say."""

from hpcdist.study.pool import Run, run_all
from hpcdist.study.statistics import Interval, interval

__all__ = ["Interval", "Run", "interval", "run_all"]
