"""`hpcdist horovod`: the command of contrib/horovod/cli.py that builds it."""

from hpcdist.tools.cli.base import of_checkout

app = of_checkout("horovod", "contrib/horovod", "Horovod, which sums gradients with strategy.provider=horovod.")
