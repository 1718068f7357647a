"""The cost of a step with each decentralised strategy, beside all-reduce and the model alone."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.tools.bench.compress import CONFIGS
from hpcdist.tools.bench.runner import Row, check
from hpcdist.tools.bench.train import ALLREDUCE, MODELS, Way, compare

PERIOD = 16  # of those that communicate once in a period


def _decentralised() -> list[Way]:
    """Make a way of each strategy without servers, but for all-reduce."""
    ways = []
    for name in strategies.available():
        fields = strategies.load(name).Config.model_fields
        if "servers" in fields or name == ALLREDUCE.strategy:
            continue
        if "period" in fields:
            ways.append(Way(f"{name}_{PERIOD}", name, {"period": PERIOD}))
            continue
        compressor = fields["compression"].default.name if "compression" in fields else "none"
        # What is compressed by default is so as the bench of compressors does it first: defaults suit other models.
        configs = [config for config in CONFIGS.values() if config["name"] == compressor]
        ways.append(Way(name, name, {"compression": configs[0]} if configs else {}))
    return ways


WAYS = tuple(_decentralised())


def measure(comm: Communicator, models: Sequence[str] = (), rounds: int = 9, steps: int = PERIOD) -> list[Row]:
    """Collective. Time training steps of each strategy, in rounds of a whole period of the periodic one.

    Returns:
        The same rows on all ranks, as `train.compare`'s.
    """
    check(comm, rounds)
    return compare(comm, models or list(MODELS), WAYS, rounds, steps)
