"""Building Horovod, whose last release does not build against today's torch as it stands, and proving that it works."""
