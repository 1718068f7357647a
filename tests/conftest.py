"""The harness does it all: see tests/harness."""

pytest_plugins = ["harness.plugin", "harness.quiet", "harness.hosts"]
