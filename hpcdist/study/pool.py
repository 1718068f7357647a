"""Independent runs spread over processes, each made once: what is finished is read back from a file of JSON lines."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcdist.config.compare import fingerprint
from hpcdist.errors import ConfigError, DataError

Settings = Mapping[str, Any]  # of JSON's types


@dataclass(frozen=True)
class Run:
    """What was set and what was measured."""

    settings: dict[str, Any]
    measured: dict[str, Any]


def run_all(
    work: Callable[[dict], dict],
    wanted: Sequence[Settings],
    path: Path,
    *,
    workers: int,
    show: Callable[[int, int], None] | None = None,
) -> list[Run]:
    """`work(settings)` for all settings, in their order; those that `path` holds already are not run again.

    Processes are spawned, each with one thread of torch; they take the runs in the order given, so put long ones
    first. A finished run is appended to `path` at once. The first run that fails ends all: its exception is raised,
    and what had finished stays.

    Args:
        work: a module's function. Returns what it measured, of JSON's types.
        workers: processes.
        show: called with the numbers of runs done and wanted, after each.

    Raises:
        ConfigError: `workers` is below 1.
        DataError: `path` holds something else.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1; got {workers}. Give as many as there are cores.")
    done = {fingerprint(run.settings): run for run in read_runs(path)}
    missing = {fingerprint(settings): dict(settings) for settings in wanted}
    total, missing = len(missing), {key: settings for key, settings in missing.items() if key not in done}
    if show is not None:
        show(total - len(missing), total)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            for finished, (key, measured) in enumerate(_spread(work, missing, workers), 1):
                line = json.dumps({"settings": missing[key], "measured": measured})
                done[key] = Run(**json.loads(line))  # as it will be read again: JSON's keys are strings
                file.write(line + "\n")
                file.flush()
                if show is not None:
                    show(total - len(missing) + finished, total)
    return [done[fingerprint(settings)] for settings in wanted]


def _spread(work: Callable[[dict], dict], missing: dict[str, dict], workers: int) -> Iterator[tuple[str, dict]]:
    """Key and measurements of each, as they finish."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks
    pool = ProcessPoolExecutor(min(workers, len(missing)), context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        running: dict[Future, str] = {pool.submit(work, settings): key for key, settings in missing.items()}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_runs(path: Path) -> list[Run]:
    """The finished runs in a file; none if it is not there. A last line that was cut short is removed.

    Raises:
        DataError: a line is no run.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    try:
        return [Run(**json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} must hold one run per line; got another ({error}). Give another folder.") from None
