"""Gradients that are clipped, scaled, accumulated or left out between the backward pass and the step."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from habits import groups
from habits.run import EPOCHS, data, enter, evaluation, habit, mse, net, sgd, train, trained

CHANGED = "gradients are changed between backward() and step()"
APART = "gradients are changed on some ranks only", CHANGED
UNEVEN = ("joint", "one", "many")


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
enter("clip_grad_norm_with_uneven_data", change=_clip, dataset=lambda: data(53), ways=UNEVEN, breaks=CHANGED)
enter("clip_grad_value", change=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05), breaks=CHANGED)
enter("gradients_scaled_in_place", change=_each(lambda p: p.grad.mul_(0.5)), breaks=CHANGED)
enter("gradients_scaled_by_their_data", change=_each(lambda p: p.grad.data.mul_(0.5)), breaks=CHANGED)
enter("gradients_clamped_by_their_data", change=_each(lambda p: p.grad.data.clamp_(-0.05, 0.05)), breaks=CHANGED)
enter("gradients_replaced", change=_each(_replace), breaks=CHANGED)
enter("looked_at_by_total_norm", change=lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@habit(ways=UNEVEN)
def norms_written_down(run):
    """Before the step and after it, also where the last batch counts nothing."""
    model, found = net(), []

    def note():
        found.append(sum(p.grad.norm().item() for p in model.parameters()))

    train(run, model, sgd(run, model, momentum=0.9), run.loader(data(49)), change=note, after=note)
    assert all(torch.isfinite(torch.tensor(found)))
    return run.finish(model)


@habit()
def gradients_by_autograd_grad(run):
    model = net()
    optimizer, parameters = sgd(run, model), list(model.parameters())

    def backward(x, y):
        for p, grad in zip(parameters, torch.autograd.grad(mse(model(x), y), parameters)):
            p.grad = grad

    return trained(run, model, optimizer, run.loader(), backward=backward)


@habit(where=("allreduce",), ways=("joint",), exact=False, breaks="replicas differ")
def noise_from_another_seed_on_each_rank(run):
    model, generator = net(), torch.Generator().manual_seed(run.rank)

    def add_noise():
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype))

    train(run, model, sgd(run, model), run.loader, change=add_noise)
    return run.finish(model)


def _on_one_rank(name, change):
    """The loop changes the gradient of one weight, on the last rank."""

    def loop(run):
        model = net()
        options = {"on_nonfinite": "skip"} if run.size > 1 else {}
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        weight, last = model[0].weight, run.rank == run.size - 1
        train(run, model, optimizer, run.loader, change=lambda: change(weight) if last else None)
        return run.finish(model)

    loop.__name__ = name
    habit(where=("allreduce",), ways=("joint",), exact=False, breaks=APART)(loop)


_on_one_rank("gradients_scaled_on_one_rank", lambda p: p.grad.mul_(0.5))
_on_one_rank("gradients_scaled_by_their_data_on_one_rank", lambda p: p.grad.data.mul_(0.5))
_on_one_rank("gradients_spoilt_by_their_data_on_one_rank", lambda p: p.grad.data.fill_(torch.nan))
_on_one_rank("gradients_removed_on_one_rank", lambda p: setattr(p, "grad", None))


@habit(where=("allreduce",), ways=("joint",), exact=False, breaks=APART)
def gradients_divided_by_each_ranks_tokens(run):
    """As in recipes of one process; in the first step already, and not at the epoch's end."""
    model = net()
    optimizer = sgd(run, model)
    steps = []

    def divide():
        assert len(steps) < 2 or run.size == 1
        steps.append(1)
        for parameter in model.parameters():
            parameter.grad /= 3 + run.rank

    train(run, model, optimizer, run.loader, change=divide)
    return run.finish(model)


@habit(breaks="synchronize() is called")
def horovods_synchronize(run):
    model = net()
    optimizer = sgd(run, model)

    def step():
        if run.size > 1:
            optimizer.synchronize()
        _clip(model)
        with optimizer.skip_synchronize() if run.size > 1 else nullcontext():
            optimizer.step()

    return trained(run, model, optimizer, run.loader(), step=step)


# --- mixed precision --------------------------------------------------------------------------------------------------
def _scaler(scale=2.0**10, growth_interval=3, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, **options)


def _scaled(run, scaler, dataset=None, *, clips=False, autocast=None, lr=0.1, **options):
    """The plain loop with a GradScaler."""
    model = net(dtype=torch.float32 if autocast else torch.float64)
    optimizer = sgd(run, model, lr, **options)

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

    return trained(run, model, optimizer, run.loader(dataset), backward=backward, step=step)


def _overflowing():
    """One sample of the first epoch, on one rank, whose loss overflows once."""
    dataset = data()
    dataset.tensors[1][6] = 1e308
    return dataset


@habit(tolerance=1e-9)
def grad_scaler(run):
    return _scaled(run, _scaler())


@habit(tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_clipping(run):
    return _scaled(run, _scaler(), clips=True)


@habit(tolerance=1e-9)
def grad_scaler_disabled(run):
    return _scaled(run, _scaler(enabled=False))


@habit(exact=False, tolerance=1e-9)
def grad_scaler_with_an_overflow_on_one_rank(run):
    return _scaled(run, _scaler(growth_interval=100), _overflowing())


@habit(where=("allreduce",), tolerance=1e-9)
def grad_scaler_with_an_overflow_that_all_see(run):
    scaler = _scaler()
    model = _scaled(run, scaler, _overflowing(), clips=True, momentum=0.9)
    run.same = scaler.get_scale()
    return model


@habit(tolerance=0.02)
def autocast_bfloat16(run):
    return _scaled(run, _scaler(enabled=False), data(dtype=torch.float32), autocast=torch.bfloat16, lr=0.05)


@habit(tolerance=0.01)
def autocast_float16_with_a_scaler(run):
    return _scaled(run, _scaler(2.0**6, 2000), data(dtype=torch.float32), autocast=torch.float16, lr=0.05)


@habit(tolerance=1e-9)
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


@habit()
def accumulation(run):
    model = net()
    _accumulate(model, sgd(run, model, momentum=0.9), run.loader(), 3)
    return run.finish(model)


@habit(ways=UNEVEN)
def accumulation_with_uneven_data(run):
    model = net()
    _accumulate(model, sgd(run, model), run.loader(data(53)), 2)
    return run.finish(model)


@habit()
def accumulation_that_goes_on_into_the_next_epoch(run):
    model = net()
    _accumulate(model, sgd(run, model), run.loader(), 3, across=True)
    return run.finish(model)


@habit(ways=UNEVEN)
def accumulation_with_no_sync(run):
    model = net()
    optimizer = sgd(run, model)

    def backward(x, y, last):
        with nullcontext() if last or run.size == 1 else optimizer.no_sync():
            (mse(model(x), y) / 3).backward()

    _accumulate(model, optimizer, run.loader(data(53)), 3, backward=backward)
    return run.finish(model)


@habit(ways=UNEVEN, tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_accumulation_and_clipping(run):
    model, scaler = net(), _scaler()
    optimizer = sgd(run, model, momentum=0.9)

    def step():
        scaler.unscale_(optimizer)
        _clip(model, 0.3)
        scaler.step(optimizer)
        scaler.update()

    def backward(x, y, last):
        scaler.scale(mse(model(x), y) / 2).backward()

    _accumulate(model, optimizer, run.loader(data(53)), 2, backward=backward, step=step)
    return run.finish(model)


def _said_and_clipped(run, *, across):
    """With clipping where a step is taken; synchronize() makes sure that it is of the mean."""
    model = net()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, accumulation=3)

    def step():
        if across and run.size > 1 and run.strategy == "allreduce":
            optimizer.synchronize()
        _clip(model, 0.3)
        optimizer.step()

    _accumulate(model, optimizer, run.loader(), 3, step=step, across=across)
    return run.finish(model)


@habit(ways=UNEVEN, breaks=CHANGED)
def accumulation_said_and_clipped(run):
    return _said_and_clipped(run, across=False)


@habit(ways=UNEVEN, breaks=CHANGED)
def accumulation_said_that_goes_on_and_clipped(run):
    return _said_and_clipped(run, across=True)


@habit(where=("allreduce",), ways=("joint",), refused={"*": "gradients must be averaged before they are changed"})
def clipped_before_it_is_averaged(run):
    model = net()
    optimizer = sgd(run, model)

    def backward(x, y):
        with optimizer.no_sync():
            mse(model(x), y).backward()

    return trained(run, model, optimizer, run.loader(), 1, backward=backward, change=lambda: _clip(model, 0.3))


def _plain(run, backward, lr=0.1):
    """The plain loop with another backward pass: (model, x, y) -> anything."""
    model = net()
    train(run, model, sgd(run, model, lr), run.loader(), backward=lambda x, y: backward(model, x, y))
    return run.finish(model)


@habit()
def several_losses(run):
    def backward(model, x, y):
        output = model(x)
        mse(output, y).backward(retain_graph=True)
        (0.1 * output.square().mean()).backward()

    return _plain(run, backward)


@habit()
def several_losses_one_of_which_reaches_a_part(run):
    def backward(model, x, y):
        mse(model(x), y).backward()
        (0.01 * model[0].weight.square().sum()).backward()

    return _plain(run, backward)


@habit(where=("allreduce", "parameter_server", "gossip_pull", "dpsgd"))
def gradient_penalty(run):
    """A loss that holds a gradient, by autograd.grad with its graph."""

    def backward(model, x, y):
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (mse(output, y) + 0.1 * slope.square().mean()).backward()

    return _plain(run, backward, lr=0.05)


@habit()
def zero_grad_between_backward_passes_of_models(run):
    def backward(model, x, y):
        mse(model(2 * x), y).backward()  # thrown away
        model.zero_grad()
        mse(model(x), y).backward()

    return _plain(run, backward)


def _zeroed(run, before=None, after=None, lr=0.1):
    """The plain loop, with `before` and `after` the passes of each step in place of zero_grad()."""
    model = net()
    optimizer = sgd(run, model, lr)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            if before:
                before(optimizer)
            mse(model(x), y).backward()
            optimizer.step()
            if after:
                after(model, optimizer)
    return run.finish(model)


@habit()
def gradients_kept_in_place(run):
    return _zeroed(run, before=lambda optimizer: optimizer.zero_grad(set_to_none=False))


@habit()
def zero_grad_at_the_end(run):
    return _zeroed(run, after=lambda model, optimizer: optimizer.zero_grad())


@habit()
def zero_grad_of_the_model_that_keeps_gradients_in_place(run):
    return _zeroed(run, after=lambda model, optimizer: model.zero_grad(set_to_none=False))


@habit(inexact=("hardsync",))
def never_zeroed(run):
    """Gradients of all steps so far add up."""
    return _zeroed(run, lr=0.002)


@habit(inexact=("hardsync colocated",))
def two_steps_along_each_gradient(run):
    model = net()
    optimizer = sgd(run, model, 0.05)
    return trained(run, model, optimizer, run.loader(), after=optimizer.step)


# --- steps that are left out ------------------------------------------------------------------------------------------
OTHER_STEPS = (
    r"ranks must take the same steps; (at step \d+ they are at different batches|batches that .* \d+ on rank 1)"
)


def _without(loader, skips):
    """An epoch's batches but for those that are skipped, by their number."""
    return lambda: (batch for i, batch in enumerate(loader()) if not skips(i))


@habit()
def a_batch_skipped_by_all(run):
    model = net()
    train(run, model, sgd(run, model), _without(run.loader, lambda i: i == 1))
    return run.finish(model)


@habit(ways=("joint", "many"), exact=False, refused=dict.fromkeys(groups.SYNCHRONOUS, OTHER_STEPS))
def a_batch_skipped_by_one_rank(run):
    """Where nobody waits for others' batches it is a gradient less, as the loop says."""
    model = net()
    train(run, model, sgd(run, model), _without(run.loader, lambda i: i == 1 and run.rank == 1))
    return run.finish(model)


@habit(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def the_last_batch_skipped_by_one_rank(run):
    """Told by `finish`. Where ranks meet the others wait for this one, until the deadline."""
    model = net()
    optimizer = sgd(run, model)
    left = EPOCHS * len(run.loader())

    def step():
        nonlocal left
        left -= 1
        if run.rank != 1 or left:
            optimizer.step()

    return trained(run, model, optimizer, run.loader, step=step)


@habit(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def an_epoch_left_early_by_one_rank(run):
    model = net()
    optimizer = sgd(run, model)
    for i, batch in enumerate(run.loader()):
        train(run, model, optimizer, [batch], 1)
        if i == 2 and run.rank == 1:
            break
    return run.finish(model)


def _with_nan():
    dataset = data()
    dataset.tensors[1][6] = torch.nan
    return dataset


@habit(exact=False, ways=UNEVEN, where=("allreduce", "parameter_server", "gossip_pull"))
def nan_loss_skipped_by_the_loop(run):
    """By all ranks where they average gradients, else by the one that has it."""
    model = net()
    optimizer = sgd(run, model)
    for _ in range(EPOCHS):
        for x, y in run.loader(_with_nan()):
            loss = mse(model(x), y)
            shares = run.size > 1 and run.strategy == "allreduce"
            known = run.metric(loss.item()) if shares else loss.item()
            optimizer.zero_grad()
            if known == known:
                loss.backward()
                optimizer.step()
    return run.finish(model)


@habit(where=("allreduce",))
def nan_gradients_looked_for_after_the_backward_pass(run):
    """They are the mean, so that all ranks see the same."""
    model = net()
    optimizer = sgd(run, model)

    def step():
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        else:
            optimizer.zero_grad()

    return trained(run, model, optimizer, run.loader(_with_nan()), step=step)


@habit()
def closure(run):
    model = net()
    optimizer = sgd(run, model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            assert torch.isfinite(optimizer.step(evaluation(model, optimizer, x, y)))
    return run.finish(model)


@habit()
def clipped_by_the_optimizer(run):
    """By `clip_norm`, which is of the mean gradient where an update is of that."""
    model = net()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=0.5)
    return trained(run, model, optimizer, run.loader(), change=lambda: _clip(model) if run.size == 1 else None)
