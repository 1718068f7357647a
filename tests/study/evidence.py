"""Folders of runs and comparisons with numbers made by hand, written by the project's own functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpcdist.records import (
    Evaluation,
    RecordWriter,
    Start,
    StepRecord,
    append_evaluation,
    end_run,
    read_records,
    record_path,
    start_run,
    summarise,
    write_summary,
)

STEPS = 12  # of each worker, of BATCH samples
BATCH = 10
JOB = "jobs/digits.py"


def summary(**changes: object) -> dict:
    """The fields of a run's summary.json."""
    return {
        "strategy": "allreduce", "ranks": 2, "workers": 2, "seed": 0, "samples": 1, "wall_s": 1.0, "metrics": {},
        "bytes_per_step": 0, "messages_per_step": 0, "sha256": "0" * 64,
        "staleness": {"mean": 0, "max": 0, "histogram": {}},
        "seconds": {"computing": 1.0, "communicating": 0.5, "waiting": 0.25},
    } | changes  # fmt: skip


def start(**changes: object) -> dict:
    """The fields of a run's run.json."""
    return {
        "started": "2026-01-31T12:00:00Z", "command": ["hpcdist"],
        "job": {"path": JOB, "sha256": f"sum of {JOB}", "copies": {}}, "commit": "c0ffee" * 7, "dirty": False,
        "ranks": 2, "hosts": ["n0", "n1"], "versions": {"hpcdist": "0.1.0"}, "settings": {},
    } | changes  # fmt: skip


def write_run(
    folder: Path,
    strategy: str = "allreduce",
    ranks: int = 2,
    seed: int = 0,
    accuracy: Sequence[float] = (0.5, 0.9, 0.97, 0.98),
    seconds: float = 12.0,
    ends: bool = True,
    virtual: dict | None = None,
    joules: float | None = None,
    staleness: int = 0,
    batch: int = BATCH,
    bytes_sent: int = 1000,
    job: str = JOB,
    job_sha256: str | None = None,
    machine: dict | None = None,
    arguments: dict | None = None,
    **options: object,
) -> None:
    """A run of which everything is known: evaluations after equal parts of `seconds`, and the same step on each rank.

    Args:
        job_sha256: of its file; None: another one for each path.
        arguments: of a script.
        options: the strategy's.
    """
    settings = {"strategy": {"name": strategy, **options}, "batch_size": batch, "accumulation": 1, "seed": seed}
    settings |= {} if arguments is None else {"arguments": arguments}
    given = {"ranks": ranks, "hosts": [f"n{rank}" for rank in range(ranks)], "settings": settings, "virtual": virtual}
    given["job"] = {"path": job, "sha256": job_sha256 or f"sum of {job}", "copies": {}}
    folder.mkdir(parents=True, exist_ok=True)
    start_run(folder, Start(**start(**given, **(machine or {}))))
    if not ends:
        return
    step_s = seconds / STEPS
    for rank in range(ranks):
        with RecordWriter(record_path(folder, rank)) as writer:
            for step in range(1, STEPS + 1):
                record = StepRecord(
                    step=step, clock=step, staleness=(staleness,), samples=batch, loss=2.0 / step,
                    bytes_sent=bytes_sent, messages_sent=2, computing_s=0.5 * step_s, communicating_s=0.25 * step_s,
                    waiting_s=0.125 * step_s,
                )  # fmt: skip
                writer.write(record)
    samples = STEPS * batch * ranks
    for i, value in enumerate(accuracy, 1):
        part = i / len(accuracy)
        metrics = {"accuracy": value, "loss": 1 - value}
        spent = None if joules is None else joules * part
        append_evaluation(folder, Evaluation(int(STEPS * part), i, int(samples * part), seconds * part, metrics, spent))
    given = {"strategy": strategy, "ranks": ranks, "seed": seed, "wall_s": seconds, "sha256": "0" * 64}
    given["metrics"] = {"accuracy": accuracy[-1], "loss": 1 - accuracy[-1]}
    if joules is not None:
        given["energy"] = {"joules": joules, "sources": {"rapl": joules}, "not_measured": None}
    write_summary(folder, summarise(read_records(folder), **given))
    end_run(folder)


def write_comparison(folder: Path, runs: Sequence[dict], **said: object) -> None:
    """A comparison's folder: its runs, each the arguments of `write_run` with the group's `name` and `kind`."""
    listed = []
    for run in runs:
        run = dict(run)
        name, kind, made = run.pop("name"), run.pop("kind", "strategy"), run.pop("made", True)
        place = f"runs/{len(listed)}"
        listed.append({"folder": place, "name": name, "kind": kind, "ranks": run.get("ranks", 2),
                       "seed": run.get("seed", 0), "set": []})  # fmt: skip
        if made:
            write_run(folder / place, **run)
    asked = {"job": "jobs/digits.py", "metric": "accuracy", "higher_is_better": True, "target": 0.97}
    content = {"version": 1, **asked, "budget": {"samples": 240}, "reference": "allreduce", "virtual": None}
    content |= {"tuning": None, "runs": listed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps({**content, **said}))


def a_study(folder: Path) -> None:
    """A comparison with all that a report may have to say, on a winner, a baseline, serial controls and failures."""
    runs: list[dict] = []
    for seed in range(5):
        slow, end = 1 + 0.02 * seed, 0.98 + 0.001 * (seed % 3)
        early, late = (0.5, 0.9, 0.97, end), (0.5, 0.8, 0.9, 0.96 if seed in (1, 3) else 0.97)
        serial = {"kind": "serial", "ranks": 1, "seed": seed, "seconds": 20.0 * slow, "accuracy": early}
        for ranks in (2, 4):
            each = {"ranks": ranks, "seed": seed, "accuracy": early}
            quick = 16.0 * (slow + 0.01 * (seed % 2)) / ranks
            other = {**each, "strategy": "softsync", "staleness": seed % 3, "splits": 4, "seconds": quick}
            runs += [
                {**each, "name": "allreduce", "seconds": 24.0 * slow / ranks},
                {**other, "name": "softsync (splits 4)", "accuracy": (0.5, 0.9, 0.97, end - 0.001 * (seed % 2))},
                {**each, "name": "gossip_pull", "strategy": "gossip_pull", "seconds": 11.0 * slow, "accuracy": late},
                {**each, "name": "ddp", "kind": "baseline", "strategy": "ddp", "seconds": 24.5 * slow / ranks},
                {**serial, "name": f"serial, batch {BATCH * ranks}", "batch": BATCH * ranks},
            ]
        runs.append({"name": "allreduce", "ranks": 1, "seed": seed, "seconds": 22.0 * slow})
    runs += [{"name": "gossip_pull", "strategy": "gossip_pull", "seed": 5, "ends": False}]
    runs += [{"name": "gossip_pull", "strategy": "gossip_pull", "seed": 6, "made": False}]
    write_comparison(folder, runs)
