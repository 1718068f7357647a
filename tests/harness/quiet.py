"""Only rank 0 reports, and remembers in pytest's cache what failed."""

from __future__ import annotations

import os

import pytest

from harness.plugin import JOB


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """After pytest has made its own reporter: puts one in its place that writes to nowhere, except on rank 0."""
    job = config.stash[JOB]
    if not job or job.rank == 0:
        return
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(type(reporter)(config, open(os.devnull, "w")), "terminalreporter")
    if hasattr(config, "cache"):
        config.cache.set = lambda key, value: None
