"""One training run, the same on hosts with real cables and on virtual ranks, and what a network does to bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import hpcdist as hd
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual import ComputeModel, Network, run_virtual

PINGS, LOADS = 20, 4
LOAD_S = 0.3  # about how long one transfer takes from which the bandwidth is measured


def write_data(path: Path) -> None:
    """The digits, standardised: 1,437 samples to train and 360 to test, all classes alike in both."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    train, test = train_test_split(torch.arange(len(y)), test_size=0.2, random_state=0, stratify=y)
    x = (x - x[train].mean()) / x[train].std()
    torch.save([x[train], y[train], x[test], y[test]], path)


def model(hidden: int) -> nn.Module:
    layers = (nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(*layers)


def train(
    comm: Communicator,
    data: Path,
    settings: dict,
    slow: Callable[[], None] = lambda: None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Collective. Trains until the target is reached, or so many steps; the same result on all ranks.

    What is timed is training alone, barriers at both ends included: not setting up, nor evaluating, which happens every
    few steps. Batches are drawn with replacement, by seed and rank.

    Args:
        slow: called on rank 0 when all is set up.
        steps: how many, without evaluating; by default until the target accuracy or the limit.
    """
    x, y, *test = torch.load(data)
    torch.manual_seed(settings["seed"])
    net = model(settings["hidden"])
    optimizer = torch.optim.SGD(net.parameters(), lr=settings["rate"], momentum=settings["momentum"])
    optimizer = hd.DistributedOptimizer(optimizer, net, **settings["options"])
    strategy, drawn = optimizer.strategy, torch.Generator().manual_seed(settings["seed"] * 1_000_003 + comm.rank)
    seconds, curve, records = 0.0, [], []

    def step() -> None:
        chosen = torch.randint(len(x), (settings["batch"],), generator=drawn)
        comm.compute()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
        optimizer.step()
        records.append(optimizer.record)

    comm.barrier()
    if comm.rank == 0:
        slow()
    while len(records) < (steps or settings["limit"]):
        comm.barrier()
        strategy.start()
        start = comm.now()
        for _ in range(settings["every"]):
            step()
        strategy.pause()
        comm.barrier()
        seconds += comm.now() - start
        if steps is None:
            curve.append([len(records), seconds, accuracy(comm, net, *test)])
            if curve[-1][2] >= settings["target"]:
                break
    everybody = _gather(comm, [[r.computing_s, r.bytes_sent + r.bytes_fetched] for r in records])
    strategy.close()
    strategy.comm.close()
    strategy.model.close()
    return {
        "steps": len(records),
        "train_s": seconds,
        "step_s": seconds / len(records),
        "curve": curve,
        "reached": bool(curve) and curve[-1][2] >= settings["target"],
        "bytes_per_step": fmean(n_bytes for of_rank in everybody for _, n_bytes in of_rank),
        "computing_s": [[computing_s for computing_s, _ in of_rank] for of_rank in everybody],  # rank by rank
    }


def _gather(comm: Communicator, value: Any) -> list[Any]:
    """Collective. Every rank's value, of JSON's types."""
    return [json.loads(told) for told in comm.exchange(json.dumps(value).encode())]


def accuracy(comm: Communicator, net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Collective. On the samples given, of each rank's own parameters; the mean of the ranks."""
    with torch.no_grad():
        own = (net(x).argmax(dim=1) == y).double().mean().item()
    return fmean(_gather(comm, own))


# --- the network ------------------------------------------------------------------------------------------------------
def measure_network(comm: Communicator, mbit_s: float | None) -> dict[str, float]:
    """Collective. Latency, as half a round trip of 8 bytes; bandwidth of cables that carry as much either way.

    For the latter every rank sends to the next and receives from the one before. Lower quartiles: a disturbance mostly
    adds, and yet the least is luck.
    """
    word, right, left = torch.zeros(2), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    count = int(LOAD_S * (mbit_s or 1000) * 1e6 / 8 / 4)
    sent, received = torch.zeros(count), torch.zeros(count)
    pings, loads = [], []
    for _ in range(PINGS):
        comm.barrier()
        start = comm.now()
        if comm.rank == 0:
            comm.isend(word, 1).wait()
            comm.irecv(word, 1).wait()
        elif comm.rank == 1:
            comm.irecv(word, 0).wait()
            comm.isend(word, 0).wait()
        pings.append((comm.now() - start) / 2)
    latency_s = _gather(comm, _quartile(pings))[0]
    others_s = (1 + (comm.size - 1).bit_length()) * latency_s  # of the first byte, and of the rounds of a barrier
    for _ in range(1 + LOADS):  # the first opens connections and their windows
        comm.barrier()
        start = comm.now()
        comm.sendrecv(sent, right, received, left)
        comm.barrier()
        loads.append(comm.now() - start - others_s)
    return {"latency_s": latency_s, "bandwidth_bytes_s": sent.nbytes / _gather(comm, _quartile(loads[1:]))[0]}


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


class Replay(ComputeModel):
    """Each rank's steps take as long as they did in some run. For one run: what was drawn is gone."""

    def __init__(self, seconds: list[list[float]]):
        self._left = [iter(of_rank) for of_rank in seconds]

    def draw(self, rank: int, generator: np.random.Generator) -> float:
        return next(self._left[rank])


def predict(data: Path, settings: dict) -> dict:
    """The same steps on virtual ranks: the step time to expect on a network of that latency and bandwidth."""
    started_s = time.perf_counter()
    network = Network(settings["latency_s"], settings["bandwidth_bytes_s"])

    def body(comm):
        hd.init(comm=comm)
        return train(comm, data, settings, steps=settings["steps"])

    compute = Replay(settings["computing_s"])
    found, *_ = run_virtual(body, settings["hosts"], seed=settings["seed"], network=network, compute=compute)
    kept = {name: found[name] for name in ("steps", "step_s", "bytes_per_step")}
    return {**kept, "real_s": time.perf_counter() - started_s}
