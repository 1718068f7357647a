"""Files that others may have made, changed at random: each is refused by one sentence, or read without harm.

Every kind of file that a tool reads is mutated: JSON by its structure, everything by its bytes, and the file itself by
a pipe, a folder, a loop of links, an endless file or a hole of 1 TiB. No tool may end in a traceback, wait, or take
gigabytes. `pytest --mutations 1000 tests/test_mutated_files.py` tries 1,000 of each kind.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpcdist.collectives.tuning import table
from hpcdist.comm import cache
from hpcdist.config.merge import load as load_settings
from hpcdist.data import HDF5Dataset, Split, create, describe, importers
from hpcdist.errors import HpcdistError
from hpcdist.records import Usage, resources_path
from hpcdist.tools import cli
from hpcdist.tools.compare import folder as comparisons
from hpcdist.tools.compare.experiment import Sweep
from hpcdist.tools.compare.run_all import Runner
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.compare.trials import Trials
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.sweep import judge_sweep, read_sweep
from hpcdist.tools.report.sweep_page import sections_of_sweep
from hpcdist.tools.report.verdict import judge
from hpcdist.topology.graph import read_edges
from study import evidence
from study.pretended import PretendedRuns

MEMORY_BYTES = 2 << 30  # beyond what the process has
LIMIT_S = 20
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"


# --- mutations --------------------------------------------------------------------------------------------------------
VALUES = (
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"), "", "x",
    "0", "nan", "1e999", "\0", "é" * 300, "2026-01-31", "2026-01-31T12:00:00+00:00", "../..", [], {}, [[]], [None],
    {"": 0}, {"name": 1}, [1, 2, 3], 0.5, -0.0,
)  # fmt: skip


def of_structure(value, draw: random.Random):
    """Change one node of a tree: another value, a copy, or none."""
    tree = copy.deepcopy(value)
    nodes = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            nodes.append((node, key))
            walk(inner)

    walk(tree)
    if not nodes or draw.random() < 0.03:
        return draw.choice(VALUES)
    node, key = draw.choice(nodes)
    what = draw.random()
    if what < 0.2:
        del node[key]
    elif what < 0.3 and isinstance(node, dict):
        node[draw.choice(["", "x", "name", key + "_"])] = node.pop(key)
    elif what < 0.4 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif what < 0.5:
        other, place = draw.choice(nodes)
        node[key] = copy.deepcopy(other[place])
    else:
        node[key] = draw.choice(VALUES)
    return tree


def of_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(of_structure(json.loads(data), draw)).encode()


def of_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at, what = draw.randrange(len(lines)), draw.random()
    if what < 0.1:
        lines[at:at] = [lines[draw.randrange(len(lines))]]
    elif what < 0.2:
        del lines[at]
    elif what < 0.3:
        lines[-1] = lines[-1][: draw.randrange(len(lines[-1]))]
    else:
        lines[at] = of_json(lines[at], draw) + b"\n"
    return b"".join(lines)


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    at = draw.randrange(len(data))
    end = min(len(data), at + draw.choice([1, 1, 4, 64, len(data)]))
    what = draw.randrange(6)
    if what == 0:
        changed[at] ^= 1 << draw.randrange(8)
    elif what == 1:
        changed[at:end] = draw.randbytes(end - at)
    elif what == 2:
        del changed[at:]
    elif what == 3:
        changed[at:at] = draw.choice([draw.randbytes(8), b"\n", b"\0" * 100, b"-", b"9" * 30, b"\xff\xfe", b"1e999"])
    elif what == 4:
        changed[at:end] = bytes(end - at)
    else:
        changed[at:at] = changed[:end]
    return bytes(changed)


def of_file(path: Path, draw: random.Random) -> str:
    """Put something else in the place of a file."""
    what = draw.choice(["pipe", "folder", "loop", "endless", "hole", "hole behind it", "nothing", "no link", "socket"])
    whole = path.read_bytes()
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what in ("loop", "endless", "no link"):
        path.symlink_to({"loop": path, "endless": "/dev/zero", "no link": "there/is/none"}[what])
    elif what == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.write_bytes(whole if what == "hole behind it" else b"")
        if what.startswith("hole"):
            os.truncate(path, 1 << 40)
    return what


def mutated(path: Path, whole: bytes, draw: random.Random) -> str:
    """Write a mutation in place of a file, and say which."""
    if path.is_symlink() or path.exists():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(whole)
    what = draw.random()
    if what < 0.06:
        return of_file(path, draw)
    lines, name = whole.splitlines(), path.name
    if name.endswith(".json") and what < 0.7:
        path.write_bytes(of_json(whole, draw))
    elif lines and all(line.startswith(b"{") for line in lines) and what < 0.7:
        path.write_bytes(of_lines(whole, draw))
    else:
        path.write_bytes(of_bytes(whole, draw))
    return path.read_bytes()[:4000].decode(errors="backslashreplace")


# --- what is read -----------------------------------------------------------------------------------------------------
def command(*arguments: object):
    return lambda: cli._run(list(map(str, arguments)), True)


def a_run(folder: Path, name: str):
    for run in ("good", "it"):
        evidence.write_run(folder / run, joules=3.0, machine={"cores": {"n0": 2}, "load": [1.0, 2.0], "processors": 2})
    run = folder / "it"
    (run / "tags.json").write_text('["good", "old"]')
    (run / "failure.txt").write_text("failed\nTraceback\nRuntimeError: no\n")
    usage = [asdict(Usage(10.0 + i, 0.5, 1000, 1.0, 2.0, 0.1, 100)) for i in range(9)]
    resources_path(run, 0).write_text("".join(json.dumps(one) + "\n" for one in usage))
    (run / ".lock").write_text("process 1 on host x since 2026\n")
    uses = [
        command("runs", "--in", folder), command("runs", "--in", folder, "--json"), command("runs", "show", run),
        command("report", folder), command("report", run, "--json"), command("watch", "--once", run),
        command("watch", "--once", folder), command("runs", "compare", run, folder / "good"),
        lambda: [one.curves for job in read_jobs([folder]) for one in job.runs],
        lambda: [judge(analyse(job)) for job in read_jobs([folder], ("accuracy", 0.9))],
    ]  # fmt: skip
    return run / name, uses


def a_comparison(folder: Path, name: str):
    evidence.write_comparison(
        folder,
        [dict(name=name, strategy=name, seed=seed) for name in ("allreduce", "softsync") for seed in (0, 1)],
        declared=asdict(DECLARED),
    )
    uses = [
        command("report", folder), command("watch", "--once", folder), command("runs", "--in", folder),
        command("report", folder, "--json"), lambda: [judge(analyse(job)) for job in read_jobs([folder])],
        lambda: comparisons.read_experiment(folder, Sweep),
        lambda: comparisons.require_same(folder, DECLARED), lambda: comparisons.default(folder, DECLARED),
    ]  # fmt: skip
    return folder / name, uses


DECLARED = Sweep(
    job=str(JOB), job_sha256="0", strategy="softsync:splits=1", trials=7, ranks=2, sampler="random", metric="accuracy",
    over=("optimizer.lr=0.001..0.128:log", "batch_size=8,16"),
)  # fmt: skip


def a_sweep(folder: Path, name: str):
    SweptRuns(DECLARED, folder).run(Runner(folder, PretendedRuns()))

    def page():
        if (folder / "sweep.json").exists():  # else it is no sweep
            judge_sweep(found := read_sweep(folder))
            sections_of_sweep(found)

    def drawn():
        own = Trials(folder, DECLARED)
        own.create(True, 9)
        for number in range(DECLARED.trials):
            own.run(number, 0, own.start(number))

    again = lambda: SweptRuns(DECLARED, folder).write()  # noqa: E731
    return folder / name, [page] if name == "sweep.json" else [
        page, drawn, again, lambda: Trials(folder, DECLARED).all(),
        lambda: comparisons.read_experiment(folder, Sweep),
    ]  # fmt: skip


def a_table(folder: Path, name: str):
    path, rows = folder / name, np.arange(60.0).reshape(12, 5) % 7
    if name.endswith(".csv"):
        np.savetxt(path, rows, delimiter=",", header="a,b,c,d,e", comments="")
    elif name.endswith(".npy"):
        np.save(path, rows)
    else:
        np.savez_compressed(path, x=rows, y=rows[:, 0])
    return path, [imported("arrays" if name.endswith(".npz") else "table", path, folder, task="regression")]


def imported(name: str, source: Path, folder: Path, **options):
    def use():
        describe(importers.load(name)(source, folder / "out.h5", **options))

    return use


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def an_mnist(folder: Path, name: str):
    for prefix in ("train", "t10k"):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(np.ones((8, 3, 3), np.uint8)))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(8, dtype=np.uint8)))
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress((folder / name[:-3]).read_bytes()))
        (folder / name[:-3]).unlink()
    return folder / name, [imported("mnist", folder, folder)]


def a_cifar(folder: Path, name: str):
    for file in ("data_batch_1.bin", "test_batch.bin"):
        (folder / file).write_bytes((b"\1" + b"\2" * 3072) * 3)
    return folder / name, [imported("cifar10", folder, folder)]


def an_image(folder: Path, name: str):
    for label in "ab":
        (folder / "images" / label).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(folder / "images" / label / f"{number}{Path(name).suffix}")
    return folder / "images" / name, [imported("images", folder / "images", folder, height=4, width=4)]


def a_data_file(folder: Path, name: str):
    x = np.arange(600, dtype=np.uint8).reshape(60, 10)
    packed = {"compression": "gzip"} if "packed" in name else {}
    create(
        folder / name, {"train": Split.of(x, np.arange(60) % 3)}, task="classification", classes=list("abc"),
        scale=0.5, chunk_samples=7, **packed,
    )  # fmt: skip

    def read():
        with HDF5Dataset(folder / name) as dataset:
            dataset.batch([0, 59, 30])
            dataset.labels()
            assert dataset.checksum

    return folder / name, [read, lambda: describe(folder / name), command("data", "info", folder / name)]


def a_file_of(text: str, read):
    def made(folder: Path, name: str):
        (folder / name).write_text(text)
        return folder / name, [lambda: read(folder / name)]

    return made


def timings(path: Path) -> None:
    def check(text: str) -> str:
        return text if sorted(table.TimingTable.model_validate_json(text).seconds) == ["native", "ring"] else ""

    if kept := cache._read(path, check, "table of all-reduce times"):
        table.TimingTable.model_validate_json(kept).ranges()


KINDS = {
    **dict.fromkeys(
        ["run.json", "summary.json", "tags.json", "evaluations.jsonl", "records-rank0000.jsonl",
         "resources-rank0000.jsonl", ".lock", "failure.txt"], a_run),
    "comparison.json": a_comparison, "sweep.json": a_sweep, "optuna.log": a_sweep,
    **dict.fromkeys(["t.csv", "t.npy", "t.npz"], a_table),
    **dict.fromkeys(["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz", "train-images-idx3-ubyte.gz"], an_mnist),
    "data_batch_1.bin": a_cifar, "a/3.png": an_image, "b/1.jpg": an_image, "b/1.gif": an_image,
    "data.h5": a_data_file, "packed.h5": a_data_file,
    "allreduce.json": a_file_of('{"sizes": [1, 2], "seconds": {"native": [1, 2], "ring": [0.5, null]}}', timings),
    "edges.txt": a_file_of("0 1\n1 2\n# three\n2 3\n", lambda path: read_edges(path, 4, False)),
    "settings.toml": a_file_of(
        'epochs = 3\n[optimizer]\nlr = 0.1\nname = "SGD"\n[data]\npath = "a.h5"\n',
        lambda path: load_settings({}, path, ()),
    ),
}  # fmt: skip


@contextlib.contextmanager
def bounded():
    """Within this much time and memory."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{LIMIT_S} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    (kib,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line[:7] == "VmSize:"]
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (int(kib) * 1024 + MEMORY_BYTES, before[1]))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_refused_by_a_sentence_or_harmless(name, tmp_path, request, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    count = request.config.getoption("--mutations")
    (whole_folder := tmp_path / "whole").mkdir()
    path, _ = KINDS[name](whole_folder, name)
    whole = path.read_bytes()
    (folder := tmp_path / "it").mkdir()
    path, uses = KINDS[name](folder, name)
    for number in range(count):
        draw = random.Random(f"{name} {number}")
        if name == "optuna.log":  # what is told to Optuna would be in the next one
            (folder / "sweep.json").write_bytes((whole_folder / "sweep.json").read_bytes())
            (folder / "comparison.json").write_bytes((whole_folder / "comparison.json").read_bytes())
            (folder / "optuna.log.lock").unlink(missing_ok=True)
        shown = mutated(path, whole, draw)
        use = draw.choice(uses)
        try:
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use()
        except HpcdistError as error:
            assert len(str(error).splitlines()) < 4 and len(str(error)) < 1500, error
        except Exception as error:
            raise AssertionError(f"mutation {number} of {name}: {shown[:1500]}") from error
        capfd.readouterr()
