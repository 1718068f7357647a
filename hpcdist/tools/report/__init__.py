"""Reports: a web page about a folder of runs, its figures, and all numbers as CSV and JSON."""

from hpcdist.tools.report.page import read_runs, write
