"""Jobs some of whose ranks are killed on the way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.data import importers
from hpcdist.records import read_records
from hpcdist.train import Job, Metric, Trainer, accuracy

ULFM = ["--with-ft", "ulfm"]  # Open MPI's User-Level Failure Mitigation: mpirun lets the others live
AT_ANY_TIME = 0  # in place of a step
DEFAULTS = {"epochs": 3, "batch_size": 16, "optimizer": {"name": "SGD", "lr": 0.2}, "seed": 3}


def _survives() -> bool:
    if find_mpirun() is None:
        return False
    help_text = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in help_text


survivable = pytest.mark.skipif(not _survives(), reason="only Open MPI's mpirun lets other ranks outlive a killed one")

JOB = """
import operator, os, signal, sys, threading, time
from pathlib import Path
import torch
import hpcdist as hd
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.train import Job, Metric, Trainer, accuracy

DEATHS, INSIDE, CALL, AMID_S = {deaths}, {inside!r}, {call}, {amid_s}
NAP_S, APART, HIDDEN = {nap_s}, {apart}, {hidden}
OPTIONS, FOLDER = {options}, Path({folder!r})
world = hd.init(deadline_s=60)  # a busy machine starts ranks late
comm = world.apart() if APART else world
calls = 0

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def arm():  # makes a call of INSIDE this rank's last one, or one that it comes to late
    owner, _, method = INSIDE.rpartition(".")
    owner = sys.modules.get(owner) or (operator.attrgetter(owner)(trainer) if owner else trainer)
    real, left = getattr(owner, method), CALL

    def armed(*args, **options):
        nonlocal left
        left -= 1
        if left == 0 and comm.rank not in DEATHS:
            time.sleep(2 * AMID_S)
        elif left == 0 and AMID_S:
            threading.Timer(AMID_S, die).start()
        elif left == 0:
            die()
        return real(*args, **options)

    setattr(owner, method, armed)

def model():
    layers = [torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10)]
    return torch.nn.Sequential(torch.nn.Flatten(), *(layers if HIDDEN else [torch.nn.Linear(64, 10)]))

def loss(outputs, y):
    global calls
    calls += outputs.requires_grad
    if outputs.requires_grad and DEATHS.get(comm.rank) == calls:
        time.sleep(NAP_S)
        arm() if INSIDE else die()
    elif outputs.requires_grad and AMID_S and calls in DEATHS.values():
        arm()
    return torch.nn.functional.cross_entropy(outputs, y)

job = Job(
    model=model,
    loss=loss,
    metrics={{"accuracy": Metric(accuracy)}},
    data=lambda path: None,  # it is there
)
values = load({{**{defaults}, "data": {{"path": {data!r}}}}}, None, OPTIONS)
trainer = Trainer(job, JobConfig(**values), comm, FOLDER / "run", None, listens=True)
if DEATHS.get(comm.rank) == 0:  # such as a server, which has no step of its own
    arm() if INSIDE else threading.Timer(0.3, die).start()
trainer.run()
trainer.close()
"""


AS_EVER = {"deaths": {}, "inside": "", "call": 1, "amid_s": 0.0, "nap_s": 0.0, "apart": False, "hidden": 0}


def job(folder: Path, size: int, *options: str, **how: object) -> subprocess.CompletedProcess[str]:
    """Trains digits.

    Args:
        how: other values than AS_EVER has.
            deaths: in which step of its own each rank is killed, 1 for the first; or AT_ANY_TIME, or with `inside`
                whenever it comes to that call.
            inside: what of the trainer's, or of a module, they are killed in a call of; by default the loss.
            call: in which call from then on.
            amid_s: seconds after its beginning, while the other workers come to it twice as late; 0: at its beginning.
            nap_s: how long they sleep before.
            apart: every rank counts as being on a node of its own.
            hidden: units of a hidden layer; 0: none.
    """
    given = {"options": list(options), "folder": str(folder), "data": str(_digits(folder.parent)), "defaults": DEFAULTS}
    return run(folder, JOB.format(**{**AS_EVER, **how, **given}), size, options=ULFM)


def go_on(folder: Path, size: int, checkpoint: Path, *options: str) -> None:
    """Resume such a run, without a hidden layer, on virtual ranks."""
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": Metric(accuracy)},
        data=lambda path: None,
    )
    values = load({**DEFAULTS, "data": {"path": str(_digits(folder.parent))}}, None, options)

    def body(comm):
        trainer = Trainer(job, JobConfig(**values), comm, folder / "run", None)
        trainer.run(checkpoint)
        trainer.close()

    run_virtual(body, size)


def _digits(folder: Path) -> Path:
    path = folder / "digits.h5"
    if not path.exists():
        importers.load("digits")(None, path)
    return path


def events(folder: Path, rank: int) -> list[str]:
    return [record.event for record in read_records(folder / "run")[rank] if record.event]
