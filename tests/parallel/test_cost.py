"""Costs of layers: bytes are counted exactly, times are those of the layers, and nothing of the model changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcdist.parallel import Chain
from hpcdist.parallel.cost import measure

FLOAT = 4


def test_bytes_of_a_network():
    """ReLU keeps its output, which the last layer needs too, and is charged for it once."""
    x, y = torch.randn(6, 10), torch.randint(0, 5, (6,))
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 5))
    linear, relu, dropout, last = measure(model, x, cross_entropy, y, repeats=1)
    assert [c.name for c in (linear, relu, dropout, last)] == ["0 Linear", "1 ReLU", "2 Dropout", "3 Linear"]
    assert linear.parameter_bytes == 88 * FLOAT and relu.parameter_bytes == 0
    assert [c.boundary_bytes for c in (linear, relu, dropout, last)] == [48 * FLOAT] * 3 + [0]
    assert linear.activation_bytes == 0, "nobody needs its output, for ReLU keeps its own"
    assert relu.activation_bytes == 48 * FLOAT
    mask = dropout.activation_bytes - 48 * FLOAT
    assert mask in (48, 48 * FLOAT), "and its output, which the last layer needs"
    assert 30 * FLOAT <= last.activation_bytes <= 60 * FLOAT + 16, "softmax's output"


def test_activations_of_all_layers_are_those_that_autograd_keeps():
    """The sum over layers is the sum over the whole model, without inputs and parameters."""
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip
    costs = measure(model, x, cross_entropy, y, repeats=1)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), x, y]}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(model(x), y)
    expected = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)
    assert sum(cost.activation_bytes for cost in costs) == expected and loss.isfinite()


class Split(nn.Module):
    def forward(self, x):
        return x, x


class Join(nn.Module):
    def forward(self, x, skip):
        return x + skip


def test_values_that_are_carried_past_layers():
    x = torch.randn(3, 4)
    costs = measure(Chain([nn.Linear(4, 4), Split(), nn.Linear(4, 4), Join()]), x, repeats=1)
    assert [cost.boundary_bytes for cost in costs] == [12 * FLOAT, 24 * FLOAT, 24 * FLOAT, 0]
    assert costs[0].activation_bytes == 12 * FLOAT, "the second linear layer needs its output"


class Clock:
    """Tells a time that passes while somebody sleeps, and a microsecond with each look."""

    def __init__(self):
        self.now_s = 0.0

    def sleep(self, seconds):
        self.now_s += seconds

    def perf_counter(self):
        self.sleep(1e-6)
        return self.now_s

    def __deepcopy__(self, _):
        return self  # layers are copied


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr("hpcdist.parallel.cost.time", clock := Clock())
    return clock


class Slow(nn.Module):
    def __init__(self, clock, forward_s, backward_s):
        super().__init__()
        self.clock, self.seconds = clock, (forward_s, backward_s)

    def forward(self, x):
        self.clock.sleep(self.seconds[0])
        x = x * 1
        x.register_hook(lambda gradient: self.clock.sleep(self.seconds[1]))
        return x


def test_seconds(clock):
    model = [nn.Linear(2, 2), Slow(clock, 0.01, 0.02), nn.Linear(2, 2)]
    first, slow, last = measure(model, torch.ones(1, 2), repeats=1)
    assert 0.01 <= slow.forward_s < 0.02 <= slow.backward_s < 0.04
    assert max(first.forward_s, last.forward_s) < 0.005
    assert slow.inputs_s == slow.backward_s, "it has no weights"
    assert first.inputs_s == 0, "nobody needs the gradient of the data"
    assert 0 < last.inputs_s <= last.backward_s


def test_seconds_of_the_loss_are_the_last_layers(clock):
    def loss(outputs, targets):
        clock.sleep(0.01)
        return outputs.sum()

    *_, last = measure([nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(1, 2), loss, torch.ones(1), repeats=1)
    assert last.forward_s >= 0.01


def test_the_model_and_random_states_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), repeats=1)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("held", [1, 100 * FLOAT, 2**30])
def test_layers_are_built_some_at_a_time(held):
    """Whatever is in memory at once, the costs are the same."""
    made = []

    def make():
        made.append(1)
        return [nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 4)]

    costs = measure(make, torch.tensor([[1, 2]]), repeats=1, held_bytes=held)
    assert [cost.parameter_bytes for cost in costs] == [40 * FLOAT, 40 * FLOAT, 36 * FLOAT]
    assert [cost.boundary_bytes for cost in costs] == [8 * FLOAT, 16 * FLOAT, 0]
    assert len(made) == 1 + 2 * {1: 3, 100 * FLOAT: 2, 2**30: 1}[held], "an outline, then two for each part"
