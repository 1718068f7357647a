"""Steps of pipelines by each schedule, beside one rank alone and torch.distributed.pipelining on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks import runner
from benchmarks.runner import Row, Side, barrier_asleep, check, peak_bytes, table
from hpcdist.comm.communicator import Communicator
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.torch_backend.default_group import default_group

STAGES = (2, 4)
BLOCKS, WIDTH, BATCH, MICRO_BATCHES = 8, 256, 512, 8
WARM_UP, STEPS, MEMORY_ROUNDS = 3, 2, 3
ALONE = "alone"
CPU = torch.device("cpu")
COLUMNS = (
    *("name", "stages", "chunks", "micro_batches", "ranks", "median_s", "samples_per_s", "speedup", "times_alone"),
    *("ideal_s", "bubble", "bubble_limit", "peak_bytes", "loss"),
)
Step = Callable[[], float]  # goes forward and backward with one batch; returns the loss, 0 where it is not known
Ways = dict[str, tuple[Row, Callable[[], Step | None]]]  # columns, and what makes the step; None on ranks without it
loss_of = nn.functional.mse_loss


@dataclass(frozen=True)
class Variant:
    """One of our schedules, or (`peer`) the class of torch's schedule that is compared with it."""

    schedule: str
    peer: str | None = None
    chunks: int = 1
    recompute: bool = False

    @property
    def name(self) -> str:
        return "torch " * bool(self.peer) + self.schedule + " recompute" * self.recompute


VARIANTS = (
    Variant("gpipe"),
    Variant("gpipe", "ScheduleGPipe"),
    Variant("one_f_one_b"),
    Variant("one_f_one_b", recompute=True),
    Variant("one_f_one_b", "Schedule1F1B"),
    Variant("interleaved", chunks=2),
    Variant("interleaved", "ScheduleInterleaved1F1B", chunks=2),
    Variant("zero_bubble"),
    Variant("zero_bubble", "ScheduleInterleavedZeroBubble"),
)


@dataclass(frozen=True)
class Workload:
    """Hold the work that all sides do: a model, a batch and the number of its micro-batches."""

    blocks: int
    width: int
    batch: int
    micro_batches: int

    def model(self) -> nn.Sequential:
        """Make the blocks of a transformer's feed-forward layers, the same at every call."""
        torch.manual_seed(0)
        width = self.width
        blocks = [
            (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(self.blocks)
        ]
        return nn.Sequential(*(nn.Sequential(*block) for block in blocks))

    def samples(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(self.batch, self.width, generator=generator) for _ in range(2))
        return x, y


def measure(
    comm: Communicator,
    stages: Sequence[int] = STAGES,
    rounds: int = 7,
    *,
    blocks: int = BLOCKS,
    width: int = WIDTH,
    batch: int = BATCH,
    micro_batches: int = MICRO_BATCHES,
) -> list[Row]:
    """Collective. Time forward and backward passes of a batch through pipelines, and on rank 0 alone.

    All sides have the same model and the same micro-batches; no parameter changes.

    Args:
        stages: of the pipelines, each on so many ranks; those of more than there are ranks are left out.
        blocks, width, batch: of the model and the samples of a step.

    Returns: name (`stages/schedule`), stages, chunks (stages per rank), micro_batches,
    ranks (of the job), median_s (of a step), samples_per_s, speedup (over torch's of the same schedule), times_alone
    (samples per second over one rank's), ideal_s (one rank's seconds / stages), bubble (1 - ideal_s / median_s: all
    that is lost, waiting and other), bubble_limit ((p-1) / (m+p-1) of p stages and m micro-batches, m times the chunks
    where there are several), peak_bytes (how much memory the busiest rank takes, model included; None where the system
    does not tell), loss (the same for all).
    """
    check(comm, rounds)
    load = Workload(blocks, width, batch, micro_batches)
    ways: Ways = {ALONE: ({"stages": 1, "chunks": 1}, lambda: None if comm.rank else _alone(load))}
    with default_group(comm, "gloo"):
        for number in [number for number in stages if number <= comm.size]:
            ways |= _variants(comm, number, load)
        sides = [Side(name, partial(_run, make()), columns) for name, (columns, make) in ways.items()]
        runner.warm_up(comm, sides, WARM_UP, synchronize=barrier_asleep)
        rows = runner.measure(comm, sides, rounds, STEPS, barrier_asleep)
        for row in rows:
            row["peak_bytes"] = _peak(comm, ways[row["name"]][1])
    return table(_compared(rows, load), COLUMNS)


def _variants(comm: Communicator, number: int, load: Workload) -> Ways:
    """Collective. Return the ways through a pipeline of so many stages, which the first ranks have."""
    inner, group = comm.split(0 if comm.rank < number else None), dist.new_group(list(range(number)))
    grid = None if inner is None else Grid(inner, number)

    def make(variant: Variant) -> Step | None:
        if grid is None:
            return None
        return _ours(grid, variant, load) if variant.peer is None else _torch(group, variant, load)

    return {f"{number}/{c.name}": ({"stages": number, "chunks": c.chunks}, partial(make, c)) for c in VARIANTS}


def _run(step: Step | None, steps: int) -> dict[str, float]:
    """Take steps where this rank takes part; return the seconds of one, and the loss."""
    start, loss = time.perf_counter(), 0.0
    if step is None:
        return {"median_s": 0.0, "loss": loss}
    for _ in range(steps):
        loss = step()
    return {"median_s": (time.perf_counter() - start) / steps, "loss": loss}


def _peak(comm: Communicator, make: Callable[[], Step | None]) -> int | None:
    """Collective. Return how much memory a way takes on the busiest rank, from its model to the end of a step."""
    peaks: list[int] = []
    for _ in range(MEMORY_ROUNDS):
        barrier_asleep(comm)
        peak = peak_bytes(lambda: _run(make(), 2))  # the second step begins with all gradients
        peaks += [] if peak is None else [peak]
    found = comm.gather(median(peaks) if peaks else None)
    return None if None in found else int(max(found))


def _compared(rows: list[Row], load: Workload) -> list[Row]:
    """Compare each row with the limit, with one rank alone, and with torch's pipeline of the same schedule."""
    by_name = {row["name"]: row for row in rows}
    alone_s = by_name[ALONE]["median_s"]
    for row in rows:
        step_s, stages = row["median_s"], row["stages"]
        places = load.micro_batches * row["chunks"] + stages - 1
        ideal_s = alone_s / stages
        row |= {"micro_batches": load.micro_batches, "samples_per_s": load.batch / step_s}
        row |= {"times_alone": alone_s / step_s, "ideal_s": ideal_s}
        row |= {"bubble": 1 - ideal_s / step_s, "bubble_limit": (stages - 1) / places}
        peer = row["name"].removesuffix(" recompute").replace("/", "/torch ")
        if peer != row["name"] and peer in by_name:
            row["speedup"] = by_name[peer]["median_s"] / step_s
    return rows


# --- the sides --------------------------------------------------------------------------------------------------------
def _alone(load: Workload) -> Step:
    """Make the step of one rank that has the whole model, and adds up the gradients of the micro-batches."""
    model, (x, y) = load.model(), load.samples()

    def step() -> float:
        model.zero_grad()
        total = 0.0
        for xs, ys in zip(x.chunk(load.micro_batches), y.chunk(load.micro_batches), strict=True):
            loss = loss_of(model(xs), ys) / load.micro_batches
            loss.backward()
            total += loss.item()
        return total

    return step


def _ours(grid: Grid, variant: Variant, load: Workload) -> Step:
    pipeline = Pipeline(
        load.model,
        loss_of,
        grid,
        micro_batches=load.micro_batches,
        schedule=variant.schedule,
        chunks=variant.chunks,
        recompute=variant.recompute,
    )
    x, y = load.samples()

    def step() -> float:
        pipeline.zero_grad()
        return pipeline.forward_backward(x, y).item()

    return step


def _torch(group: dist.ProcessGroup, variant: Variant, load: Workload) -> Step:
    """Make the step of torch's pipeline, with the same stages."""
    ranks, here = group.size(), group.rank()
    number = ranks * variant.chunks
    bounds = [load.blocks * stage // number for stage in range(number + 1)]
    model, (x, y) = load.model(), load.samples()
    parts = {stage: model[bounds[stage] : bounds[stage + 1]] for stage in range(here, number, ranks)}
    stages = [PipelineStage(part, stage, number, CPU, group=group) for stage, part in parts.items()]
    cls = getattr(schedules, str(variant.peer))
    several = issubclass(cls, schedules.PipelineScheduleMulti)
    schedule = cls(stages if several else stages[0], load.micro_batches, loss_fn=loss_of)
    inputs, target = (x,) if here == 0 else (), y if here == ranks - 1 else None
    del model  # the others' layers

    def step() -> float:
        for part in parts.values():
            part.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if losses else 0.0

    return step
