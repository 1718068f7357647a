"""Check a job before it is submitted: rules, bash's syntax check, and Slurm's own test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.config.merge import load
from hpcdist.errors import HpcdistError
from hpcdist.registry import catalogue
from hpcdist.tools.slurm import limits
from hpcdist.tools.slurm.limits import Problem, error, warning
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import ON_GPUS, JobSpec, Site, folder

if TYPE_CHECKING:  # its module imports torch
    from hpcdist.strategies.common.contract import Contract

WARN_S = 60  # Slurm checks time limits about once a minute: its signal may be that early or late
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
# Options of sbatch that the job's settings determine, by setting.
OWNED = {option: key for key, options in {
    "name": "job-name", "output": "output", "cases": "array", "time_min": "time", "warn_s": "signal",
    "requeue": "requeue no-requeue open-mode", "nodes": "nodes hetjob het-group",
    "ranks_per_node": "ntasks ntasks-per-node ntasks-per-gpu ntasks-per-socket",
    "cpus_per_rank": "cpus-per-task cpus-per-gpu", "mem_gb": "mem mem-per-cpu mem-per-gpu",
    "gpus": "gpus gpus-per-node gpus-per-task gpus-per-socket",
}.items() for option in options.split()}  # fmt: skip

Problems = Iterator[Problem]  # of a rule, see RULES


def examine(spec: JobSpec, site: Site, environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """Check a job; return all findings, the errors first. Raises ConfigError if the script can't be rendered."""
    text = render(spec, site).text
    findings = [finding for rule in RULES for finding in rule(spec, site)]
    findings += [*_environment(environ), *_syntax(text), *limits.refusals(spec, site, text)]
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))


def _time(spec: JobSpec, site: Site) -> Problems:
    """Compare the time limit with `warn_s`, the seconds before it at which ranks save and leave."""
    limit_s = 60 * spec.time_min
    if spec.warn_s >= limit_s:
        yield error(
            f"warn_s must be less than the time limit, {limit_s} s; got {spec.warn_s}. Raise time_min, or lower warn_s."
        )
    elif spec.warn_s < WARN_S:
        yield warning(
            f"warn_s must be at least {WARN_S}, for Slurm checks limits about once a minute; got {spec.warn_s}. "
            "Otherwise the signal may come too late to save."
        )
    elif limit_s - spec.warn_s < WARN_S:
        yield warning(
            f"time_min must leave time to work before the warning; got {limit_s - spec.warn_s} s. Raise time_min, or "
            "the job does little but restart."
        )


def _directives(spec: JobSpec, site: Site) -> Problems:
    """Report options of sbatch that a setting with a value already determines (see OWNED)."""
    for option, value in {**site.directives.add, **spec.directives.add}.items():
        attribute = "gpus" if option == "gres" and "gpu" in str(value) else OWNED.get(option, "")
        if (
            value is not False
            and attribute
            and (setting := getattr(spec, attribute)) not in (None, [])
            and (setting or attribute != "gpus")
        ):
            key = "gpus_per_rank" if attribute == "gpus" else attribute
            yield error(
                f"directives.add must leave {option} to {key}, which is {setting!r}; got {value!r}. Set {key}, which "
                "the script uses."
            )


def _paths(spec: JobSpec, site: Site) -> Problems:
    """Check that files exist. Paths are quoted in the script, so the shell does not expand ~ or $."""
    files = {"job": spec.job, "config": spec.config, "template": spec.template}
    files |= {f"source[{i}]": file for i, file in enumerate(site.source)}
    for name, path in {**files, "output": spec.output, "venv": site.venv}.items():
        if path and (path.startswith("~") or "$" in path):
            yield error(f"{name} must be a path without ~ and $, which are not expanded; got {path}. Write it out.")
        elif path and name == "venv" and not Path(path, "bin", "activate").is_file():
            yield error(
                f"venv of the site {spec.site} must be a virtual environment; got {path}, and no {path}/bin/activate "
                f"in {Path.cwd()}. Submit from the folder that has it, or {_with_venv(spec.site)}."
            )
        elif path and name in files and not Path(path).is_file():
            problem = "which is a folder. Name a file in it" if Path(path).is_dir() else f"and none in {Path.cwd()}"
            yield error(f"{name} must be a file that exists; got {path}, {problem}.")


def _with_venv(site: str) -> str:
    """Return how to name this Python's environment, or another one, in a profile."""
    venv = sys.prefix if sys.prefix != sys.base_prefix else "/PATH/OF/ANOTHER"
    setting = f'set venv = "{venv}"'
    profile = folder("sites") / f"{site}.toml"
    return f"copy {profile}, {setting} there, and name the copy by --site" if profile.is_file() else f"{setting} there"


def _command(spec: JobSpec, site: Site) -> Problems:
    """Check that the program and its script exist, and that Python has hpcdist; not inside a container."""
    if not spec.command or site.container:
        return
    program, *arguments = spec.command
    search_path = [f"{site.venv}/bin"] * bool(site.venv) + [os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(search_path))
    has_site_software = bool(site.modules or site.source or site.conda)  # the site's software may provide it
    if path is None:
        is_file = Path(program).is_file()
        missing = f"and no such file in {Path.cwd()}" if "/" in program else "not on PATH"
        problem = "a file that is not executable" if is_file else missing
        advice = "; those of the site's venv need no path" if "/" in program else ", or load it by the site's modules"
        advice = f"Write python {program}" if program.endswith(".py") else f"Name one{advice}"
        level = warning if has_site_software and "/" not in program else error
        yield level(f"command must start with a program; got {program}, {problem}. {advice}.")
        return
    is_python = re.fullmatch(r"python[\d.]*", Path(program).name) is not None
    script = _script(arguments) if is_python or Path(program).name in ("bash", "sh") else None
    if script is not None and not Path(script).exists():
        yield error(f"command must name a script that exists; got {script}, and none in {Path.cwd()}. Write its path.")
    elif is_python and not has_site_software and Path(path).parent != Path(sys.prefix) / "bin":
        probe = [path, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('hpcdist') is None)"]
        if subprocess.run(probe, capture_output=True, timeout=60).returncode:
            yield warning(
                f"command must start with a Python that has hpcdist; got {program}, which is {path}. Set the site's "
                f"venv, or write {sys.executable}."
            )


def _script(arguments: Sequence[str]) -> str | None:
    """Return the file that Python or a shell executes, from its arguments; None for a module or code."""
    remaining = iter(arguments)
    for argument in remaining:
        if re.fullmatch(r"-|-\w*[cm]", argument):
            return None
        if argument in ("-W", "-X", "-o", "-O"):  # options with a value
            next(remaining, None)
        elif not argument.startswith("-"):
            return argument
    return None


def _output(spec: JobSpec, site: Site) -> Problems:
    """Report an output folder that can't be written, or that other nodes don't see."""
    if spec.output.startswith("~") or "$" in spec.output:
        return  # reported by `_paths`
    folder = Path(spec.output).absolute()
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        yield error(f"output must be a folder that you may write; got {spec.output}, but {above} is not. Take another.")
    local = next((path for path in NODE_LOCAL if folder.is_relative_to(path)), None)
    if local and spec.nodes > 1:
        yield warning(
            f"output must lie on a file system that all nodes share; got {spec.output}, and {local} is usually local "
            "to each node. Take a folder in your home or scratch."
        )


def _ranks(spec: JobSpec, site: Site) -> Problems:
    if spec.job and spec.size == 1 and not spec.folders:  # runs of a comparison may be on one rank
        yield warning("nodes or ranks_per_node must be more than 1 to distribute anything; got one rank. Raise one.")


def _servers(spec: JobSpec, site: Site) -> Problems:
    """Compare the number of servers with the nodes that are to hold servers."""
    if spec.shape != "parameter_server":
        return
    if spec.servers_on == "one_per_node" and spec.servers > spec.nodes:
        yield warning(
            f"servers must be at most nodes, {spec.nodes}, to have one each; got {spec.servers}. Some would share one."
        )
    elif spec.servers_on == "first_node" and spec.servers > spec.ranks_per_node:
        yield warning(
            f"servers must be at most ranks_per_node, {spec.ranks_per_node}, to fit on the first node; got "
            f"{spec.servers}. The others are on the second."
        )


def _stages(spec: JobSpec, site: Site) -> Problems:
    if spec.shape == "hybrid" and not spec.command and spec.model_stages == 1:
        yield warning("stages must be at least 2 to split a model; got 1. Raise ranks_per_node, or choose allreduce.")


def _gpus(spec: JobSpec, site: Site) -> Problems:
    if spec.shape in ON_GPUS and not spec.gpus:
        yield warning(f"gpus_per_rank must be 1 in the shape {spec.shape} on GPUs; got 0. The job will run on CPUs.")
    if spec.provider == "nccl" and not spec.gpus:
        yield error("provider must be horovod or none without GPUs; got 'nccl', which needs GPUs.")
    if spec.gpus > 1 and not spec.command:
        yield warning(
            f"gpus_per_rank must be 1, for a rank of hpcdist uses one GPU; got {spec.gpus}. Take more ranks_per_node."
        )
    if spec.gpus and spec.ranks_per_node > 1 and site.launcher == "srun" and site.gpu_bind != "none":
        yield warning(
            f"gpu_bind must be none for NCCL to copy from GPU to GPU; got {site.gpu_bind!r}, which hides other ranks' "
            "GPUs."
        )
    if spec.gpus and spec.ranks_per_node > 1 and site.launcher != "srun" and site.gpus == "per_task":
        yield warning(
            f"gpus must be per_node with the launcher {site.launcher}, whose daemon is one task; got 'per_task'. Ranks "
            "would share one GPU."
        )


def _cores(spec: JobSpec, site: Site) -> Problems:
    """Warn if a rank has one core, though one of its threads must serve other nodes while it computes."""
    if spec.command or spec.nodes == 1 or spec.cpus_per_rank > 1:
        return
    name = _strategy_name(spec)
    contract = _contract(name)
    if contract is not None and contract.memory == "read by others":
        yield warning(
            f"cpus_per_rank must be at least 2 for {name}, whose threads serve other nodes while a rank computes; got "
            f"{spec.cpus_per_rank}. One core would alternate between both."
        )


def _checkpointing(spec: JobSpec, site: Site) -> Problems:
    """Warn if a requeued job would lose its work, or a shrunk job can't continue."""
    checkpoints = _run(spec).get("checkpoint", {})
    can_resume = spec.requeue and spec.shape != "interactive" and not spec.command
    if can_resume and not (checkpoints.get("every_s", True) or checkpoints.get("every_steps")):
        yield warning(
            "checkpoint.every_s must be above 0 for a requeued job to keep its work when a node dies; got 0, and no "
            "checkpoint.every_steps. Remove it from settings; at the time limit ranks save anyway."
        )
    if spec.shrink:
        if site.launcher != "mpirun":
            yield error(
                f"launcher must be Open MPI's mpirun, for ranks to survive others; got {site.launcher!r}. Set shrink "
                "to false, or take a profile with mpirun."
            )
        name = _strategy_name(spec)
        contract = _contract(name)
        if not spec.command and contract is not None and contract.deaths == "end all":
            able = [
                s for s in catalogue("strategies").available() if (c := _contract(s)) and c.deaths == "others continue"
            ]
            yield warning(
                f"shrink needs a strategy that can continue, {', '.join(able)}; got {name!r}, which ends when a rank "
                "dies."
            )


def _study(spec: JobSpec, site: Site) -> Problems:
    cases = [tuple(sorted(case)) for case in spec.cases]
    duplicates = sorted({i for i, case in enumerate(cases) if case in cases[:i]})
    if duplicates and not spec.command:  # with a command, their folders differ
        yield warning(f"cases must differ; got {spec.cases[duplicates[0]]} twice. They would be the same run.")
    if spec.spare_nodes and not spec.doctor:
        yield warning(f"doctor must be true to find the nodes to exclude; got {spec.spare_nodes} spare ones.")


def _settings(spec: JobSpec, site: Site) -> Problems:
    """Check the job's file and the run's settings as `hpcdist train` does; for a study, those of each case."""
    cases = spec.cases or [[]]
    cases_with: dict[Problem, list[int]] = {}  # numbers of the cases with each problem
    for number, case in enumerate(cases if _files_exist(spec) else ()):
        for finding in _config_errors(spec, case):
            cases_with.setdefault(finding, []).append(number)
    for finding, numbers in cases_with.items():
        if len(numbers) == len(cases):
            yield finding
        else:
            where = f"cases[{'], cases['.join(map(str, numbers))}]"
            yield finding._replace(text=f"{finding.text} That is in {where}.")


def _config_errors(spec: JobSpec, case: list[str]) -> Problems:
    """Check the settings of one run on the job's file."""
    from hpcdist.train.job import check_path  # imports torch, which takes seconds
    from hpcdist.train.planning import rehearse
    from hpcdist.train.runs import specify

    try:
        job, config = specify(
            Path(str(spec.job)), Path(spec.config) if spec.config else None, [*spec.run_settings, *case]
        )
        check_path(job, config)
        rehearse(config, spec.size, spec.ranks_per_node)
    except HpcdistError as failure:
        for line in str(failure).splitlines():
            yield error(line)
    except ImportError as failure:
        yield warning(f"job must import installed modules; got {failure} in {spec.job}. Do the nodes have them?")
    except Exception as failure:
        yield error(f"job must be a file that Python can run; got {type(failure).__name__} in {spec.job}: {failure}.")


def _files_exist(spec: JobSpec) -> bool:
    """Return whether the job's file and its settings exist; `_paths` reports missing files."""
    return all(file is None or Path(file).is_file() for file in (spec.job, spec.config)) and spec.job is not None


RULES: tuple[Callable[[JobSpec, Site], Problems], ...] = (
    _time, _directives, _paths, _command, _output, _ranks, _servers, _stages, _gpus, _cores, _checkpointing,
    _study, _settings,
)  # fmt: skip


def _strategy_name(spec: JobSpec) -> str:
    return str(_run(spec).get("strategy", {}).get("name", "allreduce"))


def _contract(name: str) -> Contract | None:
    """Return a strategy's contract; None if the strategy can't be loaded. Imports torch."""
    try:
        return catalogue("strategies").load(name).contract
    except HpcdistError:
        return None  # reported by `_settings`


def _run(spec: JobSpec) -> dict[str, Any]:
    """Return the run's settings, without the defaults of the job's file."""
    config = spec.config if spec.config and Path(spec.config).is_file() else None
    return load({"strategy": {"name": "allreduce"}}, config, spec.run_settings)


def _environment(environ: Mapping[str, str]) -> Problems:
    overriding = sorted(name for name in environ if re.fullmatch(r"SBATCH_\w+", name))
    if overriding:
        yield warning(
            f"the environment must hold no options of sbatch; got {', '.join(overriding)}. They override the script: "
            "unset them."
        )


def _syntax(text: str) -> Problems:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        yield error(f"the script must be valid bash; got {done.stderr.strip()}. Check the template.")
