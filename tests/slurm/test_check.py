"""Findings: each rule on a job that breaks it, and none on jobs that are all right."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cases import each
from hpcdist import strategies
from hpcdist.tools.slurm import check
from hpcdist.tools.slurm.check import Problem, _directives, examine
from hpcdist.tools.slurm.limits import minutes, nodes, unknown_pmi, unmet_requests
from hpcdist.tools.slurm.spec import Directives, JobSpec, Site

GOOD = {"job": "it.py", "nodes": 2, "settings": ["checkpoint.every_steps=100"], "cpus_per_rank": 2}
NO_SLURM = Problem(
    "note", "Slurm must be on PATH for its checks; found no sbatch. Run this on a host of the cluster, too."
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with a job, on a host without Slurm, outside of what nodes have of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "NODE_LOCAL", ("/dev/shm",))
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **where: None if name == "sbatch" else which(name, **where))
    Path("it.py").write_text("from train.tiny import job\n")
    Path("digits.h5").touch()
    return tmp_path


def found(site: Site | None = None, **settings: object) -> list[str]:
    """What is found on a host without Slurm, but for that note."""
    findings = examine(JobSpec(**{**GOOD, **settings}), site or Site(), {})
    assert findings[-1] == NO_SLURM
    return list(map(str, findings[:-1]))


@each(
    "settings",
    [
        {},
        {"shape": "allreduce", "provider": "nccl", "ranks_per_node": 4},
        {"shape": "parameter_server", "ranks_per_node": 2, "servers": 2, "servers_on": "one_per_node"},
        {"shape": "gossip", "strategy": "gossip_push"},
        {"shape": "study", "cases": [["seed=1"], ["seed=2"]]},
        {"shape": "hybrid", "job": None, "command": ["python", "it.py"]},
        {"shape": "hybrid", "ranks_per_node": 4, "stages": 2, "strategy": "dpsgd"},
        {"shape": "interactive", "job": None},
        {"shape": "interactive", "job": None, "nodes": 1, "settings": []},  # a shell: there is no run to go on
    ],
)
def test_good_jobs_have_no_findings(settings):
    assert found(**settings) == []


# A job's settings; `site`: the profile's.
@each(
    "case",
    [
        ({"warn_s": 3600}, "error: warn_s must be less than the time limit, 3600 s; got 3600. Raise time_min"),
        ({"warn_s": 59}, "warning: warn_s must be at least 60, for Slurm checks limits about once a minute; got 59."),
        ({"time_min": 5, "warn_s": 270}, "warning: time_min must leave time to work before the warning; got 30 s."),
        ({"job": "no.py"}, "error: job must be a file that exists; got no.py, and none in /"),
        ({"config": "~/a.toml"}, "error: config must be a path without ~ and $, which are not expanded; got ~/a.toml."),
        ({"output": "$SCRATCH/a"}, "error: output must be a path without ~ and $, which are not expanded; got"),
        ({"output": "it.py/a"}, "error: output must be a folder that you may write; got it.py/a, but "),
        ({"output": "/dev/shm/a"}, "warning: output must lie on a file system that all nodes share; got /dev/shm/a"),
        ({"strategy": "gosip"}, "error: strategy must be one of adpsgd, allreduce, "),
        ({"nodes": 1}, "warning: nodes or ranks_per_node must be more than 1 to distribute anything; got one rank."),
        ({"shape": "parameter_server", "servers": 2, "servers_on": "one_per_node"}, "error: strategy.servers must "),
        ({"shape": "parameter_server", "ranks_per_node": 4, "servers": 3, "servers_on": "one_per_node"},
         "warning: servers must be at most nodes, 2, to have one each; got 3."),
        ({"shape": "parameter_server", "ranks_per_node": 2, "servers": 3},
         "warning: servers must be at most ranks_per_node, 2, to fit on the first node; got 3."),
        ({"shape": "hybrid"}, "warning: stages must be at least 2 to split a model; got 1. Raise ranks_per_node, or"),
        ({"shape": "hybrid", "ranks_per_node": 7}, "error: stages must be 1 to the model's number of layers, 6; got 7"),
        ({"shape": "allreduce", "gpus_per_rank": 0}, "warning: gpus_per_rank must be 1 in the shape allreduce on GPUs"),
        ({"provider": "nccl"}, "error: provider must be horovod or none without GPUs; got 'nccl', which needs GPUs"),
        ({"gpus_per_rank": 2}, "warning: gpus_per_rank must be 1, for a rank of hpcdist uses one GPU; got 2."),
        ({"shape": "gossip", "cpus_per_rank": 1}, "warning: cpus_per_rank must be at least 2 for gossip_pull, whose"),
        ({"settings": ["checkpoint.every_s=0"]}, "warning: checkpoint.every_s must be above 0 for a requeued job to"),
        ({"shrink": True, "shape": "gossip"}, "error: launcher must be Open MPI's mpirun, for ranks to survive"),
        ({"shape": "study", "cases": [["seed=1"], ["seed=1"]]}, "warning: cases must differ; got ['seed=1'] twice."),
        ({"spare_nodes": 1, "doctor": False}, "warning: doctor must be true to find the nodes to exclude; got 1"),
        ({"site": {"venv": "none-such"}}, "error: venv of the site generic must be a virtual environment; got none-s"),
        ({"site": {"source": ["a.sh"]}}, "error: source[0] must be a file that exists; got a.sh"),
        ({"site": {"gpu_bind": "closest"}, "shape": "allreduce", "ranks_per_node": 2},
         "warning: gpu_bind must be none for NCCL to copy from GPU to GPU; got 'closest', which hides other"),
        ({"site": {"gpus": "per_task", "launcher": "mpirun"}, "shape": "allreduce", "ranks_per_node": 2},
         "warning: gpus must be per_node with the launcher mpirun, whose daemon is one task; got 'per_task'."),
        ({"site": {"launcher": "mpirun"}, "shrink": True},
         "warning: shrink needs a strategy that can continue, adpsgd, "),
    ],
)  # fmt: skip
def test_what_is_found(case):
    settings, expected = case
    job = {key: value for key, value in settings.items() if key != "site"}
    (finding,) = found(Site(**settings.get("site", {})), **job)
    assert finding.startswith(expected), finding


@each(
    "case",
    [
        (["epochss=3"], "error: setting must be one of .*; got 'epochss'. Did you mean 'epochs'?"),
        (["epochs=0", "batch_size=0"], "error: epochs must be greater than or equal to 1; got 0."),
        (["optimizer=Adm"], "error: optimizer.name must be one of .*; got 'Adm'. Did you mean 'Adam'?"),
        (["strategy=gosip_pull"], "error: strategy must be one of .* Did you mean 'gossip_pull'?"),
        (["strategy.algoritm=ring"], "error: strategy setting must be one of .*; got 'algoritm'. Did you m"),
        (["strategy=hardsync", "strategy.servers=8"], "error: strategy.servers must leave at least one rank to be"),
        (["strategy=dpsgd", "strategy.topology=rign"], "error: topology must be one of .* Did you mean 'ring'?"),
        (["strategy=dpsgd", "strategy.topology.name=torus", "strategy.topology.rows=3"],
         "error: rows must be a divisor of the number of ranks, 8; got 3."),
        (["strategy=softsync", "strategy.splits=99"], "error: strategy.splits must be "),
        (["optimizer=LBFGS", "strategy=gossip_pull", "clip_norm=none"],
         "error: strategy must be allreduce with LBFGS, whose steps"),
        (["data.path=digts.h5"], "error: data.path must be a file that exists, or data/digits.h5, which .*; got digts"),
        (["schedule=none", "model.widht=3"], "error: model options must suit the job's model, which takes width; got"),
    ],
)  # fmt: skip
def test_the_runs_own_settings_are_looked_at_as_train_does(case):
    settings, expected = case
    finding, *others = found(settings=["checkpoint.every_steps=9", *settings], ranks_per_node=4)
    assert re.match(expected.replace("?", r"\?"), finding), finding
    assert len(others) == (len(settings) if settings[0] == "epochs=0" else 1) - 1


@each(
    "case",
    [
        ("job = 3", "error: job file must define `job = hpcdist.train.Job(...)`; got it.py, which does not."),
        ("job = ", "error: job must be a file that Python can run; got SyntaxError in it.py: invalid syntax"),
        ("1 / 0", "error: job must be a file that Python can run; got ZeroDivisionError in it.py: division by zero."),
        ("import not_there_at_all", "warning: job must import installed modules; got No module named 'not_there_at"),
    ],
)
def test_a_jobs_file_that_is_wrong(case):
    text, expected = case
    Path("it.py").write_text(f"{text}\n")
    (finding,) = found()
    assert finding.startswith(expected), finding


def test_each_case_of_a_study_is_looked_at():
    cases = [["seed=1"], ["seed=-1"], ["strategy=hardsync"], ["strategy=hardsync", "strategy.servers=2"]]
    assert [finding[:30] for finding in found(shape="study", cases=cases)] == [
        "error: seed must be greater th", "error: strategy.servers must l",
    ]  # fmt: skip
    assert found(shape="study", cases=cases)[0].endswith(" That is in cases[1].")
    wrong = found(shape="study", cases=[["seed=1"], ["seed=2"]], settings=["epochs=0", "checkpoint.every_steps=9"])
    assert len(wrong) == 1 and "cases" not in wrong[0]


def test_every_strategy_is_rehearsed_on_as_many_ranks_as_threads_can_be():
    for name in strategies.available():
        sgd = strategies.load(name).contract.optimizer == "SGD"
        settings = {"settings": [*GOOD["settings"], "optimizer.name=SGD", "optimizer.lr=0.1"]} if sgd else {}
        many = name in ("allreduce", "hardsync", "gossip_pull")
        assert found(strategy=name, nodes=2, ranks_per_node=16 if many else 2, **settings) == [], name
    many = {"strategy": "hardsync", "nodes": 64, "ranks_per_node": 64}
    assert found(**many) == [], "too many to be rehearsed"
    (finding,) = found(settings=["checkpoint.every_steps=9", "strategy.servers=4096"], **many)
    assert finding.startswith("error: strategy.servers must leave at least one rank to be a worker; got 4096")


def test_the_runs_file_the_environment_and_a_template_of_ones_own_are_read():
    Path("run.toml").write_text('strategy = "gossip_pull"\n[checkpoint]\nevery_steps = 5\n')
    assert found(config="run.toml", settings=[], strategy="local_sgd") == []
    (finding, _) = examine(JobSpec(**GOOD), Site(), {"SBATCH_PARTITION": "x", "SBATCHES": "y"})
    assert str(finding).startswith("warning: the environment must hold no options of sbatch; got SBATCH_PARTITION.")
    Path("mine.sh").write_text("#: Why.\nif true\n")
    (finding,) = found(template="mine.sh")
    assert finding.startswith("error: the script must be valid bash; got bash: line 2: syntax error")


PYTHON = str(Path(sys.executable).name)
COMMANDS = [
    (["nonsense", "it.py"], {}, "error: command must start with a program; got nonsense, not on PATH. Name one"),
    (["nonsense"], {"modules": ["gcc"]}, "warning: command must start with a program; got nonsense, not on PATH"),
    (
        ["./none.sh"],
        {"modules": ["gcc"]},
        "error: command must start with a program; got ./none.sh, and no such file in /.*[^.]. Name one; those",
    ),
    (
        [".venv/bin/python", "it.py"],
        {},
        "error: .*; got .venv/bin/python, and no such file in /.*; those of the site's venv need no path.$",
    ),
    (["./it.py"], {}, "error: .*; got ./it.py, a file that is not executable. Write python ./it.py."),
    (["it.py"], {}, "error: .*; got it.py, a file that is not executable. Write python it.py."),
    (
        [PYTHON, "-u", "-W", "ignore", "train.py", "it.py"],
        {},
        "error: command must name a script .*; got train.py, and",
    ),
    (["bash", "-e", "run.sh"], {}, "error: command must name a script that exists; got run.sh, and none in /.*Write"),
    (["plain/bin/python3", "it.py"], {}, "warning: command must start with a Python that has hpcdist; got plain/bin/p"),
    (
        ["python3", "it.py"],
        {"venv": "plain"},
        "warning: .* got python3, which is plain/bin/python3. Set the site's venv",
    ),
    ([PYTHON, "-u", "it.py", "--epochs", "3"], {}, None),
    ([PYTHON, "-um", "hpcdist", "none.py"], {}, None),
    ([PYTHON, "-c", "print(1)"], {}, None),
    (["bash", "-lc", "none.sh"], {}, None),
    (["nonsense", "it.py"], {"container": ["apptainer", "exec", "it.sif"]}, None),
]


@each("case", COMMANDS)
def test_a_command_is_looked_for(case):
    command, site, message = case
    plain = Path("plain/bin/python3")
    plain.parent.mkdir(parents=True, exist_ok=True)
    plain.write_text("#!/bin/sh\nexit 1\n")  # a Python without hpcdist
    plain.chmod(0o755)
    (plain.parent / "activate").touch()
    told = found(Site(**site), job=None, command=command)
    assert len(told) == (message is not None) and all(re.match(message, text) for text in told), told


def test_errors_come_first():
    told = found(settings=["checkpoint.every_s=0"], warn_s=3600, cpus_per_rank=1, shape="gossip")
    assert [finding.split(":")[0] for finding in told] == ["error", "warning", "warning"]


def test_strategies_say_themselves_what_they_need():
    alone = {"adpsgd", "gossip_pull", "gossip_push", "gossip_sync", "strom"}
    served = {"async_diloco", "downpour", "eamsgd", "easgd", "hardsync", "parameter_server", "softsync", "ssp"}
    contracts = {name: strategies.load(name).contract for name in strategies.available()}
    assert {n for n, c in contracts.items() if c.deaths == "others continue"} == alone | served | {"sandblaster"}
    assert {n for n, c in contracts.items() if c.memory == "read by others"} == {"adpsgd", "gossip_pull", "gossip_push"}


@each(
    "case",
    [
        ({"signal": "B:TERM@300"}, {}, "warn_s"),
        ({"ntasks": 3}, {}, "ranks_per_node"),
        ({"mem-per-cpu": "1G"}, {"mem_gb": 4}, "mem_gb"),
        ({"hetjob": True}, {}, "nodes"),
        ({"time": "5"}, {}, "time_min"),
        ({"no-requeue": True}, {}, "requeue"),
        ({"gres": "gpu:2"}, {"gpus_per_rank": 1}, "gpus_per_rank"),
        ({"mem-per-cpu": "1G", "gres": "craynetwork:1", "exclusive": True, "nice": 3, "requeue": False}, {}, None),
    ],
)
def test_directives_leave_to_the_jobs_own_settings_what_these_say(case):
    add, settings, key = case
    spec = JobSpec.from_mapping({"command": ["true"], "directives": {"add": add}, **settings})
    for found in (_directives(spec, Site()), _directives(spec.model_copy(update={"directives": Directives()}),
                                                        Site(directives={"add": add}))):  # fmt: skip
        texts = [problem.text for problem in found]
        assert len(texts) == (key is not None)
        assert key is None or re.match(
            f"directives.add must leave {next(iter(add))} to {key}, which is .*; got ", texts[0]
        )


# --- what Slurm says --------------------------------------------------------------------------------------------------
SINFO = """main*|4|4000|gpu:fake:2(S:0)|infinite
main*|8|8192|(null)|infinite
gpu|16|64000|gpu:a100:4,craynetwork:2|1-00:00:00
"""


def test_what_slurm_says_is_read():
    assert nodes(SINFO) == [
        ("main", True, 4, 4000, 2, math.inf), ("main", True, 8, 8192, 0, math.inf), ("gpu", False, 16, 64000, 4, 1440)
    ]  # fmt: skip
    times = {"infinite": math.inf, "n/a": math.inf, "30:00": 30, "1:30:00": 90, "2-0:0:0": 2880, "0:30": 0.5}
    assert {text: minutes(text) for text in times} == times
    pmi = "MPI plugin types are...\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
    assert list(unknown_pmi("pmix", pmi)) == []
    ((_, text),) = unknown_pmi("pmix_v9", pmi)
    assert text == "mpi must be one of pmi2, pmix, which srun --mpi=list names; got 'pmix_v9'."


TOGETHER = "nodes + spare_nodes must be at most the number of fitting nodes of main, "


@each(
    "case",
    [
        ({}, []),
        ({"partition": "gpu", "nodes": 1, "ranks_per_node": 4, "gpus_per_rank": 1}, []),
        ({"partition": "none-such"}, ["partition must be one of gpu, main; got 'none-such'."]),
        ({"partition": "mian"}, ["partition must be one of gpu, main; got 'mian'. Did you mean 'main'?"]),
        ({"directives": {"add": {"partition": "x"}}}, ["partition must be one of gpu, main; got 'x'."]),
        ({"cpus_per_rank": 9}, ["ranks_per_node x cpus_per_rank must be at most the 8 cores of a node of main"]),
        ({"nodes": 1, "gpus_per_rank": 3}, ["ranks_per_node x gpus_per_rank must be at most the 2 GPUs of a"]),
        ({"mem_gb": 9}, ["mem_gb must be at most the 8 GB of a node of main; got 9."]),
        ({"spare_nodes": 1}, [f"{TOGETHER}2; got 3."]),
        ({"cpus_per_rank": 8}, [f"{TOGETHER}1; got 2."]),
        ({"partition": "gpu", "nodes": 1, "time_min": 1441}, ["time_min must be at most the 1440 minutes of gpu"]),
    ],
)
def test_more_than_a_partition_has(case):
    settings, expected = case
    site = Site(**({"partition": settings["partition"]} if "partition" in settings else {}))
    job = {key: value for key, value in settings.items() if key != "partition"}
    told = list(unmet_requests(JobSpec(**{**GOOD, **job}), site, nodes(SINFO)))
    assert len(told) == len(expected)
    for (level, text), beginning in zip(told, expected):
        assert level == "error" and text.startswith(beginning), text


def test_a_cluster_that_does_not_answer(monkeypatch, folder):
    """A real sinfo that fails stands for a controller that is down."""
    (folder / "bin").mkdir()
    for name in ("sinfo", "sbatch"):
        (folder / "bin" / name).write_text("#!/bin/sh\necho controller down >&2; exit 1\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(folder)
    findings = examine(JobSpec(**GOOD), Site(), {})
    assert findings[-1].level == "note" and "got: controller down" in findings[-1].text
    assert subprocess.run(["sbatch"], capture_output=True).returncode == 1
