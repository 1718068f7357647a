"""Files that somebody else has made: each is refused by one sentence of hpcdist's, or does no harm."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import socket
import struct
import warnings
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hpcdist as hd
from hpcdist import checkpoint
from hpcdist.checkpoint import Slice, SlicePosition
from hpcdist.checkpoint.slices import cut, join
from hpcdist.checkpoint.tensors import OWNERS
from hpcdist.comm.virtual import run_virtual
from hpcdist.data import HDF5Dataset, Split, create
from hpcdist.errors import CheckpointError, DataError, HpcdistError
from hpcdist.records.files import open_regular, read_bounded, stamp
from hpcdist.tools.slurm import history
from test_mutated_files import of_bytes, of_json


class Script:
    """A script's objects, made anew as a resumed one makes them."""

    def __init__(self, comm):
        hd.init(comm=comm)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = hd.DistributedOptimizer(optimizer, self.model, compression="topk")
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def load(self, path):
        return hd.load(path, optimizer=self.optimizer, schedule=self.schedule)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The script's checkpoint, saved by two ranks."""
    folder = tmp_path_factory.mktemp("saved")

    def body(comm):
        script = Script(comm)
        script.step()
        path = hd.save(folder, optimizer=script.optimizer, schedule=script.schedule, epoch=3, loss=float("nan"))
        hd.finish(script.model)
        return path

    return run_virtual(body, 2)[0]


def _stamped(path):
    """Make the checksums anew."""
    file = path / checkpoint.MANIFEST
    manifest = json.loads(file.read_bytes())
    for name in manifest["content"]["files"]:
        data = (path / name).read_bytes()
        manifest["content"]["files"][name] = stamp(io.BytesIO(data))._asdict()
    _write_manifest(file, manifest)


def _write_manifest(file, manifest):
    text = json.dumps(manifest["content"], sort_keys=True).encode()
    file.write_text(json.dumps(manifest | {"sha256": hashlib.sha256(text).hexdigest()}))


def _tensor_file(path, change):
    """Change the header of a rank's tensors."""
    file = path / "rank-0000.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    _stamped(path)


def _tree(path, change):
    file = path / "rank-0000.json"
    tree = json.loads(file.read_bytes())
    tree = change(tree) or tree
    file.write_text(json.dumps(tree))
    _stamped(path)


def _content(path, change):
    file = path / checkpoint.MANIFEST
    manifest = json.loads(file.read_bytes())
    manifest["content"] = change(manifest["content"]) or manifest["content"]
    _write_manifest(file, manifest)


def _first(header):
    return next(name for name in sorted(header) if name != "__metadata__" and "params" in name)


def _place(**change):
    def made(header):
        metadata = header["__metadata__"]
        for name, text in metadata.items():
            metadata[name] = json.dumps(json.loads(text) | change)

    return made


def _of_first(**change):
    return lambda header: header[_first(header)].update(change)


def _at(*keys, value):
    def made(tree):
        node = tree
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return made


OPTIMIZER = ("state", "optimizer")
FORGED = [
    (_tree, _at(*OPTIMIZER, "about", value={})),
    *[(_content, _at(key, value=value)) for key in ("step", "ranks", "meta", "files", "hpcdist")
      for value in (None, -1, 10**30, 1.5, "x", [], [[]], {}, {"a": 1}, True) if (key, value) != ("meta", {})
      and not (key == "hpcdist" and value == "x") and not (key == "step" and value == 10**30)],
    (_content, lambda content: []), (_content, lambda content: content.pop("files") and None),
    *[(_content, _at("files", "rank-0000.json", value={"bytes": 3} | given)) for given in (
        {}, {"checksum": ""}, {"checksum": "xxh3_128"}, {"checksum": "md5:00"}, {"checksum": 7}, {"sha256": ""})],
    (_content, _at("files", "../../secret", value={"bytes": 3, "sha256": "0"})),
    (_content, _at("meta", "stages", value=2**40)), (_content, _at("meta", "stages", value="2")),
    (_content, _at("meta", "loop", value=3)), (_content, _at("meta", "kinds", value=[])),
    *[(_tensor_file, _place(**change)) for change in (
        {"shape": [-1]}, {"shape": [10**12, 10**12]}, {"offset": [-5, 0]}, {"offset": ["a"]}, {"size": [10**9]},
        {"part": []}, {"span": [5, 1]}, {"span": [0]}, {"name": 3}, {"name": "other"}, {"more": 1}, {"shape": None})],
    *[(_tensor_file, _of_first(**change)) for change in (
        {"dtype": "F64"}, {"dtype": "X"}, {"dtype": "I8"}, {"shape": [-1]}, {"shape": [2**62, 2**62]}, {"shape": "a"},
        {"data_offsets": [8, 0]}, {"data_offsets": [-8, 16]}, {"data_offsets": [0, 2**63]}, {"data_offsets": []})],
    (_tensor_file, lambda header: header.pop("__metadata__") and None), (_tensor_file, lambda header: []),
    (_tensor_file, lambda header: header.pop(_first(header)) and None),
    (_tensor_file, lambda header: header["__metadata__"].update({_first(header): "{"})),
    *[(_tensor_file, lambda header, text=text: header["__metadata__"].update({OWNERS: text % _first(header)}))
      for text in ('{"%s": 1}', '{"%s": 7}', '{"%s": -1}', '{"%s": "../x"}', '{"%s": [1]}', '["%s"]', '3%s', '{%s')],
    (_tree, lambda tree: []), (_tree, lambda tree: 3), (_tree, lambda tree: {"state": 1}), (_tree, lambda tree: {}),
    *[(_tree, _at(*OPTIMIZER, key, value=value))
      for key in ("params", "masters", "optimizer", "strategy", "about", "works")
      for value in (None, 3, [], "x", {"0.weight": 3}, {"0.weight": {"$slice": "x"}}, {"0.weight": {"$tensor": "x"}})
      if (key, value) not in (("works", 3), ("works", "x"), ("works", {"0.weight": 3}))],
    *[(_tree, _at(*OPTIMIZER, "optimizer", key, value=value))
      for key in ("state", "param_groups") for value in (None, 3, [3], [[]], {"0.weight": 3}, {"0.weight": {"a": []}})
      if not (key == "state" and isinstance(value, dict))],
    *[(_tree, _at("state", "schedule", value=value)) for value in (None, 3, [], "x")],
    *[(_tree, _at("state", "epoch", value=value)) for value in (
        {"$int": "zz"}, {"$int": 3}, {"$float": "00"}, {"$bytes": "!"}, {"$bytes": []}, {"$tuple": 5}, {"$dict": 3},
        {"$dict": [[[], 1]]}, {"$array": {"$tensor": 1}}, {"$complex": "x"}, {"$counter": [1]}, {"$what": 1},
        {"$slice": {}}, {"$slice": 3})],
    *[(_tree, _at(*OPTIMIZER, "strategy", key, value=value)) for key in ("steps", "updates")
      for value in ("x", None, [], 1.5)],
    *[(_tree, _at("random", value=value)) for value in (None, 3, {"python": 3}, [])],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("readers", [1, 2])
def test_forged_checkpoints_with_right_checksums_are_refused_by_a_sentence(saved, tmp_path, readers):
    """Ranks read what two have saved, each its own, or one both; the files of rank 0 are forged.

    A rank that refused alone would leave the other one waiting.
    """

    def body(comm):
        script = Script(comm)
        passed, said = [], ""
        for number, (write, change) in enumerate(FORGED):
            path = tmp_path / f"{number}"
            if comm.rank == 0:
                shutil.copytree(saved, path)
                write(path, change)
            comm.barrier()
            try:
                script.load(path)
            except CheckpointError as error:
                text = str(error)
                assert len(text) < 1500 and "Traceback" not in text, text
                said += text
            else:
                passed.append(number)
        script.load(saved)
        script.step()
        return passed, said

    (harmless, said), *others = run_virtual(body, readers)
    assert len(harmless) < len(FORGED) / 5 and len(FORGED) > 130
    assert [passed for passed, _ in others] == [harmless] * (readers - 1)
    assert "must name the strategy that saved it; take another checkpoint" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["manifest.json", "rank-0000.json", "rank-0000.safetensors"])
def test_a_hundred_mutations_of_a_checkpoint_are_refused_or_harmless(saved, tmp_path, name):
    times, mutations = 100, [of_json, of_bytes] if name.endswith("json") else [of_bytes]
    path = tmp_path / "step-00000001"
    shutil.copytree(saved, path)
    content, manifest = (path / name).read_bytes(), (path / checkpoint.MANIFEST).read_bytes()

    def body(comm):
        script, draw, refused = Script(comm), random.Random(name), 0
        for _ in range(times):
            (path / checkpoint.MANIFEST).write_bytes(manifest)
            (path / name).write_bytes(draw.choice(mutations)(content, draw))
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if name != checkpoint.MANIFEST:
                    _stamped(path)
                else:
                    _content(path, lambda content: None)
            try:
                script.load(path)
            except HpcdistError:
                refused += 1
        return refused

    assert run_virtual(body, 1)[0] > 0.3 * times


# --- no regular files -------------------------------------------------------------------------------------------------
def _socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)
        listening.bind(path.name)


OTHERS = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "Is a directory": lambda path: path.mkdir(),
    "Too many levels of symbolic links": lambda path: path.symlink_to(path),
    "(a socket|No such device)": _socket,
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_that_is_not_regular_is_refused_at_once(saved, tmp_path, monkeypatch, what):
    """Of checkpoints and of Slurm's history: tests/test_mutated_files.py has other files."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-00000001"
    for name in ("manifest.json", "rank-0000.json", "rank-0000.safetensors"):
        shutil.copytree(saved, path, dirs_exist_ok=True)
        (path / name).unlink()
        OTHERS[what](path / name)
        with pytest.raises(CheckpointError, match=f"{name} must be readable; got .*{what}"):
            checkpoint.verify(path)
        shutil.rmtree(path)
    OTHERS[what](tmp_path / "jobs.jsonl")
    with pytest.raises(DataError, match=what):
        history.read(tmp_path)


def test_places_of_slices_must_be_possible():
    given = asdict(SlicePosition("weight", (4, 2), (2, 0), (2, 2), (2, 2), (1, 3)))
    assert SlicePosition.from_description(given).numel == 2
    wrong = ({"offset": [3, 0]}, {"span": [1, 5]}, {"span": [1]}, {"part": [1, 2]}, {"name": 3}, {"size": [-1, 2]})
    for change in wrong:
        with pytest.raises(ValueError, match="a slice must be inside its whole tensor; got {'name'"):
            SlicePosition.from_description(given | change)
    with pytest.raises(ValueError, match=r"a slice of 'weight' must have shape \[2\]; got torch.Size\(\[3\]\)"):
        Slice(SlicePosition.from_description(given), torch.zeros(3)).tensor  # noqa: B018 (it is read)


def test_parts_of_an_unknown_placement_are_refused():
    position = SlicePosition("weight", (4,), None, (2,), (2,))
    with pytest.raises(CheckpointError, match="parts of parameters must be contiguous chunks .*; got 'weight'"):
        join({position: torch.zeros(2)}, "folder")
    with pytest.raises(CheckpointError, match="parameters must be cut into contiguous chunks .*; got 'weight'"):
        cut(torch.zeros(4), position, "folder")


def test_a_file_larger_than_expected_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"12345"


# --- errors of reading ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["manifest.json", "rank-0001.safetensors"])
def test_an_error_of_reading_at_the_newest_falls_back_to_the_one_before(saved, tmp_path, monkeypatch, name):
    for step in (1, 2):
        shutil.copytree(saved, tmp_path / f"step-0000000{step}")
    opened = open_regular

    def failing(path):
        if str(path).endswith(f"step-00000002/{name}"):
            raise OSError(5, "Input/output error", str(path))
        return opened(path)

    monkeypatch.setattr("hpcdist.records.files.open_regular", failing)
    monkeypatch.setattr("hpcdist.checkpoint.manifest.open_regular", failing)

    def body(comm):
        script = Script(comm)
        return script.load(tmp_path)["epoch"]

    with pytest.warns(UserWarning, match=f"skipped in favour of step-00000001: .*{name} .*Input/output error"):
        assert run_virtual(body, 2) == [3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoint.latest(tmp_path, fallback=True).name == "step-00000001"


# --- other settings ---------------------------------------------------------------------------------------------------
def _resumed(saved, change):
    def body(comm):
        script = Script(comm)
        hd.finish(script.model)
        change(script)
        return script.load(saved)

    return run_virtual(body, 2)


def _optimizer(script, made, **options):
    script.optimizer = hd.DistributedOptimizer(made, script.model, **options)
    script.schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1)


def test_another_optimizer_or_schedule_is_refused_by_both_names(saved):
    def adam(script):
        _optimizer(script, torch.optim.Adam(script.model.parameters()), compression="topk")

    def cosine(script):
        _optimizer(script, torch.optim.SGD(script.model.parameters(), lr=0.1, momentum=0.9), compression="topk")
        script.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(script.optimizer, 3)

    with pytest.raises(CheckpointError, match="optimizer must be that of the checkpoint .*, 'SGD'; got Adam. Resume"):
        _resumed(saved, adam)
    with pytest.raises(CheckpointError, match="schedule must be of the class that .* has, StepLR; got CosineAnneal"):
        _resumed(saved, cosine)


def test_other_settings_are_told_with_both_values(saved, caplog):
    def other(script):
        _optimizer(script, torch.optim.SGD(script.model.parameters(), lr=0.7), compression="dgc", overlap="off")

    _resumed(saved, other)
    for said in (
        "optimizer.lr is 0.7 here, and 0.1 in", ": continuing with the checkpoint's.",
        "optimizer.momentum is 0 here, and 0.9 in",
        "strategy.compression.name is 'dgc' here, and 'topk' in", ": continuing with this run's.",
    ):  # fmt: skip
        assert said in caplog.text


def test_other_options_of_schedules_are_told_with_both_values(caplog, tmp_path):
    """Not their counters; also of a schedule in a SequentialLR, and under another name."""
    lr_scheduler = torch.optim.lr_scheduler

    def of_two(optimizer, steps):
        both = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, steps)]
        return lr_scheduler.SequentialLR(optimizer, both, milestones=[2])

    def told(name, first, second):
        caplog.clear()

        def body(comm):
            hd.init(comm=comm)
            for build in (first, second):
                parameter = torch.zeros(1, requires_grad=True)
                schedule = build(torch.optim.SGD([parameter], lr=0.1))
                hd.load(tmp_path / name, **{name: schedule})
                schedule.optimizer.step()
                schedule.step(*([0.5] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else ()))
                hd.save(tmp_path / name, **{name: schedule})

        run_virtual(body, 2)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (cosine,) = told("schedule", *(partial(lr_scheduler.CosineAnnealingLR, T_max=steps) for steps in (132, 220)))
    assert cosine.startswith("schedule.T_max is 220 here, and 132 in ") and cosine.endswith("with the checkpoint's.")
    (inner,) = told("twofold", partial(of_two, steps=8), partial(of_two, steps=9))
    assert inner.startswith("twofold: schedule.1.T_max is 9 here, and 8 in ")
    (milestones,) = told("steps", *(partial(lr_scheduler.MultiStepLR, milestones=each) for each in ([3], [3, 5])))
    assert milestones.startswith("steps: schedule.milestones is [3, 5] here, and [3] in ")
    assert told("same", *[partial(of_two, steps=8)] * 2) == []
    assert told("plateau", *[lr_scheduler.ReduceLROnPlateau] * 2) == []


def test_other_data_is_told(caplog):
    def body(comm):
        hd.init(comm=comm)
        loaders = [hd.shard(DataLoader(list(range(size)))) for size in (8, 6)]
        loaders[1].load_state_dict(loaders[0].state_dict())

    run_virtual(body, 1)
    assert "data has 6 samples here, and 8 in the checkpoint: continuing with these data." in caplog.text


def test_other_data_of_as_many_samples_are_told(caplog, tmp_path):
    """By the checksum of their file, or what they have for each sample; a file may lie elsewhere."""
    x, y = np.arange(8.0)[:, np.newaxis], np.zeros(8)
    for folder, values in (("a", x), ("b", x), ("c", x[::-1])):
        create(tmp_path / folder / "it.h5", {"train": Split.of(values, y)}, task="regression")
    a, b, c = (HDF5Dataset(tmp_path / folder / "it.h5") for folder in "abc")
    first, second = (TensorDataset(torch.from_numpy(values.copy())) for values in (x, x[::-1]))

    def told(saved, own):
        def body(comm):
            hd.init(comm=comm)
            caplog.clear()
            hd.shard(DataLoader(own)).load_state_dict(hd.shard(DataLoader(saved)).state_dict())
            return caplog.text

        return run_virtual(body, 1)[0]

    subsets = [Subset(each, list(range(1, 8))) for each in (a, b, c)]
    for saved, same, other in ((a, b, c), subsets, (first, first, second)):
        assert not told(saved, same)
        assert "in the checkpoint: continuing with these data." in told(saved, other)


def test_another_strategy_goes_on_from_the_parameters_and_the_optimizer_s_state(saved, caplog):
    def other(script):
        _optimizer(script, torch.optim.SGD(script.model.parameters(), lr=0.1, momentum=0.9), strategy="local_sgd")

    assert [found["epoch"] for found in _resumed(saved, other)] == [3, 3]
    assert "strategy.name is 'local_sgd' here, and 'allreduce' in" in caplog.text
