"""Steps of data-parallel training, beside torch's DistributedDataParallel on gloo and one rank alone."""

from __future__ import annotations

from hpcdist.bench import peers, steps as timing
from hpcdist.bench.steps import ALONE, DDP, MODELS, Side
from hpcdist.comm.communicator import Communicator

SIDES = (
    Side(ALONE),
    Side(DDP),
    Side("allreduce", "allreduce"),
    Side("allreduce_overlap_on", "allreduce", {"overlap": "on"}),
    Side("allreduce_overlap_off", "allreduce", {"overlap": "off"}),
)
HOROVOD = Side("allreduce_horovod", "allreduce", {"provider": "horovod"})  # apart: its thread is at work all the time


def measure(comm: Communicator, names: list[str] | None = None, rounds: int = 9, steps: int = 5) -> list[dict]:
    """Collective. Times training steps of each side, with the strategy's overlap left to itself, on and off.

    Where Horovod is installed, the strategy by it comes after them.

    Returns:
        The same rows on all ranks: name, what `steps.measure` tells, and speedup (over ddp_gloo).
    """
    rows = []
    with peers.gloo(comm):
        for model in names or list(MODELS):
            found = timing.measure(comm, model, SIDES, rounds, steps)
            if peers.has_horovod():
                found |= timing.measure(comm, model, [HOROVOD], rounds, steps)
            ddp_s = found[DDP]["median_s"]
            rows += [
                {"name": f"{model}/{name}", **row, "speedup": ddp_s / row["median_s"]} for name, row in found.items()
            ]
    return rows
