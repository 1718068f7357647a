"""A run of the study of scaling: a perceptron learns the digits, its gradients handed out to workers one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.data import importers
from hpcdist.model.flat import FlatModel
from hpcdist.strategies import Strategy
from hpcdist.train import Job
from kit.loop import OwnRun

PIXELS, CLASSES = 64, 10
DIVERGED = 100.0  # what a loss that is larger, or no number, counts as


class Perceptron:
    """One hidden layer of tanh, with its gradient written out and SGD with momentum, in a flat model's memory.

    In NumPy: of so small a model autograd and torch's optimiser would take most of a study's time to start operations.
    """

    def __init__(self, model: FlatModel, rate: float, momentum: float):
        if model.grads:
            model.gradients.release([True] * len(model.slots))  # gradients lie in flat memory from the first step on
        grads = model.grads[0] if model.grads else _lay_gradients(model)
        self._rate, self._momentum = rate, momentum
        self._flat, self._flat_grads = model.params[0].detach().numpy(), grads.numpy()
        self._params = [parameter.detach().numpy() for parameter in model.module.parameters()]
        self._grads = [parameter.grad.numpy() for parameter in model.module.parameters()]
        self._velocity = np.zeros_like(self._flat)

    def gradient(self, x: ndarray, y: ndarray) -> None:
        """Write the gradient of the mean cross-entropy: x (samples, 64), y (samples)."""
        (w1, b1, w2, b2), (to_w1, to_b1, to_w2, to_b2) = self._params, self._grads
        hidden = np.tanh(x @ w1.T + b1)
        errors = softmax(hidden @ w2.T + b2)
        errors[np.arange(len(y)), y] -= 1
        errors /= len(y)
        np.matmul(errors.T, hidden, out=to_w2)
        np.sum(errors, axis=0, out=to_b2)
        inner = (errors @ w2) * (1 - hidden * hidden)
        np.matmul(inner.T, x, out=to_w1)
        np.sum(inner, axis=0, out=to_b1)

    def update(self) -> None:
        self._velocity *= self._momentum
        self._velocity += self._flat_grads
        self._flat -= self._rate * self._velocity


def _lay_gradients(model: FlatModel) -> Tensor:
    """Lay gradients out as the parameters are, where the strategy leaves them to whoever makes them."""
    flat = torch.zeros_like(model.params[0])
    for parameter in model.module.parameters():
        start = parameter.storage_offset() - model.params[0].storage_offset()
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
    return flat


def softmax(scores: ndarray) -> ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def module(hidden: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


job = Job(module, nn.functional.cross_entropy, metrics={}, data=lambda path: importers.load("digits")(None, path))


def model_bytes(hidden: int) -> int:
    """Count the bytes of all parameters, as float32."""
    return 4 * (PIXELS * hidden + hidden + hidden * CLASSES + CLASSES)


@cache
def digits() -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Load training and test images and labels; pixels standardised by mean and deviation of the training set."""
    x, y = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=0, stratify=y)
    x = ((x - x[train].mean()) / x[train].std()).astype(np.float32)
    return x[train], y[train], x[test], y[test]


def test_loss(flat: ndarray) -> float:
    """Compute the mean cross-entropy of the test set at flat parameters, at most DIVERGED."""
    hidden = (len(flat) - CLASSES) // (PIXELS + 1 + CLASSES)
    w1, b1, w2, b2 = np.split(flat, np.cumsum([PIXELS * hidden, hidden, hidden * CLASSES]))
    _, _, x, y = digits()
    found = softmax(np.tanh(x @ w1.reshape(hidden, PIXELS).T + b1) @ w2.reshape(CLASSES, hidden).T + b2)
    loss = float(-np.log(found[np.arange(len(y)), y]).mean())
    return min(loss, DIVERGED) if loss == loss else DIVERGED


class Course:
    """Shared by the ranks of a run outside of virtual time: the gradients left to take, and what they have come to.

    A worker takes one gradient after the other until none is left, so that a slow one takes fewer.
    """

    def __init__(self, gradients: int, every: int):
        self._gradients, self._every, self._taken = gradients, every, 0
        self._strategies: dict[int, Strategy] = {}
        self.curve: list[tuple[int, float, float]] = []  # gradients, virtual seconds, test loss

    def enter(self, strategy: Strategy) -> None:
        self._strategies[strategy.comm.rank] = strategy

    def take(self, own: Strategy, now_s: float) -> bool:
        """Tell whether a gradient is left, which the caller computes now; at times look at the test loss first."""
        if self._taken == self._gradients:
            return False
        if self._taken % self._every == 0:
            self.look(own, now_s)
        self._taken += 1
        return True

    def look(self, own: Strategy, now_s: float) -> None:
        self.curve.append((self._taken, now_s, test_loss(self._consensus(own))))

    def _consensus(self, own: Strategy) -> ndarray:
        """Give what `Strategy.consensus` does, without any communication; `own` may be half a step ahead of others."""
        found = [self._strategies[rank] for rank in sorted(self._strategies)]
        servers = [strategy for strategy in found if not strategy.is_worker]
        if servers:
            return np.concatenate([strategy.server.master()[0].numpy() for strategy in servers])
        replicas = [own] if strategies.load("allreduce") is type(own) else found
        return np.mean([strategy.model.params[0].detach().numpy() for strategy in replicas], axis=0)


def train(settings: dict, folder: Path) -> Callable[[Communicator], None]:
    """Make one run; look at the test loss after every so many gradients, at the moment when the next one begins."""
    seed, batch, optimizer = settings["seed"], settings["batch_size"], settings["optimizer"]
    images, labels, *_ = digits()
    course = Course(settings["budget"]["samples"] // batch, settings["eval_every_samples"] // batch)
    ended_s: list[float] = []

    def body(comm: Communicator) -> None:
        np.seterr(all="ignore")  # of this thread: a run that diverges is made to its end
        torch.manual_seed(seed)
        options = dict(settings["strategy"])
        cls = strategies.load(options.pop("name"))
        channel, own = comm.split(0), OwnRun(comm, settings, folder)
        drawing = {"seed": seed} if "seed" in cls.Config.model_fields else {}
        strategy = cls(cls.Config(**options, **drawing), channel, FlatModel(module(**settings["model"])))
        strategy.records.write = own.write
        perceptron = Perceptron(strategy.model, optimizer["lr"], optimizer["momentum"])
        generator = np.random.default_rng((seed, comm.rank))
        course.enter(strategy)
        comm.barrier()
        begun_s = comm.now()
        strategy.records.start()
        if strategy.is_worker:
            while course.take(strategy, comm.now() - begun_s):
                chosen = generator.integers(len(labels), size=batch)
                comm.compute()
                perceptron.gradient(images[chosen], labels[chosen])
                own.write(replace(strategy.step(perceptron.update), samples=batch))
            ended_s.append(comm.now() - begun_s)
            strategy.pause()
        else:
            strategy.serve(perceptron.update)
        comm.barrier()
        if comm.rank == 0:
            course.look(strategy, max(ended_s))
            for taken, now_s, loss in course.curve:
                own.evaluate(taken, taken * batch, now_s, {"loss": loss})
        own.end(strategy, max(ended_s), {"loss": course.curve[-1][2]})
        channel.close()

    return body
