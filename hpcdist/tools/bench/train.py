"""Steps of data-parallel training, beside torch's DistributedDataParallel on gloo and one rank alone."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.external.rendezvous import default_group
from hpcdist.tools.bench import peers
from hpcdist.tools.bench import steps as training
from hpcdist.tools.bench.runner import Row, beside, check
from hpcdist.tools.bench.steps import ALLREDUCE, ALONE, DDP, MODELS, Way

WAYS = (
    ALONE,
    DDP,
    ALLREDUCE,
    Way("allreduce_overlap_on", "allreduce", {"overlap": "on"}),
    Way("allreduce_overlap_off", "allreduce", {"overlap": "off"}),
)
HOROVOD = Way("allreduce_horovod", "allreduce", {"provider": "horovod"})  # apart: its thread is at work all the time


def measure(comm: Communicator, models: Sequence[str] = (), rounds: int = 9, steps: int = 5) -> list[Row]:
    """Collective. Time training steps of each way, with the strategy's overlap left to itself, on and off.

    Where Horovod is installed, the strategy by it comes after them.

    Returns:
        The same rows on all ranks: those of `steps.measure`, with speedup (over ddp_gloo).
    """
    check(comm, rounds)
    rows = []
    with default_group(comm):
        for model in models or MODELS:
            found = training.measure(comm, model, WAYS, rounds, steps)
            if peers.has_horovod():
                found += training.measure(comm, model, [HOROVOD], rounds, steps)
            rows += beside(found, [f"{model}/{DDP.name}"], speedup="speedup")
    return rows
