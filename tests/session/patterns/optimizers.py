"""Optimisers of torch, and what loops ask of them."""

from __future__ import annotations

import copy

import torch
from torch import optim

from patterns import groups
from patterns.run import (
    EPOCHS,
    Table,
    copied,
    data,
    difference,
    enter,
    evaluation,
    mean_loss,
    mse,
    net,
    pattern,
    train,
    trained,
    training,
    using,
)

ADAPTIVE = {"tolerance": 1e-9}  # a root of small numbers is less exact
enter("sgd_foreach", lr=0.05, momentum=0.9, nesterov=True, foreach=True)
enter("adam_fused", make=using(optim.Adam, lr=0.01, fused=True), **ADAPTIVE)
enter("adamw_amsgrad", make=using(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1), **ADAPTIVE)
enter("adafactor", make=using(optim.Adafactor, lr=0.01), **ADAPTIVE)
enter("asgd", make=using(optim.ASGD, lr=0.01), **ADAPTIVE)
enter("rprop", make=using(optim.Rprop, lr=0.01), exact=False)


@pattern(tolerance=1e-5)
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


SEVERAL = "the optimiser evaluates its closure several times"


@training(make=using(optim.LBFGS, lr=0.5, max_iter=4), tolerance=1e-6, breaks=SEVERAL)
def lbfgs(run, model, optimizer):
    for x, y in run.loader():
        optimizer.step(evaluation(model, optimizer, x, y))


SPARSE = "the optimiser takes sparse gradients"
enter("sparse_adam", model=lambda: net(Table(sparse=True)), make=using(optim.SparseAdam, lr=0.1), breaks=SPARSE)
enter("sparse_gradients", model=lambda: net(Table(sparse=True)))


@training()
def step_hooks(run, model, optimizer):
    called = []
    optimizer.register_step_pre_hook(lambda own, *_: called.append(own.param_groups[0]["lr"]))
    train(run, model, optimizer, run.loader())
    assert len(called) == len(run.rates)


def _hooked():
    """Gradients doubled as they arrive: on each rank's own samples where there is one model each, before the mean."""
    model = net()
    for p in model.parameters():
        p.register_hook(lambda grad: 2 * grad)
    return model


enter("gradient_hooks", model=_hooked, lr=0.05)


def _double(p):
    p.grad.mul_(2)


@training(0.05)
def hooks_on_accumulated_gradients(run, model, optimizer):
    """Registered after DistributedOptimizer; on each rank's own samples, before the mean."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_double)
    train(run, model, optimizer, run.loader())


@training(
    make=using(optim.Adam, lr=0.01), ways=("joint", "one", "same"),
    where=("allreduce", "gossip_sync", "local_sgd", "dpsgd", "gossip_pull"),
)  # fmt: skip
def state_dict_there_and_back(run, model, optimizer):
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)


@pattern(ways=("joint", "one", "same"), where=("allreduce", "hardsync", "gossip_sync", "dpsgd", "parameter_server"))
def state_of_a_plain_run_taken_up(run):
    """A checkpoint by torch.save of a run in one process: loaded into the model and the optimiser, then wrapped."""
    adam = using(optim.Adam, lr=0.01)
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.zeros(4, 1)) for _ in range(3)]
    (earlier, model), made = (net(), net()), []
    made += [adam(earlier), adam(model)]
    train(run, earlier, made[0], batches, 1)
    model.load_state_dict(earlier.state_dict())
    made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
    return trained(run, model, run.optimizer(made[1], model), run.loader())


@training(ways=("joint", "many"), breaks="two optimisers have one parameter")
def a_second_optimizer_while_the_first_is_there(run, model, optimizer):
    train(run, model, optimizer, run.loader(), epochs=1)
    optimizer = run.optimizer(optim.Adam(model.parameters(), lr=0.01), model)
    train(run, model, optimizer, run.loader(), epochs=1)


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


# --- optimisers of other packages: counts in param_groups, own methods, closures, steps inside backward() -------------
class Averaging(torch.optim.Optimizer):
    """SGD that keeps a slow average of its parameters, and counts its steps in param_groups, as schedulefree does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0, "averaged": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"] ** 0.5)
        self.update_average()

    @torch.no_grad()
    def update_average(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("average", p.clone()).lerp_(p, 1.0 / group["k"] if group["k"] else 1.0)

    @torch.no_grad()
    def swap(self):
        for group in self.param_groups:
            group["averaged"] = not group["averaged"]
            for p in group["params"]:
                if "average" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["average"])
                    self.state[p]["average"] = kept


averaging = using(Averaging, lr=0.1)
METHOD = "an additional method of the optimiser is called"
enter("counts_of_steps_in_param_groups", make=averaging)


@training(make=averaging, breaks=METHOD)
def evaluated_at_the_optimizers_average(run, model, optimizer):
    """Between epochs, as schedulefree's `eval` and `train`; evaluated outside of a consensus, too."""
    loader = run.loader(data(24))
    for _ in range(EPOCHS):
        train(run, model, optimizer, loader, 1)
        optimizer.swap()
        run.before.append(copied(model))
        with run.consensus(model):
            run.before.append(copied(model))
            served = run.size == 1 or run.strategy in groups.SERVED
            assert not served or difference(run.before[-1], run.before[-2]) == 0.0
        optimizer.swap()
        run.before.append(copied(model))
    if run.size > 1 and run.strategy in groups.SERVED:
        run.same = optimizer.strategy.replica.clock
    optimizer.swap()


def _schedulefree(model):
    import schedulefree

    return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=3)


@training(make=_schedulefree, breaks=METHOD, tolerance=1e-9, needs="schedulefree")
def schedulefree_adamw(run, model, optimizer):
    """The real package."""
    for _ in range(EPOCHS):
        optimizer.train()
        train(run, model, optimizer, run.loader(), 1)
        optimizer.eval()
        mean_loss(run, model, run.test())


def _averaged_between_epochs(name, swaps, **given):
    """After each epoch, as Lookahead's `sync_lookahead`."""

    def loop(run, model, optimizer):
        loader = run.loader()
        for _ in range(EPOCHS):
            train(run, model, optimizer, loader, 1)
            if swaps(run):
                optimizer.swap()

    loop.__name__ = name
    training(make=averaging, **given)(loop)


_averaged_between_epochs("parameters_set_to_the_optimizers_average", lambda run: True, breaks=METHOD)
_averaged_between_epochs(
    "averaged_on_one_rank", lambda run: run.rank == 0, where=("hardsync", "parameter_server"),
    exact=False, breaks="ranks are at different places in the loop",
)  # fmt: skip


@training(make=averaging, breaks=(METHOD, "an additional method of the optimiser is called in the loop"))
def averaged_by_hand_in_the_loop(run, model, optimizer):
    train(run, model, optimizer, run.loader, after=optimizer.update_average)
    optimizer.swap()


@training(
    make=averaging, ways=("joint", "one"),
    breaks=(METHOD, "an additional method of the optimiser is called in an evaluation"),
)  # fmt: skip
def averaged_within_an_evaluation(run, model, optimizer):
    train(run, model, optimizer, run.loader())
    with run.consensus(model):
        optimizer.swap()


class SAM(torch.optim.Optimizer):
    """As https://github.com/davda54/sam: declares `closure=None`, and insists on one."""

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / norm.item())
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires a closure"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@training(make=using(SAM, base_optimizer=optim.SGD, lr=0.1, momentum=0.9), tolerance=1e-9, breaks=SEVERAL)
def sam_with_a_closure(run, model, optimizer):
    for _ in range(EPOCHS):
        for x, y in run.loader():

            def closure(x=x, y=y):
                loss = mse(model(x), y)
                loss.backward()
                return loss

            mse(model(x), y).backward()
            optimizer.step(closure)
            optimizer.zero_grad()
    run.rates = []


@training(0.05, momentum=0.9, breaks="an optimiser steps inside the backward pass")
def a_step_inside_backward(run, model, optimizer):
    """Once all gradients are there."""

    def step(_):
        if all(p.grad is not None for p in model.parameters()):
            optimizer.step()
            optimizer.zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    train(run, model, optimizer, run.loader, step=lambda: None)


@pattern(breaks="an optimiser steps inside the backward pass")
def a_step_for_each_parameter_inside_backward(run):
    """As torch's tutorial on saving memory: one optimiser for each parameter, stepped as its gradient arrives."""
    model = net()
    of = {p: run.optimizer(optim.SGD([p], lr=0.05, momentum=0.9), model) for p in model.parameters()}

    def step(p):
        of[p].step()
        of[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            mse(model(x), y).backward()
    return run.finish(model)


@pattern(breaks="an epoch trains without step()")
def a_step_kept_from_before(run):
    """Gradients are averaged with allreduce before, so that there is nothing to miss."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step
    run.optimizer(optimizer, model)
    return trained(run, model, optimizer, run.loader, step=step)


@training(0.05, momentum=0.9, ways=("joint", "one"), breaks="the optimiser's state is loaded within an epoch")
def state_loaded_within_an_epoch(run, model, optimizer):
    train(run, model, optimizer, run.loader, 1, after=lambda: optimizer.load_state_dict(optimizer.state_dict()))


def _own_state(name, load, where="before", **given):
    """Puts a loop into the table that loads an optimiser's state on some ranks."""

    def loop(run):
        model = net()
        saved = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        saved.step()
        saved.zero_grad()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if load(run) and where == "before":
            optimizer.load_state_dict(saved.state_dict())
        optimizer = run.optimizer(optimizer, model)
        if load(run) and where == "after":
            optimizer.load_state_dict(saved.state_dict())
        return trained(run, model, optimizer, run.loader())

    loop.__name__ = name
    pattern(**given)(loop)


_own_state("a_state_loaded_on_all_ranks", lambda run: True, "after")
for where in ("before", "after"):
    rule = {"breaks": "the optimiser's state differs", "exact": False}
    _own_state(f"a_state_loaded_on_one_rank_{where}", lambda run: run.rank == run.size - 1, where, **rule)
