"""A model that is cut by an example, on which its layers are measured, in a loop of one's own."""

from __future__ import annotations

import pytest
import torch
from staged import batches, difference, mse, pipeline, sgd, values, whole
from torch import nn

import hpcdist as hd
from hpcdist.errors import ConfigError, MismatchError

pytestmark = pytest.mark.computes


class Work(nn.Linear):
    """A layer that takes long."""

    def forward(self, x):
        for _ in range(100):
            x = super().forward(x).tanh()
        return x


def unequal() -> nn.Sequential:
    """Most parameters are in the second layer, most work is in the last but one."""
    torch.manual_seed(0)
    wide = [nn.Linear(6, 500), nn.Linear(500, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    return nn.Sequential(*wide, Work(4, 4), nn.Linear(4, 2)).double()


def example():
    return next(iter(batches()))


@pytest.mark.sizes(4)
def test_stages_take_equal_times_and_train_as_one_process(ranks):
    def body(comm):
        plain = pipeline(comm, 2, unequal).cut.sizes
        model = pipeline(comm, 2, unequal, example=example())
        hd.DistributedOptimizer(sgd(model.parameters()), model)
        for x, y in hd.shard(batches(model.grid.replicas)):
            model.step(x, y)
        hd.finish(model)
        return plain, model.cut.sizes, values(model)

    found = ranks(body)
    expected = unequal()
    optimizer = sgd(expected.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        mse(expected(x), y).backward()
        optimizer.step()
    assert difference(whole([part for _, _, part in found]), values(expected)) <= 1e-12
    assert len({cut for _, cut, _ in found}) == 1, "all ranks have the same"
    plain, measured, _ = found[0]
    assert plain == (1, 5) and measured[0] >= 4


EXAMPLES = {
    r"cut must be None with an example, by .*; got \[1, 5\]. Pass only one": {"cut": [1, 5], "example": (1, 2)},
    "example must be a batch, a tuple of inputs and targets; got Tensor. Pass what": {"example": torch.zeros(3)},
}


@pytest.mark.sizes(2)
def test_examples_that_are_none_or_on_one_rank_alone_are_refused(ranks):
    def body(comm):
        for message, options in EXAMPLES.items():
            with pytest.raises(ConfigError, match=message):
                pipeline(comm, 2, unequal, **options)
        with pytest.raises(MismatchError, match="settings of the pipeline must be the same .*example"):
            pipeline(comm, 2, unequal, example=None if comm.rank else example())

    ranks(body)
