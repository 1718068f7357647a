"""What is wrong with a job, found before the queue has eaten two days: rules, bash's own check, and what Slurm says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.layers import load
from hpcdist.slurm import cluster
from hpcdist.slurm.render import render
from hpcdist.slurm.site import Site
from hpcdist.slurm.spec import ON_GPUS, JobSpec

WARN_S = 60  # Slurm looks at time limits about once a minute, and may send its signal that much early or late
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
# They go on without any rank, and without a worker.
OUTLIVES = ("adpsgd", "gossip_pull", "gossip_push", "gossip_sync", "strom")
WITH_WORKERS = ("downpour", "eamsgd", "easgd", "hardsync", "parameter_server", "softsync", "ssp")
READ_BY_OTHERS = ("adpsgd", "gossip_pull", "gossip_push")


@dataclass(frozen=True)
class Finding:
    """Something about a job that is wrong (error), may be (warning), or could not be examined (note)."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


def examine(spec: JobSpec, site: Site, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """All that is found, the errors first. Reads files and asks Slurm, where there is one; changes nothing.

    Raises:
        ConfigError: the script can't be rendered.
    """
    text = render(spec, site).text
    found = [Finding(*told) for rule in RULES for told in rule(spec, site)]
    found += [Finding(*told) for told in _environment(environ)]
    found += [Finding(*told) for told in _syntax(text)]
    found += [Finding(*told) for told in cluster.refusals(spec, site, text)]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.level))


Told = Iterator[tuple[str, str]]  # level and text


def _time(spec: JobSpec, site: Site) -> Told:
    limit_s = 60 * spec.time_min
    if spec.warn_s >= limit_s:
        yield "error", (
            f"warn_s must be less than the time limit, {limit_s} s; got {spec.warn_s}. Raise time_min, or lower warn_s."
        )
    elif spec.warn_s < WARN_S:
        yield "warning", (
            f"warn_s must be at least {WARN_S}, for Slurm looks at limits about once a minute; got {spec.warn_s}. "
            "Otherwise the signal may come too late to save."
        )
    elif limit_s - spec.warn_s < WARN_S:
        yield "warning", (
            f"time_min must leave time to work before the warning; got {limit_s - spec.warn_s} s. Raise time_min, or "
            "the job does little but start again."
        )


def _paths(spec: JobSpec, site: Site) -> Told:
    """A quoted path is taken as it stands."""
    paths = {
        "job": spec.job, "config": spec.config, "output": spec.output, "template": spec.template, "venv": site.venv,
        **{f"source[{i}]": file for i, file in enumerate(site.source)},
    }  # fmt: skip
    for name, path in paths.items():
        if path and (path.startswith("~") or "$" in path):
            yield "error", f"{name} must be the path itself, for ~ and $ are not expanded; got {path}. Write it out."
            continue
        file = f"{path}/bin/activate" if name == "venv" else path
        if path and name != "output" and not Path(file).exists():
            yield "error", f"{name} must exist; got {path}, without {file}. Run this where the job is submitted."


def _output(spec: JobSpec, site: Site) -> Told:
    if spec.output.startswith("~") or "$" in spec.output:
        return  # told already
    folder = Path(spec.output).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield "error", (
            f"output must be a folder that you may write; got {spec.output}, but {there} is not. Take another."
        )
    local = next((place for place in NODE_LOCAL if folder.is_relative_to(place)), None)
    if local and spec.nodes > 1:
        yield "warning", (
            f"output must lie on a file system that all nodes share; got {spec.output}, and each node usually has a "
            f"{local} of its own. Take one in your home or scratch folder."
        )


def _strategy(spec: JobSpec, site: Site) -> Told:
    known = strategies()
    name = _run(spec).get("strategy", {}).get("name", "allreduce")
    if not spec.command and name not in known:
        yield "error", f"strategy must be one of {', '.join(known)}; got {name!r}."
    if not spec.command and spec.size == 1:
        yield "warning", "nodes or ranks_per_node must be more than 1 to distribute anything; got one rank. Raise one."


def _servers(spec: JobSpec, site: Site) -> Told:
    if spec.shape != "parameter_server":
        return
    if spec.size <= spec.servers:
        yield "error", (
            f"servers must leave at least one rank to work; got {spec.servers} on {spec.size} ranks. Raise nodes or "
            "ranks_per_node."
        )
    elif spec.servers_on == "one_per_node" and spec.servers > spec.nodes:
        yield "warning", (
            f"servers must be at most nodes, {spec.nodes}, to have one each; got {spec.servers}. Some would share one."
        )
    elif spec.servers_on == "first_node" and spec.servers > spec.ranks_per_node:
        yield "warning", (
            f"servers must be at most ranks_per_node, {spec.ranks_per_node}, to fit on the first node; got "
            f"{spec.servers}. The others are on the second."
        )


def _gpus(spec: JobSpec, site: Site) -> Told:
    if spec.shape in ON_GPUS and not spec.gpus:
        yield "warning", f"gpus_per_rank must be 1 in the shape {spec.shape} on GPUs; got 0. Everything runs on cores."
    if spec.provider == "nccl" and not spec.gpus:
        yield "error", "provider must be horovod or none without GPUs; got 'nccl', which sums on GPUs only."
    if spec.gpus > 1 and not spec.command:
        yield "warning", (
            f"gpus_per_rank must be 1, for a rank of hpcdist uses one GPU; got {spec.gpus}. Take more ranks_per_node."
        )
    if spec.gpus and spec.ranks_per_node > 1 and site.launcher == "srun" and site.gpu_bind != "none":
        yield "warning", (
            f"gpu_bind must be none for NCCL to copy from GPU to GPU; got {site.gpu_bind!r}, which hides the others "
            "from each rank."
        )
    if spec.gpus and spec.ranks_per_node > 1 and site.launcher != "srun" and site.gpus == "per_task":
        yield "warning", (
            f"gpus must be per_node with the launcher {site.launcher}, whose daemon is one task; got 'per_task'. Ranks "
            "would share one GPU."
        )


def _cores(spec: JobSpec, site: Site) -> Told:
    name = _run(spec).get("strategy", {}).get("name")
    if not spec.command and spec.nodes > 1 and spec.cpus_per_rank < 2 and name in READ_BY_OTHERS:
        yield "warning", (
            f"cpus_per_rank must be at least 2 for {name}, whose threads answer other nodes while a rank computes; got "
            f"{spec.cpus_per_rank}. With one core they take turns."
        )


def _going_on(spec: JobSpec, site: Site) -> Told:
    run = _run(spec)
    if spec.requeue and not spec.command and not run.get("checkpoint", {}).get("every_steps"):
        yield "warning", (
            "checkpoint.every_steps must be set for a requeued job to keep its work when a node dies; got none. Add "
            '"checkpoint.every_steps=100" to settings; on a warning ranks save anyway.'
        )
    if spec.shrink:
        name = run.get("strategy", {}).get("name", "allreduce")
        if site.launcher != "mpirun":
            yield "error", (
                f"launcher must be mpirun, of Open MPI, for ranks to outlive others; got {site.launcher!r}. Set shrink "
                "to false, or take a profile with mpirun."
            )
        if not spec.command and name not in (*OUTLIVES, *WITH_WORKERS):
            yield "warning", (
                f"shrink must go with a strategy that can go on, {', '.join((*OUTLIVES, *WITH_WORKERS))}; got "
                f"{name!r}. It ends when a rank dies."
            )


def _study(spec: JobSpec, site: Site) -> Told:
    cases = [tuple(sorted(case)) for case in spec.cases]
    twice = sorted({i for i, case in enumerate(cases) if case in cases[:i]})
    if twice:
        yield "warning", f"cases must differ; got {spec.cases[twice[0]]} twice. They would be the same run."
    if spec.spare_nodes and not spec.doctor:
        yield "warning", f"doctor must be true to find which nodes to leave out; got {spec.spare_nodes} spare ones."


RULES: tuple[Callable[[JobSpec, Site], Told], ...] = (
    _time, _paths, _output, _strategy, _servers, _gpus, _cores, _going_on, _study,
)  # fmt: skip


def strategies() -> list[str]:
    """The strategies' names, without importing them, which takes torch."""
    folders = importlib.util.find_spec("hpcdist.strategies").submodule_search_locations  # type: ignore[union-attr]
    files = [path for folder in folders for path in Path(folder).glob("*.py")]  # type: ignore[union-attr]
    return sorted(path.stem for path in files if path.stem not in ("__init__", "base"))


def _run(spec: JobSpec) -> dict[str, Any]:
    """The run's settings as `hpcdist train` will read them, but for the job's own defaults."""
    config = spec.config if spec.config and Path(spec.config).is_file() else None
    return load({"strategy": {"name": "allreduce"}}, config, spec.run_settings)


def _environment(environ: Mapping[str, str]) -> Told:
    beats = sorted(name for name in environ if re.fullmatch(r"SBATCH_\w+", name))
    if beats:
        yield "warning", (
            f"the environment must hold no options of sbatch; got {', '.join(beats)}. They beat the script: unset them."
        )


def _syntax(text: str) -> Told:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        yield "error", f"the script must be valid bash; got {done.stderr.strip()}. Look at the template."
