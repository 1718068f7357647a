"""Learning rates and momenta that change in the loop."""

from __future__ import annotations

import numpy as np
import torch
from torch.optim import SGD, lr_scheduler

from patterns import groups
from patterns.run import EPOCHS, data, enter, mean_loss, mse, net, pattern, train, training, using

LOCAL = r"hyper-parameters must be the same on every .*lr is .*ReduceLROnPlateau by the mean"


enter("plain_loop")
enter("uneven_data", momentum=0.9, dataset=lambda: data(29), ways=("joint", "one", "many"))


def _per_epoch(run, model, optimizer, schedule) -> None:
    loader = run.loader()
    for _ in range(3):
        train(run, model, optimizer, loader, epochs=1)
        schedule.step()


@training(momentum=0.9)
def step_lr_per_epoch(run, model, optimizer):
    _per_epoch(run, model, optimizer, lr_scheduler.StepLR(optimizer, 1, gamma=0.1))
    assert optimizer.param_groups[0]["lr"] < 2e-4


@pattern()
def schedule_made_before_the_optimizer_is_distributed(run):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    _per_epoch(run, model, run.optimizer(optimizer, model), schedule)
    return run.finish(model)


def _per_step(name, schedule, **given):
    """Puts a loop into the table with what `schedule(optimizer, steps of an epoch)` makes."""

    def loop(run, model, optimizer):
        loader = run.loader()
        train(run, model, optimizer, loader, after=schedule(optimizer, len(loader)).step)

    loop.__name__ = name
    training(**given)(loop)


def _sequence(optimizer, steps):
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])


def _one_cycle(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * steps)


_per_step("warm_up_from_zero", lambda own, _: lr_scheduler.LambdaLR(own, lambda step: min(1.0, step / 5)), lr=0.2)
_per_step("one_cycle_per_step_with_momentum", _one_cycle, momentum=0.9)
_per_step("betas_cycled", _one_cycle, make=using(torch.optim.AdamW, lr=0.05))
_per_step("sequential_of_warm_up_and_cosine", _sequence)


@training(ways=("joint", "one", "many"), inexact=("easgd",))
def plateau_on_a_shared_evaluation(run, model, optimizer):
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    loader, test = run.loader(), run.test()
    for _ in range(4):
        model.train()
        train(run, model, optimizer, loader, epochs=1)
        model.eval()
        schedule.step(mean_loss(run, model, test))
    run.same = optimizer.param_groups[0]["lr"]


@training(0.01, exact=False, ways=("joint", "many"), refused=dict.fromkeys(groups.SYNCHRONOUS, LOCAL))
def plateau_on_this_ranks_own_loss(run, model, optimizer):
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


@training(1, momentum=0, weight_decay=0)
def decay_of_zero_raised_by_hand(run, model, optimizer):
    """From integers, which are what they were written as."""
    values = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.3}
    train(run, model, optimizer, run.loader, change=lambda: optimizer.param_groups[0].update(values))


@training(np.float32(0.1))
def rates_of_numpy(run, model, optimizer):
    rates = iter(np.linspace(0.1, 0.01, 40, dtype=np.float32))
    train(run, model, optimizer, run.loader, change=lambda: optimizer.param_groups[0].update(lr=next(rates)))


@training(make=lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05), foreach=False))
def rate_that_is_a_tensor(run, model, optimizer):
    train(run, model, optimizer, run.loader, after=lambda: optimizer.param_groups[0]["lr"].mul_(0.9))


@training(0.05, momentum=0.5, weight_decay=0.1)
def momentum_and_decay_changed_by_hand(run, model, optimizer):
    for epoch in range(3):
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.2 * epoch
        optimizer.param_groups[0]["weight_decay"] = 0.01 * epoch
        train(run, model, optimizer, run.loader(), epochs=1)


@training(exact=False, ways=("joint", "one", "many"))
def fewer_samples_than_ranks(run, model, optimizer):
    train(run, model, optimizer, run.loader(data(2), batch=1), epochs=4)
