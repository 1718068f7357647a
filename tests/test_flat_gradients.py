"""Flat gradients: views after each backward pass, valid after collect(), given back by release(), checked for NaN."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.cases import each as each_of
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes
cuda = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@each_of("set_to_none", [True, False])
def test_gradients_are_views_after_every_backward(set_to_none):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[2].weight.requires_grad_(False)
    plain = copy.deepcopy(module)
    model = FlatModel(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    for _ in range(2):
        for each in (module, plain):
            each.zero_grad(set_to_none=set_to_none)
        for _ in range(3):
            x = torch.randn(5, 3)
            for each in (module, plain):
                each(x).square().sum().backward()
            assert torch.equal(model.grads[0], torch.cat([p.grad.flatten() for p in trained]))
            expected = [p.grad for p in plain.parameters() if p.requires_grad]
            torch.testing.assert_close([p.grad for p in trained], expected)
    model.grads[0].fill_(3)
    assert all((p.grad == 3).all() for p in trained)


def left(module: nn.Module, **options: int) -> FlatModel:
    """Its gradients stay where autograd makes them, for strategies whose own optimiser alone reads them."""
    model = FlatModel(module, **options)
    model.keep_gradients(None)
    return model


@each_of("wrap", [left, FlatModel])
def test_sparse_gradients_are_made_dense(wrap):
    table = nn.Embedding(5, 2, sparse=True)
    model = wrap(table)
    for _ in range(2):
        table.zero_grad()
        for rows in ([1, 1, 2], [2, 4]):
            table(torch.tensor(rows)).sum().backward()
        assert table.weight.grad.layout is torch.strided
        for grad in (table.weight.grad.flatten(), *model.grads):
            assert grad.tolist() == [0, 0, 2, 2, 2, 2, 0, 0, 1, 1]


def pair(wrap=FlatModel) -> tuple[nn.ModuleList, FlatModel]:
    module = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    return module, wrap(module)


def test_collect_clears_stale_slices_and_tells_who_was_used():
    module, model = pair()
    model.grads[0].fill_(float("nan"))
    module[1](torch.ones(1, 2)).sum().backward()
    assert model.gradients.collect().tolist() == [False, True]
    assert model.grads[0].tolist() == [0, 0, 1, 1]
    assert module[0].weight.grad is None


def test_release_gives_views_to_what_any_rank_used():
    module, model = pair()
    module[1](torch.ones(1, 2)).sum().backward()
    model.gradients.collect()
    model.grads[0].add_(torch.tensor([5.0, 5, 0, 0]))  # another rank's gradient comes in
    model.gradients.release([True, False])
    assert module[0].weight.grad.tolist() == [[5, 5]] and module[1].weight.grad is None
    model.gradients.release(torch.tensor([False, True]))
    assert module[0].weight.grad is None and module[1].weight.grad.tolist() == [[1, 1]]
    with pytest.raises(ConfigError, match="used must be 2 flags, one per trainable parameter; got 1"):
        model.gradients.release([True])


def test_gradients_that_the_user_replaced_are_taken():
    module, model = pair()
    module[0](torch.ones(1, 2)).sum().backward()
    module[1](torch.ones(1, 2)).sum().backward()
    module[0].weight.grad = module[0].weight.grad * 3
    module[1].weight.grad.data = torch.full((1, 2), 7.0)
    assert model.gradients.collect().all()
    assert model.grads[0].tolist() == [3, 3, 7, 7]
    model.gradients.release([True, True])
    model.grads[0].zero_()
    assert not module[0].weight.grad.any() and not module[1].weight.grad.any()


def test_gradients_that_the_user_replaced_between_passes_are_announced_with_both():
    module, model = pair()
    sent = []
    model.gradients.on_bucket = lambda bucket: sent.append(bucket.grads.tolist())
    loss = lambda: sum(layer(torch.ones(1, 2)).sum() for layer in module)  # noqa: E731
    model.gradients.announce(early=False)
    loss().backward()
    module[0].weight.grad.data = torch.full((1, 2), 7.0)
    module[1].weight.grad = torch.full((1, 2), 4.0)
    model.gradients.announce()
    loss().backward()
    assert sent == [[8, 8, 5, 5]]


def test_a_bucket_waits_for_hooks_that_were_registered_later():
    """They may change its gradients, while a thread would send them."""
    module, model = pair()
    sent = []
    model.gradients.on_bucket = lambda bucket: sent.append(bucket.grads.tolist())

    def double(p):
        p.grad.mul_(2)

    module[1].weight.register_post_accumulate_grad_hook(double)
    model.gradients.announce()
    sum(layer(torch.ones(1, 2)).sum() for layer in module).backward()
    assert sent == []
    model.gradients.collect(last=True)
    assert sent == [[1, 1, 2, 2]]


def test_gradients_replaced_after_they_were_announced_are_refused():
    for new, got in ((None, "None"), (torch.zeros(1, 2), "another tensor")):
        module, model = pair()
        model.gradients.announce()
        (module[0](torch.ones(1, 2)) + module[1](torch.ones(1, 2))).sum().backward()
        module[1].weight.grad = new
        with pytest.raises(ConfigError, match=rf"'1.weight' must be changed in place .* got {got}. Use p.grad.mul_"):
            model.gradients.collect(last=True)
    module, model = pair()  # those of an earlier pass
    model.gradients.announce(early=False)
    module[0](torch.ones(1, 2)).sum().backward()
    model.gradients.announce()
    module[1](torch.ones(1, 2)).sum().backward()
    assert model.gradients.collect(last=True).all()
    module[0].weight.grad = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="'0.weight' must be changed in place .* got another tensor"):
        model.gradients.collect()


def test_an_announced_slice_of_an_unused_parameter_is_not_cleared_again():
    module, model = pair()
    model.gradients.announce()
    module[1](torch.ones(1, 2)).sum().backward()
    assert model.gradients.collect(last=True).tolist() == [False, True]
    model.grads[0].add_(2)  # the sum over the ranks
    assert model.gradients.collect().tolist() == [False, True]
    assert model.grads[0].tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("wrap", [FlatModel, left])
@pytest.mark.parametrize("device", ["cpu", cuda])
def test_nonfinite_gradients_are_named(device, wrap):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for bad in (float("nan"), float("inf"), -float("inf")):
            module = nn.ModuleList([nn.Linear(2, 2, dtype=dtype, device=device) for _ in range(3)])
            model = wrap(module, bucket_bytes=8)
            sum(layer(torch.ones(1, 2, dtype=dtype, device=device)).abs().sum() for layer in module).backward()
            if wrap is left:
                model.gradients.collect()
            assert problem.nonfinite(model) == []
            module[2].weight.grad[0, 1] = bad
            module[0].bias.grad[0] = -bad
            assert problem.nonfinite(model) == ["0.bias", "2.weight"]
            found = [name for bucket in model.gradients.buckets for name in problem.nonfinite(model, bucket)]
            assert wrap is left or sorted(found) == ["0.bias", "2.weight"]
    module, model = pair(wrap)
    module[0].weight.grad = torch.full((1, 2), 3e38)  # their sum overflows
    model.gradients.collect()
    assert problem.nonfinite(model) == []


def test_batches_of_weight_0_in_a_row_leave_no_trace_in_buffers():
    norm = nn.BatchNorm1d(3)
    model = FlatModel(norm)
    model.gradients.start_batch(1.0)
    norm(torch.randn(4, 3))
    counted = [flat.clone() for flat in model.buffers]
    for steps in (True, True, False, False):  # a batch without a step is undone when the next one begins
        model.gradients.start_batch(0.0)
        norm(torch.randn(4, 3))
        if steps:
            model.flat_buffers.restore()
    model.gradients.start_batch(None)
    assert all(map(torch.equal, model.buffers, counted))
    norm(torch.randn(4, 3))
    model.gradients.start_batch(1.0)
    assert not torch.equal(model.buffers[0], counted[0]), "what no batch of weight 0 has done stays"


def test_hooks_stay_where_a_loop_weighs_its_batches():
    module = nn.Linear(2, 1, bias=False)
    model = FlatModel(module)
    model.gradients.configure(weights_batches=True)
    found = []
    for announced, weight in ((1.0, 3.0), (1.0, 1.0), (1.0, None), (0.0, 2.0), (1.0, 0.0)):
        model.gradients.start_batch(announced)
        if weight is not None:
            model.gradients.set_batch_weight(weight)
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        model.gradients.collect()
        model.gradients.done()
        found.append((model.grads[0][0].item(), list(module.weight._backward_hooks)))
    assert [grad for grad, _ in found] == [3, 1, 1, 0, 0]
    assert all(hooks == found[0][1] for _, hooks in found)


# --- gradients left where autograd makes them ------------------------------------------------------------------------
@each_of("set_to_none", [True, False])
def test_gradients_are_autograds_own_through_passes_and_steps(set_to_none):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(module)
    model = left(module)
    assert model.grads == model.gradients.buckets == ()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            x = torch.randn(5, 3)
            for each in (module, plain):
                each(x).square().sum().backward()
        made = [p.grad for p in module.parameters()]
        model.gradients.collect()
        assert all(p.grad is grad for p, grad in zip(module.parameters(), made, strict=True))
        assert problem.nonfinite(model) == []
        for optimizer in optimizers:
            optimizer.step()
        model.gradients.done()
        for own, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, expected) and torch.equal(own.grad, expected.grad)


def test_gradients_of_batches_of_weight_0_are_hidden_from_the_optimiser_and_shown_as_zeros():
    module, model = pair(left)
    x = torch.ones(1, 2)
    model.gradients.start_batch(0.0)
    (module[0](x) + module[1](x)).sum().backward()
    model.gradients.collect()
    assert module[0].weight.grad is None and module[1].weight.grad is None
    model.gradients.done()
    assert not module[0].weight.grad.any() and not module[1].weight.grad.any()
    model.gradients.start_batch(0.0)
    module.zero_grad()
    (module[0](x) + module[1](x)).sum().backward()
    model.gradients.start_batch(1.0)
    module[1](x).sum().backward()
    model.gradients.collect()
    assert module[0].weight.grad is None, "only a batch of weight 0 has made it"
    assert module[1].weight.grad.tolist() == [[1, 1]]
    model.gradients.done()
    model.gradients.start_batch(0.0)
    module.zero_grad(set_to_none=False)
    module[0](x).sum().backward()
    model.gradients.start_batch(1.0)
    module[1](x).sum().backward()
    model.gradients.collect()
    assert module[0].weight.grad.tolist() == [[0, 0]], "it was there before"


def test_weights_are_counted_once_where_they_count():
    module, model = pair(left)
    model.gradients.configure(weights_batches=True)
    x = torch.ones(1, 2)
    model.gradients.start_batch(3.0)
    module[0](x).sum().backward()
    module[1].weight.grad = torch.ones(1, 2)
    model.gradients.collect()
    assert module[0].weight.grad.tolist() == [[3, 3]]
    model.gradients.done()
    module.zero_grad()
    model.gradients.start_batch(2.0)
    module[1].weight.grad = torch.ones(1, 2)  # by hand alone, which no hook has weighed
    model.gradients.collect()
    assert module[1].weight.grad.tolist() == [[2, 2]] and module[0].weight.grad is None


@each_of("wrap", [left, FlatModel])
def test_gradients_that_are_no_plain_tensors_are_refused(wrap):
    """Left or flat."""
    for change, got in (
        (lambda p: setattr(p, "grad", p.grad.clone().requires_grad_()), "must be a plain tensor .* got one with a gra"),
        (lambda p: setattr(p, "grad", None), "must be a plain tensor after backward.*; got none; register a hook"),
    ):
        single = nn.Linear(2, 1, bias=False)
        single.weight.register_post_accumulate_grad_hook(change)
        wrap(single)
        with pytest.raises(ConfigError, match=f"'weight' {got}"):
            single(torch.ones(1, 2)).sum().backward()


def test_a_parameter_that_is_unfrozen_is_left_its_gradient():
    module, _ = pair(left)
    module[0].weight.requires_grad_(False)
    model = left(module)
    model.gradients.configure(weights_batches=True)
    module[0].weight.requires_grad_(True)
    model.gradients.start_batch(2.0)
    (module[0](torch.ones(1, 2)) + module[1](torch.ones(1, 2))).sum().backward()
    model.relayout()
    assert model.grads == () and len(model.slots) == 2
    assert module[0].weight.grad.tolist() == module[1].weight.grad.tolist() == [[2, 2]]


@each_of("name", problem.stepping())
@pytest.mark.virtual
@pytest.mark.sizes(1, 4)
def test_strategies_copy_gradients_only_to_sum_them(ranks, name):
    def body(comm):
        strategy = problem.make(comm, name, problem.model())
        grads = strategy.model.grads
        strategy.close()
        return len(grads), strategy.contract.reads_gradients

    for count, reads in ranks(body):
        assert count == (problem.steps_itself(name) or (reads and ranks.size > 1))


def test_a_rank_without_others_has_hooks_only_where_a_batch_has_another_weight():
    """Autograd's own gradients are found at the step; sparse ones become dense, those with a graph stay."""
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))
    flat = left(model)
    flat.gradients.configure(alone=True)
    flat.keep_gradients(None)
    hooks = lambda: [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]  # noqa: E731
    assert hooks() == [0, 0, 0]
    model(torch.tensor([1])).sum().backward()
    assert flat.gradients.collect().all() and model[0].weight.grad.layout is torch.strided
    flat.gradients.done()
    model.zero_grad()
    model(torch.tensor([1])).sum().backward()
    graph = model[1].weight.grad.requires_grad_()
    assert flat.gradients.collect().all() and model[1].weight.grad is graph
    model.zero_grad()
    flat.gradients.done()
    flat.gradients.start_batch(0.0)
    assert hooks() == [1, 1, 1]
    model(torch.tensor([1])).sum().backward()
    assert not flat.gradients.collect().any()
