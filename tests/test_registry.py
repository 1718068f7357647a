"""Plug-ins of every kind: in our folders, in packages that are installed, in files of the user's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import h5py
import pytest
import torch

import hpcdist as hd
from harness.cases import each
from hpcdist import collectives, compress, registry, strategies, topology
from hpcdist.collectives.tuning.table import candidates
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import importers
from hpcdist.errors import ConfigError
from hpcdist.parallel import schedules
from hpcdist.registry import label
from hpcdist.tools import cli
from hpcdist.tools.doctor.base import Nodes, Requirements
from hpcdist.tools.slurm.check import examine
from hpcdist.tools.slurm.spec import JobSpec, Site
from hpcdist.train.runs import train

ALONE = '''
"""A strategy that needs nobody."""
from typing import final
from hpcdist.strategies.base import Contract, Strategy

class _Shared(Strategy):
    contract = Contract(averages="nothing", synchronizes="never")

@final
class Alone(_Shared):
    """Every rank on its own.

    Reference: Nobody, "Alone", 2020.
    """

    def advance(self, update):
        return self.gradients.step_alone(update)
'''
HALVED = '''
"""Half of everything."""
from hpcdist.compress.none import Uncompressed

class Halved(Uncompressed):
    """Half of everything is sent at once, the rest later."""

    def encode_residual_(self, residual):
        message = super().encode_residual_(residual * 0.5)
        residual.mul_(0.5)
        return message
'''
STAR = '''
"""A star."""
from hpcdist.topology.base import Topology, uniform

class Star(Topology):
    """Rank 0 and each of the others by turns."""
    symmetric = True
    period = None

    def in_neighbours(self, rank, step):
        other = 1 + step % (self.size - 1) if self.size > 1 else 0
        return uniform((0, other) if rank in (0, other) else (rank,))
'''
TWO = STAR + "\nclass {}(Topology):\n    symmetric = True\n\n    def in_neighbours(self, *at):\n        return {{}}\n"
TWICE = '''
"""One more all-reduce."""
from hpcdist.collectives.base import AllReduce

class Twice(AllReduce):
    """MPI's own."""

    def _sum(self, tensor):
        self.comm.allreduce(tensor)
'''
COUNTED = '''
"""Numbers from 0 on."""
from pathlib import Path
import h5py
import numpy as np

def convert(source, destination, *, count: int = 8) -> Path:
    """Numbers.

    Args:
        count: how many.
    """
    x = np.arange(count, dtype=np.float32).reshape(-1, 1)
    with h5py.File(destination, "w") as file:
        file["x"] = x
    return Path(destination)
'''
UPTIME = '''
"""Whether nodes are awake."""
from hpcdist.tools.doctor.base import OK, Finding

def measure(comm, nodes, asked):
    return {"awake": True}

def judge(measured, nodes, asked):
    yield Finding(OK, "awake")
'''
ALTERNATE = '''
"""One micro-batch after the other."""
from hpcdist.parallel.schedules.base import Operation

def table(ranks, micro_batches, chunks=1):
    return [[Operation(kind, rank, i) for i in range(micro_batches) for kind in "FB"] for rank in range(ranks)]
'''
PLUGINS = {
    "alone": ("strategies", ALONE, "Alone"), "halved": ("compressors", HALVED, "Halved"),
    "star": ("topologies", STAR, "Star"), "twice": ("collectives", TWICE, "Twice"),
    "counted": ("importers", COUNTED, "convert"),
    "alternate": ("schedules", ALTERNATE, "table"),
    "uptime": ("checks", UPTIME, None),
}  # fmt: skip
ROOMS = {
    "strategies": strategies, "compressors": compress, "topologies": topology, "collectives": collectives,
    "importers": importers, "schedules": schedules, "checks": registry.catalogue("checks"),
}  # fmt: skip


def install(folder: Path, entries: dict[str, list[str]], name: str = "extras") -> None:
    """A distribution with these entry points by group, as pip leaves it."""
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    text = "".join("\n".join([f"[hpcdist.{group}]", *lines, ""]) for group, lines in entries.items())
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which is on sys.path; modules that are imported from it are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def extras(folder):
    """An installed package with a plug-in of each kind, half of them named by their modules alone."""
    entries = {}
    for number, (name, (group, text, member)) in enumerate(PLUGINS.items()):
        (folder / f"extra_{name}.py").write_text(text)
        entries[group] = [f"{name} = extra_{name}{f':{member}' if member and number % 2 else ''}"]
    install(folder, entries)
    return folder


# --- installed packages -----------------------------------------------------------------------------------------------
def test_a_package_adds_a_plugin_of_each_kind_that_is_imported_when_it_is_asked_for(extras):
    for number, (name, (group, _, member)) in enumerate(PLUGINS.items(), 1):
        room, module = ROOMS[group], f"extra_{name}"
        own = set(room.available())
        assert name in own and len(own) > 4 and module not in sys.modules
        found = room.load(name)
        assert found is (getattr(sys.modules[module], member) if member else sys.modules[module])
        assert sum(f"extra_{other}" in sys.modules for other in PLUGINS) == number
        assert sum(f"hpcdist.{group} {name}: extra_{name}" in line for line in registry.installed()) == 1


def test_what_a_package_adds_does_its_work(extras):
    def body(comm):
        model = torch.nn.Linear(2, 1)
        hd.init(comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hd.DistributedOptimizer(optimizer, model, "dpsgd", topology="star")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.strategy.close()
        config = strategies.load("allreduce").Config(compression={"name": "halved"}, algorithm="twice")
        tensor = torch.ones(3) * comm.rank
        collectives.load("twice")(comm)(tensor)
        return config.compression.name, tensor.tolist()

    assert run_virtual(body, 3) == [("halved", [3.0] * 3)] * 3


def test_all_reduce_chooses_among_a_packages_algorithms_too(extras):
    (extras / "extra_twice.py").write_text(
        TWICE.replace("AllReduce", "Algorithm")
        + "    @staticmethod\n    def cost(n_bytes, size, ranks_per_node=1):\n        return 0, 0, 0\n"
    )
    assert all("twice" in names for names in run_virtual(candidates, 2))


def test_the_doctor_runs_a_packages_check(extras):
    check = registry.catalogue("checks").load("uptime")
    (finding,) = check.judge(check.measure(None, None, None), Nodes((), ()), Requirements())
    assert finding.text == "awake"


def test_commands_list_what_packages_add(extras, monkeypatch, capsys):
    for command, words in (
        (["strategies"], ["alone ", "Every rank on its own."]),
        (["compressors", "halved"], ["halved\n", "Half of everything is sent at once"]),
        (["topology", "star", "--ranks", "3"], ["symmetric: yes"]),
        (["topology", "sart", "--ranks", "3"], ["Did you mean 'star'?"]),
        (["data", "import", "conted", "x", "y"], ["Did you mean 'counted'?"]),
    ):
        monkeypatch.setattr(sys, "argv", ["hpcdist", *command])
        with pytest.raises(SystemExit):
            cli.main()
        told = "".join(capsys.readouterr())
        assert all(word in told for word in words), told


def test_a_name_that_is_taken_is_refused_where_it_is_asked_for(folder):
    (folder / "mine.py").write_text(STAR)
    install(folder, {"topologies": ["ring = mine:Star", "star = mine:Star"]})
    install(folder, {"topologies": ["star = mine"]}, name="more")
    own = "topology 'ring' must be the name of one plug-in; got hpcdist.topology.ring and mine:Star of the package extr"
    with pytest.raises(ConfigError, match=own):
        topology.load("ring")
    with pytest.raises(ConfigError, match="topology 'star' must be the name of one plug-in; got .*more.*Rename the en"):
        topology.load("star")
    assert topology.load("torus") is topology.load("torus") and topology.available().count("ring") == 1


@pytest.mark.parametrize(
    ("entry", "text", "message"),
    [
        ("mine:Non", STAR, "topology must be in a file that can be imported; got AttributeError: .*Non.*, from mine:N"),
        ("none_such:A", "", "got ModuleNotFoundError: No module named 'none_such'"),
        ("mine:Star", "import math\n1 / 0\n", r"got ZeroDivisionError: division by zero \(.*mine.py:2\), from mine:St"),
        ("mine:Star", "Star = 3\n", "mine:Star of the package extras must be a subclass of Topology; got 3. See CONTR"),
        ("mine", "x = 1\n", r"mine.py must define one subclass of Topology; got none\. Name it after the file"),
        (
            "mine:Star",
            STAR.replace("def in_n", "def not_in_n"),
            "must define the abstract methods of Topology; got no in_nei",
        ),
        ("mine", STAR.replace("def in_n", "def not_in_n"), r"mine.py must define one subclass of Topology; got none\."),
        ("mine", TWO.format("Other"), r"mine.py must define one subclass of Topology; got Star and Other\. Name it"),
    ],
)
def test_what_is_no_plugin_is_refused(folder, entry, text, message):
    (folder / "mine.py").write_text(text)
    install(folder, {"topologies": [f"it = {entry}"]})
    with pytest.raises(ConfigError, match=message):
        topology.load("it")


def test_an_importer_is_a_function_and_a_check_has_two(folder):
    (folder / "mine.py").write_text("convert = 3\ndef measure(): pass\n")
    install(folder, {"importers": ["it = mine", "that = mine:measure"], "checks": ["it = mine"]})
    with pytest.raises(ConfigError, match="mine of the package extras must be, or define, a function convert; got no"):
        importers.load("it")
    assert importers.load("that") is sys.modules["mine"].measure
    with pytest.raises(ConfigError, match="mine of the package extras must define measure and judge; got no judge"):
        registry.catalogue("checks").load("it")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TWO.format("_Helper"), "Star"), (TWO.format("It"), "It"),
        (f"{STAR}\nAlias, Names = Star, list[str]\n", "Star"),
        pytest.param(
            TWO.format("Other").replace("class Other", "from typing import final\n\n@final\nclass Other"), "Other",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.final leaves no mark on Python 3.10"),
        ),
    ],
)  # fmt: skip
def test_of_several_classes_it_is_that_of_the_files_name_or_the_final_or_the_only_public_one(folder, text, found):
    (folder / "it.py").write_text(text)
    install(folder, {"topologies": ["it = it"]})
    assert topology.load("it").__name__ == found


# --- the modules of our own folders -----------------------------------------------------------------------------------
def test_a_folder_of_plugins_holds_nothing_else():
    for kind in registry.CATALOGUES.values():
        for path in Path(importlib.import_module(kind.package).__file__).parent.glob("*.py"):
            assert path.stem in (*kind.available(), "base") or path.stem.startswith("_"), path
        assert all(kind.load(name) for name in kind.available())


def test_an_error_in_a_plugin_of_our_own_is_not_hidden(folder, monkeypatch):
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.setattr(topology, "__path__", [*topology.__path__, str(folder)])
    kind = registry.catalogue("topologies")
    monkeypatch.setattr(registry, "_modules", lambda package: frozenset({"broken"}))
    with pytest.raises(ZeroDivisionError):
        kind.load("broken")


# --- files ------------------------------------------------------------------------------------------------------------
@each("name", PLUGINS)
def test_a_file_holds_a_plugin_of_each_kind(folder, name):
    group, text, member = PLUGINS[name]
    (folder / "plugins").mkdir(exist_ok=True)
    (folder / "plugins" / f"my_{name}.py").write_text(text)
    room, reference = ROOMS[group], f"plugins/my_{name}.py:{member or 'judge'}"
    if member is None:  # a module, which nobody names
        with pytest.raises(ConfigError, match="must define measure and judge; got no measure"):
            room.load(reference)
        return
    found = room.load(reference)
    assert found.__name__ == member and room.load(reference) is found and reference not in room.available()
    assert room.load(str(folder / reference)) is found, "the same file by another path"
    if group == "importers":
        with h5py.File(found(None, folder / "a.h5", count=3)) as file:
            assert file["x"].shape == (3, 1)


@each(
    "case",
    [
        (
            {"name": "gossip_pull"},
            "strategy must be a name or path/to/file.py:Class; got {'name': 'gossip_pull'}. Pass",
        ),
        ("mine.py", "strategy must be path/to/file.py:Class to be loaded from a file; got 'mine.py'. Add a"),
        ("mine.py:", "strategy must be path/to/file.py:Class to be loaded from a file; got 'mine.py:'"),
        ("none.py:Alone", "strategy must be in a file that exists; got 'none.py:Alone', and there is no none.py in /"),
        ("mine.py:Alon", "strategy must be defined in mine.py, which has Alone; got 'Alon'. Did you mean 'Alone'?"),
        ("two.py:Aloen", "strategy must be defined in two.py, which has Alone, Lonely; got 'Aloen'. Did you mean 'Alo"),
        ("wide.py:Alone", "strategy must be defined in wide.py, which has none; got 'Alone'."),
        ("mine.py:final", "mine.py:final must be a subclass of Strategy; got <function final"),
        ("mine.py:Strategy", "mine.py:Strategy must be a subclass of Strategy; got <class"),
        ("mine.py:_Shared", "mine.py:_Shared must define the abstract methods of Strategy; got no advance. Add it."),
        ("wrong.py:Alone", r"strategy must be in a file that can be imported; got SyntaxError: .*wrong.py, line 1\)"),
        ("untyped.py:Alone", r"got PydanticUserError: .*: `interval = 1`.* type annotation.*untyped.py:11\), from"),
        ("worded.py:Alone", r"averages of a Contract must be one of .*; got 'params'.* \(.*/worded\.py:\d+\)$"),
        ("alone", "strategy must be one of adpsgd, .*zero_one_adam; got 'alone'"),
    ],
)
def test_a_file_that_holds_none(folder, case):
    reference, message = case
    (folder / "mine.py").write_text(ALONE)
    (folder / "two.py").write_text(f"{ALONE}\nclass Lonely(Alone):\n    pass\n")
    (folder / "wide.py").write_text("from mine import Alone as Other\n\nclass Wide:\n    pass\n")
    (folder / "wrong.py").write_text("class:\n")
    (folder / "worded.py").write_text(f"{ALONE}\nOTHER = Contract(averages='params', synchronizes='never')\n")
    option = "class Alone(_Shared):\n    class Config(Strategy.Config):\n        interval = 1\n"
    (folder / "untyped.py").write_text(ALONE.replace("class Alone(_Shared):\n", option))
    with pytest.raises(ConfigError, match=message):
        strategies.load(reference)


JOB = "from train.tiny import job\n"
NEIGHBOURED = """
import dataclasses
import helpers
from train import tiny

assert helpers.OF == 'the job'

def model():
    import later
    return tiny.job.model(later.WIDTH)

job = dataclasses.replace(tiny.job, model=model)
"""


def test_a_job_trains_by_a_strategy_in_a_file_and_goes_on(folder):
    """What is written keeps the name as it was given; the files beside the job are kept, too."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine.py").write_text(f"import helpers\n{ALONE}")
    (folder / "elsewhere" / "helpers.py").write_text("OF = 'the strategy'\n")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "it.py").write_text(NEIGHBOURED)
    (folder / "jobs" / "helpers.py").write_text("OF = 'the job'\n")
    (folder / "jobs" / "later.py").write_text("WIDTH = 5\n")
    name = "elsewhere/mine.py:Alone"
    settings = [f"strategy={name}", "epochs=1", "checkpoint.every_steps=5"]

    def body(comm, *more, **given):
        return train(comm, Path("jobs/it.py"), None, [*settings, *more], **given)

    ((made, summary), _) = run_virtual(body, 2)
    assert made.name == "it-mine-Alone-2-1" and summary.strategy == name
    text = (made / "run.json").read_text()
    assert f'"name": "{name}"' in text and "helpers.py" in text
    assert "the job" in next(made.glob("job*/**/helpers.py")).read_text()
    ((again, longer), *_) = run_virtual(lambda comm: body(comm, "epochs=2", output=made, resume=True), 3)
    assert again == made and longer.samples == 2 * summary.samples


def test_a_job_for_slurm_is_checked_with_a_strategy_in_a_file(folder):
    (folder / "mine.py").write_text(ALONE)
    (folder / "it.py").write_text(JOB)

    def found(strategy: str, **given) -> list[str]:
        spec = JobSpec(job="it.py", nodes=2, strategy=strategy, settings=["checkpoint.every_steps=9"], **given)
        told = [str(finding) for finding in examine(spec, Site(launcher="mpirun"), {})]
        return [text for text in told if text.startswith(("error", "warning: shrink"))]

    assert found("mine.py:Alone") == []
    (error,) = found("mine.py:Alnoe")
    assert error.startswith("error: strategy must be defined in mine.py, which has Alone; got 'Alnoe'. Did you mean")
    (warning,) = found("mine.py:Alone", shrink=True)
    assert "got 'mine.py:Alone', which ends when a rank dies." in warning
    (folder / "mine.py").write_text(
        ALONE.replace('synchronizes="never"', 'synchronizes="never", deaths="others continue"')
    )
    assert found("mine.py:Alone", shrink=True) == []
    (folder / "mine.py").write_text("1 / 0\n")
    (error,) = found("mine.py:Alone")
    assert error.startswith("error: strategy must be in a file that can be imported; got ZeroDivisionError: division")
    (error,) = found("none.py:Alone")
    assert "there is no none.py" in error


def test_a_name_in_a_files_name():
    names = {"local_sgd": "local_sgd", "a/b/mine.py:Averaging": "mine-Averaging", "odd name/x": "odd_name_x"}
    assert [label(name) for name in names] == list(names.values())
