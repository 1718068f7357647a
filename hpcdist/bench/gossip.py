"""What a step costs with each decentralised strategy, beside all-reduce and the model alone."""

from __future__ import annotations

from hpcdist.bench import steps as timing
from hpcdist.bench.steps import ALONE, MODELS, Side
from hpcdist.comm.communicator import Communicator

PERIOD = 16  # of local_sgd
SIDES = (
    Side(ALONE),
    Side("allreduce", "allreduce"),
    Side(f"local_sgd_{PERIOD}", "local_sgd", {"period": PERIOD}),
    Side(f"diloco_{PERIOD}", "diloco", {"period": PERIOD}),
    Side("gossip_pull", "gossip_pull"),
    Side("gossip_push", "gossip_push"),
    Side("gossip_sync", "gossip_sync"),
    Side("dpsgd", "dpsgd"),
    Side("adpsgd", "adpsgd"),
    Side("sgp", "sgp"),
    Side("strom", "strom", {"compression": {"name": "threshold", "density": 0.001}}),
)


def measure(comm: Communicator, names: list[str] | None = None, rounds: int = 9, steps: int = PERIOD) -> list[dict]:
    """Collective. Times training steps of each strategy, in rounds of a whole period of the periodic one.

    Returns:
        The same rows on all ranks: name, what `steps.measure` tells, overhead_s (over the model alone), and speedup
        (over all-reduce).
    """
    return [row for model in names or list(MODELS) for row in compare(comm, model, SIDES, rounds, steps)]


def compare(comm: Communicator, model: str, sides: tuple[Side, ...], rounds: int, steps: int) -> list[dict]:
    """Collective. Rows of these sides, `alone` and `allreduce` among them."""
    found = timing.measure(comm, model, sides, rounds, steps)
    alone_s, allreduce_s = found[ALONE]["median_s"], found["allreduce"]["median_s"]
    return [
        {
            "name": f"{model}/{name}",
            **row,
            "overhead_s": row["median_s"] - alone_s,
            "speedup": allreduce_s / row["median_s"],
        }
        for name, row in found.items()
    ]
