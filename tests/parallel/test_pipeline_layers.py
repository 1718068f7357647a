"""Layers at the boundary between two stages; dropout and batch norm in micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.cases import each
from harness.pipelines import assert_close, linear, make_pipeline, merged, outcome, piped, samples, whole
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.parallel import Chain

loss_of = nn.functional.mse_loss
pytestmark = [pytest.mark.computes, pytest.mark.sizes(3)]
WAYS = [("gpipe", False), ("one_f_one_b", True), ("zero_bubble", False), ("zero_bubble", True)]


def check_against_whole(ranks, make, x, y, loss=loss_of, **options):
    """Run the model by several schedules, recomputed and not, and compare gradients with the unsplit model's."""

    def body(comm):
        return [
            piped(comm, make, loss, x, y, schedule=schedule, recompute=recompute, micro_batches=3, **options)
            for schedule, recompute in WAYS
        ]

    expected = whole(make, loss, x, y)
    for outcomes in zip(*ranks(body), strict=True):
        assert_close(merged(outcomes), expected, 1e-12)


class Fork(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Join(nn.Module):
    def forward(self, x, skip):
        return x + skip


class Flat(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


# --- what goes across -------------------------------------------------------------------------------------------------
def test_skip_connections_are_carried_past_stages(ranks):
    layers = [linear(), Fork(), linear(), Flat(torch.tanh), Fork(), linear(), Join(), linear(), Join()]
    check_against_whole(ranks, lambda: Chain(layer_copies(layers)), *samples())


def layer_copies(layers):
    """New modules of the same kinds, whose values the random state gives."""
    return [linear() if isinstance(layer, nn.Linear) else layer for layer in layers]


class Tied(nn.Linear):
    """A linear layer with the weight of another one."""

    def __init__(self, other):
        super().__init__(4, 4, bias=False, dtype=torch.float64)
        self.weight = other.weight


def tied():
    first = linear()
    return nn.Sequential(first, nn.Tanh(), linear(), nn.Tanh(), linear(), Tied(first))


def test_gradients_of_weights_that_stages_share_are_summed(ranks):
    """And each stage that has one makes the same update, so that they stay equal."""
    x, y = samples()

    def body(comm):
        found = []
        for schedule, recompute in WAYS:
            pipeline = make_pipeline(comm, tied, loss_of, schedule=schedule, recompute=recompute, micro_batches=3)
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            for _ in range(2):
                pipeline.zero_grad()
                value = pipeline.forward_backward(x, y)
                found.append(outcome(value, pipeline))
                optimizer.step()
        return found

    torch.manual_seed(5)
    model, expected = tied(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.zero_grad()
        value = loss_of(model(x), y)
        value.backward()
        expected.append(outcome(value, model))
        optimizer.step()
    for outcomes, wanted in zip(zip(*ranks(body), strict=True), expected * len(WAYS), strict=True):
        assert_close(merged(outcomes), wanted, 1e-12)


class Offsets(nn.Module):
    """Adds one weight at two places, each time together with another one."""

    def __init__(self):
        super().__init__()
        self.both, self.one, self.other = (nn.Parameter(torch.rand(4, dtype=torch.float64)) for _ in range(3))

    def forward(self, x):
        return 2 * (x + (self.both + self.one)) + x * x + (self.both + self.other)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.cell(x, self.cell(x, self.cell(x, x)))


class Packed(nn.Module):
    """Has three layers side by side in one weight, as attention does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12, 4, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (nn.functional.linear(x, part) for part in self.weight.chunk(3))
        return q * k.tanh() + v


def repeated(*kinds):
    """A model that has the same layer wherever a kind is None."""
    layer = linear()
    return nn.Sequential(*(layer if kind is None else kind() for kind in kinds))


AT_SEVERAL_PLACES = {  # how the model is made, and the layers of each stage
    "with a layer between": (lambda: repeated(linear, linear, None, linear, None), (2, 3)),
    "three times": (lambda: repeated(linear, None, linear, None, nn.Tanh, linear, None), (1, 6)),
    "one after the other": (lambda: repeated(linear, None, None), (1, 2)),
    "in both stages": (lambda: repeated(None, linear, None, linear, None), (1, 4)),
    "with others": (lambda: repeated(linear, Offsets), (1, 1)),
    "as a recurrence": (lambda: repeated(linear, Recurrent), (1, 1)),
    "side by side": (lambda: repeated(linear, Packed), (1, 1)),
}


@each("name", AT_SEVERAL_PLACES)
def test_a_stage_may_use_a_weight_at_several_places(name):
    """Also where gradients of weights are made later than those of inputs."""
    make, cut = AT_SEVERAL_PLACES[name]
    x, y = samples()
    for recompute in (False, True):
        options = {"schedule": "zero_bubble", "cut": cut, "micro_batches": 2, "recompute": recompute}
        got = run_virtual(lambda comm: piped(comm, make, loss_of, x, y, **options), 2)
        assert_close(merged(got), whole(make, loss_of, x, y), 1e-12)


def frozen(*layers):
    for layer in layers:
        layer.requires_grad_(False)
    return layers


def test_layers_may_be_frozen_or_have_no_parameters(ranks):
    """Stages before the first weight that is trained get no gradients, and wait for none."""

    def make():
        return nn.Sequential(nn.Tanh(), *frozen(linear()), linear(), nn.Tanh(), *frozen(linear()), nn.Tanh())

    first = [1] * (ranks.size - 1)
    check_against_whole(ranks, make, *samples(), cut=[*first, 6 - len(first)])
    check_against_whole(ranks, make, *samples())


class Unused(nn.Module):
    """Returns values without a gradient, or that nobody uses, beside the one that is used."""

    def __init__(self):
        super().__init__()
        self.used, self.other = linear(), linear()

    def forward(self, x):
        return self.used(x), self.other(x), x.detach() + 1


class First(nn.Module):
    def forward(self, x, unused, detached):
        return x * detached


def test_outputs_may_stay_unused(ranks):
    """Weights that only they depend on get the gradient 0, as a stage can't know what the next ones use, or none."""
    x, y = samples()
    make = lambda: Chain([linear(), Unused(), Flat(torch.tanh), linear(), First(), linear()])  # noqa: E731

    def body(comm):
        return [piped(comm, make, loss_of, x, y, schedule=schedule, recompute=r) for schedule, r in WAYS]

    expected = whole(make, loss_of, x, y)
    for outcomes in zip(*ranks(body), strict=True):
        got = merged(outcomes)
        for name in ("1.other.weight", "1.other.bias"):
            assert got.grads[name] is None or not got.grads[name].any()
            got.grads[name] = None
        assert_close(got, expected, 1e-12)


def test_layers_may_change_what_they_receive(ranks):
    """In place: neither what was sent, nor what a recomputation starts from, changes with it."""
    make = lambda: nn.Sequential(  # noqa: E731
        linear(),
        nn.Sequential(nn.ReLU(inplace=True), linear()),
        Flat(lambda x: x.mul_(2).add_(1)),
        nn.Sequential(nn.SiLU(inplace=True), linear()),
        nn.ReLU(inplace=True),
        linear(),
    )
    check_against_whole(ranks, make, *samples())


class Numbered(nn.Module):
    """Returns words' vectors, in single precision, with the words and a mask, which have no gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, dtype=torch.float64)

    def forward(self, words):
        return self.table(words).float(), words, words > 2


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, words, mask):
        return (self.layer(x.double()) * mask.unsqueeze(-1) + words.unsqueeze(-1)).bfloat16(), words, mask


class Last(nn.Module):
    def forward(self, x, words, mask):
        return x.double().mean(1)


def test_integers_booleans_and_narrow_floats_cross_boundaries(ranks):
    """The unsplit model rounds these as well."""
    words = torch.randint(10, (6, 5), generator=torch.Generator().manual_seed(2))
    make = lambda: Chain([Numbered(), *(Masked() for _ in range(3)), Last(), linear()])  # noqa: E731
    check_against_whole(ranks, make, words, samples()[1])


# --- what goes in -----------------------------------------------------------------------------------------------------
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x, z):
        return self.one(x) + self.other(z)


class Named(Pair):
    def forward(self, batch):
        return self.one(batch["x"]) + self.other(batch["z"])


def test_inputs_may_be_several(ranks):
    """A tuple is the first layer's arguments; a dictionary is one argument, split as well, and so are targets."""
    x, y = samples()
    z = x.flip(0)
    rest = lambda: (nn.Tanh(), linear(), nn.Tanh(), linear())  # noqa: E731
    check_against_whole(ranks, lambda: Chain([Pair(), *rest()]), (x, z), y)
    loss = lambda output, target: loss_of(output, target["y"]) + target["w"].double().mean()  # noqa: E731
    targets = {"y": y, "w": torch.arange(6)}
    check_against_whole(ranks, lambda: Chain([Named(), *rest()]), {"x": x, "z": z}, targets, loss)


def test_sequences_may_differ_in_length_from_batch_to_batch(ranks):
    _, y = samples()
    make = lambda: nn.Sequential(nn.Embedding(10, 4, dtype=torch.float64), linear(), nn.Tanh(), linear())  # noqa: E731
    loss = lambda output, target: loss_of(output.mean(1), target)  # noqa: E731
    batches = [torch.randint(10, (6, n), generator=torch.Generator().manual_seed(n)) for n in (5, 2, 9, 5)]

    def body(comm):
        pipeline, found = make_pipeline(comm, make, loss, schedule="zero_bubble", micro_batches=3), []
        for words in batches:
            pipeline.zero_grad()
            found.append(outcome(pipeline.forward_backward(words, y), pipeline))
        return found

    for words, outcomes in zip(batches, zip(*ranks(body), strict=True), strict=True):
        assert_close(merged(outcomes), whole(make, loss, words, y), 1e-12)


# --- layers that depend on the micro-batch ----------------------------------------------------------------------------
class Constant(nn.Module):
    """Fails where it is computed a second time with other random numbers: its gradient is the mask it has drawn."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return x * nn.functional.dropout(self.weight.expand(len(x), 4), 0.5, self.training)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble"])
def test_each_micro_batch_draws_its_own_mask_and_draws_it_again_when_recomputed(ranks, schedule):
    """Dropout: the numbers are those of the rank's generator, one micro-batch after the other."""
    x, y = torch.ones(8, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    make = lambda: nn.Sequential(*(Constant() for _ in range(4)))  # noqa: E731
    loss = lambda output, target: output.sum()  # noqa: E731

    def body(comm):
        found = []
        for recompute in (False, True):
            pipeline = make_pipeline(comm, make, loss, schedule=schedule, recompute=recompute, micro_batches=4)
            torch.manual_seed(comm.rank)
            value = pipeline.forward_backward(x, y)
            found.append((outcome(value, pipeline), torch.rand(1).item()))
        return found

    for (kept, state), (recomputed, state_again) in ranks(body):
        assert state == state_again, "the generator goes on alike"
        assert kept.loss == recomputed.loss
        assert all(torch.equal(grad, recomputed.grads[name]) for name, grad in kept.grads.items())
    if ranks.size == 1:  # the same numbers as a loop over micro-batches draws
        torch.manual_seed(0)
        model = make()
        sums = [model(part).sum().item() for part in x.chunk(4)]
        assert len(set(sums)) > 1, "masks differ"
        assert kept.loss == pytest.approx(sum(sums) / 4)


def normal():
    return nn.Sequential(linear(), nn.BatchNorm1d(4, dtype=torch.float64), linear(), nn.Tanh(), linear())


@each("way", WAYS)
def test_batch_norm_sees_micro_batches_in_their_order_once(ranks, way):
    """Its statistics are those of a micro-batch, and its running ones move once with each, recomputed or not."""
    (schedule, recompute), (x, y) = way, samples(8)

    def body(comm):
        pipeline = make_pipeline(comm, normal, loss_of, schedule=schedule, micro_batches=4, recompute=recompute)
        found = outcome(pipeline.forward_backward(x, y), pipeline)
        return found, {name: buffer.clone() for name, buffer in pipeline.named_buffers()}

    torch.manual_seed(5)
    model, total = normal(), 0.0
    for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
        value = loss_of(model(xs), ys) / 4
        value.backward()
        total += value.detach()
    results = ranks(body)
    assert_close(merged([found for found, _ in results]), outcome(total, model), 1e-12)
    buffers = {name: buffer for _, part in results for name, buffer in part.items()}
    expected = dict(model.named_buffers())
    assert set(buffers) == set(expected)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=1e-12)


class Watched(nn.Module):
    """Keeps an activation for the gradient of its weights, and watches how many of them there are."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept, self.most = linear(), [], []

    def forward(self, x):
        self.most.append(sum(not memory.expired() for memory in self.kept))
        y = x.exp()
        self.kept.append(StorageWeakRef(y.untyped_storage()))
        return self.layer(y).tanh()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("schedule, most", [("gpipe", (0, 0)), ("one_f_one_b", (0, 0)), ("zero_bubble", (0, 1))])
def test_a_recomputed_pass_is_run_twice_and_kept_until_its_gradients_are_made(ranks, schedule, most):
    """With zero_bubble rank 1 makes gradients of weights one micro-batch later."""
    x, y = samples(8)

    def body(comm):
        layer = Watched()
        pipeline = make_pipeline(comm, [layer, Watched()], loss_of, schedule=schedule, micro_batches=8, recompute=True)
        pipeline.forward_backward(x, y)
        mine = next(module for module in pipeline.modules() if isinstance(module, Watched))
        assert not any(not memory.expired() for memory in mine.kept), "nothing is left behind"
        return len(mine.most), max(mine.most)

    assert ranks(body) == [(16, kept) for kept in most]


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_layers_that_compute_something_else_when_recomputed_are_refused(schedule):
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = linear(), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x).exp() if self.calls == 1 else self.layer(x[:, None]).exp()[:, 0]

    def body(comm):
        pipeline = make_pipeline(
            comm, [Fickle() for _ in range(comm.size)], loss_of, schedule=schedule, micro_batches=1, recompute=True
        )
        x, y = samples()
        with pytest.raises(ConfigError, match="layers must compute the same from the same inputs each time with recom"):
            pipeline.forward_backward(x, y)

    run_virtual(body, 1)
