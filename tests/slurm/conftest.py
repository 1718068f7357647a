from __future__ import annotations

import pytest

from slurm.fakes import Bash


@pytest.fixture
def bash(tmp_path) -> Bash:
    return Bash(tmp_path)
