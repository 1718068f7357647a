"""`hpcdist plan`: cut a job's model into pipeline stages, and predict time and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdist.tools import console
from hpcdist.tools.cli.base import JobFile, Json, plugin, whole_number
from hpcdist.tools.options import Config, Overrides, flag, option, read_counts

if TYPE_CHECKING:  # its module imports torch, which takes seconds
    from hpcdist.parallel.plan import Plan


app = typer.Typer()


@app.command()
def plan(
    job: JobFile,
    stages: Annotated[int | None, whole_number("Ranks that the model is split over (parallel.stages).")] = None,
    micro_batches: Annotated[int | None, whole_number("Parts of a batch (parallel.micro_batches).")] = None,
    schedule: Annotated[
        str | None, plugin("schedules", "Order of the passes (parallel.schedule); see `hpcdist schedules`.")
    ] = None,
    chunks: Annotated[int | None, whole_number("Stages of each rank (parallel.chunks).")] = None,
    cut: Annotated[
        str | None, option("N,N,...", "Layers of each stage (parallel.cut). Default: the fastest cut.")
    ] = None,
    recompute: Annotated[
        bool, flag("--recompute", "Recompute activations in the backward pass (parallel.recompute).")
    ] = False,
    limit_mb: Annotated[float | None, option("MB", "Memory that each rank may need.", min=0.0)] = None,
    network: Annotated[
        str | None,
        option("LATENCY,BANDWIDTH", "Speed of each link, such as 2us,100Gbit/s. Default: messages take no time."),
    ] = None,
    config: Config = None,
    overrides: Overrides = None,
    json_path: Json = None,
) -> None:
    """Cut a job's model into stages of equal time, and predict its pipeline: idle time, memory, other schedules.

    Each layer is measured here on a micro-batch of the job's data, on the first GPU, or with one thread. The model may
    be larger than this machine's memory. The optimiser's time is not included.

    Example: hpcdist plan jobs/digits.py --stages 4 --micro-batches 8 --network 2us,100Gbit/s
    """
    from hpcdist.config.files import neighbours
    from hpcdist.config.merge import as_flags
    from hpcdist.parallel import by_hand
    from hpcdist.parallel.plan import compare, predict
    from hpcdist.tools.simulate.cluster import read_cluster
    from hpcdist.train.loop import local_device
    from hpcdist.train.planning import copies, measure_layers
    from hpcdist.train.runs import specify

    options = {
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "chunks": chunks,
        "cut": None if cut is None else read_counts("--cut", cut),
        "recompute": recompute or None,
    }
    flags = as_flags({key: value for key, value in options.items() if value is not None}, "parallel.")
    loaded, settings = specify(job, config, [*(overrides or []), *flags])
    parallel = settings.parallel
    shared: dict[str, Any] = {  # arguments of `predict` and `compare`
        "micro_batches": parallel.micro_batches * settings.accumulation,
        "recompute": parallel.recompute,
        "limit_bytes": None if limit_mb is None else int(limit_mb * 1e6),
        "copies": copies(settings),
    }
    if network is not None:
        link = read_cluster(None, network, None).links()
        shared["transfer_s"] = lambda n_bytes: link.latency_s + n_bytes / link.bandwidth_bytes_s
    with neighbours(job):
        costs = measure_layers(loaded, settings, local_device(0))
    user_cut = None if parallel.sizes is None else by_hand(parallel.sizes, len(costs))
    plan = predict(costs, parallel.stages, schedule=parallel.schedule, chunks=parallel.chunks, cut=user_cut, **shared)
    one_rank_s = shared["micro_batches"] * sum(cost.forward_s + cost.backward_s for cost in costs)
    _show(plan, compare(costs, parallel.stages, **shared), one_rank_s)
    if json_path is not None:
        content = {"micro_batches": shared["micro_batches"], **plan.as_dict(), "layers": [asdict(c) for c in costs]}
        json_path.write_text(json.dumps(content, indent=2) + "\n")


def _show(chosen: Plan, others: Sequence[Plan], one_rank_s: float) -> None:
    """Print a plan, its drawing, and a table of all schedules. `one_rank_s`: seconds of a step on one rank."""
    from hpcdist.parallel.schedules.base import gantt

    step_s, ranks = chosen.timing.makespan_s, len(chosen.table)
    console.rows(f"Stages: {chosen.cut}; times of one micro-batch", stage_rows(chosen))
    console.rows("Ranks", rank_rows(chosen))
    print(*gantt(chosen.table, chosen.timing, console.columns() - 10), "", sep="\n")
    print(
        f"{chosen.schedule}: a step takes {step_s * 1e3:.4g} ms, {one_rank_s / step_s:.2f} times as fast as on one "
        f"rank; {ranks} rank{'s are' if ranks > 1 else ' is'} idle for {chosen.timing.bubble:.1%} of it, with equal "
        f"stages {chosen.equal_bubble:.1%}.\n"
    )
    console.rows("All schedules, each with its best cut", plan_rows(others))


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the table of stages, with times in ms and sizes in MB or kB."""
    return [
        {
            "stage": stage.stage,
            "rank": stage.rank,
            "layers": " to ".join(str(n) for n in dict.fromkeys((stage.layers[0], stage.layers[-1]))),
            "forward\nms": stage.forward_s * 1e3,
            "backward\nms": stage.backward_s * 1e3,
            "parameters\nMB": stage.parameter_bytes / 1e6,
            "activations\nMB": stage.activation_bytes / 1e6,
            "sends\nkB": stage.sent_bytes / 1e3,
        }
        for stage in plan.stages
    ]


def rank_rows(plan: Plan) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "idle": f"{idle:.1%}", "micro-batches\nkept": kept, "memory\nMB": n_bytes / 1e6}
        for rank, (idle, kept, n_bytes) in enumerate(zip(plan.timing.bubbles, plan.timing.peaks, plan.memory_bytes))
    ]


def plan_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return the table that compares schedules by step time, idle time and memory."""
    return [
        {
            "schedule": plan.schedule,
            "stages\nper rank": plan.cut.stages // len(plan.table),
            "step\nms": plan.timing.makespan_s * 1e3,
            "idle": f"{plan.timing.bubble:.1%}",
            "fullest rank's\nmemory MB": max(plan.memory_bytes) / 1e6,
        }
        for plan in plans
    ]
