"""Learning rates and momenta that change in the loop."""

from __future__ import annotations

import numpy as np
import torch
from torch.optim import SGD, lr_scheduler

from habits import groups
from habits.run import EPOCHS, data, enter, habit, mean_loss, mse, net, sgd, train, trained, using

LOCAL = r"hyper-parameters must be the same on every .*lr is .*ReduceLROnPlateau on the mean"


enter("plain_loop")
enter("uneven_data", make=using(SGD, lr=0.1, momentum=0.9), dataset=lambda: data(53), ways=("joint", "one", "many"))


def _per_epoch(run, model, optimizer, schedule, loader) -> None:
    for _ in range(3):
        train(run, model, optimizer, loader, epochs=1)
        schedule.step()


@habit()
def step_lr_per_epoch(run):
    model = net()
    optimizer = sgd(run, model, momentum=0.9)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    _per_epoch(run, model, optimizer, schedule, run.loader())
    assert optimizer.param_groups[0]["lr"] < 2e-4
    return run.finish(model)


@habit()
def schedule_made_before_the_optimizer_is_distributed(run):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer = run.optimizer(optimizer, model)
    _per_epoch(run, model, optimizer, schedule, run.loader())
    return run.finish(model)


@habit()
def warm_up_from_zero_per_step(run):
    model = net()
    optimizer = sgd(run, model, 0.2)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    return trained(run, model, optimizer, run.loader, after=schedule.step)


@habit()
def cosine_per_epoch_with_adam(run):
    model = net()
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    _per_epoch(run, model, optimizer, schedule, run.loader)
    return run.finish(model)


@habit()
def one_cycle_per_step_with_momentum(run):
    model = net()
    optimizer = sgd(run, model, momentum=0.9)
    loader = run.loader()
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, epochs=EPOCHS, steps_per_epoch=len(loader))
    return trained(run, model, optimizer, loader, after=schedule.step)


@habit()
def sequential_of_warm_up_and_cosine(run):
    model = net()
    optimizer = sgd(run, model)
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
    return trained(run, model, optimizer, run.loader, after=schedule.step)


@habit(exact=False)
def plateau_on_the_mean_training_loss(run):
    model = net()
    optimizer = sgd(run, model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    loader, losses = run.loader(), []

    def backward(x, y):
        loss = mse(model(x), y)
        loss.backward()
        losses.extend([loss.item()] * len(x))

    for _ in range(4):
        losses.clear()
        train(run, model, optimizer, loader, epochs=1, backward=backward)
        schedule.step(run.metric(sum(losses) / max(len(losses), 1), len(losses)))
    run.same = optimizer.param_groups[0]["lr"]
    return run.finish(model)


@habit(ways=("joint", "one", "many"), inexact=("easgd",))
def plateau_on_a_shared_evaluation(run):
    model = net()
    optimizer = sgd(run, model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    loader, test = run.loader(), run.test()
    for _ in range(4):
        model.train()
        train(run, model, optimizer, loader, epochs=1)
        model.eval()
        schedule.step(mean_loss(run, model, test))
    run.same = optimizer.param_groups[0]["lr"]
    return run.finish(model)


@habit(exact=False, ways=("joint", "many"), refused=dict.fromkeys(groups.SYNCHRONOUS, LOCAL))
def plateau_on_this_ranks_own_loss(run):
    model = net()
    optimizer = sgd(run, model, 0.01)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2 * run.rank)
    losses = []

    def backward(x, y):
        loss = mse(model(x), y)
        loss.backward()
        losses.append(loss.item())

    for _ in range(5):
        losses.clear()
        train(run, model, optimizer, run.loader(), epochs=1, backward=backward)
        schedule.step(sum(losses))
    return run.finish(model)


@habit()
def rate_set_by_hand(run):
    model = net()
    optimizer = sgd(run, model)
    rates = iter(0.1 / (1 + step) for step in range(1000))
    return trained(run, model, optimizer, run.loader, change=lambda: optimizer.param_groups[0].update(lr=next(rates)))


@habit()
def decay_of_zero_raised_by_hand(run):
    """From integers, which are what they were written as."""
    model = net()
    optimizer = sgd(run, model, 1, momentum=0, weight_decay=0)
    values = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.3}
    return trained(run, model, optimizer, run.loader, change=lambda: optimizer.param_groups[0].update(values))


@habit()
def rates_of_numpy(run):
    model, rates = net(), iter(np.linspace(0.1, 0.01, 40, dtype=np.float32))
    optimizer = sgd(run, model, next(rates))
    return trained(run, model, optimizer, run.loader, change=lambda: optimizer.param_groups[0].update(lr=next(rates)))


@habit()
def rate_that_is_a_tensor(run):
    model = net()
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05), foreach=False), model)
    return trained(run, model, optimizer, run.loader, after=lambda: optimizer.param_groups[0]["lr"].mul_(0.9))


@habit()
def momentum_and_decay_changed_by_hand(run):
    model = net()
    optimizer = sgd(run, model, 0.05, momentum=0.5, weight_decay=0.1)
    for epoch in range(3):
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.2 * epoch
        optimizer.param_groups[0]["weight_decay"] = 0.01 * epoch
        train(run, model, optimizer, run.loader(), epochs=1)
    return run.finish(model)


@habit()
def betas_cycled(run):
    model = net()
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model)
    loader = run.loader()
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * len(loader))
    return trained(run, model, optimizer, loader, after=schedule.step)


@habit(exact=False, ways=("joint", "one", "many"))
def fewer_samples_than_ranks(run):
    model = net()
    optimizer = sgd(run, model)
    return trained(run, model, optimizer, run.loader(data(2), batch=1), epochs=4)
