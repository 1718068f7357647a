"""Reports: one page on a folder of runs, with its figures, and every number in files."""

from hpcdist.tools.report.page import read_runs, write

__all__ = ["read_runs", "write"]
