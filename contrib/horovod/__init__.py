"""Real Horovod: `hpcdist horovod build` builds, tests and installs it."""
