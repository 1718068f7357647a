"""The cluster: hosts, and Slurm on them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Template

from harness.launch import SITE
from hpcdist.comm.launch import LAUNCHED
from kit import hosts

KIT = Path(__file__).parent
ROOT = KIT.parents[2]
PACKAGES = (KIT / "packages").read_text().split()  # of Debian
ACCOUNTING_PACKAGES = (KIT / "packages-accounting").read_text().split()
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")
ACCOUNTING_TOOLS = ("slurmdbd", "mariadbd")
NODES, CPUS, GPUS = 4, 8, 2  # CPUs and GPUs of each node, as Slurm believes
NET = "10.77.0"
PREFIX = "hpcdist-cluster-"
MPICH = ROOT / ".venv-mpich"
# Else each node would bind to the same cores of this machine.
SETTINGS = {**hosts.SETTINGS, "PRTE_MCA_hwloc_default_binding_policy": "none"}
# What a job that runs these tests has in its environment, and jobs of this cluster must not inherit.
INHERITED = (*LAUNCHED, "PRTE_MCA_", "SLURM_", "SBATCH_", "SRUN_", "PYTEST_")


def why_not(accounting: bool = False) -> str | None:
    """Return the reason why there can be no such cluster here, or none with accounting; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    missing += [] if Path("/etc/slurm").is_dir() else ["/etc/slurm"]
    missing += [] if list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")) else ["libpmix.so"]  # of srun --mpi=pmix
    packages = PACKAGES
    if accounting:
        missing += [tool for tool in ACCOUNTING_TOOLS if shutil.which(tool, path=path) is None]
        packages = PACKAGES + ACCOUNTING_PACKAGES
    if missing:
        return f"needs {', '.join(missing)}: apt-get install {' '.join(packages)}"
    return hosts.why_not(hosts.Cable(1))


def mpich() -> dict[str, str]:
    """Return the environment's changes under which MPICH of .venv-mpich runs."""
    return {"PATH": f"{MPICH}/bin:{os.environ['PATH']}", "MPI4PY_LIBMPI": f"{MPICH}/lib/libmpi.so.12"}


class Cluster:
    """Run a controller `ctl` and nodes `n1`, `n2`, ... under Slurm; see `cluster.kit`.

    Args:
        folder: an empty one, for all its files.
        accounting: a database keeps what became of jobs, and the controller forgets them 2 s after their end.
    """

    def __init__(self, folder: Path, accounting: bool = False):
        self.folder = folder
        self._accounting = accounting
        self.nodes = tuple(f"n{i + 1}" for i in range(NODES))
        common = {folder, ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        hosts.describe(folder / "hosts", [*self.nodes, "ctl"], NET)
        self.hosts = hosts.Hosts(folder / "hosts", [path for path in sorted(common) if not common & set(path.parents)])

    # --- commands -------------------------------------------------------------------------------------------------
    def command(self, *command: str | Path, on: str = "ctl", cwd: Path | None = None) -> list[str]:
        """Return the command as one that this machine runs."""
        return [*self.hosts.inside(on), "env", "-C", str(cwd or self.folder), *map(str, command)]

    def run(
        self,
        *command: str | Path,
        on: str = "ctl",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 120.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; return what it wrote, and its exit status. Ends it after `timeout_s`.

        Raises:
            RuntimeError: it failed, unless `check` is false; or it took too long. Shows what it wrote.
        """
        limited = ["timeout", "--kill-after=5", str(timeout_s), *command]
        done = subprocess.run(
            self.command(*limited, on=on, cwd=cwd),
            env=self.environment(env),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode in (124, 137) or (check and done.returncode):
            said = f"{done.stdout}\n{done.stderr}".strip()
            raise RuntimeError(f"{' '.join(map(str, command))} on {on} had status {done.returncode}:\n{said}")
        return done

    def environment(self, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a command on a host."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
        return {**own, **SETTINGS, "PYTHONPATH": str(SITE), **(changes or {})}

    # --- jobs -----------------------------------------------------------------------------------------------------
    def submit(self, script: str, *options: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Submit the text of a batch script; return the job's id."""
        done = self.run("sbatch", "--parsable", *options, cwd=cwd, env=env, stdin=script)
        return done.stdout.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` tells; of an array, of its first task there."""
        first = self.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()[0]
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def wait(self, job: str, state: str = "COMPLETED", timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until a job has that state; return what Slurm then tells of it.

        Raises:
            RuntimeError: it ended in another one, or was not there in time. Shows its output.
        """
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        until = time.monotonic() + timeout_s
        while (found := self.job(job))["JobState"] != state:
            if found["JobState"] in ended or time.monotonic() > until:
                raise RuntimeError(f"job {job} must become {state}; got {found['JobState']}.\n{self.output(job)}")
            time.sleep(0.1)
        return found

    def output(self, job: str) -> str:
        """Return what a job has written so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else f"(no {path})"

    def until(self, true: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        """Wait until `true()` is; `what` says what that means."""
        until = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > until:
                raise RuntimeError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.1)

    # --- nodes ----------------------------------------------------------------------------------------------------
    def kill(self, node: str) -> None:
        """Make its power fail: all its processes, its mounts and its end of the cable are gone when this returns."""
        self.hosts.end(node)

    def start(self, node: str, wait: bool = True) -> None:
        """Start a node that does not run; wait until Slurm can use it."""
        self._boot(node, "slurmd", "-D")
        if wait:
            self.until(lambda: self._state(node) in ("IDLE", "MIXED", "ALLOCATED"), f"{node} is back")

    def _boot(self, host: str, *daemon: str | Path) -> None:
        """Start a host, and its daemon on it."""
        self.hosts.start(host)
        command = [*self.hosts.inside(host), "bash", KIT / "daemons.sh", host, self.folder, *daemon]
        with open(self.folder / "log" / f"host.{host}", "a") as log:
            done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if done.returncode:
            raise RuntimeError(f"{host}'s daemons did not start:\n{self.logs()}")

    def _state(self, node: str) -> str:
        told = self.run("scontrol", "--oneliner", "show", "node", node).stdout
        return told.partition("State=")[2].split()[0]

    @contextlib.contextmanager
    def shaped(self, node: str, *, mbit_s: float) -> Iterator[None]:
        """Make a node's cable as slow as that within the block."""
        self.shape(node, mbit_s=mbit_s)
        try:
            yield
        finally:
            self.shape(node)

    def shape(self, node: str, *, mbit_s: float | None = None) -> None:
        """Let a node's cable carry so many 10⁶ bits per second each way; None: as many as the machine manages."""
        self.hosts.shape(hosts.Cable(mbit_s), node)

    # --- all of it ------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Start all hosts; return when all nodes are idle."""
        self._write_files()
        accounting = ("bash", KIT / "accounting.sh", self.folder)
        self._boot("ctl", *(accounting if self._accounting else ("slurmctld", "-D", "-c")))
        for node in self.nodes:
            self.start(node, wait=False)
        try:
            self.until(self._all_idle, "all nodes are idle")
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.logs()}") from None

    def _all_idle(self) -> bool:
        found = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).stdout.split()
        return found == ["idle"] * NODES

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of Slurm's daemons."""
        paths = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{p.name}: {line}" for p in paths for line in p.read_text().splitlines()[-lines:])

    def _write_files(self) -> None:
        for name in ("etc", "log", "state", "dev", "munge", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for gpu in range(GPUS):
            os.mknod(self.folder / "dev" / f"nvidia{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # /dev/null
        etc = self.folder / "etc"
        # Not used, but what is looked for without it is missing here.
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        values = {"folder": self.folder, "nodes": f"n[1-{NODES}]", "cpus": CPUS, "gpus": GPUS, "last_gpu": GPUS - 1}
        # The accounting is for jobs that the controller has forgotten.
        values |= {"storage": "slurmdbd", "memory_s": 2} if self._accounting else {"storage": "none", "memory_s": 3600}
        for name in ("slurm.conf", "slurmdbd.conf", "gres.conf"):
            (etc / name).write_text(Template((KIT / name).read_text()).substitute(values))
        (etc / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists: a password could be there

    def close(self) -> None:
        """End all hosts, and all that runs on them, at once."""
        self.hosts.close()


@contextlib.contextmanager
def made(accounting: bool = False) -> Iterator[Cluster]:
    """Make a cluster and take it away again, with all its files; see `Cluster` for `accounting`."""
    delete_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    folder.chmod(0o755)
    cluster = Cluster(folder, accounting)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it does
        try:
            cluster.open()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)


def delete_left_behind() -> None:
    """Delete the files of clusters whose makers were killed; their hosts have ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
