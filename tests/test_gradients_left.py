"""Gradients left where autograd makes them, for strategies whose own optimiser alone reads them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.cases import each as each_of
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem


def left(module: nn.Module) -> FlatModel:
    model = FlatModel(module)
    model.gradients.leave()
    return model


def pair() -> tuple[nn.ModuleList, FlatModel]:
    module = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    return module, left(module)


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
        model.gradients.settle()
        assert all(p.grad is grad for p, grad in zip(module.parameters(), made, strict=True))
        assert model.gradients.nonfinite() == []
        for optimizer in optimizers:
            optimizer.step()
        model.passes.done()
        for own, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, expected) and torch.equal(own.grad, expected.grad)


def test_gradients_of_batches_of_weight_0_are_hidden_from_the_optimiser_and_shown_as_zeros():
    module, model = pair()
    x = torch.ones(1, 2)
    model.begin_batch(0.0)
    (module[0](x) + module[1](x)).sum().backward()
    model.gradients.settle()
    assert module[0].weight.grad is None and module[1].weight.grad is None
    model.gradients.reveal()
    model.passes.done()
    assert not module[0].weight.grad.any() and not module[1].weight.grad.any()
    model.begin_batch(0.0)
    module.zero_grad()
    (module[0](x) + module[1](x)).sum().backward()
    model.begin_batch(1.0)
    module[1](x).sum().backward()
    model.gradients.settle()
    assert module[0].weight.grad is None, "only a batch of weight 0 has made it"
    assert module[1].weight.grad.tolist() == [[1, 1]]
    model.gradients.reveal()
    model.passes.done()
    model.begin_batch(0.0)
    module.zero_grad(set_to_none=False)
    module[0](x).sum().backward()
    model.begin_batch(1.0)
    module[1](x).sum().backward()
    model.gradients.settle()
    assert module[0].weight.grad.tolist() == [[0, 0]], "it was there before"


def test_weights_are_counted_once_where_they_count():
    module, model = pair()
    model.passes.weighs = True
    x = torch.ones(1, 2)
    model.begin_batch(3.0)
    module[0](x).sum().backward()
    module[1].weight.grad = torch.ones(1, 2)
    model.gradients.settle()
    assert module[0].weight.grad.tolist() == [[3, 3]]
    model.passes.done()
    module.zero_grad()
    model.begin_batch(2.0)
    module[1].weight.grad = torch.ones(1, 2)  # by hand alone, which no hook has weighed
    model.gradients.settle()
    assert module[1].weight.grad.tolist() == [[2, 2]] and module[0].weight.grad is None


def test_sparse_gradients_are_made_dense():
    table = nn.Embedding(5, 2, sparse=True)
    left(table)
    for rows in ([1, 1, 2], [2, 4]):
        table(torch.tensor(rows)).sum().backward()
    assert table.weight.grad.layout is torch.strided
    assert table.weight.grad.flatten().tolist() == [0, 0, 2, 2, 2, 2, 0, 0, 1, 1]


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
    module, _ = pair()
    module[0].weight.requires_grad_(False)
    model = left(module)
    model.passes.weighs = True
    module[0].weight.requires_grad_(True)
    model.begin_batch(2.0)
    (module[0](torch.ones(1, 2)) + module[1](torch.ones(1, 2))).sum().backward()
    model.lay_out_again()
    assert model.grads == () and len(model.names) == 2
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
