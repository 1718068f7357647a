"""Build Horovod, whose last release does not compile against today's torch without changes, and test that it works."""
