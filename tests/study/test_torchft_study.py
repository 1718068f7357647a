"""jobs/studies/torchft_diloco.py: what can be seen without the other program: the same data, and its refusal."""

from __future__ import annotations

import pytest
import torch

import torchft_diloco
from hpcdist.errors import ConfigError


def test_replicas_start_equal_and_read_different_batches():
    widths = torchft_diloco.MODELS["100 k"]
    first, second = (torchft_diloco.network(widths).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    (x, y), (other_x, _) = (torchft_diloco.batches(widths, rank)[0] for rank in range(2))
    assert x.shape == (torchft_diloco.BATCH, widths[0]) and y.shape == (torchft_diloco.BATCH,)
    assert not torch.equal(x, other_x)


def test_without_torchft_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torchft_diloco.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`torchft` must be there; got none. Install it: pip install torchft==0.2.0."):
        torchft_diloco.main(tmp_path)
