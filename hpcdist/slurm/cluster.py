"""What Slurm offers and refuses, asked before a job is submitted. Says so where there is no Slurm."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcdist.errors import QueueError
from hpcdist.slurm.queue import ask
from hpcdist.slurm.site import Site
from hpcdist.slurm.spec import JobSpec

FORMAT = "%P|%c|%m|%G|%l"  # partition, cores, memory in MB, generic resources, time limit


class Node(NamedTuple):
    """A node as one of its partitions offers it."""

    partition: str
    default: bool  # it is the partition of those who name none
    cores: int
    memory_mb: int
    gpus: int
    limit_min: float


def refusals(spec: JobSpec, site: Site, text: str) -> Iterator[tuple[str, str]]:
    """Level and text of each finding."""
    if shutil.which("sbatch") is None:
        yield "note", "Slurm must be on PATH to be asked; found no sbatch. Run this on a host of the cluster, too."
        return
    try:
        yield from misfits(spec, site, nodes(ask("sinfo", "--noheader", "--Node", "--format", FORMAT)))
        if site.launcher == "srun" and site.mpi:
            yield from unknown_pmi(site.mpi, ask("srun", "--mpi=list"))
    except QueueError as error:
        yield "note", str(error)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(text)
        script.flush()
        try:
            if spec.shape != "interactive":
                ask("sbatch", "--test-only", script.name)
        except QueueError as error:
            yield "error", str(error).replace(script.name, "the script")


def nodes(told: str) -> list[Node]:
    """sinfo's lines, one for each node and partition it belongs to."""
    found = []
    for line in told.splitlines():
        partition, cores, memory_mb, gres, limit = line.strip().rsplit("|", 4)
        gpus = sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))
        default = partition.endswith("*")
        found.append(Node(partition.rstrip("*"), default, _int(cores), _int(memory_mb), gpus, minutes(limit)))
    return found


def minutes(limit: str) -> float:
    """A time of Slurm's, `[days-]hours:minutes:seconds` or less of it; infinite where it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        return float("inf")
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[1] or found[4]:
        return 1440 * days + 60 * first + second + third / 60
    return first + second / 60


def misfits(spec: JobSpec, site: Site, offered: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Where the job asks for more than the partition has."""
    name = spec.directives.add.get("partition", site.directives.add.get("partition", site.partition))
    partitions = sorted({node.partition for node in offered})
    wanted = str(name).split(",") if name else sorted({node.partition for node in offered if node.default})
    unknown = [partition for partition in wanted if partition not in partitions]
    if unknown:
        yield "error", f"partition must be one of {', '.join(partitions)}; got {unknown[0]!r}."
        return
    there = [node for node in offered if node.partition in wanted]
    if not there:
        return
    cores = spec.ranks_per_node * spec.cpus_per_rank
    gpus = spec.ranks_per_node * spec.gpus
    asked = {
        "ranks_per_node x cpus_per_rank": (cores, "cores", [node.cores for node in there]),
        "ranks_per_node x gpus_per_rank": (gpus, "GPUs", [node.gpus for node in there]),
        "mem_gb": (spec.mem_gb or 0, "GB", [node.memory_mb // 1024 for node in there]),
    }
    too_much = {setting: it for setting, it in asked.items() if it[0] > max(it[2])}
    for setting, (count, what, has) in too_much.items():
        yield "error", f"{setting} must be at most the {max(has)} {what} of a node of {', '.join(wanted)}; got {count}."
    fit = sum(all(count <= has[i] for count, _, has in asked.values()) for i in range(len(there)))
    if not too_much and fit < spec.nodes + spec.spare_nodes:
        yield "error", (
            f"nodes and spare_nodes must be at most the {fit} nodes of {', '.join(wanted)} that fit; got "
            f"{spec.nodes + spec.spare_nodes}. Take fewer, with more ranks on each."
        )
    longest = max(node.limit_min for node in there)
    if spec.time_min > longest:
        yield "error", (
            f"time_min must be at most the {longest:g} of {', '.join(wanted)}; got {spec.time_min}. With requeue a "
            "shorter job goes on by itself."
        )


def unknown_pmi(mpi: str, told: str) -> Iterator[tuple[str, str]]:
    """Whether srun has this PMI."""
    known = re.findall(r"^\s+([\w]+)$", told, re.M)
    if known and mpi not in known:
        yield "error", f"mpi must be one of {', '.join(known)}, which srun --mpi=list names; got {mpi!r}."


def _int(text: str) -> int:
    return int(re.sub(r"\D.*", "", text) or 0)
