"""Specifications and profiles: what is refused, with which words."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest

from harness.cases import each
from hpcdist.config.settings import describe
from hpcdist.errors import ConfigError
from hpcdist.tools.slurm.spec import JobSpec, Shape, Site, load_spec, sites

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@each(
    "case",
    [
        ({"nodes": 0}, "nodes must be greater than or equal to 1; got 0. Nodes that ranks run on (default 1)."),
        ({"node": 1}, "setting must be one of at_once, cases, command,"),
        ({"shape": "gpu"}, "shape must be 'allreduce', 'cpu', 'gossip', 'hybrid', 'interactive', "),
        ({"name": "a\nb"}, "name must be one line of printable characters; got 'a\\nb'. Take another name."),
        ({"name": "a\n#SBATCH --uid=0"}, "name must be one line of printable characters"),
        ({"name": "é" * 101}, "name must have at most 200 bytes; got 'éé"),
        ({"name": ""}, "name must be one line of printable characters; got ''"),
        ({"name": "a/b"}, "name must be a file's name without / and \\; got 'a/b'. It is part of the log's name."),
        ({"output": "a\\b"}, "output must be a path without \\, at which Slurm expands no %j; got 'a\\\\b'."),
        ({"output": "a\rb"}, "output must be one line of printable characters"),
        ({"job": "a\0b"}, "job must be text without NUL, in UTF-8; got 'a\\x00b'."),
        ({"settings": ["a=\udcff"]}, "settings[0] must be text without NUL, in UTF-8"),
        ({"settings": ["epochs"]}, "--set must be key=value, such as strategy.period=4; got 'epochs'."),
        ({"settings": ["$(id)=1"]}, "--set must be key=value"),
        ({"shape": "study", "cases": [["a b=1"]]}, "--set must be key=value"),
        ({"env": {"A B": "1"}}, "env.A B must have names of letters, digits and _; got 'A B'. Rename the variable."),
        ({"env": {"A;id": "1"}}, "must have names of letters, digits and _; got 'A;id'"),
        ({"directives": {"add": {"--time": "1"}}}, "must name long options of sbatch without --, such as partition"),
        ({"directives": {"remove": ["a b"]}}, "must name long options of sbatch without --"),
        ({"directives": {"add": {"comment": "a\nb"}}}, "must be one line of printable characters; got 'a\\nb'"),
        ({"job": None, "command": ["-x"]}, "command must start with a program's name; got ['-x']. Launchers would"),
        ({"job": None, "command": [""]}, "command must start with a program's name; got ['']."),
        ({"command": ["python"]}, "command must be omitted where job is given; got ['python']. Take one of the two."),
        ({"job": None}, "job or command must be given; got neither. Name a file such as jobs/digits.py."),
        ({"stages": 2}, "shape must be hybrid for stages; got 'cpu'. Set shape = \"hybrid\"."),
        ({"shape": "hybrid", "job": None, "command": ["a"], "stages": 2},
         "stages must be omitted where command is given, which sets them; got 2."),
        ({"shape": "hybrid", "nodes": 3, "ranks_per_node": 4, "stages": 3},
         "stages must divide ranks_per_node, 4; got 3. A copy of the model has its stages on one node, unless set"),
        ({"shape": "hybrid", "nodes": 3, "ranks_per_node": 4, "stages": 5, "settings": ["parallel.spread=true"]},
         "stages must divide the number of ranks, 12; got 5."),
        ({"shape": "study"}, 'cases must be given in the shape study; got none. Write cases = [["seed=1"], ["s'),
        ({"shape": "study", "job": None, "command": ["a"], "cases": [["seed=1"]]},
         "job must be given in the shape study, whose cases are its settings; got none."),
        ({"shape": "study", "cases": [["seed=1"]], "folders": ["a", "b"]}, "folders must be as many as cases, 1; got"),
        ({"cases": [["seed=1"]]}, "shape must be study for cases; got 'cpu'. Set shape = \"study\"."),
    ],
)  # fmt: skip
def test_a_job_that_is_refused(case):
    settings, message = case
    with pytest.raises(ConfigError) as caught:
        JobSpec(**{"job": "it.py", **settings})
    assert message in str(caught.value)


@each(
    "case",
    [
        ({"partitoin": "a"}, "; got 'partitoin'. Did you mean 'partition'?"),
        ({"partition": "a\nb"}, "partition must be one line of printable characters"),
        ({"modules": ["-x"]}, "modules[0] must not be empty nor start with -; got '-x'. Write a path, such as ./NAME."),
        ({"modules": [""]}, "must not be empty nor start with -; got ''"),
        ({"conda": "-n"}, "conda must not be empty nor start with -"),
        ({"venv": "a", "conda": "b"}, "conda must be omitted where venv is given; got 'b'. Take one of the two."),
        ({"container": ["--rm"]}, "container must start with a program's name; got ['--rm']. Launchers would take"),
        ({"launcher": "mpirun", "mpi": "pmix"}, "mpi must be omitted with the launcher mpirun; got 'pmix'."),
        ({"launcher": "ssh"}, "launcher must be 'srun', 'mpirun' or 'mpiexec'; got 'ssh'."),
    ],
)
def test_a_profile_that_is_refused(case):
    settings, message = case
    with pytest.raises(ConfigError) as caught:
        Site(**settings)
    assert message in str(caught.value)


def test_settings_come_from_a_file_and_flags(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('job = "it.py"\nnodes = 2\nsettings = ["epochs=3"]\n[env]\nA = "1"\n')
    spec = load_spec(path, ["nodes=16", "env.B=x", "directives.add.partition=gpu"])
    assert (spec.nodes, spec.size, spec.env) == (16, 16, {"A": "1", "B": "x"})
    assert spec.directives.add == {"partition": "gpu"} and spec.settings == ["epochs=3"]


def test_a_copy_of_a_model_has_the_ranks_of_a_node_as_stages_if_nothing_else_is_said():
    hybrid = {"shape": "hybrid", "job": "it.py", "nodes": 3, "ranks_per_node": 4}
    assert JobSpec(**hybrid).run_settings == ["strategy=allreduce", "parallel.stages=4"]
    two = JobSpec(**hybrid, stages=2, strategy="gossip_pull", settings=["epochs=3"])
    assert two.run_settings == ["strategy=gossip_pull", "parallel.stages=2", "epochs=3"]
    assert JobSpec(**hybrid, stages=6, settings=["parallel.spread=true"]).model_stages == 6


@pytest.mark.parametrize("model", [JobSpec, Site])
def test_every_setting_is_described(model):
    assert [option.key for option in describe(model) if not option.description] == []


def test_the_logs_name_expands_only_what_slurm_should():
    assert JobSpec(job="it.py", output="100%/").log == "100%%/%x-%j.out"


def test_what_the_readme_shows_is_valid_and_whole():
    text = (Path(__file__).parents[2] / "slurm" / "README.md").read_text()
    job, site = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.S))
    assert JobSpec(**job).shape == "gossip" and Site(**site).mpi == "pmix"
    shapes, profiles = (set(re.findall(r"^\| (`.*?) \|", part, re.M)) for part in text.split("## Profiles"))
    assert {name.strip("`") for name in shapes} == set(get_args(Shape))
    assert {name.strip("`") for row in profiles for name in row.split(", ")} == set(sites())
