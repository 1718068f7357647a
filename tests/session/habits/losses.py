"""Losses that are no mean over a batch's samples: sums, and means over those samples or tokens that count."""

from __future__ import annotations

import torch

from habits.gradients import _accumulate, _clip
from habits.run import data, habit, mse, net, sgd, trained

UNEVEN = ("joint", "one", "many")


def _squares(output, y):
    """A loss with reduction="sum"."""
    return torch.nn.functional.mse_loss(output, y, reduction="sum")


def _summing(run, model, lr=0.005, **options):
    return run.optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), model, loss="sum", **options)


@habit()
def a_loss_that_is_a_sum(run):
    model = net()
    return trained(run, model, _summing(run, model), run.loader(), loss=_squares)


@habit(ways=UNEVEN)
def a_loss_that_is_a_sum_with_uneven_data(run):
    model = net()
    return trained(run, model, _summing(run, model), run.loader(data(49)), loss=_squares)


@habit()
def a_clipped_sum(run):
    model = net()
    change = lambda: _clip(model, 3.0) if run.size == 1 else None  # noqa: E731
    return trained(run, model, _summing(run, model, clip_norm=3.0), run.loader(), loss=_squares, change=change)


@habit(ways=UNEVEN)
def sums_of_several_batches(run):
    model = net()

    def backward(x, y, last):
        _squares(model(x), y).backward()

    _accumulate(model, _summing(run, model, 0.002), run.loader(data(53)), 3, backward=backward)
    return run.finish(model)


@habit(where=("allreduce",), ways=("joint",), tolerance=1e-10)
def a_sum_in_lbfgs(run):
    """Its line search sees the sum of all ranks' losses."""
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=4, line_search_fn="strong_wolfe")
    optimizer = run.optimizer(lbfgs, model, loss="sum")
    for x, y in run.loader(data(53)):

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = _squares(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return run.finish(model)


@habit(breaks="a sum is weighed")
def a_sum_that_is_weighed(run):
    model = net()
    optimizer = _summing(run, model)
    return trained(run, model, optimizer, run.loader(), loss=_squares, change=lambda: _weigh(run, optimizer, 1))


# --- means over what counts -------------------------------------------------------------------------------------------
def _weigh(run, optimizer, n):
    if run.size > 1:
        optimizer.weigh(n)


def _masked_mean(model, x, y):
    """A mean over the tokens that count, as where sentences are padded."""
    mask = (x[:, :1] > -0.3).to(x.dtype)
    return (mask * (model(x) - y).square()).sum() / mask.sum().clamp(min=1)


def _by_tokens(run, model, optimizer, share=1.0):
    def backward(x, y, *_):
        _weigh(run, optimizer, (x[:, 0] > -0.3).sum())
        (share * _masked_mean(model, x, y)).backward()

    return backward


NO_TOKEN = ("softsync", "ssp")  # whose only worker's step is left out then


@habit(inexact=NO_TOKEN)
def a_mean_over_tokens(run):
    model = net()
    optimizer = sgd(run, model, momentum=0.5)
    return trained(run, model, optimizer, run.loader(), backward=_by_tokens(run, model, optimizer))


@habit(ways=UNEVEN, inexact=NO_TOKEN)
def a_mean_over_tokens_with_uneven_data(run):
    """Some rank's last batch, of one sample or none, has no token."""
    model = net()
    optimizer = sgd(run, model)
    return trained(run, model, optimizer, run.loader(data(49)), backward=_by_tokens(run, model, optimizer))


@habit(ways=UNEVEN)
def means_over_tokens_of_several_batches(run):
    """Each is weighed by itself."""
    model = net()
    optimizer = sgd(run, model)
    _accumulate(model, optimizer, run.loader(data(53)), 3, backward=_by_tokens(run, model, optimizer, 1 / 3))
    return run.finish(model)


def _kept(samples):
    """A collate_fn that drops samples, as those that can't be read; if all are, it returns one."""
    kept = [sample for sample in samples if sample[0][1] > -0.5] or samples[:1]
    return tuple(map(torch.stack, zip(*kept)))


@habit(ways=UNEVEN)
def a_collate_fn_that_drops_samples(run):
    model = net()
    optimizer = sgd(run, model)

    def backward(x, y):
        _weigh(run, optimizer, len(x))
        mse(model(x), y).backward()

    return trained(run, model, optimizer, run.loader(data(48), collate_fn=_kept), backward=backward)
