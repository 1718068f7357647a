"""Optimisers of torch, and what loops ask of them."""

from __future__ import annotations

import copy

import torch
from torch import nn, optim

from habits.run import EPOCHS, habit, mse, net, train


def _enter(name, make, **given):
    """Puts the plain loop with this optimiser into the table."""

    def loop(run):
        model = net()
        optimizer = run.optimizer(make(model), model)
        train(run, model, optimizer, run.loader())
        return run.finish(model)

    loop.__name__ = name
    habit(**given)(loop)


def _all(kind, **given):
    return lambda model: kind(model.parameters(), **given)


ADAPTIVE = {"tolerance": 1e-9}  # a root of small numbers is less exact
_enter("nesterov", _all(optim.SGD, lr=0.05, momentum=0.9, nesterov=True))
_enter("sgd_foreach", _all(optim.SGD, lr=0.05, momentum=0.9, foreach=True))
_enter("sgd_dampening", _all(optim.SGD, lr=0.05, momentum=0.5, dampening=0.1))
_enter("adam", _all(optim.Adam, lr=0.01), **ADAPTIVE)
_enter("adam_fused", _all(optim.Adam, lr=0.01, fused=True), **ADAPTIVE)
_enter("adamw_amsgrad", _all(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1), **ADAPTIVE)
_enter("rmsprop", _all(optim.RMSprop, lr=0.01, momentum=0.9, centered=True), **ADAPTIVE)
_enter("adagrad", _all(optim.Adagrad, lr=0.05), **ADAPTIVE)
_enter("adadelta", _all(optim.Adadelta, lr=0.5), **ADAPTIVE)
_enter("adafactor", _all(optim.Adafactor, lr=0.01), **ADAPTIVE)
_enter("nadam", _all(optim.NAdam, lr=0.01), **ADAPTIVE)
_enter("asgd", _all(optim.ASGD, lr=0.01), **ADAPTIVE)
_enter("rprop", _all(optim.Rprop, lr=0.01), exact=False)
_enter("adam_capturable_rate", _all(optim.Adam, lr=torch.tensor(0.01)), **ADAPTIVE)


@habit(tolerance=1e-5)
def muon_and_adamw(run):
    """Muon for matrices, AdamW for the rest."""
    model = net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    one = run.optimizer(optim.Muon(matrices, lr=0.02, weight_decay=0.0), model)
    two = run.optimizer(optim.AdamW(rest, lr=0.01), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            one.zero_grad()
            two.zero_grad()
            mse(model(x), y).backward()
            one.step()
            two.step()
    run.rates = []
    return run.finish(model)


@habit(
    ways=("joint", "one", "same", "many"),
    tolerance=1e-6,
    breaks="the optimiser evaluates its closure several times",
)
def lbfgs(run):
    model = net()
    optimizer = run.optimizer(optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), model)
    for x, y in run.loader():

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return run.finish(model)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))


@habit(breaks="the optimiser takes sparse gradients")
def sparse_adam(run):
    model = net(Sparse())
    optimizer = run.optimizer(optim.SparseAdam(model.parameters(), lr=0.1), model)
    train(run, model, optimizer, run.loader())
    return run.finish(model)


@habit()
def sparse_gradients(run):
    model = net(Sparse())
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.1), model)
    train(run, model, optimizer, run.loader())
    return run.finish(model)


@habit()
def step_hooks(run):
    model = net()
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.1), model)
    called = []
    optimizer.register_step_pre_hook(lambda own, *_: called.append(own.param_groups[0]["lr"]))
    train(run, model, optimizer, run.loader())
    assert len(called) == len(run.rates)
    return run.finish(model)


@habit()
def gradient_hooks(run):
    """Gradients clamped as they arrive: on each rank's own samples where there is one model each, before the mean."""
    model = net()
    for p in model.parameters():
        p.register_hook(lambda grad: 2 * grad)
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.05), model)
    train(run, model, optimizer, run.loader())
    return run.finish(model)


@habit(ways=("joint", "one", "same"), where=("allreduce", "gossip_sync", "local_sgd", "dpsgd", "gossip_pull"))
def state_dict_there_and_back(run):
    model = net()
    optimizer = run.optimizer(optim.Adam(model.parameters(), lr=0.01), model)
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
    return run.finish(model)


@habit(ways=("joint", "one", "same"), where=("allreduce", "hardsync", "gossip_sync", "dpsgd", "parameter_server"))
def state_of_a_plain_run_taken_up(run):
    """A checkpoint by torch.save of a run in one process: loaded into the model and the optimiser, then wrapped."""
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}
    model = net()
    model.load_state_dict(saved["model"])
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    optimizer = run.optimizer(optimizer, model)
    train(run, model, optimizer, run.loader())
    return run.finish(model)


@habit(inexact=("easgd",))
def deleted_and_made_anew(run):
    """A new optimiser for the same model after the first was finished."""
    model = net()
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    train(run, model, optimizer, run.loader(), epochs=1)
    run.finish(model)
    run.before = []
    optimizer = run.optimizer(optim.Adam(model.parameters(), lr=0.01), model)
    train(run, model, optimizer, run.loader(), epochs=1)
    run.rates = []
    return run.finish(model)


@habit(ways=("joint", "many"), breaks="two optimisers have one parameter")
def a_second_optimizer_while_the_first_is_there(run):
    model = net()
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.1), model)
    train(run, model, optimizer, run.loader(), epochs=1)
    optimizer = run.optimizer(optim.Adam(model.parameters(), lr=0.01), model)
    train(run, model, optimizer, run.loader(), epochs=1)
    return run.finish(model)


class SettingData(torch.optim.Optimizer):
    """One's own, whose step gives parameters other memory."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad.data


@habit()
def an_optimizer_that_sets_data(run):
    model = net()
    optimizer = run.optimizer(SettingData(model.parameters(), lr=0.1), model)
    train(run, model, optimizer, run.loader())
    return run.finish(model)


@habit(breaks="an epoch trains without step()")
def a_step_kept_from_before(run):
    """Gradients are averaged with allreduce before, so that there is nothing to miss."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step
    run.optimizer(optimizer, model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            step()
    return run.finish(model)


@habit(
    ways=("joint", "one"),
    breaks="the optimiser's state is loaded within an epoch",
)
def state_loaded_within_an_epoch(run):
    model = net()
    optimizer = run.optimizer(optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    for x, y in run.loader():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return run.finish(model)
