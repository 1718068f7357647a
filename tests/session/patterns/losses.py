"""Losses that are no mean over a batch's samples: sums, and means over those samples or tokens that count."""

from __future__ import annotations

import torch

from patterns.gradients import _accumulate, _clip
from patterns.run import data, evaluation, mse, train, training, using

UNEVEN = ("joint", "one", "many")


def _squares(output, y):
    """A loss with reduction="sum"."""
    return torch.nn.functional.mse_loss(output, y, reduction="sum")


def _summing(**given):
    return {"lr": 0.005, "momentum": 0.5, "distributed": {"loss": "sum"}} | given


@training(**_summing())
def a_loss_that_is_a_sum(run, model, optimizer):
    train(run, model, optimizer, run.loader(), loss=_squares)


@training(**_summing(ways=UNEVEN))
def a_loss_that_is_a_sum_with_uneven_data(run, model, optimizer):
    train(run, model, optimizer, run.loader(data(25)), loss=_squares)


@training(**_summing(distributed={"loss": "sum", "clip_norm": 3.0}))
def a_clipped_sum(run, model, optimizer):
    change = lambda: _clip(model, 3.0) if run.size == 1 else None  # noqa: E731
    train(run, model, optimizer, run.loader(), loss=_squares, change=change)


@training(**_summing(lr=0.002, ways=UNEVEN))
def sums_of_several_batches(run, model, optimizer):
    _accumulate(model, optimizer, run.loader(data(29)), 3, backward=lambda x, y, _: _squares(model(x), y).backward())


@training(
    make=using(torch.optim.LBFGS, lr=0.05, max_iter=4, line_search_fn="strong_wolfe"),
    distributed={"loss": "sum"}, where=("allreduce",), ways=("joint",), tolerance=1e-10,
)  # fmt: skip
def a_sum_in_lbfgs(run, model, optimizer):
    """Its line search sees the sum of all ranks' losses."""
    for x, y in run.loader(data(29)):
        optimizer.step(evaluation(model, optimizer, x, y, _squares))


@training(**_summing(breaks="a sum is weighted"))
def a_sum_that_is_weighed(run, model, optimizer):
    train(run, model, optimizer, run.loader(), loss=_squares, change=lambda: _apply_weight(run, optimizer, 1))


# --- means over what counts -------------------------------------------------------------------------------------------
def _apply_weight(run, optimizer, n):
    if run.size > 1:
        optimizer.set_batch_weight(n)


def _masked_mean(model, x, y):
    """A mean over the tokens that count, as where sentences are padded."""
    mask = (x[:, :1] > -0.3).to(x.dtype)
    return (mask * (model(x) - y).square()).sum() / mask.sum().clamp(min=1)


def _by_tokens(run, model, optimizer, share=1.0):
    def backward(x, y, *_):
        _apply_weight(run, optimizer, (x[:, 0] > -0.3).sum())
        (share * _masked_mean(model, x, y)).backward()

    return backward


NO_TOKEN = ("softsync", "ssp")  # whose only worker's step is left out then


@training(momentum=0.5, inexact=NO_TOKEN)
def a_mean_over_tokens(run, model, optimizer):
    train(run, model, optimizer, run.loader(), backward=_by_tokens(run, model, optimizer))


@training(ways=UNEVEN, inexact=NO_TOKEN)
def a_mean_over_tokens_with_uneven_data(run, model, optimizer):
    """Some rank's last batch, of one sample or none, has no token."""
    train(run, model, optimizer, run.loader(data(25)), backward=_by_tokens(run, model, optimizer))


@training(ways=UNEVEN)
def means_over_tokens_of_several_batches(run, model, optimizer):
    """Each is weighed by itself."""
    _accumulate(model, optimizer, run.loader(data(29)), 3, backward=_by_tokens(run, model, optimizer, 1 / 3))


def _kept(samples):
    """A collate_fn that drops samples, as those that can't be read; if all are, it returns one."""
    kept = [sample for sample in samples if sample[0][1] > -0.5] or samples[:1]
    return tuple(map(torch.stack, zip(*kept)))


@training(ways=UNEVEN)
def a_collate_fn_that_drops_samples(run, model, optimizer):
    def backward(x, y):
        _apply_weight(run, optimizer, len(x))
        mse(model(x), y).backward()

    train(run, model, optimizer, run.loader(data(24), collate_fn=_kept), backward=backward)
