"""Pipelines that can't be, and steps that fail: a clear message, on all ranks, and never a wait for ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.cases import each
from harness.pipelines import make_pipeline
from hpcdist.errors import ConfigError
from hpcdist.parallel.cut import Cut

loss_of = nn.functional.mse_loss
pytestmark = pytest.mark.computes


def layers(count=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Call(nn.Module):
    """Calls a function, and has a parameter so that its outputs have a gradient."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x):
        return self.function(self.scale * x)


def fail(comm, make, x, y=None, **options):
    """Collective. Try a step of the pipeline."""
    pipeline = make_pipeline(comm, make, loss_of, **options)
    pipeline.forward_backward(x, torch.zeros(len(x), 4) if y is None else y)


SETTINGS = [
    ({"micro_batches": 0}, "micro_batches of a schedule must be at least 1; got 0"),
    ({"schedule": "one_f_one_b", "chunks": 2}, "chunks must be 1 with the schedule one_f_one_b; got 2"),
    ({"schedule": "nothing"}, "nothing"),
    ({"cut": [1, 1]}, "cut must be numbers of layers, .* whose sum is the model's 4; got 1, 1"),
    ({"cut": Cut((0, 1, 2, 3))}, "cut must be of 4 layers into . stages, .*; got one of 3 layers into 3"),
]
BATCHES = (torch.zeros(0, 4), {"a": torch.zeros(2, 4), "b": torch.zeros(3, 4)}, {})


@pytest.mark.sizes(1, 4)
def test_settings_models_and_batches_that_break_a_rule(ranks):
    """On every rank, before anything is built."""

    def body(comm):
        with pytest.raises(ConfigError, match="stages must be 1 to the model's number of layers, 3; got 4"):
            make_pipeline(comm, lambda: layers(3), loss_of, schedule="interleaved", chunks=4 // comm.size)
        for options, message in SETTINGS:
            with pytest.raises(ConfigError, match=message):
                make_pipeline(comm, layers, loss_of, **options)
        with pytest.raises(ConfigError, match="model in stages must be an nn.Sequential, a list .*; got Bilinear"):
            make_pipeline(comm, lambda: nn.Bilinear(4, 4, 4), loss_of)
        with pytest.raises(ConfigError, match="model in stages must be one that can be made on torch's meta device"):
            make_pipeline(comm, lambda: nn.Sequential(nn.Linear(int(torch.ones(1).item()), 4)), loss_of)
        with pytest.raises(ConfigError, match="layers must be torch.nn.Modules; got str as layer 0"):
            make_pipeline(comm, lambda: ["linear"] * 4, loss_of)
        for x in BATCHES:
            with pytest.raises(ConfigError, match="a batch in micro-batches must be of tensors with one sample or mor"):
                make_pipeline(comm, layers, loss_of).forward_backward(x, None)
        with pytest.raises(ConfigError, match=r"must be called under torch.no_grad\(\) in training"):
            make_pipeline(comm, layers, loss_of)(torch.zeros(4, 4))

    ranks(body)


# --- a failure on one rank, while others wait for it ------------------------------------------------------------------
@pytest.mark.sizes(2)
@pytest.mark.virtual
@pytest.mark.parametrize(
    "between, message",
    [
        (
            lambda x: x.reshape(-1, 2),
            r"stage 1 \(layer.*\) must be able to take what stage 0 returns; got float32 \[2, ",
        ),
        (
            lambda x: x.double(),
            r"must be able to take what stage 0 returns; got float64 \[1, 4\], and RuntimeError: .*",
        ),
        (lambda x: (x, x), r"got float32 \[1, 4\], float32 \[1, 4\], and TypeError"),
        (lambda x: [x.tolist()], r"what stage 0 returns must be tensors, .*; got float"),
    ],
)
def test_a_stage_that_returns_what_the_next_one_cannot_take(ranks, between, message):
    """The message names shapes and types of what came, and of what the next stage's layer wants."""

    def make():
        return nn.Sequential(Call(between), *(nn.Linear(4, 4) for _ in range(3)))

    with pytest.raises(ConfigError, match=message):
        ranks(lambda comm: fail(comm, make, torch.zeros(4, 4), cut=[1, 3]))


@pytest.mark.sizes(4)
@pytest.mark.virtual
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble"])
@each("where", [0, 2, 3])
def test_an_error_in_any_stage_ends_all_ranks(ranks, schedule, where):
    def broken(x):
        raise KeyError("broken")

    def make():
        return nn.Sequential(*(Call(broken) if number == where else nn.Linear(4, 4) for number in range(4)))

    with pytest.raises(KeyError, match="broken"):
        ranks(lambda comm: fail(comm, make, torch.zeros(4, 4), schedule=schedule))


@pytest.mark.virtual
@pytest.mark.sizes(4)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_an_error_in_the_loss_or_a_backward_pass_ends_all_ranks(ranks):
    with pytest.raises(RuntimeError, match="size of tensor a"):
        ranks(lambda comm: fail(comm, layers, torch.zeros(4, 4), torch.zeros(4, 5)))

    def once(x):
        return Broken.apply(x)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("backward is broken")

    with pytest.raises(ValueError, match="backward is broken"):
        make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Call(once), nn.Linear(4, 4))  # noqa: E731
        ranks(lambda comm: fail(comm, make, torch.zeros(4, 4)))


@pytest.mark.sizes(2)
@pytest.mark.virtual
def test_shapes_that_do_not_follow_from_the_inputs(ranks):
    """The next stage has made memory for those that came before."""
    lengths = iter(range(1, 100))

    def make():
        return nn.Sequential(Call(lambda x: x.repeat(1, next(lengths))), Call(torch.tanh))

    with pytest.raises(
        ConfigError, match=r"shapes and types of what stage 0 returns must follow .*; got .*, and .* before"
    ):
        ranks(lambda comm: fail(comm, make, torch.zeros(4, 4), micro_batches=2))
