"""Ranks with other files of the same names, as where a node has an old copy: each has a folder of its own here."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import pytest

import hpcdist
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.data import importers

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")

FILES = {
    "job.py": "import beside\nfrom train import tiny\n\njob = tiny.job\nRATE = 1\n",
    "beside.py": "RATE = 1\n",
    "mine.py": "from hpcdist.strategies.dpsgd import DPSGD\n\n\nclass Mine(DPSGD):\n    SHARE = 1\n",
    "graph.py": "from hpcdist.topology.ring import RingGraph\n\n\nclass Mine(RingGraph):\n    SHARE = 1\n",
    "own.py": """
import torch
import hpcdist as hd
hd.init()
model = torch.nn.Linear(2, 1)
hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy="mine.py:Mine")
""",
}
# A rank goes to its folder; the library is that of the folder, if there is one.
START = """
import os, runpy, sys
os.chdir(f"node-{os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))}")
sys.path.insert(0, os.getcwd())
sys.argv = sys.argv[1:]
runpy.run_module("hpcdist", run_name="__main__") if sys.argv[0] == "hpcdist" else runpy.run_path(sys.argv[0])
"""
TRAIN = ["hpcdist", "train", "job.py", "--set", "data.path=digits.h5", "--set", "epochs=1"]
WITH_PLUG_IN = [*TRAIN, "--set", "strategy=mine.py:Mine"]
WITH_TOPOLOGY = [*TRAIN, "--set", "strategy=dpsgd", "--set", "strategy.topology=graph.py:Mine"]
MINE = ["job.py", "beside.py", "mine.py"]


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("1", "2"))


def relabel(path: Path) -> None:
    """Change one label, as of samples that have been corrected: name, size and shapes remain."""
    with h5py.File(path, "r+") as file:
        file["train/y"][70] = (file["train/y"][70] + 1) % 10


def other_library(path: Path) -> None:
    """A copy of the library in which one file differs, but not in size."""
    shutil.copytree(Path(hpcdist.__file__).parent, path, ignore=shutil.ignore_patterns("__pycache__"))
    source = path / "strategies" / "allreduce.py"
    source.write_text(source.read_text().replace("import annotations\n\n", "import  annotations\n"))


@pytest.mark.parametrize(
    ("words", "names", "change", "what", "named"),
    [
        (WITH_PLUG_IN, MINE, edit, "files of jobs and plug-ins", MINE),
        (WITH_TOPOLOGY, ["graph.py"], edit, "files of jobs and plug-ins", ["graph.py"]),
        (["own.py"], ["mine.py"], edit, "files of jobs and plug-ins", ["mine.py"]),
        (TRAIN, ["digits.h5"], relabel, "the data's content", ["checksums.train"]),
        (["own.py"], ["hpcdist"], other_library, "versions and settings", ["hpcdist's source files"]),
    ],
    ids=["job, what it imports, and plug-in", "topology", "plug-in of a loop", "data", "library"],
)
def test_an_old_copy_on_a_node_is_named(tmp_path, monkeypatch, words, names, change, what, named):
    monkeypatch.chdir(tmp_path)
    Path("start.py").write_text(START)
    for node in map(Path, ("node-0", "node-1")):
        node.mkdir()
        for file, text in FILES.items():
            (node / file).write_text(text)
        importers.load("digits")(None, node / "digits.h5", test_fraction=0.8)
    for name in names:
        change(Path("node-1", name))
    output = ["--output", str(tmp_path / "run")] if words[0] == "hpcdist" else []
    imports = names == ["hpcdist"]  # rank by rank: a server that forks them has the library already
    job = launch(2, ["start.py", *words, *output], env=IMPORTS, compiler=imports)
    told = job.stderr.partition(f"{what} must be the same on every rank; rank 1 differs from rank 0: ")[2]
    assert all(f"{file}: " in told for file in named), job.stderr
    assert job.returncode == 1 and not list(tmp_path.glob("run/records-rank*"))
