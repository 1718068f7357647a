"""A parameter without a gradient on all ranks is left alone by every strategy, as torch's optimisers leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hpcdist as hd
from harness.cases import each
from harness.ranks import VirtualRanks
from session.patterns.run import Repeated, data, difference, mse, renewed
from strategies import problem

pytestmark = [pytest.mark.computes, pytest.mark.filterwarnings("ignore:The optimiser's state is divided")]
# With these every strategy makes some steps of each of its kinds in an epoch of 8 steps.
FEW: dict[str, dict[str, Any]] = {
    **problem.PERIODS, "demo": {"keep": 1}, "strom": {"compression": {"name": "topk", "ratio": 0.1}},
    "easgd": {"beta": 0.0}, "eamsgd": {"beta": 0.0},  # no spring pulls at them
    "streaming_diloco": {"period": 4, "fragment_layers": 1, "blend": 0.0},
}  # fmt: skip
TOPK = {"compression": {"name": "topk", "ratio": 0.1}}
FRAGMENTS = FEW["streaming_diloco"]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("allreduce", TOPK), ("hardsync", TOPK), ("parameter_server", {"servers": "colocated"}),
    ("downpour", {"server_rule": "optimizer"}), ("downpour", {"n_push": 2, **TOPK}),
    ("diloco", {"period": 2, **TOPK}), ("diloco", {"period": 2, "overlap": True}),
    ("local_sgd", {"period": 2, "average_optimizer_state": True}), ("slowmo", {"period": 4, "base": "dpsgd"}),
    *(("streaming_diloco", {**FRAGMENTS, "merge": late}) for late in ("shift", "eager")),
    ("gradient_tracking", {"order": "after"}), ("dpsgd", TOPK), ("strom", {"topology": "ring", **TOPK}),
    *(("async_diloco", {"period": 2, **rule}) for rule in ({"rule": "buffered"}, {"spread": 0.25})),
    ("zero_one_adam", {"variance_steps": 2, "local_steps": 2, **TOPK}),
]  # fmt: skip
# Their ranks are at different steps when a layer is frozen, and go on to average what differs; or what is averaged is
# rounded. All others leave it alone to the bit.
BETWEEN = ("gossip_pull", "gossip_push", "adpsgd", "sgp", "sparta", "slowmo", "strom")


class Parts(nn.Module):
    """Layers of which one may be frozen, one is used at times, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.never, self.head = (nn.Linear(n, m) for n, m in ((5, 8), (8, 8), (5, 8), (8, 1)))

    def forward(self, x: Tensor, *, whole: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.head(hidden + self.extra(hidden) if whole else hidden)


def sgd(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    momentum = 0.0 if name == "demo" else 0.9
    return lambda parameters: torch.optim.SGD(parameters, lr=0.003, momentum=momentum, weight_decay=0.1)


def adamw(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, betas=(0.9, 0.9))


def fitting(name: str) -> list[Callable[[str], Any]]:
    return {torch.optim.SGD: [sgd], torch.optim.AdamW: [adamw]}.get(problem.suited(name, None), [sgd, adamw])


def loop(model: nn.Module, optimizer, loader, *, values: Callable[[], Any]) -> list[Any]:
    """The values before each of four epochs, and at the end.

    In the second and the third one the first layer is frozen, and another is not used.
    """
    found = []
    for epoch in range(4):
        found.append(values())
        left_alone = epoch in (1, 2)
        model.first.requires_grad_(not left_alone)
        for x, y in loader:
            optimizer.zero_grad()
            mse(model(x, whole=not left_alone), y).backward()
            optimizer.step()
    return [*found, values()]


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(comm, name: str, options: dict[str, Any], make) -> list[tuple[dict, dict]]:
    """Collective. This rank's values and the consensus, where all workers have the same batches."""
    hd.init(comm=comm)
    model = renewed(Parts().double())
    options = {**problem.fitting(name, comm.size), **options}
    optimizer = hd.DistributedOptimizer(
        make(model.parameters()), model, strategy=name, identical_batches="allow", **options
    )
    workers = len(optimizer.strategy.config.workers(comm.size))
    loader = hd.shard(DataLoader(Repeated(data(32), 4, workers), batch_size=4))

    def values() -> tuple[dict, dict]:
        with hd.consensus(model):
            common = copied(model)
        return copied(model), common

    found = loop(model, optimizer, loader, values=values)
    hd.finish(model)
    return found


def outside(after: list[Tensor], before: list[Tensor]) -> float:
    """How far a value of some rank lies outside of those that the ranks had before."""
    low, high = torch.stack(before).amin(0), torch.stack(before).amax(0)
    return max(float(torch.maximum(low - value, value - high).max()) for value in after)


@each("case", enumerate([*((name, FEW.get(name, {})) for name in problem.stepping()), *MORE]))
def test_it_is_left_alone(case):
    """With strategies that go with both kinds of optimisers one, in turn."""
    number, (name, options) = case
    kinds = fitting(name)
    make = kinds[number % len(kinds)](name)
    found = VirtualRanks(3)(lambda comm: trained(comm, name, options, make))
    rounding = 1e-14 if name in BETWEEN else 0.0
    for layer in ("first.weight", "first.bias", "extra.weight", "extra.bias", "never.weight", "never.bias"):
        own, common = ([[of_rank[time][which][layer] for of_rank in found] for time in range(5)] for which in (0, 1))
        held = [common] if name == "hardsync" else [own, common]  # compressed replies bring workers there in the end
        for of in held:
            if layer.startswith("never"):
                assert max(outside(of[time], of[0]) for time in range(1, 5)) <= rounding
            elif layer.startswith("first") or (name, options.get("topology")) != ("strom", "ring"):
                # What was under way has arrived an epoch later; a tree passes on what is not sent yet, too.
                assert outside(of[3], own[2] + common[2]) <= rounding, layer
        if layer in ("first.weight", "extra.weight"):
            assert outside(own[1], own[0]) > 1e-5
            assert outside(own[4], own[3]) > 1e-6, f"{layer} does not go on"


@each("case", [("before", sgd), ("after", adamw)])
def test_gradient_tracking_equals_one_process(case):
    """Where all ranks have the same batches. The others that do are in the table of patterns."""
    order, kind = case
    make = kind("gradient_tracking")
    found = VirtualRanks(3)(lambda comm: trained(comm, "gradient_tracking", {"order": order}, make))
    model = renewed(Parts().double())
    loader = DataLoader(data(32), batch_size=4)
    expected = loop(model, make(model.parameters()), loader, values=lambda: copied(model))
    for of_rank in found:
        for (own, _), alone in zip(of_rank, expected, strict=True):
            assert difference(own, alone) <= 1e-9


@each("topology", ["ring", "complete"])
def test_gradient_tracking_steps_where_another_rank_has_the_gradient(topology):
    """Of a parameter that one rank uses. The mean of all follows the mean gradient, once all ranks have heard of it."""
    steps, rate, size = 12, 0.1, 5

    def body(comm):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        strategy = problem.make(comm, "gradient_tracking", module, topology=topology)
        local = torch.optim.SGD(module.parameters(), lr=rate)
        for _ in range(steps):
            module.weight.grad = torch.ones(2, dtype=torch.float64) if comm.rank == 0 else None
            strategy.step(local.step)
        found = strategy.consensus()[0][0].clone()
        strategy.close()
        return found

    for found in VirtualRanks(size)(body):
        late = 0 if topology == "complete" else 2.0  # steps until the news has gone round
        assert ((-found * size / rate - steps).abs() <= late + 1e-9).all()
