"""A run of the study of networks, the same on hosts with real cables and on virtual ranks; how fast a network is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import hpcdist as hd
from hpcdist.comm.communicator import Communicator
from hpcdist.data import importers
from hpcdist.train import Job, Metric
from hpcdist.train import accuracy as right
from kit.hosts import Cable, Hosts
from kit.loop import OwnRun

PINGS, LOADS = 20, 4
LOAD_S = 0.3  # about how long one transfer takes from which the bandwidth is measured


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load the digits, standardised: 1,437 samples to train and 360 to test, all classes alike in both."""
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    train, test = train_test_split(torch.arange(len(y)), test_size=0.2, random_state=0, stratify=y)
    x = (x - x[train].mean()) / x[train].std()
    return x[train], y[train], x[test], y[test]


def model(hidden: int = 3100) -> nn.Module:
    layers = (nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(*layers)


job = Job(
    model, nn.functional.cross_entropy, {"accuracy": Metric(right)}, lambda path: importers.load("digits")(None, path)
)


def train(settings: dict[str, Any], folder: Path) -> Callable[[Communicator], None]:
    """Train until the target is reached, or for so many steps.

    Training alone is timed, barriers at both ends included: not setting up, nor evaluating, which happens every few
    steps. Batches are drawn with replacement, by seed and rank.

    Args:
        settings: with `steps` there are as many, without evaluations; else `target`, the accuracy, and `limit`, the
            most steps. With `hosts`, their cables are fast while nothing is timed, and the network is measured first.
    """
    x, y, *test = digits()
    seed, batch, every, steps = (settings.get(name) for name in ("seed", "batch_size", "every", "steps"))

    def body(comm: Communicator) -> None:
        hd.init(comm=comm)
        cables = Cables(comm, settings) if "hosts" in settings else None
        network = cables.measure() if cables else {}
        torch.manual_seed(seed)
        net = model(**settings["model"])
        optimizer = torch.optim.SGD(net.parameters(), settings["optimizer"]["lr"], settings["optimizer"]["momentum"])
        options = dict(settings["strategy"])
        optimizer = hd.DistributedOptimizer(optimizer, net, strategy=options.pop("name"), **options)
        strategy, own = optimizer.strategy, OwnRun(comm, settings, folder, keeps=True)
        drawn = torch.Generator().manual_seed(seed * 1_000_003 + comm.rank)
        seconds, done, reached, found = 0.0, 0, False, {}

        def step() -> None:
            chosen = torch.randint(len(x), (batch,), generator=drawn)
            comm.compute()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            own.write(replace(optimizer.record, samples=batch))

        comm.barrier()
        if cables:
            cables.shape()
        while done < (steps or settings["limit"]) and not reached:
            comm.barrier()
            strategy.records.start()
            start = comm.now()
            for _ in range(every):
                step()
            strategy.pause()
            comm.barrier()
            seconds, done = seconds + comm.now() - start, done + every
            if steps is None:
                found = {"accuracy": accuracy(comm, net, *test)}
                reached = found["accuracy"] >= settings["target"]
                if comm.rank == 0:
                    own.evaluate(done, done * batch * comm.size, seconds, found)
        comm.barrier()
        if cables:
            cables.unshape()
        own.end(strategy, seconds, found, **network)
        strategy.comm.close()

    return body


def accuracy(comm: Communicator, net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Compute the ranks' mean accuracy on the samples given, each by its own parameters. Collective."""
    with torch.no_grad():
        own = (net(x).argmax(dim=1) == y).double().mean().item()
    return fmean(comm.gather(own))


# --- the network ------------------------------------------------------------------------------------------------------
def measure_network(comm: Communicator, mbit_s: float | None) -> dict[str, float]:
    """Measure latency and bandwidth of cables that carry as much either way. Collective.

    The former is half a round trip of 8 bytes. For the latter every rank sends to the next and receives from the one
    before. Lower quartiles: a disturbance mostly adds, and yet the least is luck.
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
    latency_s = comm.gather(_quartile(pings))[0]
    others_s = (1 + (comm.size - 1).bit_length()) * latency_s  # of the first byte, and of the rounds of a barrier
    for _ in range(1 + LOADS):  # the first opens connections and their windows
        comm.barrier()
        start = comm.now()
        comm.sendrecv(sent, right, received, left)
        comm.barrier()
        loads.append(comm.now() - start - others_s)
    return {"latency_s": latency_s, "bandwidth_bytes_s": sent.nbytes / comm.gather(_quartile(loads[1:]))[0]}


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


class Cables:
    """Shape the cables of the hosts that ranks run on, and measure them."""

    def __init__(self, comm: Communicator, settings: dict[str, Any]):
        self._comm, self._hosts, self._cable = comm, Hosts(Path(settings["hosts"])), Cable(**settings["cable"])

    def measure(self) -> dict[str, float]:
        """Collective. Measure the network, whose cables are fast from then on."""
        found = measure_network(self._comm, self._cable.mbit_s)
        self.unshape()
        return found

    def shape(self) -> None:
        """Collective. Make the cables as slow as they are meant to be."""
        if self._comm.rank == 0:
            self._hosts.shape(self._cable)

    def unshape(self) -> None:
        """Collective. Make the cables fast.

        Not without the delay: TCP may take the shortest round trip of the last 10 s for the network's (BBR).
        """
        if self._comm.rank == 0:
            self._hosts.shape(Cable(delay_ms=self._cable.delay_ms))
        self._comm.barrier()
