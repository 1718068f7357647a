"""A small problem in float64, and training on it by any strategy or by one process, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness import loops
from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import EpochPlan
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel
from hpcdist.records import StepRecord
from hpcdist.session.loader.period import joint_batch
from hpcdist.strategies.common.gradients import LocalGradients
from hpcdist.strategies.common.state import copy_all

SAMPLES, FEATURES = 240, 6
_generator = torch.Generator().manual_seed(7)
X = torch.randn(SAMPLES, FEATURES, generator=_generator, dtype=torch.float64)
Y = (X @ torch.randn(FEATURES, 2, generator=_generator, dtype=torch.float64)).tanh()

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02),  # stable at the staleness of 15 workers
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def loss(module: nn.Module, indices: Any) -> Tensor:
    dtype = next(module.parameters()).dtype
    return nn.functional.mse_loss(module(X[indices].to(dtype)), Y[indices].to(dtype))


def stepping() -> list[str]:
    """The strategies whose steps go along gradients that the loop has computed; the others evaluate portions."""
    return [name for name in strategies.available() if strategies.load(name).contract.batch == "local"]


# By strategy: options for runs of a few steps.
PERIODS: dict[str, dict[str, Any]] = {
    "local_sgd": {"period": 2}, "diloco": {"period": 2}, "streaming_diloco": {"period": 4, "fragment_layers": 1},
    "sparse_loco": {"period": 2, "compression": {"ratio": 0.2}}, "easgd": {"period": 2}, "eamsgd": {"period": 2},
    "slowmo": {"period": 2}, "async_diloco": {"period": 2}, "noloco": {"period": 2}, "sparta": {"share": 0.5},
    "onebit_adam": {"warmup_steps": 4}, "zero_one_adam": {"variance_steps": 6, "full_steps": 2, "local_steps": 4},
    "dion": {"rate": 4.0},
}  # fmt: skip


def suited(name: str, usual: type[torch.optim.Optimizer] = torch.optim.SGD) -> type[torch.optim.Optimizer]:
    """The class of optimisers that a strategy goes with; `usual` where it goes with any."""
    of_word = {"SGD": torch.optim.SGD, "Adam": torch.optim.AdamW, "any": usual}
    return of_word[strategies.load(name).contract.optimizer]


def settings(name: str) -> list[str]:
    """The settings without which a job's optimiser, Adam's, does not suit a strategy."""
    return ["optimizer.name=SGD", "optimizer.lr=0.01"] if suited(name, torch.optim.Adam) is torch.optim.SGD else []


def local(name: str, parameters: Any, lr: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    """An optimiser that a strategy goes with: SGD, with momentum unless the strategy has its own; or AdamW."""
    cls = suited(name)
    if cls is torch.optim.AdamW:  # of a short memory, as nothing corrects the bias of its moments
        return cls(parameters, lr=lr, betas=(0.9, 0.9))
    return cls(parameters, lr=lr, momentum=0.0 if steps_itself(name) else momentum)


def steps_itself(name: str) -> bool:
    """Whether a strategy's rule is its own on one rank too, and not the optimiser's."""
    return strategies.load(name).contract.step == "the strategy's"


def fitting(name: str, size: int) -> dict[str, Any]:
    """The options without which a strategy refuses so many ranks: pairs of an odd number."""
    return {"group": size} if name == "noloco" and size > 1 and size % 2 else {}


def _period(name: str) -> int:
    field = strategies.load(name).Config.model_fields.get("period")
    return 0 if field is None else field.default


LONG_PERIODS = [name for name in stepping() if _period(name) > 20]  # longer than most runs of tests


def load(module: nn.Module, params: Collection[Tensor]) -> None:
    """Copies flat parameters into a module."""
    copy_all(FlatModel(module).params, params)


def nonfinite(model: FlatModel, bucket: Bucket | None = None) -> list[str]:
    """The parameters whose gradient is not finite, as a strategy finds them."""
    return LocalGradients(SingleRankCommunicator(), model, "stop", None, None).nonfinite(bucket)


def make(
    comm: Communicator, name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> strategies.Strategy:
    """Collective. A strategy for `module`, on a communicator of its own."""
    cls = strategies.load(name)
    config = cls.Config(**fitting(name, comm.size) | options)
    return cls(config, comm.split(0), FlatModel(module), optimizer=optimizer)


@contextmanager
def poisoned(parameter: nn.Parameter) -> Iterator[None]:
    """Backward passes in the context give the parameter a gradient of NaN."""
    hook = parameter.register_hook(lambda grad: torch.full_like(grad, torch.nan))
    yield
    hook.remove()


def seconds(strategy: strategies.Strategy, steps: int) -> float:
    """What so many steps on `model()` take on the clock of the strategy's communicator."""
    start = strategy.comm.now()
    module = strategy.model.module
    local = OPTIMIZERS["sgd"](module.parameters())
    loops.by_strategy(strategy, local, range(steps), lambda step: loss(module, range(4)).backward(), pauses=False)
    return strategy.comm.now() - start


class Run:
    """What training gave on one rank."""

    def __init__(self, strategy: strategies.Strategy, records: list[StepRecord]):
        self.params = [p.clone() for p in strategy.model.params]
        self.consensus = [p.clone() for p in strategy.consensus()[0]]
        self.records = records
        self.is_worker = strategy.is_worker
        self.pending = strategy.records.pending()
        self.seconds = strategy.comm.now()

    @property
    def staleness(self) -> list[int]:
        """Of every gradient applied on this rank, in order."""
        return [s for record in self.records for s in record.staleness]


def train(
    comm: Communicator,
    name: str | type[strategies.Strategy],
    options: dict | None = None,
    *,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "momentum",
    batch: int = 4,
    samples: int = SAMPLES,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
    poison: Collection[tuple[int, int]] = (),
    tells: bool = True,
    turns: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Run:
    """Collective. Trains by a strategy, with every step's computation on the virtual clock where there is one.

    If it `tells`, the strategy knows the optimiser, so that hyper-parameters travel, or are compared. In every epoch
    the gradient of each (worker, step) in `poison` is NaN. A worker takes each step in the context `turns()`.
    """
    cls = strategies.load(name) if isinstance(name, str) else name
    module = model(dtype)
    if isinstance(name, str) and steps_itself(name) and name != "dion" and isinstance(optimizer, str):
        optimizer = partial(local, name, lr=0.02)
    own = OPTIMIZERS.get(optimizer, optimizer)(module.parameters())
    channel = comm.split(0)
    records: list[StepRecord] = []
    given = {"optimizer": own if tells else None, "on_record": records.append}
    needed = fitting(name, comm.size) if isinstance(name, str) else {}
    strategy = cls(cls.Config(**needed | (options or {})), channel, FlatModel(module), **given)
    workers = len(strategy.config.workers(comm.size))
    strategy.records.start()
    for number in range(epochs):
        epoch(strategy, own, EpochPlan(samples, workers, batch, seed=1, epoch=number), records, poison, turns)
    run = Run(strategy, records)
    strategy.close()
    channel.close()
    return run


def virtual(options: dict, size: int, name: str | type[strategies.Strategy], **settings: Any) -> list[Run]:
    """`train` on virtual ranks; of the settings `compute`, `network` and `seed` are of the simulation."""
    simulation = {key: settings.pop(key) for key in ("compute", "network", "seed") if key in settings}
    return run_virtual(lambda comm: train(comm, name, options, **settings), size, **simulation)


def staleness(runs: Collection[Run]) -> list[int]:
    """Of every gradient applied on any rank."""
    return [s for run in runs for s in run.staleness]


def epoch(
    strategy: strategies.Strategy,
    local: torch.optim.Optimizer,
    plan: EpochPlan,
    records: list[StepRecord],
    poison: Collection[tuple[int, int]] = (),
    turns: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Collective. Takes the steps of an epoch, as `train` does, and adds their records to those."""
    module, joint = strategy.model.module, []
    worker = strategy.config.workers(strategy.comm.size).index(strategy.comm.rank) if strategy.is_worker else 0

    def backward(step: int) -> None:
        sizes = plan.sizes(step)
        strategy.model.gradients.start_batch(sizes[worker] * len(sizes) / sum(sizes))
        if strategy.contract.batch == "portions":
            joint[:], strategy.joint = joint_batch(plan, step, worker, strategy.config)
            return
        indices = plan.indices(step, worker) if sizes[worker] else range(plan.batch_size)  # what counts 0 may be any
        with poisoned(next(module.parameters())) if (worker, step) in poison else nullcontext():
            loss(module, indices).backward()

    def take() -> None:
        if strategy.contract.batch == "portions":
            records.append(strategy.minimise(local.step, lambda portion: _backward(module, joint[portion]))[0])
            return
        with turns():
            records.append(strategy.step(local.step))

    loops.by_strategy(strategy, local, range(plan.steps), backward, take=take)


def _backward(module: nn.Module, indices: Any) -> float:
    mean = loss(module, indices)
    mean.backward()
    return mean.item()


def serial(
    workers: int,
    *,
    optimizer: str = "momentum",
    batch: int = 4,
    samples: int = SAMPLES,
    epochs: int = 2,
    leave_out: Collection[tuple[int, int]] = (),
) -> list[Tensor]:
    """One process with the batches of all workers together; its parameters as one flat tensor.

    In every epoch the batch of each (worker, step) in `leave_out` is missing; without any there is no step.
    """
    module = model()
    local = OPTIMIZERS[optimizer](module.parameters())
    for epoch in range(epochs):
        plan = EpochPlan(samples, workers, batch, seed=1, epoch=epoch)
        pairs = [[(worker, step) for worker in range(workers)] for step in range(plan.steps)]
        batches = [
            [i for w, step in pair if (w, step) not in leave_out for i in plan.indices(step, w)] for pair in pairs
        ]
        loops.steps(local, filter(None, batches), lambda indices: loss(module, indices).backward())
    return [loops.vector(module)]


def noting(lr: float) -> tuple[Callable[..., torch.optim.Optimizer], Tensor]:
    """An optimiser for `train`, SGD with momentum, and the tensor where it sums how it has moved the parameters."""
    moved = torch.zeros(sum(p.numel() for p in model().parameters()), dtype=torch.float64)

    def add(optimizer, sign):
        moved.add_(torch.cat([p.detach().reshape(-1) for p in optimizer.param_groups[0]["params"]]), alpha=sign)

    def make(parameters):
        local = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        local.register_step_pre_hook(lambda optimizer, *_: add(optimizer, -1))
        local.register_step_post_hook(lambda optimizer, *_: add(optimizer, 1))
        return local

    return make, moved


def learns(ranks, name: str, options: dict, *, epochs: int = 6, below: float = 0.8, **virtual: Any) -> list[Run]:
    """Trains on the fixture `ranks`; all must agree in the end, on a loss below so much of the first one.

    Real ranks that wait for nobody may be done before others begin, so that no loss but the first bounds theirs.

    Args:
        virtual: the network and compute model of virtual ranks.
    """

    def body(comm):
        run = train(comm, name, options, optimizer="sgd", epochs=epochs)
        return run, [p.tolist() for p in run.consensus]

    found = ranks(body, **virtual)
    assert all(consensus == found[0][1] for _, consensus in found), "ranks disagree on what they stand for"
    module = model()
    start = loss(module, range(SAMPLES)).item()
    load(module, found[0][0].consensus)
    assert loss(module, range(SAMPLES)).item() < (1 if ranks.real else below) * start
    return [run for run, _ in found]
