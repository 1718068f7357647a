"""`hpcdist horovod`: build Horovod, by contrib/horovod/cli.py."""

from hpcdist.tools.cli.base import of_checkout

app = of_checkout("horovod", "contrib/horovod", "Horovod, which sums gradients with strategy.provider=horovod.")
