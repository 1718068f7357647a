"""Submit the runs of a comparison or a sweep as job arrays, one for each number of ranks; ask how their tasks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist.config.merge import load
from hpcdist.errors import ConfigError
from hpcdist.records import claimed
from hpcdist.tools import console
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import LAST_LINES
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.run_all import ExperimentRuns, missing, prepare
from hpcdist.tools.runs import FAILURE, is_done, last_lines
from hpcdist.tools.slurm import history, queue
from hpcdist.tools.slurm.check import examine
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import JobSpec, load_site, load_spec
from hpcdist.tools.slurm.state import FORGOTTEN, State, describe

# Settings of a job that follow from the comparison or the sweep.
OWN = "cases command config folders job nodes output provider servers servers_on settings shape site strategy".split()


def specify(
    experiment: Comparison | Sweep,
    runs: Sequence[PlannedRun],
    output: Path,
    site: str,
    overrides: Sequence[str] = (),
    at_once: int | None = None,
) -> list[JobSpec]:
    """Describe the arrays: one for each number of ranks, because all tasks of an array have the same number.

    Ranks are on one node, or on several by `ranks_per_node`.

    Args:
        output: the folder of the comparison or the sweep.
        site: profile of the cluster.
        overrides: settings of the jobs, as `hpcdist slurm submit --set` takes them.
        at_once: tasks of each that run at the same time; None for all.

    Raises:
        ConfigError: a setting is wrong, or the comparison has runs that no array can make.
    """
    if isinstance(experiment, Comparison) and experiment.tune:
        raise ConfigError(
            f"--tune must be 0 with --slurm, whose runs don't wait for each other; got {experiment.tune}. Search the "
            "rates inside one allocation, with --launcher, and give them by --rate."
        )
    if isinstance(experiment, Comparison) and experiment.baselines:
        raise ConfigError(
            f"--baselines must be omitted with --slurm, whose jobs run `hpcdist train`; got "
            f"{','.join(experiment.baselines)}. Compare with them inside one allocation, with --launcher."
        )
    for key in load({}, None, overrides):
        if key in OWN:
            raise ConfigError(f"--slurm-set must leave {key} to the comparison or the sweep; got it there. Remove it.")
    specs = []
    for ranks in sorted({run.ranks for run in runs}):
        own = [run for run in runs if run.ranks == ranks]
        payload: dict[str, Any] = {"job": experiment.job, "cases": [list(run.overrides) for run in own]}
        if own[0].by_folder:
            payload = {"command": ["hpcdist", "trial"], "cases": [[] for _ in own]}
        spec = load_spec(
            overrides=overrides,
            shape="study",
            site=site,
            name=f"{experiment.command}-{Path(experiment.job).stem}",
            output=str(output / Path(own[0].folder).parent),
            folders=[Path(run.folder).name for run in own],
            at_once=at_once,
            ranks_per_node=ranks,
            cpus_per_rank=experiment.threads,
            env={"OMP_NUM_THREADS": str(experiment.threads)},  # also where a rank has more cores
            **payload,
        )
        on_node = min(spec.ranks_per_node, ranks)
        if ranks % on_node:
            raise ConfigError(
                f"ranks_per_node must divide each of --ranks that is larger; got {on_node} for {ranks} ranks. Take "
                "another."
            )
        specs.append(spec.model_copy(update={"nodes": ranks // on_node, "ranks_per_node": on_node}))
    return specs


def submit_missing(made: ExperimentRuns, site: str, overrides: Sequence[str], at_once: int | None = None) -> bool:
    """Submit the runs that are missing to Slurm, an array for each number of ranks; tell whether a check refuses.

    All is checked, as by `hpcdist slurm check`, before anything is written.
    """
    output, profile = made.folder, load_site(site)
    waiting = pending(output)
    left = [run for run in missing(made.plan, output) if output / run.folder not in waiting]
    specs = specify(made.experiment, left, output, site, overrides, at_once)
    findings = dict.fromkeys(finding for spec in specs for finding in examine(spec, profile))
    for sentence in (*made.skipped, *map(str, findings)):
        console.note(sentence)
    if any(finding.level == "error" for finding in findings):
        return True
    with claimed(output):
        made.write()
        made.trained.make_data()
        for run in left:
            prepare(run, output)
        for spec in specs:
            entry = queue.submit(spec, render(spec, profile).text)
            history.append(entry, output)  # for `pending`
            print(entry.job)
            console.note(f"job {entry.job}: runs on {spec.size} ranks: {entry.cases}; their logs go to {entry.log}")
    console.note(
        f"{len(left)} runs are submitted; `hpcdist {made.experiment.command} --output {output}` shows what has come of "
        "them"
    )
    return False


def show(made: ExperimentRuns, waiting: Mapping[Path, State]) -> bool:
    """Show what runs have measured while others wait or run under Slurm; tell whether one failed."""
    output, planned = made.folder, {run.folder: run for run in made.plan}.values()
    left = missing(made.plan, output)
    pending = sum(state.state == "PENDING" for state in waiting.values())
    console.note(
        f"{len(planned) - len(left)} of {len(planned)} runs have ended; of Slurm's tasks {len(waiting) - pending} run, "
        f"{pending} wait"
    )
    failed = [run for run in left if (output / run.folder / FAILURE).exists()]
    if len(left) < len(planned):
        with claimed(output):
            made.write()  # a sweep knows more now
        made.show(failed)
    return bool(failed)


def pending(output: Path) -> dict[Path, State]:
    """Return the states of tasks that wait or run, by the folders of their runs.

    Tasks that have ended without a result leave the reason in their run's folder, as runs that fail here do.

    Raises:
        QueueError: a run has no result yet, and there is no Slurm to be asked for it.
    """
    tasks = {}  # by folder; a later one is of a run that was submitted again
    for entry in history.read(output):
        for number, folder in enumerate(entry.folders):
            tasks[output / folder.parent.name / folder.name] = entry, number
    tasks = {folder: task for folder, task in tasks.items() if not is_done(folder) and not (folder / FAILURE).exists()}
    states = {job: queue.states(job) for job in dict.fromkeys(entry.job for entry, _ in tasks.values())}
    found = {}
    for folder, (entry, number) in tasks.items():
        state = _state_of(f"{entry.job}_{number}", states[entry.job])
        if state.ended:
            _write_failure(folder, state, folder.parent / Path(entry.log).name.replace("%a", str(number)))
        else:
            found[folder] = state
    return found


def _state_of(task: str, states: Sequence[State]) -> State:
    """Find the state of a task; tasks that wait together are one entry, such as 7_[2-3]."""
    listed = (one for one in states if "[" in one.job and not one.ended)
    return next((one for one in states if one.job == task), next(listed, State(task, FORGOTTEN)))


def _write_failure(folder: Path, state: State, log: Path) -> None:
    if not is_done(folder):  # it may have ended since
        folder.mkdir(parents=True, exist_ok=True)
        said = "\n".join(last_lines(log, LAST_LINES)) or "(none)"
        (folder / FAILURE).write_text(f"{describe(state)}; its last lines:\n{said}\n")
