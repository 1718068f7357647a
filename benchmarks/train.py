"""Training steps by several ways of training, one beside the other on the same ranks.

`hpcdist bench train`: all-reduce beside torch's DistributedDataParallel; `bench gossip`: each strategy without servers;
`bench compress` on several ranks: all-reduce with each compressor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import runner
from benchmarks.compress import CONFIGS
from benchmarks.runner import Row, Side, beside, check, finish, perceptron, perceptron_bytes, table, timed
from hpcdist import strategies
from hpcdist.collectives.tuning.timing import calls_within
from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.torch_backend.default_group import default_group

MODELS: dict[str, tuple[int, ...]] = {"mlp_100k": (128, 384, 128, 10), "mlp_10M": (1024, 2560, 2560, 384, 10)}
BATCH = 32
WARM_UP = 25  # steps: enough for what measures its own first steps to have made up its mind
SPAN_S = 12.0  # of a way's warm-up, and of all its rounds: a slower way takes fewer steps, in fewer rounds
SHORT_S = 1.0  # the same where each of two dozen strategies is measured: all of it in a minute and a half
FEW = 3  # rounds that every way takes
COLUMNS = ("name", "bytes", "ranks", "median_s", "bytes_sent", "bytes_fetched")


@dataclass(frozen=True)
class Way:
    """Name a way of training: a strategy with options, or one of ALONE, COPY, DDP and DDP_NCCL."""

    name: str
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


ALONE, ALONE_ADAM = Way("alone"), Way("alone_adamw")  # the model without any communication: the limit
COPY = Way("copy")  # no training: a copy of the parameters, which every rank makes at the same time
DDP, DDP_NCCL = Way("ddp_gloo"), Way("ddp_nccl")  # torch's DistributedDataParallel, in its default process group
ALLREDUCE = Way("allreduce", "allreduce")
PERIOD = 16  # of strategies that communicate once in a period
ALLREDUCE_WAYS = (
    ALONE,
    DDP,
    ALLREDUCE,
    Way("allreduce_overlap_on", "allreduce", {"overlap": "on"}),
    Way("allreduce_overlap_off", "allreduce", {"overlap": "off"}),
)
HOROVOD = Way("allreduce_horovod", "allreduce", {"provider": "horovod"})  # apart: its thread is at work all the time


def gossip_ways(size: int) -> Iterator[Way]:
    """Make a way of each strategy without servers, but for all-reduce, that trains on `size` ranks."""
    for name in strategies.available():
        fields = strategies.load(name).Config.model_fields
        if "servers" in fields or name == ALLREDUCE.strategy:
            continue
        if "period" in fields:
            # Groups of equal size: pairs, unless the number of ranks is odd.
            group = {"group": size} if "group" in fields and size > 1 and size % 2 else {}
            yield Way(f"{name}_{PERIOD}", name, {"period": PERIOD, **group})
            continue
        compressor = fields["compression"].default.name if "compression" in fields else "none"
        # Compressors are at the density that `bench compress` begins with: their defaults suit other models.
        configs = [config for config in CONFIGS.values() if config["name"] == compressor]
        options: dict[str, Any] = {"compression": configs[0]} if configs else {}
        options |= dict.fromkeys({"warmup_steps", "variance_steps"} & set(fields), 1)  # what follows is measured
        yield Way(name, name, options)


COMPRESSED_WAYS = tuple(Way(name, "allreduce", {"compression": config}) for name, config in CONFIGS.items())


def measure(comm: Communicator, models: Sequence[str] = (), rounds: int = 9, steps: int = 5) -> list[Row]:
    """Collective. Time training steps of each way, with the strategy's overlap left to itself, on and off.

    Where Horovod is installed, the strategy by it comes after them.

    Returns:
        Rows of `time_steps`, with speedup (over ddp_gloo).
    """
    from hpcdist.comm.external.horovod import obstacle  # starts MPI: not at import

    check(comm, rounds)
    rows = []
    with default_group(comm, "gloo"):
        for model in models or MODELS:
            found = time_steps(comm, model, ALLREDUCE_WAYS, rounds, steps)
            if not obstacle():
                found += time_steps(comm, model, [HOROVOD], rounds, steps)
            rows += beside(found, [f"{model}/{DDP.name}"], speedup="speedup")
    return rows


def time_steps(
    comm: Communicator,
    model: str,
    ways: Sequence[Way],
    rounds: int,
    steps: int = 5,
    device: torch.device | str = "cpu",
    span_s: float | None = None,
) -> list[Row]:
    """Collective. Time `steps` training steps of each way in every round, fewer where they are slow (`span_s`, FEW).

    Every way has a replica of one of MODELS and a plain SGD optimiser of its own; AdamW where its strategy reads that.

    Args:
        device: where this rank computes.
        span_s: of a way's warm-up, and of its rounds together, at most, unless FEW rounds take longer; None: SPAN_S.

    Returns:
        The same rows on all ranks: name (`model/way`), bytes (of the gradients), ranks, median_s (of a step, of the
        slowest worker), bytes_sent and bytes_fetched (per step, the mean of the ranks; None for DDP, which doesn't
        tell).
    """
    torch.manual_seed(0)
    widths = MODELS[model]
    x, y = torch.randn(BATCH, widths[0]).to(device), torch.randint(widths[-1], (BATCH,)).to(device)
    sides = [_side(comm, f"{model}/{way.name}", way, widths, x, y) for way in ways]
    once_s = runner.warm_up(comm, sides, 1, 1)
    span_s = SPAN_S if span_s is None else span_s
    runner.warm_up(comm, sides, calls_within(span_s, once_s, WARM_UP))
    whole = {side.name: steps for side, way in zip(sides, ways) if "period" in way.options}  # else an exchange may lack
    counts = calls_within(span_s / FEW, once_s, steps) | whole
    times = calls_within(span_s, {name: counts[name] * step_s for name, step_s in once_s.items()}, rounds)
    few = {name: max(times[name], min(FEW, rounds)) for name in times}
    return table(runner.measure(comm, sides, few, counts), COLUMNS)


def compare(
    comm: Communicator, ways: Sequence[Way], models: Sequence[str] = (), rounds: int = 9, steps: int = PERIOD,
    span_s: float | None = None,
) -> list[Row]:  # fmt: skip
    """Collective. Time `ways`, the model alone and dense all-reduce side by side, by default in whole periods.

    Returns:
        Rows as `time_steps`'s, with overhead_s (over the model alone), overhead_copies (the same in copies of the
        parameters, of which each reads and writes all of them) and speedup (over all-reduce).
    """
    check(comm, rounds)
    rows = []
    for model in models or MODELS:
        found = time_steps(comm, model, (ALONE, ALONE_ADAM, COPY, ALLREDUCE, *ways), rounds, steps, span_s=span_s)
        found = beside(found, [f"{model}/{ALONE.name}"], overhead_s="overhead_s")
        found = beside(found, [f"{model}/{ALLREDUCE.name}"], speedup="speedup")
        (copy,) = (row for row in found if row["name"] == f"{model}/{COPY.name}")
        for row in found:
            row["overhead_copies"] = row["overhead_s"] / copy["median_s"]
        copy |= dict.fromkeys(("overhead_s", "overhead_copies", "speedup"))  # it is no step
        rows += found
    return rows


def _side(comm: Communicator, name: str, way: Way, widths: tuple[int, ...], x: torch.Tensor, y: torch.Tensor) -> Side:
    """Collective. Make a replica that is trained in one way."""
    module: nn.Module = perceptron(widths).to(x.device)
    adam = way == ALONE_ADAM or (way.strategy and strategies.load(way.strategy).contract.optimizer == "Adam")
    # Strategies that freeze Adam's v do so after one gradient here: without the large eps, elements of tiny v run away.
    kind = partial(torch.optim.AdamW, eps=1e-2) if adam else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=1e-3)
    n_bytes = perceptron_bytes(widths)

    def take(steps: int, finish_step: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            finish_step()
        finish(x)
        return (time.perf_counter() - start) / steps

    if way == COPY:
        source, target = (torch.zeros(n_bytes // 4, device=x.device) for _ in range(2))
        copy = timed(comm, lambda: finish(target.copy_(source)))
        return Side(name, copy, {"bytes": n_bytes, "bytes_sent": 0.0, "bytes_fetched": 0.0})
    if way.strategy is None:
        module = DistributedDataParallel(module) if way in (DDP, DDP_NCCL) else module
        sent = {"bytes_sent": 0.0, "bytes_fetched": 0.0} if way in (ALONE, ALONE_ADAM) else {}
        return Side(name, lambda steps: take(steps, optimizer.step), {"bytes": n_bytes, **sent})
    cls = strategies.load(way.strategy)
    strategy = cls(cls.Config(**way.options), comm.split(0), FlatModel(module), optimizer=optimizer)
    strategy.records.start()
    before, taken = strategy.records.traffic(), 0

    def run(steps: int) -> float:
        nonlocal taken
        taken += steps
        if not strategy.is_worker:  # it serves, and takes no time for that
            strategy.serve(optimizer.step)
            return 0.0
        step_s = take(steps, lambda: strategy.step(optimizer.step))
        strategy.pause()  # nothing is under way afterwards
        return step_s

    def columns() -> Row:
        moved = strategy.records.traffic() - before
        sums = torch.tensor([moved.bytes_sent, moved.bytes_fetched])
        comm.allreduce(sums)
        sent, fetched = (sums / (comm.size * taken)).tolist()
        return {"bytes": n_bytes, "bytes_sent": sent, "bytes_fetched": fetched}

    def close() -> None:
        strategy.close()
        strategy.comm.close()

    return Side(name, run, columns, close)
