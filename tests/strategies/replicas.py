"""Local SGD and DiLoCo: ranks that step alone for a period, and the same by hand in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from harness import loops
from harness.worlds import HeldRank
from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual import Network
from hpcdist.model.flat import FlatModel
from hpcdist.records import Summary
from hpcdist.strategies.common.state import copy_all
from strategies import problem
from train import tiny

PAIRS = Network(0.0, math.inf, ranks_per_node=2)
BATCH = 4


def in_pairs(comm: Communicator) -> Communicator:
    """Collective. The ranks on nodes of two: so they are on virtual ranks on PAIRS; real ones are told so."""
    if comm.mpi is None:
        return comm.split(0)
    nodes = tuple(rank // 2 for rank in range(comm.size))
    return comm.apart(nodes=nodes)


def backward(module: torch.nn.Module, rank: int, size: int, step: int) -> None:
    """The gradient of this rank's batch at a step, which counts from 0."""
    first = (step * size + rank) * BATCH
    indices = [i % problem.SAMPLES for i in range(first, first + BATCH)]
    problem.loss(module, indices).backward()


def make(comm: Communicator, name: str, options: dict, optimizer: str):
    """Collective. A strategy on a fresh model, and the local optimiser."""
    module = problem.model()
    local = problem.OPTIMIZERS[optimizer](module.parameters())
    cls = strategies.load(name)
    ring = {"algorithm": "ring"} if "algorithm" in cls.Config.model_fields else {}
    strategy = cls(cls.Config(**ring, **options), in_pairs(comm), FlatModel(module))
    strategy.optimizer = local
    strategy.records.start()
    return strategy, local


def go(strategy, local, steps: range) -> tuple[list[Tensor], list]:
    """Takes these steps; the parameters after each of them, and the records."""
    values, module = [], strategy.model.module
    records = loops.by_strategy(
        strategy, local, steps, lambda step: backward(module, strategy.comm.rank, strategy.comm.size, step),
        after=lambda step: values.append(strategy.model.params[0].clone()), pauses=False,
    )  # fmt: skip
    return values, records


def taken_up(comm: Communicator, name: str, options: dict, steps: int, then: dict, optimizer: str = "sgd"):
    """Collective. A strategy after some steps, its optimiser, and another with other options, from its state."""
    strategy, local = make(comm, name, options, optimizer)
    go(strategy, local, range(steps))
    saved = deepcopy(strategy.state.save())
    again, local_again = make(comm, name, {**options, **then}, optimizer)
    copy_all(again.model.params, strategy.model.params)
    again.state.load(saved)
    return strategy, local, again, local_again


def stay(strategy, local) -> None:
    """Takes a step in which this rank does not move by itself."""
    for slot in strategy.model.slots:
        slot.tensor.grad = torch.zeros_like(slot.tensor)
    strategy.step(local.step)


def train(comm: Communicator, name: str, options: dict, optimizer: str, steps: int) -> tuple[Tensor, list]:
    """Collective. The parameters after each step, as rows, and the records."""
    strategy, local = make(comm, name, options, optimizer)
    values, records = go(strategy, local, range(steps))
    end(strategy)
    return torch.stack(values), records


def end(strategy) -> None:
    """Collective."""
    strategy.close()
    strategy.comm.close()


def places_where_it_differs(
    comm: Communicator, name: str, options: dict, optimizer: str, places: Sequence[int], steps: int
) -> list[int]:
    """Collective. After which steps a strategy made anew, with the state of then, doesn't take the same steps."""
    strategy, local = make(comm, name, options, optimizer)
    values, saved = [], {}
    for step in range(steps):
        if step in places:
            state = [[flat.clone() for flat in strategy.model.params], local.state_dict(), strategy.state.save()]
            saved[step] = HeldRank(state)
        values += go(strategy, local, range(step, step + 1))[0]
    end(strategy)
    return [place for place in places if not _goes_on(comm, name, options, optimizer, saved[place], values, place)]


def _goes_on(comm, name, options, optimizer, saved: HeldRank, values: list[Tensor], place: int) -> bool:
    params, of_local, of_strategy = saved.at()
    again, local = make(comm, name, options, optimizer)
    copy_all(again.model.params, params)
    local.load_state_dict(of_local)
    again.state.load(of_strategy)
    found, _ = go(again, local, range(place, len(values)))
    end(again)
    return all(torch.equal(a, b) for a, b in zip(found, values[place:], strict=True))


def same_when_resumed(comm: Communicator, folder: Path, name: str, options: Sequence[str], at: int) -> bool:
    """Collective. Whether a job resumed from the checkpoint of step `at` ends on the same bits."""
    whole, again = resumed(comm, folder, name, options, at)
    return whole.sha256 == again.sha256


def resumed(
    comm: Communicator, folder: Path, name: str, options: Sequence[str], at: int, then: Sequence[str] = ()
) -> list[Summary]:
    """Collective. A job, and a job resumed from its checkpoint of step `at`, with options `then` as well."""
    ring = ["strategy.algorithm=ring"] if "algorithm" in strategies.load(name).Config.model_fields else []
    sgd = ("optimizer.name=SGD", "optimizer.lr=0.05") if problem.suited(name, None) is torch.optim.SGD else ()
    saving = (*sgd, "epochs=2", "batch_size=16", f"checkpoint.every_steps={at}", "checkpoint.keep=100")

    def run(to: Path, path: Path | None = None, more: Sequence[str] = ()) -> Summary:
        settings = [f"strategy={name}", *ring, *(f"strategy.{option}" for option in (*options, *more))]
        return tiny.run(comm, to, *settings, *saving, resume=path)[0]

    first = run(folder / "whole")
    return [first, run(folder / "again", folder / "whole" / "run" / "checkpoints" / f"step-{at:08d}", then)]


class ByHand:
    """`size` replicas and optimisers in one process, stepped one after the other; groups of them are averaged."""

    def __init__(self, size: int, optimizer: str):
        self.size, self.step = size, 0
        modules = [problem.model() for _ in range(size)]
        self.models = [FlatModel(module) for module in modules]
        self.optimizers = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]

    @property
    def params(self) -> list[Tensor]:
        return [model.params[0] for model in self.models]

    def steps(self) -> None:
        """One step of every replica."""
        for rank, (model, local) in enumerate(zip(self.models, self.optimizers, strict=True)):
            local.zero_grad()
            backward(model.module, rank, self.size, self.step)
            local.step()
        self.step += 1

    def average(self, ranks: range) -> None:
        """The mean of these replicas' parameters for each of them."""
        mean = sum(self.params[rank] for rank in ranks) / len(ranks)
        for rank in ranks:
            self.params[rank].copy_(mean)

    def average_state(self, ranks: range) -> None:
        """Likewise of all state but the number of steps."""
        of_ranks = [list(self.optimizers[rank].state.values()) for rank in ranks]
        for of_parameter in zip(*of_ranks, strict=True):
            for name in of_parameter[0].keys() - {"step"}:
                mean = sum(state[name] for state in of_parameter) / len(ranks)
                for state in of_parameter:
                    state[name].copy_(mean)


def by_hand(
    size: int, optimizer: str, steps: int, *, period: int = 1, warmup_steps: int = 0, node_period: int | None = None,
    average_optimizer_state: bool = False, overlap: bool = False, outer_lr: float = 1.0, outer_momentum: float = 0.0,
    nesterov: bool = True,
) -> Tensor:  # fmt: skip
    """The parameters of all replicas after each step, [step, rank, parameter]; with the defaults they are averaged."""
    hand, values, late = ByHand(size, optimizer), [], None
    x = hand.params[0].clone()
    velocity = torch.zeros_like(x)

    def move(params: Sequence[Tensor]) -> None:
        """Take one step of the outer optimiser, by the formulas of SGD."""
        gradient = sum(x - own for own in params) / size
        velocity.mul_(outer_momentum).add_(gradient)
        x.sub_(outer_lr * (gradient + outer_momentum * velocity if nesterov else velocity))

    for step in range(1, steps + 1):
        hand.steps()
        if late is not None:
            move(late)
            for own, then in zip(hand.params, late, strict=True):
                own.copy_(x + (own - then))
            late = None
        after, groups = step - warmup_steps, []
        if after <= 0 or after % period == 0:
            if overlap:
                late = [own.clone() for own in hand.params]
            else:
                move(hand.params)
                for own in hand.params:
                    own.copy_(x)
                groups = [range(size)]
        elif node_period and after % node_period == 0:
            groups = [range(first, min(first + 2, size)) for first in range(0, size, 2)]
            for group in groups:
                hand.average(group)
        for group in groups if average_optimizer_state else ():
            hand.average_state(group)
        values.append(torch.stack(hand.params))
    return torch.stack(values)
