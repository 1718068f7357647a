"""Gradients that are clipped, scaled, accumulated or left out between the backward pass and the step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from patterns import groups
from patterns.run import EPOCHS, data, enter, evaluation, mse, net, passes, pattern, sgd, train, training

CHANGED = "gradients are changed between backward() and step()"
APART = "gradients are changed on some ranks only", CHANGED
UNEVEN = ("joint", "one", "many")
REPLICAS = {"where": ("allreduce",), "ways": ("joint",)}


def _clip(model, norm=0.5):
    return nn.utils.clip_grad_norm_(model.parameters(), norm)


def _clip_finite(model):
    assert torch.isfinite(_clip(model))


def _each(change):
    """A change of each parameter of a model."""

    def all_of(model):
        for p in model.parameters():
            change(p)

    return all_of


def _replace(p):
    p.grad = p.grad.sign() * 0.1


enter("clip_grad_norm", change=_clip_finite, breaks=CHANGED)
enter("clip_grad_norm_with_uneven_data", change=_clip, dataset=lambda: data(29), ways=UNEVEN, breaks=CHANGED)
enter("gradients_scaled_by_their_data", change=_each(lambda p: p.grad.data.mul_(0.5)), breaks=CHANGED)
enter("gradients_replaced", change=_each(_replace), breaks=CHANGED)
enter("looked_at_by_total_norm", change=lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@training(momentum=0.9, ways=UNEVEN)
def norms_written_down(run, model, optimizer):
    """Before the step and after it, also where the last batch counts nothing."""
    found = []

    def note():
        found.append(sum(p.grad.norm().item() for p in model.parameters()))

    train(run, model, optimizer, run.loader(data(25)), change=note, after=note)
    assert all(torch.isfinite(torch.tensor(found)))


@passes()
def gradients_by_autograd_grad(model, x, y):
    parameters = list(model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(mse(model(x), y), parameters)):
        p.grad = grad


@training(**REPLICAS, exact=False, breaks="replicas differ")
def noise_from_another_seed_on_each_rank(run, model, optimizer):
    generator = torch.Generator().manual_seed(run.rank)
    noise = _each(lambda p: p.grad.add_(0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype)))
    train(run, model, optimizer, run.loader, change=partial(noise, model))


def _on_one_rank(name, change):
    """The loop changes the gradient of one weight, on the last rank."""

    def loop(run, model, optimizer):
        last = run.rank == run.size - 1
        train(run, model, optimizer, run.loader, change=lambda: change(model[0].weight) if last else None)

    loop.__name__ = name
    training(**REPLICAS, exact=False, breaks=APART, distributed={"on_nonfinite": "skip"})(loop)


_on_one_rank("gradients_scaled_on_one_rank", lambda p: p.grad.mul_(0.5))
_on_one_rank("gradients_spoilt_by_their_data_on_one_rank", lambda p: p.grad.data.fill_(torch.nan))
_on_one_rank("gradients_removed_on_one_rank", lambda p: setattr(p, "grad", None))


@training(**REPLICAS, exact=False, breaks=APART)
def gradients_divided_by_each_ranks_tokens(run, model, optimizer):
    """As in recipes of one process; in the first step already, and not at the epoch's end."""
    steps = []

    def divide():
        assert len(steps) < 2 or run.size == 1
        steps.append(1)
        for parameter in model.parameters():
            parameter.grad /= 3 + run.rank

    train(run, model, optimizer, run.loader, change=divide)


@training(breaks="synchronize() is called")
def horovods_synchronize(run, model, optimizer):
    def step():
        if run.size > 1:
            optimizer.synchronize()
        _clip(model)
        with optimizer.skip_synchronize() if run.size > 1 else nullcontext():
            optimizer.step()

    train(run, model, optimizer, run.loader(), step=step)


# --- mixed precision --------------------------------------------------------------------------------------------------
def _scaler(scale=2.0**10, growth_interval=3, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, **options)


def _scaled(run, model, optimizer, *, scaler, dataset=None, clips=False, autocast=None):
    """The plain loop with a GradScaler."""

    def backward(x, y):
        with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
            loss = mse(model(x), y)
        scaler.scale(loss).backward()

    def step():
        if clips:
            scaler.unscale_(optimizer)
            _clip(model)
        scaler.step(optimizer)
        scaler.update()

    train(run, model, optimizer, run.loader(dataset), backward=backward, step=step)


def _overflowing():
    """One sample of the first epoch, on one rank, whose loss overflows once."""
    dataset = data()
    dataset.tensors[1][6] = 1e308
    return dataset


@training(tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_clipping(run, model, optimizer):
    _scaled(run, model, optimizer, scaler=_scaler(), clips=True)


@training(exact=False, tolerance=1e-9)
def grad_scaler_with_an_overflow_on_one_rank(run, model, optimizer):
    _scaled(run, model, optimizer, scaler=_scaler(growth_interval=100), dataset=_overflowing())


@training(momentum=0.9, where=("allreduce",), tolerance=1e-9)
def grad_scaler_with_an_overflow_that_all_see(run, model, optimizer):
    scaler = _scaler()
    _scaled(run, model, optimizer, scaler=scaler, dataset=_overflowing(), clips=True)
    run.same = scaler.get_scale()


def _autocast(name, scaler, dtype, lr, **given):
    def loop(run, model, optimizer):
        _scaled(run, model, optimizer, scaler=scaler(), dataset=data(dtype=torch.float32), autocast=dtype)

    loop.__name__ = name
    training(lr, model=lambda: net(dtype=torch.float32), **given)(loop)


_autocast("autocast_bfloat16", lambda: _scaler(enabled=False), torch.bfloat16, 0.05, tolerance=0.02)
_autocast("autocast_float16_with_a_scaler", lambda: _scaler(2.0**6, 2000), torch.float16, 0.1, tolerance=0.01)


@pattern(tolerance=1e-9)
def grad_scaler_of_two_optimizers(run):
    model, scaler = net(), _scaler()
    one, two = sgd(run, model, part=model[0]), sgd(run, model, 0.05, part=model[2])

    def step():
        scaler.step(one)
        scaler.step(two)
        scaler.update()

    train(run, model, model, run.loader(), backward=lambda x, y: scaler.scale(mse(model(x), y)).backward(), step=step)
    run.rates = []
    return run.finish(model)


# --- several backward passes ------------------------------------------------------------------------------------------
def _accumulate(model, optimizer, loader, k, *, backward=None, step=None, across=False):
    """Steps at every k-th batch, and after the epoch's last one unless the count goes on `across` epochs."""
    n = 0
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            n += 1
            last = n % k == 0 if across else (i + 1) % k == 0 or i + 1 == len(loader)
            backward(x, y, last) if backward else (mse(model(x), y) / k).backward()
            if last:
                (step or optimizer.step)()
                optimizer.zero_grad()


@training(momentum=0.9, ways=UNEVEN)
def accumulation_with_uneven_data(run, model, optimizer):
    _accumulate(model, optimizer, run.loader(data(29)), 2)


@training()
def accumulation_that_goes_on_into_the_next_epoch(run, model, optimizer):
    _accumulate(model, optimizer, run.loader(), 3, across=True)


@training(ways=UNEVEN)
def accumulation_with_no_sync(run, model, optimizer):
    def backward(x, y, last):
        with nullcontext() if last or run.size == 1 else optimizer.no_sync():
            (mse(model(x), y) / 3).backward()

    _accumulate(model, optimizer, run.loader(data(29)), 3, backward=backward)


@training(momentum=0.9, ways=UNEVEN, tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_accumulation_and_clipping(run, model, optimizer):
    scaler = _scaler()

    def step():
        scaler.unscale_(optimizer)
        _clip(model, 0.3)
        scaler.step(optimizer)
        scaler.update()

    def backward(x, y, last):
        scaler.scale(mse(model(x), y) / 2).backward()

    _accumulate(model, optimizer, run.loader(data(29)), 2, backward=backward, step=step)


def _said_and_clipped(name, *, across):
    """With clipping where a step is taken; synchronize() makes sure that it is of the mean."""

    def loop(run, model, optimizer):
        def step():
            if across and run.size > 1 and run.strategy == "allreduce":
                optimizer.synchronize()
            _clip(model, 0.3)
            optimizer.step()

        _accumulate(model, optimizer, run.loader(), 3, step=step, across=across)

    loop.__name__ = name
    training(distributed={"accumulation": 3}, ways=UNEVEN, breaks=CHANGED)(loop)


_said_and_clipped("accumulation_said_and_clipped", across=False)
_said_and_clipped("accumulation_said_that_goes_on_and_clipped", across=True)


@training(**REPLICAS, refused={"*": "gradients must be averaged before they are changed"})
def clipped_before_it_is_averaged(run, model, optimizer):
    def backward(x, y):
        with optimizer.no_sync():
            mse(model(x), y).backward()

    train(run, model, optimizer, run.loader(), 1, backward=backward, change=lambda: _clip(model, 0.3))


@passes()
def several_losses_one_of_which_reaches_a_part(model, x, y):
    output = model(x)
    mse(output, y).backward(retain_graph=True)
    (0.1 * output.square().mean()).backward()
    (0.01 * model[0].weight.square().sum()).backward()


@passes(0.05, where=("allreduce", "parameter_server", "gossip_pull", "dpsgd"))
def gradient_penalty(model, x, y):
    """A loss that holds a gradient, by autograd.grad with its graph."""
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (mse(output, y) + 0.1 * slope.square().mean()).backward()


@passes()
def zero_grad_between_backward_passes_of_models(model, x, y):
    mse(model(2 * x), y).backward()  # thrown away
    model.zero_grad()
    mse(model(x), y).backward()


def _zeroed(name, before=None, after=None, lr=0.1, **given):
    """The plain loop, with `before` and `after` the passes of each step in place of zero_grad()."""

    def loop(run, model, optimizer):
        for _ in range(EPOCHS):
            for x, y in run.loader():
                if before:
                    before(optimizer)
                mse(model(x), y).backward()
                optimizer.step()
                if after:
                    after(model)

    loop.__name__ = name
    training(lr, **given)(loop)


_zeroed("gradients_kept_in_place", before=lambda optimizer: optimizer.zero_grad(set_to_none=False))
_zeroed("zero_grad_of_the_model_at_the_end", after=lambda model: model.zero_grad(set_to_none=False))
_zeroed("never_zeroed", lr=0.002, inexact=("hardsync",))  # gradients of all steps so far add up


@training(0.05, inexact=("hardsync colocated",))
def two_steps_along_each_gradient(run, model, optimizer):
    train(run, model, optimizer, run.loader(), after=optimizer.step)


@training(0.05, ways=("joint", "same"), breaks="a server rank takes a step")
def a_step_after_the_next_batch_is_read(run, model, optimizer):
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(run.loader()):
            if number:
                optimizer.step()
                optimizer.zero_grad()
            mse(model(x), y).backward()
        optimizer.step()


# --- steps that are left out ------------------------------------------------------------------------------------------
OTHER_STEPS = (
    r"ranks must take the same steps; (at step \d+ they are at different batches|batches that .* \d+ on rank 1)"
)


def _without(loader, skips):
    """An epoch's batches but for those that are skipped, by their number."""
    return lambda: (batch for i, batch in enumerate(loader()) if not skips(i))


@training()
def a_batch_skipped_by_all(run, model, optimizer):
    train(run, model, optimizer, _without(run.loader, lambda i: i == 1))


@training(ways=("joint", "many"), exact=False, refused=dict.fromkeys(groups.SYNCHRONOUS, OTHER_STEPS))
def a_batch_skipped_by_one_rank(run, model, optimizer):
    """Where nobody waits for others' batches it is a gradient less, as the loop says."""
    train(run, model, optimizer, _without(run.loader, lambda i: i == 1 and run.rank == 1))


@training(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def the_last_batch_skipped_by_one_rank(run, model, optimizer):
    """Told by `finish`. Where ranks meet the others wait for this one, until the deadline."""
    left = EPOCHS * len(run.loader())

    def step():
        nonlocal left
        left -= 1
        if run.rank != 1 or left:
            optimizer.step()

    train(run, model, optimizer, run.loader, step=step)


@training(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def an_epoch_left_early_by_one_rank(run, model, optimizer):
    for i, batch in enumerate(run.loader()):
        train(run, model, optimizer, [batch], 1)
        if i == 1 and run.rank == 1:
            break


def _with_nan():
    dataset = data()
    dataset.tensors[1][6] = torch.nan
    return dataset


@training(exact=False, ways=UNEVEN, where=("allreduce", "parameter_server", "gossip_pull"))
def nan_loss_skipped_by_the_loop(run, model, optimizer):
    """By all ranks where they average gradients, else by the one that has it."""
    for _ in range(EPOCHS):
        for x, y in run.loader(_with_nan()):
            loss = mse(model(x), y)
            shares = run.size > 1 and run.strategy == "allreduce"
            known = run.metric(loss.item()) if shares else loss.item()
            optimizer.zero_grad()
            if known == known:
                loss.backward()
                optimizer.step()


@training(where=("allreduce",))
def nan_gradients_looked_for_after_the_backward_pass(run, model, optimizer):
    """They are the mean, so that all ranks see the same."""

    def step():
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        else:
            optimizer.zero_grad()

    train(run, model, optimizer, run.loader(_with_nan()), step=step)


@training()
def closure(run, model, optimizer):
    for _ in range(EPOCHS):
        for x, y in run.loader():
            assert torch.isfinite(optimizer.step(evaluation(model, optimizer, x, y)))


@training(distributed={"clip_norm": 0.5})
def clipped_by_the_optimizer(run, model, optimizer):
    """By `clip_norm`, which is of the mean gradient where an update is of that."""
    train(run, model, optimizer, run.loader(), change=lambda: _clip(model) if run.size == 1 else None)
