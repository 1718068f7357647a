"""Updates per second through parameter servers, beside send and recv on gloo: the figures of `hpcdist bench server`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from hpcdist.bench import peers
from hpcdist.collectives.timing import between, slowest
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.flat import FlatModel
from hpcdist.strategies.parameter_server import ParameterServer

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)  # float32 parameters
WORKERS = (1, 2, 4)
SERVERS = (1, 2)
SIDES = ("ours", "gloo")
RATE = 1e-3
PHASE_S, MOST_STEPS = 0.25, 2000  # one timing of a side takes about so long, if its steps are that short
IDLE_STEPS, IDLE_STEP_S = 20, 0.1  # a worker's steps that leave the server idle
LATE_S = 0.5  # how much later than its workers' letters the server comes
TAG = 1


def measure(comm: Communicator, sizes: Sequence[int] = SIZES, *, rounds: int = 5) -> list[dict]:
    """Collective. Times workers that each post a gradient, which the server applies (x ← x − rate·g, in place), and
    get the new parameters back; with 1, 2 and 4 workers, 1 and 2 servers, as far as the ranks allow.

    Sides: ours, the strategy `parameter_server` as it is by default, so that it looks for NaNs and writes records; and
    torch.distributed's send and recv on gloo between the same tensors, which do neither. Every round times both.

    Args:
        sizes: numbers of parameters.
        rounds: how often each side is timed; the median counts.

    Returns: the same rows on all ranks: name, bytes (of the gradient), servers, workers (that take part), ranks,
    median_s (per update, of all workers together), bytes_sent (per update, by all ranks; None for gloo, which doesn't
    tell), updates_per_s, per_worker (updates_per_s of one), bytes_per_s (of gradients and parameters), speedup (over
    gloo) and cpu_percent (of one core, used by rank 0, the server). Rows `idle` are with workers that sleep 0.1 s a
    step; in rows `waiting` cpu_percent is that of workers whose server comes late.
    """
    for count in sizes:
        if count < max(SERVERS):
            raise ConfigError(f"sizes must be at least {max(SERVERS)} parameters; got {count}.")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1; got {rounds}.")
    if comm.size < 2:
        raise ConfigError(f"ranks of this measurement must be at least 2; got {comm.size}. Use mpirun -n 2.")
    for count in sizes:
        _check_memory(comm, count)
    rows = []
    with peers.gloo(comm):
        for servers in SERVERS[: comm.size - 1]:
            for count in sizes:
                place = _Place(comm, servers, count)
                for active in [n for n in WORKERS if n <= comm.size - servers]:
                    rows += _updates(place, active, rounds)
                if servers == 1 and count == min(sizes):
                    rows += _idle(place)
                place.close()
    return rows


def _check_memory(comm: Communicator, count: int) -> None:
    """Collective. Raises where what this rank's node has free is too little for a model of `count` parameters."""
    # Workers have parameters, gradients and the answer; a server parameters, gradients and a slot for each worker.
    here = [rank for rank in range(comm.size) if comm.nodes[rank] == comm.nodes[comm.rank]]
    needed = 4 * count * sum(3 if rank else 2 + comm.size - 1 for rank in here)
    short = needed - _available_bytes()
    worst = slowest(comm, [short, needed])
    if worst[0] > 0:
        raise ConfigError(
            f"sizes must fit into the memory that is free; got {count} parameters, for which {worst[0] / 1e9:.1f} GB "
            f"of {worst[1] / 1e9:.1f} GB are missing on a node. Pass smaller --sizes."
        )


def _available_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return float("inf")
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


class _Place:
    """Collective. A model of `count` parameters on every rank, on which both sides work."""

    def __init__(self, comm: Communicator, servers: int, count: int):
        ends = [count * i // servers for i in range(servers + 1)]  # no parameter lies on two servers
        module = nn.ParameterList(torch.zeros(b - a) for a, b in zip(ends, ends[1:]))
        self.comm, self.servers, self.count, self.model = comm, servers, count, FlatModel(module)
        self.strategy = ParameterServer(ParameterServer.Config(servers=servers), comm.split(0), self.model)
        self.workers = self.strategy.roles.workers
        self.shards = [self.strategy.shards[rank] for rank in range(servers)]
        self._parameters = list(module)
        self.model.grads[0].fill_(1e-3)
        self.model.release([True] * servers)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-RATE)

    # --- the sides ------------------------------------------------------------------------------------------------
    def ours(self, active: int, steps: int, step_s: float = 0.0) -> None:
        """The first `active` workers take `steps` steps each, after `step_s` of sleep."""
        rank = self.comm.rank
        if rank in self.workers[:active]:
            for _ in range(steps):
                _sleep(step_s)
                self.strategy.step(self.update)
        if rank in self.workers:
            self.strategy.pause()
        else:
            self.strategy.serve(self.update)

    def gloo(self, active: int, steps: int, step_s: float = 0.0) -> None:
        """The same, to the bit, by messages."""
        rank, params, grads = self.comm.rank, self.model.params, self.model.grads
        if rank < self.servers:
            (own,), (arrived,) = self.shards[rank].of(params), self.shards[rank].of(grads)
            for _ in range(active * steps):
                worker = dist.recv(arrived)
                self.update()
                dist.send(own, worker)
        elif rank in self.workers[:active]:
            parts = [(r, *shard.of(grads), *shard.of(params)) for r, shard in enumerate(self.shards)]
            for _ in range(steps):
                _sleep(step_s)
                # All at once: two servers that answer different workers first would wait for each other.
                requests = [dist.irecv(own, server) for server, _, own in parts]
                requests += [dist.isend(grad, server) for server, grad, _ in parts]
                for request in requests:
                    request.wait()

    # --- timing ---------------------------------------------------------------------------------------------------
    def time(self, side: str, active: int, steps: int, **options) -> _Taken:
        """Collective. One phase of a side."""
        run: Callable[..., None] = getattr(self, side)
        _meet(self.comm)
        start, cpu_start = self.comm.now(), time.process_time()
        run(active, steps, **options)
        lasted_s, used_s = self.comm.now() - start, time.process_time() - cpu_start
        _meet(self.comm)
        (all_s,) = slowest(self.comm, [lasted_s])
        (used,) = slowest(self.comm, [used_s / lasted_s if self.comm.rank == 0 else 0.0])
        return _Taken(all_s / (active * steps), used)

    def close(self) -> None:
        self.strategy.close()
        self.strategy.comm.close()


@dataclass(frozen=True)
class _Taken:
    """What a phase took: seconds per update of all workers together, cores used by rank 0."""

    update_s: float
    cores: float


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def _meet(comm: Communicator) -> None:
    """Collective. A barrier in which whoever waits leaves the core to others, as MPI's doesn't."""
    token = torch.zeros(1)
    if comm.rank:
        comm.isend(token, 0, TAG).wait()
        comm.probe(0, TAG)
        comm.irecv(token, 0, TAG).wait()
        return
    for rank in range(1, comm.size):
        comm.probe(rank, TAG)
        comm.irecv(token, rank, TAG).wait()
    for request in [comm.isend(token, rank, TAG) for rank in range(1, comm.size)]:
        request.wait()


# --- what is measured -------------------------------------------------------------------------------------------------
def _updates(place: _Place, active: int, rounds: int) -> list[dict]:
    """Collective. Both sides with `active` workers."""
    steps = {}
    for side in SIDES:  # a first phase that is not counted
        place.time(side, active, 1)
        few = place.time(side, active, 3 if place.count < 10_000_000 else 1)
        steps[side] = between(1, PHASE_S / (few.update_s * active), MOST_STEPS)
    sent = _bytes_sent(place, active)
    taken: dict[str, list[_Taken]] = {side: [] for side in SIDES}
    shuffled = random.Random(0)  # the same order on all ranks
    for _ in range(rounds):
        for side in shuffled.sample(SIDES, len(SIDES)):
            taken[side].append(place.time(side, active, steps[side]))
    update_s = {side: median(t.update_s for t in taken[side]) for side in SIDES}
    cores = {side: median(t.cores for t in taken[side]) for side in SIDES}
    return [
        _row(place, side, active, update_s[side], sent if side != "gloo" else None, update_s["gloo"], cores[side])
        for side in SIDES
    ]


def _bytes_sent(place: _Place, active: int) -> int:
    """Collective. Bytes that all ranks together send per update, without those that end a phase."""
    sent = []
    for steps in (1, 2):
        before = place.strategy.traffic().bytes_sent
        place.ours(active, steps)
        here = place.strategy.traffic().bytes_sent - before
        sent.append(sum(int.from_bytes(told, "little") for told in place.comm.exchange(here.to_bytes(8, "little"))))
    return (sent[1] - sent[0]) // active


def _idle(place: _Place) -> list[dict]:
    """Collective. What a server costs whose workers compute, and a worker whose server does."""
    active = max(n for n in WORKERS if n <= len(place.workers))
    taken = {side: place.time(side, active, IDLE_STEPS, step_s=IDLE_STEP_S) for side in SIDES}
    rows = [
        _row(place, f"{side} idle", active, t.update_s, None, taken["gloo"].update_s, t.cores)
        for side, t in taken.items()
    ]
    for side in SIDES:
        cores, update_s = _waiting(place, side, active)
        rows.append(_row(place, f"{side} waiting", active, update_s, None, None, cores))
    return rows


def _waiting(place: _Place, side: str, active: int) -> tuple[float, float]:
    """Collective. Cores that a worker uses while it waits for an answer, and how long the update took."""
    comm, waits = place.comm, place.comm.rank in place.workers[:active]
    _meet(comm)
    start, cpu_start = comm.now(), time.process_time()
    _sleep(0.0 if waits else LATE_S)
    getattr(place, side)(active, 1)
    lasted_s, used_s = comm.now() - start, time.process_time() - cpu_start
    _meet(comm)
    cores, update_s = slowest(comm, [used_s / lasted_s if waits else 0.0, lasted_s / active])
    return cores, update_s


def _row(
    place: _Place, name: str, active: int, update_s: float, sent: int | None, gloo_s: float | None, cores: float
) -> dict:
    return {
        "name": name,
        "bytes": 4 * place.count,
        "servers": place.servers,
        "workers": active,
        "ranks": place.comm.size,
        "median_s": update_s,
        "bytes_sent": sent,
        "updates_per_s": 1 / update_s,
        "per_worker": 1 / (update_s * active),
        "bytes_per_s": 2 * 4 * place.count / update_s,
        "speedup": None if gloo_s is None else gloo_s / update_s,
        "cpu_percent": 100 * cores,
    }
