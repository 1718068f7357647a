"""Updates per second through parameter servers, beside send and recv on gloo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import runner
from benchmarks.runner import Row, Side, barrier_asleep, beside, check, table, warm_up
from hpcdist.collectives.tuning.timing import calls_within, slowest
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.parameter_server import ParameterServer
from hpcdist.torch_backend.default_group import default_group

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)  # float32 parameters
WORKERS = (1, 2, 4)
SERVERS = (1, 2)
OURS, GLOO = SIDES = ("ours", "gloo")
RATE = 1e-3
PHASE_S, MOST_STEPS = 0.25, 2000  # one timing of a side takes about so long, if its steps are that short
IDLE_STEPS, IDLE_STEP_S = 20, 0.1  # a worker's steps that leave the server idle
LATE_S = 0.5  # how much later than its workers' requests the server comes
COLUMNS = (
    *("name", "bytes", "servers", "workers", "ranks", "median_s", "bytes_sent"),
    *("updates_per_s", "per_worker", "bytes_per_s", "speedup", "cpu_percent"),
)


def measure(comm: Communicator, sizes: Sequence[int] = SIZES, *, rounds: int = 5) -> list[Row]:
    """Collective. Time workers that each push a gradient, which the server applies (x ← x − rate·g, in place), and
    get the new parameters back; with 1, 2 and 4 workers, 1 and 2 servers, as far as the ranks allow.

    Sides: ours, the strategy `parameter_server` as it is by default, so that it looks for NaNs and writes records; and
    torch.distributed's send and recv on gloo between the same tensors, which do neither. Every round times both.

    Args:
        sizes: numbers of parameters.

    Returns: name, bytes (of the gradient), servers, workers (that take part), ranks,
    median_s (per update, of all workers together), bytes_sent (per update, by all ranks; None for gloo, which doesn't
    tell), updates_per_s, per_worker (updates_per_s of one), bytes_per_s (of gradients and parameters), speedup (over
    gloo) and cpu_percent (of one core, used by rank 0, the server). Rows `idle` are with workers that sleep 0.1 s a
    step; in rows `waiting` cpu_percent is that of workers whose server comes late.
    """
    for count in sizes:
        if count < max(SERVERS):
            raise ConfigError(f"sizes must be at least {max(SERVERS)} parameters; got {count}.")
    check(comm, rounds, ranks=2)
    for count in sizes:
        _check_memory(comm, count)
    rows = []
    with default_group(comm, "gloo"):
        for servers in SERVERS[: comm.size - 1]:
            for count in sizes:
                place = _Place(comm, servers, count)
                for active in [n for n in WORKERS if n <= comm.size - servers]:
                    rows += _updates(place, active, rounds)
                if servers == 1 and count == min(sizes):
                    rows += _idle(place)
                place.close()
    for row in rows:
        updates_per_s = 1 / row["median_s"]
        row |= {"updates_per_s": updates_per_s, "per_worker": updates_per_s / row["workers"]}
        row["bytes_per_s"] = 2 * row["bytes"] * updates_per_s
    return table(rows, COLUMNS)


def _check_memory(comm: Communicator, count: int) -> None:
    """Collective. Refuse a model of `count` parameters where this rank's node has too little memory free."""
    # Workers have parameters, gradients and the reply; a server parameters, gradients and a slot for each worker.
    needed = 4 * count * sum(3 if rank else 2 + comm.size - 1 for rank in comm.memory.local_ranks)
    short = needed - psutil.virtual_memory().available
    worst = slowest(comm, [short, needed])
    if worst[0] > 0:
        raise ConfigError(
            f"sizes must fit into the memory that is free; got {count} parameters, for which {worst[0] / 1e9:.1f} GB "
            f"of {worst[1] / 1e9:.1f} GB are missing on a node. Pass smaller --sizes."
        )


# --- measurements -----------------------------------------------------------------------------------------------------
def _updates(place: _Place, active: int, rounds: int) -> list[Row]:
    """Collective. Time both sides with `active` workers."""
    sides = [place.side(name, active) for name in SIDES]
    once_s = warm_up(place.comm, sides, 1, 3 if place.count < 10_000_000 else 1, synchronize=barrier_asleep)
    steps = calls_within(PHASE_S, {name: update_s * active for name, update_s in once_s.items()}, MOST_STEPS)
    sent = {OURS: _bytes_sent(place, active)}
    rows = runner.measure(place.comm, sides, rounds, steps, barrier_asleep)
    return [{**row, "bytes_sent": sent.get(row["name"])} for row in beside(rows, [GLOO], speedup="speedup")]


def _bytes_sent(place: _Place, active: int) -> int:
    """Collective. Return the bytes that all ranks together send per update, those that end a phase aside."""
    sent = []
    for steps in (1, 2):
        before = place.strategy.records.traffic().bytes_sent
        place.ours(active, steps)
        here = place.strategy.records.traffic().bytes_sent - before
        sent.append(sum(place.comm.gather(here)))
    return (sent[1] - sent[0]) // active


def _idle(place: _Place) -> list[Row]:
    """Collective. Measure the processor time of a server whose workers compute, and of workers whose server is late."""
    active = max(n for n in WORKERS if n <= len(place.workers))
    idle = [place.side(name, active, " idle", step_s=IDLE_STEP_S) for name in SIDES]
    waiting = [place.side(name, active, " waiting", late_s=LATE_S) for name in SIDES]
    rows = beside(runner.measure(place.comm, idle, 1, IDLE_STEPS, barrier_asleep), [f"{GLOO} idle"], speedup="speedup")
    return rows + runner.measure(place.comm, waiting, 1, 1, barrier_asleep)


# --- the sides --------------------------------------------------------------------------------------------------------
class _Place:
    """Hold a model of `count` parameters on every rank, on which both sides work. Collective."""

    def __init__(self, comm: Communicator, servers: int, count: int):
        ends = [count * i // servers for i in range(servers + 1)]  # no parameter lies on two servers
        module = nn.ParameterList(torch.zeros(b - a) for a, b in itertools.pairwise(ends))
        self.comm, self.servers, self.count, self.model = comm, servers, count, FlatModel(module)
        self.strategy = ParameterServer(ParameterServer.Config(servers=servers), comm.split(0), self.model)
        self.workers = self.strategy.roles.workers
        self.shards = [self.strategy.replica.shards[rank] for rank in range(servers)]
        self._parameters = list(module)
        self.model.grads[0].fill_(1e-3)
        self.model.gradients.release([True] * servers)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-RATE)

    def side(self, name: str, active: int, suffix: str = "", *, step_s: float = 0.0, late_s: float = 0.0) -> Side:
        """Make a side of `active` workers that sleep in each step, and of servers that come late.

        Its seconds are those of an update of all workers together. cpu_percent is rank 0's, but where the servers come
        late the workers'.
        """
        exchange = {OURS: self.ours, GLOO: self.gloo}[name]
        works = self.comm.rank in self.workers[:active]
        watched = works if late_s else self.comm.rank == 0

        def run(steps: int) -> dict[str, float]:
            start, cpu_start = self.comm.now(), time.process_time()
            _sleep(0.0 if works else late_s)
            exchange(active, steps, step_s)
            lasted_s, used_s = self.comm.now() - start, time.process_time() - cpu_start
            cpu_percent = 100 * used_s / lasted_s if watched else 0.0
            return {"median_s": lasted_s / (active * steps), "cpu_percent": cpu_percent}

        return Side(name + suffix, run, {"bytes": 4 * self.count, "servers": self.servers, "workers": active})

    def ours(self, active: int, steps: int, step_s: float = 0.0) -> None:
        """Collective. Let the first `active` workers take `steps` steps each, after `step_s` of sleep."""
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
        """Collective. Do the same, to the bit, by messages."""
        rank, params, grads = self.comm.rank, self.model.params, self.model.grads
        if rank < self.servers:
            (own,), (arrived,) = self.shards[rank].of(params), self.shards[rank].of(grads)
            for _ in range(active * steps):
                worker = dist.recv(arrived)
                self.update()
                dist.send(own, worker)
        elif rank in self.workers[:active]:
            parts = [(r, shard.of(grads)[0], shard.of(params)[0]) for r, shard in enumerate(self.shards)]
            for _ in range(steps):
                _sleep(step_s)
                # All at once: two servers that reply to different workers first would wait for each other.
                works = [dist.irecv(own, server) for server, _, own in parts]
                works += [dist.isend(grad, server) for server, grad, _ in parts]
                for work in filter(None, works):
                    work.wait()

    def close(self) -> None:
        """Collective. Release the strategy."""
        self.strategy.close()
        self.strategy.comm.close()


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
