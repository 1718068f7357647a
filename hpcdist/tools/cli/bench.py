"""`hpcdist bench`: the commands of benchmarks/cli.py."""

from hpcdist.tools.cli.base import of_checkout, on_all_ranks

MEANING = "Measure a part of hpcdist beside its alternatives, in one run. Collective: start it with mpirun."
app = on_all_ranks(of_checkout("bench", "benchmarks", MEANING))
