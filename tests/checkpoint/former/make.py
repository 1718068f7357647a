"""Checkpoints that commit 3eb5cc0 has written, and what runs that are resumed from them come to.

With that commit's package first in PYTHONPATH, `python make.py write` made checkpoints.tar.xz: of each strategy, and of
options by which it keeps more. `python make.py values` made values.json, by 4e47968. Neither is to be made anew: a new
case has a later commit's checkpoint, in a file beside these.
"""

from __future__ import annotations

import json
import math
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from hpcdist import strategies
from hpcdist.comm.virtual import Jitter, Network, run_virtual

HERE = Path(__file__).parent
ARCHIVE, VALUES = HERE / "checkpoints.tar.xz", HERE / "values.json"
LATER = HERE / "checkpoints-3.tar.xz"  # by 8a44890: version 3 of the format, each rank has all its tensors
SIZE = 4  # ranks that have saved
SAMPLES, BATCH = 50, 2  # four workers take 7 steps in an epoch, the last of which has two samples
NETWORK, COMPUTE = Network(0.0, math.inf, ranks_per_node=2), Jitter(1.0, 0.3)


class Case(NamedTuple):
    """A run of a strategy.

    Attributes:
        options: the strategy's, or a function that makes them for a number of ranks.
        step: after which the checkpoint is taken, in the middle of an exchange where there is one that lasts; None:
            after the epoch, as it must be where ranks only serve.
        optimizer: AdamW, SGD with or without momentum, or an optimiser with a count of steps in its param_groups.
        other: another number of ranks, which also resumes.
    """

    options: dict[str, Any] | Callable[[int], dict[str, Any]]
    step: int | None = None
    optimizer: str = "adam"
    other: int = 3


def compressed(name: str, **options: Any) -> dict[str, Any]:
    return {"compression": {"name": name, **options}}


def warmed(steps: int) -> dict[str, Any]:
    return compressed("topk", ratio=0.3, warmup_steps=steps)  # more than have been sent when the checkpoint is taken


def digraph(size: int) -> dict[str, Any]:
    return {"topology": {"name": "digraph", "path": str(HERE / f"edges-{size}.txt")}}


# The commits that made the files had this option's former name.
MERGE = "merge" if "merge" in strategies.load("streaming_diloco").Config.model_fields else "take_up"
RING = {"algorithm": "ring"}
JOINT = {**RING, "overlap": "off"}
SPARSE = compressed("chunk_topk", ratio=0.3, side=4, values="2bit", decay=0.9)
TOPK = compressed("topk", ratio=0.3)
LAYERS = {**RING, "fragment_layers": 1}
# By the strategy's name, and what is special.
CASES = {
    "adpsgd": Case({}, 4),
    "allreduce": Case(JOINT, 5),
    "allreduce dgc": Case(JOINT | compressed("dgc", ratio=0.3, warmup_steps=3), 5, "momentum"),
    "allreduce powersgd": Case(JOINT | compressed("powersgd", rank=1), 5),
    "allreduce qsgd": Case(JOINT | compressed("qsgd"), 5),
    "allreduce topk": Case(JOINT | TOPK, 5),
    "allreduce onebit": Case(JOINT | compressed("onebit"), 5),
    "allreduce signsgd": Case(JOINT | compressed("signsgd"), 5),
    "async_diloco": Case({"period": 4}),
    "async_diloco buffered": Case({"period": 2, "rule": "buffered", "every": 2, "inner_state": "reset"}),
    "async_diloco colocated": Case({"period": 4, "servers": "colocated", "dynamic": True}),
    "d2": Case({}, 4, "momentum"),
    "demo": Case({"keep": 2, "side": 4, "momentum": 0.9}, 5, "sgd"),
    "diloco": Case({**RING, "period": 3}, 5),
    "diloco overlap": Case({**RING, "period": 2, "overlap": True}, 4),
    "dion": Case({"fraction": 0.5}, 5),
    "downpour": Case({"n_push": 4, "n_fetch": 5, "servers": 2}),
    "downpour colocated": Case({"n_push": 3, "n_fetch": 2, "servers": "colocated"}, 5),
    "downpour optimizer": Case({"n_push": 2, "n_fetch": 3, "server_rule": "optimizer", **warmed(5)}),
    "dpsgd": Case({}, 5, "momentum"),
    "dpsgd topk": Case(TOPK, 5),
    "dpsgd powersgd": Case({"overlap": False, **compressed("powersgd", rank=1)}, 5),
    "dpsgd qsgd": Case({"consensus_rate": 0.2, **compressed("qsgd")}, 5),
    "eamsgd": Case({"period": 4}),
    "eamsgd colocated": Case({"period": 3, "servers": "colocated", **TOPK}, 4),
    "easgd": Case({"period": 4, "servers": 2}),
    "easgd topk": Case({"period": 4, **TOPK}),
    "gossip_pull": Case({"pulls": 2}, 4),
    "gossip_push": Case({"pushes": 2}, 4),
    "gossip_sync": Case({"pairing": "matching", "order": "before"}, 5),
    "gradient_tracking": Case({}, 4, "momentum"),
    "gradient_tracking after": Case({"order": "after"}, 4, "momentum"),
    "hardsync": Case({"servers": 2}, None, "momentum"),
    "hardsync counting": Case({}, None, "counting"),
    "hardsync fan_in": Case({"fan_in": 2, **warmed(16)}),
    "hardsync colocated": Case({"servers": "colocated", "split_parameters": True, **compressed("onebit")}, 5),
    "local_sgd": Case({**RING, "period": 4, "average_optimizer_state": True}, 5),
    "local_sgd overlap": Case({**RING, "period": 4, "overlap": True}, 4),
    "local_sgd nodes": Case({**RING, "period": 6, "node_period": 2, "overlap": True}, 6),
    "local_sgd powersgd": Case({**RING, "period": 2, **compressed("powersgd", rank=1)}, 5),
    "local_sgd threshold": Case({**RING, "period": 2, "overlap": True, **compressed("threshold")}, 4),
    "noloco": Case({"period": 3}, 5, "adam", 2),
    "onebit_adam": Case({"warmup_steps": 3}, 5),
    "parameter_server": Case({"modulation": "measured", "modulation_window": 5}, None, "momentum"),
    "parameter_server overlap": Case({"overlap": True, "servers": 2, **warmed(16)}),
    "qg_dsgd": Case({}, 4, "momentum"),
    "sandblaster": Case({"history": 2}, None, "sgd"),
    "sandblaster overlap": Case({"history": 3, "overlap": 0.25}, None, "sgd", 5),
    "sgp": Case({}, 5),
    "sgp digraph": Case(lambda size: digraph(size) | {"overlap": True}, 5),
    "sgp overlap": Case({"overlap": True, **compressed("fp16")}, 5, "momentum"),
    "slowmo": Case({**RING, "period": 3}, 5),
    "slowmo overlap": Case({**RING, "period": 2, "overlap": True}, 4),
    "slowmo sgp": Case(lambda size: {**RING, "period": 4, "base": {"name": "sgp", **digraph(size)}}, 5),
    "slowmo dpsgd": Case({**RING, "period": 4, "base": {"name": "dpsgd"}}, 5),
    "slowmo sparta": Case({**RING, "period": 4, "base": {"name": "sparta", "share": 0.5, "delay": 2}}, 5),
    "softsync": Case({"splits": 1, "servers": 2}),
    "softsync colocated": Case({"splits": 1, "servers": "colocated"}, 5, "momentum"),
    "softsync topk": Case({"splits": 2, "fan_in": 2, **TOPK}, other=5),
    "sparse_loco": Case({**RING, "period": 2, **SPARSE}, 5),
    "sparse_loco overlap": Case({**RING, "period": 2, "overlap": True, **SPARSE}, 4),
    "sparta": Case({**RING, "share": 0.3, "delay": 2}, 5),
    "sparta partition": Case({**RING, "share": 0.3, "selection": "partition", "delay": 3}, 5),
    "ssp": Case({"bound": 2, "servers": 2}, None, "momentum"),
    "ssp colocated": Case({"bound": 1, "servers": "colocated"}, 5),
    "streaming_diloco": Case({**LAYERS, "period": 4, "delay": 2}, 5),
    "streaming_diloco shift": Case({**LAYERS, "period": 4, "delay": 3, MERGE: "shift"}, 5),
    "streaming_diloco e3m0": Case({**LAYERS, "period": 4, "delay": 2, **compressed("e3m0", error_feedback=True)}, 5),
    "streaming_diloco eager": Case({**LAYERS, "period": 4, MERGE: "eager", **compressed("e3m0")}, 5),
    "strom": Case(compressed("threshold", density=0.2), 5),
    "strom tree": Case({"topology": {"name": "exponential"}, **compressed("threshold", density=0.2)}, 5),
    "allreduce v3": Case(JOINT, 5),
    "gossip_pull v3": Case({"pulls": 2}, 4),
    "hardsync v3": Case({"servers": 2}, None, "momentum"),
    "zero_one_adam": Case({"variance_steps": 2, "full_steps": 2, "local_steps": 2}, 5),
}


def waves(*shape: int, phase: float) -> Tensor:
    """Numbers that no generator has drawn, so that every version of torch makes the same."""
    count = math.prod(shape)
    return torch.tensor([math.sin(1.7 * i * i + phase) for i in range(count)], dtype=torch.float64).view(shape)


class Counting(torch.optim.SGD):
    """SGD whose rate falls with a count in its group of parameters."""

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        group["count"] += 1
        with torch.no_grad():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / group["count"] * parameter.grad


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, betas=(0.9, 0.9)),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "counting": Counting,
}


class Loop:
    """Collective. A script's model and optimiser."""

    def __init__(self, comm: Any, label: str):
        self.comm, self.case, self.name = comm, CASES[label], label.split()[0]
        hd.init(comm=comm)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(torch.float64)
        with torch.no_grad():
            for i, parameter in enumerate(self.model.parameters()):
                parameter.copy_(0.5 * waves(*parameter.shape, phase=float(i)))
        local, options = OPTIMIZERS[self.case.optimizer](self.model.parameters()), self.case.options
        options = options(comm.size) if callable(options) else options
        self.optimizer = hd.DistributedOptimizer(local, self.model, strategy=self.name, **options)

    def epoch(self, save_in: Path | None = None) -> None:
        """Collective. Train, and perhaps take a checkpoint."""
        x, y = waves(SAMPLES, 4, phase=0.3), waves(SAMPLES, 2, phase=0.7)
        batch = 5 if self.name == "sandblaster" else BATCH
        for step, (inputs, targets) in enumerate(hd.shard(DataLoader(TensorDataset(x, y), batch_size=batch)), 1):
            self.optimizer.zero_grad()
            if self.name == "sandblaster":
                self.optimizer.step(lambda portion, x=inputs, y=targets: self.backward(x[portion], y[portion]))
            else:
                self.backward(inputs, targets)
                self.optimizer.step()
            if save_in and step == self.case.step:
                hd.save(save_in, optimizer=self.optimizer)
        if save_in and self.case.step is None:
            hd.save(save_in, optimizer=self.optimizer)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.comm.compute()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss

    def params(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def write(folder: Path, label: str) -> None:
    run_virtual(lambda comm: Loop(comm, label).epoch(folder / label), SIZE, network=NETWORK, compute=COMPUTE)


def resumed(folder: Path, label: str, size: int) -> list[Tensor]:
    """The parameters of so many ranks after an epoch, and what they stand for together."""

    def body(comm: Any) -> list[Tensor]:
        loop = Loop(comm, label)
        assert hd.load(folder / label, optimizer=loop.optimizer)["step"] > 0
        loop.epoch()
        own = loop.params()
        hd.finish(loop.model)
        return [own, loop.params()]

    found = run_virtual(body, size, seed=1, network=NETWORK, compute=COMPUTE)
    return [*(own for own, _ in found), found[0][1]]


def saved_again(folder: Path, label: str, to: Path) -> None:
    """Take another checkpoint on the ranks of the first, which is loaded."""

    def body(comm: Any) -> None:
        loop = Loop(comm, label)
        hd.load(folder / label, optimizer=loop.optimizer)
        hd.save(to, optimizer=loop.optimizer)

    run_virtual(body, SIZE, network=NETWORK)


def value(params: Tensor) -> float:
    """A number that changes with any parameter: with other processors torch rounds in other ways, so no digest."""
    return round(math.fsum(p * math.cos(i) for i, p in enumerate(params.tolist())), 12)


def values(folder: Path, label: str) -> dict[str, list[float]]:
    """By the number of ranks: of each rank's parameters, and of what they stand for."""
    return {str(size): [value(each) for each in resumed(folder, label, size)] for size in (SIZE, CASES[label].other)}


def extract(folder: Path) -> None:
    for path in (ARCHIVE, LATER):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


def main(what: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if what == "write":
            for label in CASES:
                write(folder, label)
            with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
                for path in sorted(folder.iterdir()):
                    archive.add(path, path.name)
        else:
            extract(folder)
            found = {label: values(folder, label) for label in CASES}
            lines = ",\n".join(f"{json.dumps(label)}: {json.dumps(each)}" for label, each in found.items())
            VALUES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
