"""Command line, reports, comparisons, simulation, Slurm jobs, node checks.

`import hpcdist` imports nothing of this folder, and nothing below it does.
"""

from hpcdist.errors import require_packages

require_packages("the command line and its tools", "tools", "h5py", "jinja2", "pandas", "rich", "scipy", "typer")
