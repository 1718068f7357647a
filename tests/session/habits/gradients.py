"""Gradients that are clipped, scaled, accumulated or left out between the backward pass and the step."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.optim import SGD

from habits import groups
from habits.run import EPOCHS, data, habit, mse, net

CHANGED = "gradients are changed between backward() and step()"


@habit(breaks=CHANGED)
def clip_grad_norm(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert torch.isfinite(norm)
            optimizer.step()
    return run.finish(model)


@habit(breaks=CHANGED)
def clip_grad_value(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return run.finish(model)


@habit(ways=("joint", "one", "many"))
def norms_written_down(run):
    """Before the step and after it, also where the last batch counts nothing."""
    model, found = net(), []
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for _ in range(EPOCHS):
        for x, y in run.loader(data(49)):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            found.append(sum(p.grad.norm().item() for p in model.parameters()))
            optimizer.step()
            found.append(sum(p.grad.norm().item() for p in model.parameters()))
    assert all(torch.isfinite(torch.tensor(found)))
    return run.finish(model)


@habit()
def looked_at_by_total_norm(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
    return run.finish(model)


@habit(breaks=CHANGED)
def gradients_scaled_in_place(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            for p in model.parameters():
                p.grad.mul_(0.5)
            optimizer.step()
    return run.finish(model)


@habit(breaks=CHANGED)
def gradients_scaled_by_their_data(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            for p in model.parameters():
                p.grad.data *= 0.5
            optimizer.step()
    return run.finish(model)


@habit(breaks=CHANGED)
def gradients_clamped_by_their_data(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            for p in model.parameters():
                p.grad.data.clamp_(-0.05, 0.05)
            optimizer.step()
    return run.finish(model)


@habit(breaks=CHANGED)
def gradients_replaced(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            for p in model.parameters():
                p.grad = p.grad.sign() * 0.1
            optimizer.step()
    return run.finish(model)


@habit()
def gradients_by_autograd_grad(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    parameters = list(model.parameters())
    for _ in range(EPOCHS):
        for x, y in run.loader():
            grads = torch.autograd.grad(mse(model(x), y), parameters)
            for p, grad in zip(parameters, grads):
                p.grad = grad
            optimizer.step()
    return run.finish(model)


@habit(where=("allreduce",), ways=("joint",), exact=False, breaks="replicas differ")
def noise_from_another_seed_on_each_rank(run):
    model, generator = net(), torch.Generator().manual_seed(run.rank)
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            for p in model.parameters():
                p.grad.add_(0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
            optimizer.step()
    return run.finish(model)


@habit(breaks="synchronize() is called")
def horovods_synchronize(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if run.size > 1:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize() if run.size > 1 else nullcontext():
                optimizer.step()
    return run.finish(model)


@habit(ways=("joint", "one", "many"), breaks=CHANGED)
def clip_grad_norm_with_uneven_data(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader(data(53)):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return run.finish(model)


# --- mixed precision --------------------------------------------------------------------------------------------------
@habit(tolerance=1e-9)
def grad_scaler(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return run.finish(model)


@habit(tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_clipping(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return run.finish(model)


@habit(tolerance=1e-9)
def grad_scaler_disabled(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return run.finish(model)


@habit(ways=("joint", "one", "many"), tolerance=1e-9, breaks=CHANGED)
def grad_scaler_with_accumulation_and_clipping(run):
    model, k = net(), 2
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    loader = run.loader(data(53))
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            scaler.scale(mse(model(x), y) / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return run.finish(model)


@habit(tolerance=1e-9)
def grad_scaler_of_two_optimizers(run):
    model = net()
    one = run.optimizer(SGD(model[0].parameters(), lr=0.1), model)
    two = run.optimizer(SGD(model[2].parameters(), lr=0.05), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            model.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(one)
            scaler.step(two)
            scaler.update()
    run.rates = []
    return run.finish(model)


def _overflowing(run, dtype=torch.float64):
    """One sample of the first epoch, on one rank, whose loss overflows once."""
    dataset = data()
    dataset.tensors[1][6] = 1e308
    return dataset


@habit(exact=False, tolerance=1e-9)
def grad_scaler_with_an_overflow_on_one_rank(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for _ in range(EPOCHS):
        for x, y in run.loader(_overflowing(run)):
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return run.finish(model)


@habit(where=("allreduce",), tolerance=1e-9)
def grad_scaler_with_an_overflow_that_all_see(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(EPOCHS):
        for x, y in run.loader(_overflowing(run)):
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    run.same = scaler.get_scale()
    return run.finish(model)


@habit(tolerance=0.02)
def autocast_bfloat16(run):
    model = net(dtype=torch.float32)
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.05), model)
    for _ in range(EPOCHS):
        for x, y in run.loader(data(dtype=torch.float32)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
    return run.finish(model)


@habit(tolerance=0.01)
def autocast_float16_with_a_scaler(run):
    model = net(dtype=torch.float32)
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.05), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for _ in range(EPOCHS):
        for x, y in run.loader(data(dtype=torch.float32)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return run.finish(model)


# --- several backward passes ------------------------------------------------------------------------------------------
@habit()
def accumulation(run):
    """Steps at every third batch, and after the epoch's last one."""
    model, k = net(), 3
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    loader = run.loader()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            (mse(model(x), y) / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit(ways=("joint", "one", "many"))
def accumulation_with_uneven_data(run):
    model, k = net(), 2
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(data(53))
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            (mse(model(x), y) / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit()
def accumulation_that_goes_on_into_the_next_epoch(run):
    model, k, n = net(), 3, 0
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            (mse(model(x), y) / k).backward()
            n += 1
            if n % k == 0:
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit(ways=("joint", "one", "many"))
def accumulation_with_no_sync(run):
    model, k = net(), 3
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(data(53))
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % k == 0 or i + 1 == len(loader)
            with nullcontext() if last or run.size == 1 else optimizer.no_sync():
                (mse(model(x), y) / k).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit(ways=("joint", "one", "many"), breaks=CHANGED)
def accumulation_said_and_clipped(run):
    model, k = net(), 3
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model, accumulation=k)
    loader = run.loader()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            (mse(model(x), y) / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit(ways=("joint", "one", "many"), breaks=CHANGED)
def accumulation_said_that_goes_on_and_clipped(run):
    """Into the next epoch, with clipping where a step is taken; synchronize() makes sure that it is of the mean."""
    model, k, n = net(), 3, 0
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model, accumulation=k)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            (mse(model(x), y) / k).backward()
            n += 1
            if n % k == 0:
                if run.size > 1 and run.strategy == "allreduce":
                    optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return run.finish(model)


@habit(where=("allreduce",), ways=("joint",), refused={"*": "gradients must be averaged before they are changed"})
def clipped_before_it_is_averaged(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for x, y in run.loader():
        with optimizer.no_sync():
            mse(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return run.finish(model)


@habit()
def several_losses(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            output = model(x)
            mse(output, y).backward(retain_graph=True)
            (0.1 * output.square().mean()).backward()
            optimizer.step()
    return run.finish(model)


@habit()
def several_losses_one_of_which_reaches_a_part(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            (0.01 * model[0].weight.square().sum()).backward()
            optimizer.step()
    return run.finish(model)


@habit()
def gradients_kept_in_place(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad(set_to_none=False)
            mse(model(x), y).backward()
            optimizer.step()
    return run.finish(model)


@habit()
def zero_grad_at_the_end(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.finish(model)


@habit()
def zero_grad_between_backward_passes_of_models(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            mse(model(2 * x), y).backward()  # thrown away
            model.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            model.zero_grad(set_to_none=False)
    return run.finish(model)


@habit(inexact=("hardsync",))
def never_zeroed(run):
    """Gradients of all steps so far add up."""
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.002), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            mse(model(x), y).backward()
            optimizer.step()
    return run.finish(model)


@habit(ways=("joint", "one", "same", "many"), where=("allreduce", "parameter_server", "gossip_pull", "dpsgd"))
def gradient_penalty(run):
    """A loss that holds a gradient, by autograd.grad with its graph."""
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.05), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            x = x.clone().requires_grad_()
            optimizer.zero_grad()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (mse(output, y) + 0.1 * slope.square().mean()).backward()
            optimizer.step()
    return run.finish(model)


@habit(inexact=("hardsync colocated",))
def two_steps_along_each_gradient(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.05), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.step()
    return run.finish(model)


# --- steps that are left out ------------------------------------------------------------------------------------------
@habit()
def a_batch_skipped_by_all(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(run.loader()):
            if i == 1:
                continue
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
    return run.finish(model)


OTHER_STEPS = (
    r"ranks must take the same steps; (at step \d+ they are at different batches|batches that .* \d+ on rank 1)"
)


@habit(ways=("joint", "many"), exact=False, refused=dict.fromkeys(groups.SYNCHRONOUS, OTHER_STEPS))
def a_batch_skipped_by_one_rank(run):
    """Where nobody waits for others' batches it is a gradient less, as the loop says."""
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(run.loader()):
            if i == 1 and run.rank == 1:
                continue
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
    return run.finish(model)


@habit(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def the_last_batch_skipped_by_one_rank(run):
    """Told by `finish`. Where ranks meet the others wait for this one, until the deadline."""
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for epoch in range(EPOCHS):
        loader = run.loader()
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if run.rank != 1 or i < len(loader) - 1 or epoch < EPOCHS - 1:
                optimizer.step()
    return run.finish(model)


@habit(ways=("joint",), where=("hardsync",), refused={"*": OTHER_STEPS})
def an_epoch_left_early_by_one_rank(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for i, (x, y) in enumerate(run.loader()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if i == 2 and run.rank == 1:
            break
    return run.finish(model)


@habit(exact=False, ways=("joint", "one", "many"), where=("allreduce", "parameter_server", "gossip_pull"))
def nan_loss_skipped_by_the_loop(run):
    dataset = data()
    dataset.tensors[1][6] = torch.nan
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader(dataset):
            loss = mse(model(x), y)
            if run.strategy == "allreduce" if run.size > 1 else False:
                loss_all = run.metric(loss.item())
                if loss_all != loss_all:
                    optimizer.zero_grad()
                    continue
            elif not torch.isfinite(loss):
                optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return run.finish(model)


@habit(where=("allreduce",))
def nan_gradients_looked_for_after_the_backward_pass(run):
    """They are the mean, so that all ranks see the same."""
    dataset = data()
    dataset.tensors[1][6] = torch.nan
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader(dataset):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if not all(torch.isfinite(p.grad).all() for p in model.parameters()):
                optimizer.zero_grad()
                continue
            optimizer.step()
    return run.finish(model)


@habit()
def closure(run):
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model)
    for _ in range(EPOCHS):
        for x, y in run.loader():

            def evaluate(x=x, y=y):
                optimizer.zero_grad()
                loss = mse(model(x), y)
                loss.backward()
                return loss

            assert torch.isfinite(optimizer.step(evaluate))
    return run.finish(model)


@habit()
def clipped_by_the_optimizer(run):
    """By `clip_norm`, which is of the mean gradient where an update is of that."""
    model = net()
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1), model, clip_norm=0.5)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if run.size == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return run.finish(model)
