"""What is compared: setups, each a strategy with its options, and networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from network_study.hosts import Cable

DENSE = "allreduce"  # what the others are held against

# A dense all-reduce is a ring, whose messages the virtual network has too; MPI's own takes longer over such cables.
SETUPS: dict[str, dict[str, Any]] = {
    DENSE: {"strategy": "allreduce", "algorithm": "ring", "overlap": "off"},
    "allreduce + powersgd": {
        "strategy": "allreduce",
        "algorithm": "ring",
        "overlap": "off",
        "compression": {"name": "powersgd", "rank": 8},
    },
    "local_sgd": {"strategy": "local_sgd", "algorithm": "ring", "period": 8},
    "gossip_pull": {"strategy": "gossip_pull"},
    "gossip_push": {"strategy": "gossip_push"},
    "sgp": {"strategy": "sgp"},
    "strom": {"strategy": "strom"},
}


@dataclass(frozen=True)
class Scale:
    """How much is trained, where. `hidden`: units of both hidden layers; `every`: steps between two looks."""

    networks: tuple[Cable, ...] = (Cable(100), Cable(100, 10), Cable(1000), Cable(1000, 10), Cable())
    hidden: int = 3100  # 9.8 million parameters
    batch: int = 64
    rate: float = 0.1
    momentum: float = 0.9
    target: float = 0.85
    every: int = 2
    limit: int = 40
    seed: int = 0

    def settings(self, hosts: int) -> Iterator[dict[str, Any]]:
        """All that each run depends on, but for the code."""
        same = {name: value for name, value in vars(self).items() if name != "networks"}
        for network in self.networks:
            for setup, options in SETUPS.items():
                yield {"network": vars(network), "setup": setup, "options": options, "hosts": hosts, **same}


QUICK = Scale(networks=(Cable(100),), hidden=1000, target=0.8)  # 1.1 million parameters
