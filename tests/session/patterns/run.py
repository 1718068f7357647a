"""What a pattern is given: the same few calls for one process and for ranks, and one comparison of the two."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hpcdist as hd
from harness import loops
from hpcdist.session import rules
from hpcdist.strategies import Contract

N, BATCH, EPOCHS = 28, 4, 2
PATTERNS: dict[str, Pattern] = {}


@dataclass
class Pattern:
    """A loop, and what becomes of it.

    Attributes:
        exact: with strategies that have an equal in one process it equals that; else it only works.
        breaks: rows of the table of rules: where one of them refuses a strategy's contract, the loop is refused so.
        refused: the message of a refusal that is no row of that table, by the names of strategies; "*" for all.
        where: strategies that it is for; all, if empty.
        ways: ways in which its samples can be dealt out, see `test_patterns`.
        inexact: strategies with which it works, and equals nothing in one process.
        tolerance: of the comparison, absolute.
        needs: the package that it is for, if any.
    """

    loop: Callable[[Any], Any]
    exact: bool = True
    breaks: str | Sequence[str] = ()
    refused: dict[str, str] = field(default_factory=dict)
    where: Sequence[str] = ()
    ways: Sequence[str] = ("joint", "one", "same", "many")
    inexact: Sequence[str] = ()
    tolerance: float = 1e-12
    needs: str = ""

    def refusal(self, name: str, contract: Contract, size: int) -> str | None:
        """A regex of the message with which a strategy refuses the loop; None where it does not."""
        rows = [self.breaks] if isinstance(self.breaks, str) else self.breaks
        regexes = [message(row) for row in rows if refuses(row, contract, size)]
        regexes += [self.refused[key] for key in (name, "*") if key in self.refused][:1]
        return "|".join(regexes) or None


def refuses(row: str, contract: Contract, size: int) -> bool:
    rule = rules.RULES[row]
    return (size > 1 or rule.alone) and rule.refused(contract)


def message(row: str, **facts: object) -> str:
    """A regex of a rule's message, whatever is filled in but for these facts."""
    chunks = re.split(r"{(\w+)(?:!r)?}", rules.RULES[row].message)
    return "".join(re.escape(str(facts.get(p, ""))) or ".*" if i % 2 else re.escape(p) for i, p in enumerate(chunks))


def pattern(**given):
    """Puts a loop into the table."""

    def enter(loop):
        PATTERNS[loop.__name__] = Pattern(loop, **given)
        return loop

    return enter


def training(lr: float = 0.1, *, model=None, make=None, distributed=None, **given):
    """Puts a loop `(run, model, optimizer)` into the table; the model is finished if it does not return one.

    Args:
        model: () -> the model; `net`, if None.
        make: (model) -> its optimiser; SGD, if None.
        distributed: options of DistributedOptimizer.
        given: fields of `Pattern`; others are options of SGD.
    """
    fields = {key: given.pop(key) for key in [*given] if key in Pattern.__dataclass_fields__}
    make = make or using(SGD, lr=lr, **given)

    def put(loop):
        @functools.wraps(loop)
        def whole(run):
            own = (model or net)()
            result = loop(run, own, run.optimizer(make(own), own, **(distributed or {})))
            return run.finish(own) if result is None else result

        return pattern(**fields)(whole)

    return put


def data(n: int = N, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), y.to(dtype))


def net(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small model, the same each time."""
    if layers:
        return renewed(nn.Sequential(*layers).to(dtype))
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def renewed(model: nn.Module) -> nn.Module:
    """The model with weights that depend on nothing but their shapes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def mse(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.to(y.dtype), y)


class Table(nn.Module):
    """An embedding and a layer."""

    def __init__(self, **options: Any):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 3, **options), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))


class Repeated(Dataset):
    """Each batch once for every worker, so that all get the same ones."""

    def __init__(self, dataset: Dataset, batch: int, workers: int):
        self.dataset, self.batch, self.workers = dataset, batch, workers

    def __len__(self) -> int:
        return len(self.dataset) * self.workers

    def __getitem__(self, index: int):
        block, place = divmod(index, self.batch * self.workers)
        return self.dataset[block * self.batch + place % self.batch]


class Run:
    """What is common to `Alone` and `Together`."""

    rank, size, workers = 0, 1, 1

    def __init__(self) -> None:
        self.rates: list[tuple] = []  # (learning rate, momentum) of each update that was made here
        self.before: list[dict[str, Tensor]] = []  # models as they were before `finish`

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda own, *_: self.rates.append(numbers(own)))


def numbers(optimizer: torch.optim.Optimizer) -> tuple:
    keys = ("lr", "momentum", "weight_decay")
    return tuple(float(group[key]) for group in optimizer.param_groups for key in keys if key in group)


class Alone(Run):
    """One process, with batches as large as those of all workers together."""

    def __init__(self, joint: int = 1):
        super().__init__()
        self.joint = joint

    def optimizer(self, optimizer, model, clip_norm=None, accumulation=1, **_):
        self.note(optimizer)
        return optimizer

    def loader(self, dataset=None, batch: int | None = BATCH, **options):
        return DataLoader(dataset or data(), batch_size=batch and batch * self.joint, **options)

    def test(self, dataset=None, batch: int = 8):
        return DataLoader(dataset or data(24), batch_size=batch)

    def metric(self, value, weight=1.0):
        return float(value)

    def consensus(self, model):
        return torch.no_grad()

    def finish(self, *models):
        self.before += [copied(model) for model in models]
        return models[0]


class Together(Run):
    """Ranks."""

    def __init__(self, comm, way: str, workers: int, strategy: str, **options):
        super().__init__()
        hd.init(comm=comm)
        self.rank, self.size, self.workers = hd.rank(), hd.size(), workers
        self.way, self.strategy, self.options = way, strategy, options

    def optimizer(self, optimizer, model, **options):
        options = {k: v for k, v in options.items() if k != "accumulation" or self.strategy == "allreduce"}
        made = hd.DistributedOptimizer(optimizer, model, strategy=self.strategy, **self.options, **options)
        self.note(made)
        return made

    def loader(self, dataset=None, batch: int | None = BATCH, **options):
        dataset = dataset or data()
        if self.way == "same":
            dataset = Repeated(dataset, batch, self.workers)
        return hd.shard(DataLoader(dataset, batch_size=batch, **options))

    def test(self, dataset=None, batch: int = 8):
        return hd.shard(DataLoader(dataset or data(24), batch_size=batch), training=False)

    def metric(self, value, weight=1.0):
        return hd.metric(value, weight)

    def consensus(self, model):
        return hd.consensus(model)

    def finish(self, *models):
        self.before += [copied(model) for model in models]
        for model in models:
            hd.finish(model)
        return models[0]


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, none of them shared with the model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def sgd(run, model: nn.Module, lr: float = 0.1, part: nn.Module | None = None, **options: Any):
    return run.optimizer(SGD((part or model).parameters(), lr=lr, **options), model)


def evaluation(model: nn.Module, optimizer, x: Tensor, y: Tensor, loss_of=mse) -> Callable[[], Tensor]:
    """A closure for `optimizer.step`."""

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    return evaluate


def train(
    run,
    model,
    optimizer,
    loader,
    epochs: int = EPOCHS,
    *,
    loss=mse,
    backward: Callable | None = None,
    change: Callable | None = None,
    step: Callable | None = None,
    after: Callable | None = None,
) -> None:
    """The plain loop, and places in it where patterns may stand.

    Args:
        loader: or a function that makes the batches of an epoch.
        backward: (x, y) -> anything, in place of the backward pass of `loss(model(x), y)`.
        change, after: () -> anything, before and after the step.
        step: () -> anything, in place of the optimiser's step.
    """

    def compute(batch) -> None:
        x, y = batch
        backward(x, y) if backward else loss(model(x), y).backward()
        if change:
            change()

    for _ in range(epochs):
        batches = loader() if callable(loader) else loader
        loops.steps(optimizer, batches, compute, step=step, after=after and (lambda batch: after()))


def trained(run, model, optimizer, loader, *given, **hooks) -> nn.Module:
    """The model at the end of the plain loop, see `train`."""
    train(run, model, optimizer, loader, *given, **hooks)
    return run.finish(model)


@torch.no_grad()
def mean_loss(run, model: nn.Module, loader) -> float:
    """Of all ranks' samples."""
    total, count = 0.0, 0
    for x, y in loader:
        total, count = total + mse(model(x), y).item() * len(x), count + len(x)
    return run.metric(total / max(count, 1), count)


def using(kind, **options):
    """Makes the optimiser of a model."""
    return lambda model: kind(model.parameters(), **options)


def enter(name, *, dataset=data, epochs=EPOCHS, start=None, change=None, after=None, backward=None, **given):
    """Puts the plain loop into the table. Hooks, see `train`, are given the model first; `start`, the epoch's number.

    Other arguments are those of `training`.
    """

    def loop(run, model, optimizer):
        loader, hooks = run.loader(dataset()), {"change": change, "after": after, "backward": backward}
        hooks = {key: functools.partial(hook, model) for key, hook in hooks.items() if hook}
        for epoch in range(epochs):
            if start:
                start(model, epoch)
            train(run, model, optimizer, loader, 1, **hooks)

    loop.__name__ = name
    training(**given)(loop)


def passes(lr: float = 0.1, **given):
    """Puts the plain loop with this backward pass, `(model, x, y)`, into the table."""
    return lambda backward: enter(backward.__name__, lr=lr, backward=backward, **given)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest one of any element."""
    assert found.keys() == expected.keys()
    wide = [(found[k].to(torch.float64), expected[k].to(torch.float64)) for k in expected]
    return max((float((a - b).abs().max()) for a, b in wide if a.numel()), default=0.0)
