"""Submit a function to Slurm, or to ranks on this machine, and get its results."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hpcdist.comm.launch import unlaunched
from hpcdist.errors import ConfigError, RunError
from hpcdist.records import making
from hpcdist.tools.compare.launchers import LAST_LINES, end
from hpcdist.tools.mpirun import find_launcher, ranks_environment
from hpcdist.tools.runs import last_lines
from hpcdist.tools.slurm import queue
from hpcdist.tools.slurm.call import CallOutcome, outcome_file, pickled_call
from hpcdist.tools.slurm.check import examine
from hpcdist.tools.slurm.spec import JobSpec, load_site, load_spec
from hpcdist.tools.slurm.state import State, describe, status_of

LOCAL = "local"  # site name for ranks on this machine
# A job's settings that `submit` takes; all other keyword arguments are the function's.
SETTINGS = (
    "cpus_per_rank directives doctor env gpus_per_rank mem_gb name nodes output ranks_per_node requeue spare_nodes "
    "template time_min warn_s"
).split()
CHECK_S = 0.2  # between checks for a rank's file, which a shared file system may show late
RESULT_TIMEOUT_S = 5.0  # timeout for these files after a job has completed
ADVICE = {
    "TIMEOUT": "Raise time_min.",
    "OUT_OF_MEMORY": "Raise mem_gb, or reduce the work of each rank.",
    "NODE_FAIL": "A node died: submit the function again.",
    "PREEMPTED": "Other jobs had priority: submit the function again.",
}

log = logging.getLogger(__name__)


def submit(function: Callable[..., Any], /, *args: Any, site: str = "generic", **settings: Any) -> Future:
    """Submit a function, to be called by every rank of a job, and return a Future immediately.

    The function and its arguments are pickled by cloudpickle, so a lambda or a function defined in a notebook works. To
    communicate, the function calls `hpcdist.init()`. Files and results are in a new folder NAME-... below `output`.

    Args:
        function: the function.
        args: its arguments.
        site: profile of the cluster, a name or a TOML file, as for `hpcdist slurm`; `local` starts nodes x
            ranks_per_node ranks on this machine immediately, without limits of time and memory.
        settings: settings of the job, named as for `hpcdist slurm`: `nodes`, `ranks_per_node`, `cpus_per_rank`,
            `gpus_per_rank`, `mem_gb`, `time_min`, `name`, `output`, `env`, `directives`, `template`, `spare_nodes`,
            `warn_s`, `doctor` and `requeue` (both False by default). All others are keyword arguments of the function;
            use functools.partial for those with the name of a setting.

    Raises:
        ConfigError: a setting is wrong, a check of the job finds an error, or a value can't be pickled.
        QueueError: Slurm is not available, or refuses the job.
    """
    job = {name: settings.pop(name) for name in SETTINGS if name in settings}  # the others are the function's
    values = {"name": getattr(function, "__name__", "function").strip("<>"), "doctor": False, "requeue": False, **job}
    # Checks come before the folder is created; the real command needs the folder.
    spec = load_spec(**values, site=site, command=[sys.executable])
    if site != LOCAL:
        findings = examine(spec, load_site(site))
        if errors := [finding.text for finding in findings if finding.level == "error"]:
            raise ConfigError("\n".join(errors))
        for finding in findings:
            log.warning("%s", finding.text)
    call, parent = pickled_call(function, args, settings), Path(spec.output).absolute()
    with making(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{spec.name}-", dir=parent))  # mode 0700
    try:
        (folder / "call.pickle").write_bytes(call)
        return Future((LocalJob if site == LOCAL else SlurmJob)(spec, folder), folder, spec.size)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _command(folder: Path, python: str) -> list[str]:
    return [python, "-m", "hpcdist.tools.slurm.call", str(folder)]


class Future:
    """A submitted function and its results.

    Attributes:
        job_id: Slurm's number of the job; on this machine, the process id of mpirun.
        folder: of the job's files.
        size: number of ranks.
    """

    def __init__(self, job: SlurmJob | LocalJob, folder: Path, size: int):
        self._job, self.folder, self.size = job, folder, size
        self.job_id = job.id

    def __repr__(self) -> str:
        return f"<Future: {describe(self._job.state())}>"

    @property
    def state(self) -> str:
        """Return the job's state as Slurm names it: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT..."""
        return self._job.state().state

    def done(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        return self._job.state().ended

    def wait(self) -> None:
        """Wait until the job has ended."""
        self._job.wait()

    def cancel(self) -> None:
        """Cancel the job, waiting or running."""
        self._job.cancel()

    def stdout(self) -> str:
        """Return the job's output so far, each line with its rank."""
        return _text(self._job.stdout)

    def stderr(self) -> str:
        """Return the job's standard error so far."""
        return _text(self._job.stderr)

    def result(self) -> Any:
        """Wait, and return the function's result on rank 0.

        Raises:
            RunError: the job ended without results: killed, cancelled, or out of time or memory.
            Exception: the function's exception, from the first rank that raised one; its cause holds the traceback
                there.
        """
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait, and return the function's result on each rank, in rank order; raises as `result` does."""
        outcomes = self._outcomes()
        for rank in sorted(outcomes, key=lambda rank: outcome_file(self.folder, rank).stat().st_mtime):
            if (error := outcomes[rank].error) is not None:  # the first one: others may be consequences
                raise error from RunError(f"on rank {rank} of job {self.job_id}:\n{outcomes[rank].traceback}")
        if len(outcomes) < self.size:
            raise RunError(self._failure_message(sorted(set(range(self.size)) - set(outcomes))))
        return [outcomes[rank].value for rank in range(self.size)]

    def exception(self) -> Exception | None:
        """Wait, and return the exception that `result` raises; None if the function has returned."""
        try:
            self.results()
        except Exception as error:
            return error
        return None

    def _outcomes(self) -> dict[int, CallOutcome]:
        """Wait for the job's end, and read the outcome of each rank."""
        self.wait()
        until_s = time.monotonic() + (RESULT_TIMEOUT_S if self.state == "COMPLETED" else 0.0)
        while True:
            os.listdir(self.folder)  # lets a network file system refresh its cache
            files = {rank: outcome_file(self.folder, rank) for rank in range(self.size)}
            existing = {rank: file for rank, file in files.items() if file.exists()}
            if len(existing) == self.size or time.monotonic() >= until_s:
                return {rank: CallOutcome(*pickle.loads(file.read_bytes())) for rank, file in existing.items()}
            time.sleep(CHECK_S)

    def _failure_message(self, missing: list[int]) -> str:
        state = self._job.state()
        lines = "\n".join(last_lines(self._job.stderr, LAST_LINES)) or "(none)"
        advice = f" {ADVICE[state.state]}" if state.state in ADVICE else ""
        ranks = "any rank" if len(missing) == self.size else f"rank {', '.join(map(str, missing))}"
        return f"{describe(state)}, without a result of {ranks}.{advice} The last lines of its standard error:\n{lines}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# --- backends ---------------------------------------------------------------------------------------------------------
class SlurmJob:
    """A job in Slurm; it runs the Python of the site's environment, or this one."""

    def __init__(self, spec: JobSpec, folder: Path):
        site = load_site(spec.site)
        python = "python" if site.venv or site.conda or site.container else sys.executable
        spec = spec.model_copy(update={"output": str(folder), "command": _command(folder, python)})
        error_log = f"{spec.log.removesuffix('.out')}.err"
        directives = spec.directives.model_copy(update={"add": {"error": error_log, **spec.directives.add}})
        spec = spec.model_copy(update={"directives": directives})
        entry = queue.submit(spec, site)
        self.id, self.stdout = entry.job, Path(entry.log)
        self.stderr = self.stdout.with_suffix(".err")

    def state(self) -> State:
        return queue.states(self.id)[0]

    def wait(self) -> int:
        return queue.wait(self.id)

    def cancel(self) -> None:
        queue.cancel(self.id)


class LocalJob:
    """Ranks on this machine, started by mpirun; they survive this process."""

    def __init__(self, spec: JobSpec, folder: Path):
        self.stdout, self.stderr = folder / f"{spec.name}.out", folder / f"{spec.name}.err"
        environ = ranks_environment(os.environ, spec.cpus_per_rank, crowded=spec.size > len(os.sched_getaffinity(0)))
        environ = {**unlaunched(environ), **spec.env, "HPCDIST_RUN": str(folder)}
        command = [*find_launcher(None, environ.get("PATH", "")), str(spec.size), *_command(folder, sys.executable)]
        with open(self.stdout, "wb") as out, open(self.stderr, "wb") as err:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self.id = str(self._process.pid)
        self._cancelled = False

    def state(self) -> State:
        code = self._process.poll()
        if code is None:
            return State(self.id, "RUNNING")
        state = "CANCELLED" if self._cancelled else "FAILED" if code else "COMPLETED"
        return State(self.id, state, status=status_of(state, f"{code}:0" if code >= 0 else f"0:{-code}"))

    def wait(self) -> int:
        return self._process.wait()

    def cancel(self) -> None:
        if self._process.poll() is None:
            self._cancelled = True
            end(psutil.Process(self._process.pid))
