"""Compare a job with the limits of the cluster: query Slurm for its partitions and PMI types, and let it test the
script."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hpcdist.errors import QueueError, suggestion
from hpcdist.tools import console
from hpcdist.tools.slurm.queue import ask
from hpcdist.tools.slurm.spec import JobSpec, Site

FORMAT = "%P|%c|%m|%G|%l"  # partition, cores, memory in MB, generic resources, time limit


class Problem(NamedTuple):
    """A finding about a job: wrong (error), possibly wrong (warning), or not checked (note)."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


error, warning, note = (partial(Problem, level) for level in ("error", "warning", "note"))


class Node(NamedTuple):
    """A node in one of its partitions."""

    partition: str
    default: bool  # the default partition
    cores: int
    memory_mb: int
    gpus: int
    limit_min: float


def refusals(spec: JobSpec, site: Site, text: str) -> Iterator[Problem]:
    """Report what Slurm's partitions, PMI types and `sbatch --test-only` refuse; a note if Slurm does not reply."""
    if shutil.which("sbatch") is None:
        yield note("Slurm must be on PATH for its checks; found no sbatch. Run this on a host of the cluster, too.")
        return
    try:
        yield from unmet_requests(spec, site, nodes(ask("sinfo", "--noheader", "--Node", "--format", FORMAT)))
        if site.launcher == "srun" and site.mpi:
            yield from unknown_pmi(site.mpi, ask("srun", "--mpi=list"))
    except QueueError as failure:
        yield note(str(failure))
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(text)
        script.flush()
        try:
            if spec.shape != "interactive":
                ask("sbatch", "--test-only", script.name)
        except QueueError as failure:
            yield error(str(failure).replace(script.name, "the script"))


def nodes(output: str) -> list[Node]:
    """Parse the output of sinfo: one line per node and partition."""
    available = []
    for line in output.splitlines():
        partition, cores, memory_mb, gres, limit = line.strip().rsplit("|", 4)
        gpus = sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))
        default = partition.endswith("*")
        available.append(Node(partition.rstrip("*"), default, _int(cores), _int(memory_mb), gpus, minutes(limit)))
    return available


def minutes(limit: str) -> float:
    """Convert Slurm's time limit, `[days-]hours:minutes:seconds` or shorter, to minutes; infinity if it is no time."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        return float("inf")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # the first number is hours, otherwise minutes
        return 1440 * days + 60 * first + second + third / 60
    return first + second / 60


def unmet_requests(spec: JobSpec, site: Site, available: Sequence[Node]) -> Iterator[Problem]:
    """Report requests that no node of the job's partitions can satisfy."""
    name = spec.directives.add.get("partition", site.directives.add.get("partition", site.partition))
    partitions = sorted({node.partition for node in available})
    chosen = str(name).split(",") if name else sorted({node.partition for node in available if node.default})
    unknown = [partition for partition in chosen if partition not in partitions]
    if unknown:
        close = suggestion(unknown[0], partitions)
        yield error(f"partition must be one of {', '.join(partitions)}; got {unknown[0]!r}.{close}")
        return
    candidates = [node for node in available if node.partition in chosen]
    if not candidates:
        return
    cores = spec.ranks_per_node * spec.cpus_per_rank
    gpus = spec.ranks_per_node * spec.gpus
    needs = {  # setting: need, unit, capacity of each candidate
        "ranks_per_node x cpus_per_rank": (cores, "core", [node.cores for node in candidates]),
        "ranks_per_node x gpus_per_rank": (gpus, "GPU", [node.gpus for node in candidates]),
        "mem_gb": (spec.mem_gb or 0, "GB", [node.memory_mb // 1024 for node in candidates]),
    }
    too_large = {setting: need for setting, need in needs.items() if need[0] > max(need[2])}
    for setting, (count, unit, capacities) in too_large.items():
        largest = f"{max(capacities)} GB" if unit == "GB" else console.count(max(capacities), unit)
        yield error(f"{setting} must be at most the {largest} of a node of {', '.join(chosen)}; got {count}.")
    n_fit = sum(all(count <= capacities[i] for count, _, capacities in needs.values()) for i in range(len(candidates)))
    if not too_large and n_fit < spec.nodes + spec.spare_nodes:
        yield error(
            f"nodes + spare_nodes must be at most the number of fitting nodes of {', '.join(chosen)}, {n_fit}; "
            f"got {spec.nodes + spec.spare_nodes}. Take fewer, with more ranks on each."
        )
    longest = max(node.limit_min for node in candidates)
    if spec.time_min > longest:
        yield error(
            f"time_min must be at most the {longest:g} minutes of {', '.join(chosen)}; got {spec.time_min}. With "
            "requeue a shorter job is continued automatically."
        )


def unknown_pmi(mpi: str, output: str) -> Iterator[Problem]:
    """Report a PMI type that is not in the output of `srun --mpi=list`."""
    known = re.findall(r"^\s+([\w]+)$", output, re.M)
    if known and mpi not in known:
        yield error(f"mpi must be one of {', '.join(known)}, which srun --mpi=list names; got {mpi!r}.")


def _int(text: str) -> int:
    return int(re.sub(r"\D.*", "", text) or 0)
