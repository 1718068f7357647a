"""A checkpoint that an earlier commit has written resumes to the same parameters, whatever states are made of now."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from former import make

from hpcdist.checkpoint import SavedRank, Slice, latest

pytestmark = pytest.mark.computes
IN_FLIGHT = re.compile(r"\.under_way\.\d+$")
every = pytest.mark.parametrize("label", make.CASES)


@pytest.fixture(scope="module")
def former(tmp_path_factory):
    """The folder with the checkpoints, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("former")
    make.extract(folder)
    return folder


@every
def test_it_resumes_to_the_same_parameters_on_its_ranks_and_on_others(former, label):
    expected = json.loads(make.VALUES.read_text())[label]
    found = make.values(former, label)
    assert found == {size: pytest.approx(each, rel=0, abs=1e-9) for size, each in expected.items()}


@every
def test_all_that_it_holds_is_loaded_and_saved_again(former, label, tmp_path):
    make.saved_again(former, label, tmp_path)
    for rank in range(make.SIZE):
        saved, again = (SavedRank(latest(path), rank).at("state", "optimizer") for path in (former / label, tmp_path))
        assert different(saved, again) == [], f"on rank {rank}"


def different(saved: Any, again: Any, key: str = "") -> list[str]:
    """The keys of values that are not the same again; there may be more now, and an empty dict may be missing.

    Each exchange in flight, a list, may have more at its end.
    """
    if isinstance(saved, dict):
        return [each for k, value in saved.items() for each in different(value, again.get(k, {}), f"{key}.{k}")]
    more = len(again) - len(saved) if isinstance(saved, (list, tuple)) else 0
    if isinstance(saved, (list, tuple)) and (more == 0 or (more > 0 and IN_FLIGHT.search(key))):
        return [each for i, value in enumerate(saved) for each in different(value, again[i], f"{key}.{i}")]
    if isinstance(saved, Slice):
        return [] if saved.position == again.position and torch.equal(saved.tensor, again.tensor) else [key]
    if isinstance(saved, torch.Tensor):
        return [] if torch.equal(saved, again) else [key]
    return [] if (type(saved), saved) == (type(again), again) else [key]
