"""`hpcdist bench`: the commands of benchmarks/cli.py."""

from hpcdist.tools.cli.base import of_checkout, on_all_ranks

MEANING = "Benchmark a part of hpcdist against alternatives, in one run. Collective: start it with mpirun."
app = on_all_ranks(of_checkout("bench", "benchmarks", MEANING))
