"""Optimisers of torch, and what loops ask of them."""

from __future__ import annotations

import copy

import torch
from torch import optim

from habits.run import EPOCHS, Table, enter, evaluation, habit, net, sgd, train, trained, using

ADAPTIVE = {"tolerance": 1e-9}  # a root of small numbers is less exact
enter("nesterov", make=using(optim.SGD, lr=0.05, momentum=0.9, nesterov=True))
enter("sgd_foreach", make=using(optim.SGD, lr=0.05, momentum=0.9, foreach=True))
enter("sgd_dampening", make=using(optim.SGD, lr=0.05, momentum=0.5, dampening=0.1))
enter("adam", make=using(optim.Adam, lr=0.01), **ADAPTIVE)
enter("adam_fused", make=using(optim.Adam, lr=0.01, fused=True), **ADAPTIVE)
enter("adamw_amsgrad", make=using(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1), **ADAPTIVE)
enter("rmsprop", make=using(optim.RMSprop, lr=0.01, momentum=0.9, centered=True), **ADAPTIVE)
enter("adagrad", make=using(optim.Adagrad, lr=0.05), **ADAPTIVE)
enter("adadelta", make=using(optim.Adadelta, lr=0.5), **ADAPTIVE)
enter("adafactor", make=using(optim.Adafactor, lr=0.01), **ADAPTIVE)
enter("nadam", make=using(optim.NAdam, lr=0.01), **ADAPTIVE)
enter("asgd", make=using(optim.ASGD, lr=0.01), **ADAPTIVE)
enter("rprop", make=using(optim.Rprop, lr=0.01), exact=False)
enter("adam_capturable_rate", make=using(optim.Adam, lr=torch.tensor(0.01)), **ADAPTIVE)


@habit(tolerance=1e-5)
def muon_and_adamw(run):
    """Muon for matrices, AdamW for the rest."""
    model = net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    one = run.optimizer(optim.Muon(matrices, lr=0.02, weight_decay=0.0), model)
    two = run.optimizer(optim.AdamW(rest, lr=0.01), model)
    train(run, model, model, run.loader, step=lambda: (one.step(), two.step()))
    run.rates = []
    return run.finish(model)


@habit(tolerance=1e-6, breaks="the optimiser evaluates its closure several times")
def lbfgs(run):
    model = net()
    optimizer = run.optimizer(optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), model)
    for x, y in run.loader():
        optimizer.step(evaluation(model, optimizer, x, y))
    return run.finish(model)


SPARSE = "the optimiser takes sparse gradients"
enter("sparse_adam", model=lambda: net(Table(sparse=True)), make=using(optim.SparseAdam, lr=0.1), breaks=SPARSE)
enter("sparse_gradients", model=lambda: net(Table(sparse=True)))


@habit()
def step_hooks(run):
    model = net()
    optimizer = sgd(run, model)
    called = []
    optimizer.register_step_pre_hook(lambda own, *_: called.append(own.param_groups[0]["lr"]))
    train(run, model, optimizer, run.loader())
    assert len(called) == len(run.rates)
    return run.finish(model)


def _hooked():
    """Gradients doubled as they arrive: on each rank's own samples where there is one model each, before the mean."""
    model = net()
    for p in model.parameters():
        p.register_hook(lambda grad: 2 * grad)
    return model


enter("gradient_hooks", model=_hooked, make=using(optim.SGD, lr=0.05))


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
    batches = [(torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.zeros(4, 1)) for _ in range(3)]
    train(run, model, optimizer, batches, 1)
    saved = {"model": model.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}
    model = net()
    model.load_state_dict(saved["model"])
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    optimizer = run.optimizer(optimizer, model)
    return trained(run, model, optimizer, run.loader())


@habit(inexact=("easgd",))
def deleted_and_made_anew(run):
    """A new optimiser for the same model after the first was finished."""
    model = net()
    optimizer = sgd(run, model, momentum=0.9)
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
    optimizer = sgd(run, model)
    train(run, model, optimizer, run.loader(), epochs=1)
    optimizer = run.optimizer(optim.Adam(model.parameters(), lr=0.01), model)
    return trained(run, model, optimizer, run.loader(), epochs=1)


class SettingData(torch.optim.Optimizer):
    """One's own, whose step gives parameters other memory."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad.data


enter("an_optimizer_that_sets_data", make=using(SettingData, lr=0.1))


@habit(breaks="an epoch trains without step()")
def a_step_kept_from_before(run):
    """Gradients are averaged with allreduce before, so that there is nothing to miss."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step
    run.optimizer(optimizer, model)
    return trained(run, model, optimizer, run.loader, step=step)


@habit(
    ways=("joint", "one"),
    breaks="the optimiser's state is loaded within an epoch",
)
def state_loaded_within_an_epoch(run):
    model = net()
    optimizer = sgd(run, model, 0.05, momentum=0.9)
    return trained(
        run, model, optimizer, run.loader, 1, after=lambda: optimizer.load_state_dict(optimizer.state_dict())
    )
