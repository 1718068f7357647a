"""Read runs: state, settings, records and metrics, while a run trains and after it has ended."""

from hpcdist.tools.runs.folder import COMPARISON, FILES, SWEEP, find_runs, read_comparison
from hpcdist.tools.runs.run import FAILURE, Run, State, is_done, last_lines, quiet_s
from hpcdist.tools.runs.steps import Steps
