"""Submit the runs of a comparison or sweep as job arrays, one per number of ranks; query the states of their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist.config.merge import load
from hpcdist.errors import ConfigError
from hpcdist.records import locked
from hpcdist.tools import console
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import LAST_LINES
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.run_all import ExperimentRuns, missing, prepare
from hpcdist.tools.runs import FAILURE, is_done, last_lines
from hpcdist.tools.slurm import history, queue
from hpcdist.tools.slurm.check import examine
from hpcdist.tools.slurm.spec import JobSpec, load_site, load_spec
from hpcdist.tools.slurm.state import FORGOTTEN, State, describe

# Settings of a job that the comparison or the sweep determines.
FIXED = "cases command config folders job nodes output provider servers servers_on settings shape site strategy".split()


def specify(
    experiment: Comparison | Sweep,
    runs: Sequence[PlannedRun],
    output: Path,
    site: str,
    overrides: Sequence[str] = (),
    at_once: int | None = None,
) -> list[JobSpec]:
    """Return the specifications of the arrays, one per number of ranks: all tasks of an array have the same size.

    Ranks are on one node, or on several by `ranks_per_node` in `overrides`, settings of the jobs. `at_once`: tasks of
    an array that may run concurrently; None: all.
    """
    if isinstance(experiment, Comparison) and experiment.tune:
        raise ConfigError(
            f"--tune must be 0 with --slurm, whose runs don't wait for each other; got {experiment.tune}. Search the "
            "rates inside one allocation, with --launcher, then pass them by --rate."
        )
    if isinstance(experiment, Comparison) and experiment.baselines:
        raise ConfigError(
            f"--baselines must be omitted with --slurm, whose arrays hold runs of strategies; got "
            f"{','.join(experiment.baselines)}. Compare with them inside one allocation, with --launcher."
        )
    for key in load({}, None, overrides):
        if key in FIXED:
            raise ConfigError(f"--slurm-set must leave {key} to the comparison or the sweep; got it there. Remove it.")
    specs = []
    for ranks in sorted({run.ranks for run in runs}):
        array_runs = [run for run in runs if run.ranks == ranks]
        payload: dict[str, Any] = {"job": experiment.job, "cases": [list(run.overrides) for run in array_runs]}
        if array_runs[0].by_folder:  # `hpcdist trial` reads its settings from `output`
            payload = {"command": ["hpcdist", "trial"], "cases": [[] for _ in array_runs]}
        spec = load_spec(
            overrides=overrides,
            shape="study",
            site=site,
            name=f"{experiment.command}-{Path(experiment.job).stem}",
            output=str(output / Path(array_runs[0].folder).parent),
            folders=[Path(run.folder).name for run in array_runs],
            at_once=at_once,
            ranks_per_node=ranks,
            cpus_per_rank=experiment.threads,
            env={"OMP_NUM_THREADS": str(experiment.threads)},  # even if a rank has more cores
            **payload,
        )
        ranks_on_node = min(spec.ranks_per_node, ranks)
        if ranks % ranks_on_node:
            raise ConfigError(
                f"ranks_per_node must divide each larger number of --ranks; got {ranks_on_node} for {ranks} ranks. "
                "Take another."
            )
        specs.append(spec.model_copy(update={"nodes": ranks // ranks_on_node, "ranks_per_node": ranks_on_node}))
    return specs


def submit_missing(
    experiment_runs: ExperimentRuns, site: str, overrides: Sequence[str], at_once: int | None = None
) -> bool:
    """Check the missing runs; submit an array per number of ranks, or return True if a check found an error."""
    output, profile = experiment_runs.folder, load_site(site)
    waiting = pending(output)
    remaining = [run for run in missing(experiment_runs.plan, output) if output / run.folder not in waiting]
    specs = specify(experiment_runs.experiment, remaining, output, site, overrides, at_once)
    findings = dict.fromkeys(finding for spec in specs for finding in examine(spec, profile))
    for sentence in (*experiment_runs.skipped, *map(str, findings)):
        console.note(sentence)
    if any(finding.level == "error" for finding in findings):
        return True
    with locked(output):
        experiment_runs.write()
        experiment_runs.trained.create_data()
        for run in remaining:
            prepare(run, output)
        for spec in specs:
            entry = queue.submit(spec, profile)
            history.append(entry, output)  # read by `pending`
            print(entry.job)
            console.note(f"job {entry.job}: runs on {spec.size} ranks: {entry.cases}; their logs go to {entry.log}")
    console.note(
        f"{len(remaining)} runs are submitted; `hpcdist {experiment_runs.experiment.command} --output {output}` shows "
        "their results"
    )
    return False


def show(experiment_runs: ExperimentRuns, waiting: Mapping[Path, State]) -> bool:
    """Show the results so far; return whether a run failed. `waiting`: waiting and running tasks, from `pending`."""
    output, planned = experiment_runs.folder, {run.folder: run for run in experiment_runs.plan}.values()
    remaining = missing(experiment_runs.plan, output)
    n_pending = sum(state.state == "PENDING" for state in waiting.values())
    console.note(
        f"{len(planned) - len(remaining)} of {len(planned)} runs have ended; Slurm tasks: {len(waiting) - n_pending} "
        f"running, {n_pending} waiting"
    )
    failed = [run for run in remaining if (output / run.folder / FAILURE).exists()]
    if len(remaining) < len(planned):
        with locked(output):
            experiment_runs.write()  # new results of a sweep
        experiment_runs.show(failed)
    return bool(failed)


def pending(output: Path) -> dict[Path, State]:
    """Return the states of the waiting and running tasks, by the folders of their runs.

    For a task that ended without a result, the reason is written to its run's folder, as for runs on this machine.
    """
    tasks = {}  # entry and task number by folder; a later entry is a resubmission
    for entry in history.read(output):
        for number, folder in enumerate(entry.folders):
            tasks[output / folder.parent.name / folder.name] = entry, number  # its path from here
    tasks = {folder: task for folder, task in tasks.items() if not is_done(folder) and not (folder / FAILURE).exists()}
    states = {job: queue.states(job) for job in dict.fromkeys(entry.job for entry, _ in tasks.values())}
    unfinished = {}
    for folder, (entry, number) in tasks.items():
        state = _state_of(f"{entry.job}_{number}", states[entry.job])
        if state.ended:
            _write_failure(folder, state, folder.parent / Path(entry.log).name.replace("%a", str(number)))
        else:
            unfinished[folder] = state
    return unfinished


def _state_of(task: str, states: Sequence[State]) -> State:
    """Return a task's state; Slurm lists waiting tasks in one entry, such as 7_[2-3], and forgets ended ones."""
    waiting = (state for state in states if "[" in state.job and not state.ended)
    return next((state for state in states if state.job == task), next(waiting, State(task, FORGOTTEN)))


def _write_failure(folder: Path, state: State, log: Path) -> None:
    """Write a task's last state, and the last lines of its log, to its run's folder."""
    if not is_done(folder):  # it may have ended meanwhile
        folder.mkdir(parents=True, exist_ok=True)
        tail = "\n".join(last_lines(log, LAST_LINES)) or "(none)"
        (folder / FAILURE).write_text(f"{describe(state)}; its last lines:\n{tail}\n")
