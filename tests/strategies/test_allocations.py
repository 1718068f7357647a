"""No strategy allocates memory as long as a parameter in a step: fresh pages cost more than the sums made in them."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.train import ALLREDUCE, gossip_ways
from hpcdist import strategies
from hpcdist.comm.chunks import CACHED
from hpcdist.comm.virtual import run_virtual
from hpcdist.model.flat import FlatModel

WIDTH = 1024  # of a matrix that is longer than the chunks in which vectors are worked on
WAYS = {way.strategy: way for way in [ALLREDUCE, *gossip_ways(2)]}


class Allocations(TorchDispatchMode):
    """Collects the modules whose calls of torch return new memory of at least so many elements."""

    def __init__(self, count: int):
        super().__init__()
        self.count, self.modules = count, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.numel() >= self.count and _memory(each) not in given:
                self.modules.add(_caller())
        return result


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _caller():
    """Return the library's module that has made the call."""
    frame = sys._getframe()
    while not frame.f_globals["__name__"].startswith("hpcdist."):
        frame = frame.f_back
    return frame.f_globals["__name__"].removeprefix("hpcdist.")


@pytest.mark.parametrize("name", WAYS)
def test_a_step_allocates_no_memory_as_long_as_a_parameter(name):
    cls, options = strategies.load(name), dict(WAYS[name].options)
    options |= {"period": 2} if "period" in options else {}

    def body(comm):
        torch.manual_seed(0)
        module = nn.Linear(WIDTH, WIDTH)
        adam = cls.contract.optimizer == "Adam"
        local = (partial(torch.optim.AdamW, eps=1e-2) if adam else torch.optim.SGD)(module.parameters(), lr=1e-3)
        strategy = cls(cls.Config(**options), comm, FlatModel(module), optimizer=local)
        seen = Allocations(WIDTH * WIDTH)
        for step in range(8):
            local.zero_grad()
            module(torch.randn(4, WIDTH)).square().mean().backward()
            if step < 4:  # what is kept is made in the first steps
                strategy.step(local.step)
            else:
                with seen:
                    strategy.step(local.step)
        strategy.close()
        return seen.modules

    assert WIDTH * WIDTH > 2 * CACHED
    found = set().union(*run_virtual(body, 2))
    assert {module for module in found if not module.startswith("comm.virtual")} == set()
