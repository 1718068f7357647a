"""Random routes of micro-batches: from each stage to the next one they go to a replica that is sampled anew."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from hpcdist.comm.communicator import Traffic
from hpcdist.errors import ConfigError
from hpcdist.parallel.agreement import Agreement
from hpcdist.parallel.grid import Grid

ROUTINGS = ("straight", "random")


class Routing:
    """Collective. Routes through the replicas of a grid, the same on all its ranks.

    For each boundary and micro-batch of a step, a permutation of the replicas is sampled: the outputs of replica i go
    to replica permutation[i] of the next stage, which returns their gradients. Each rank has the same number of
    micro-batches as on the straight route, and each stage's sum of gradients over the replicas is the same. But each
    stage is trained next to all replicas of the neighbouring stages. Batches that differ between replicas
    in their sizes or weights, as at the end of an epoch, go the straight route.

    Messages of a rank in a step: as on the straight route, but to several ranks; the targets, from ranks of the last
    stage to the rank that gets the outputs; and an all-reduce of one number per replica.

    Args:
        grid: of several stages.
        seed: of the random routes, at least 0.

    Attributes:
        comm: all ranks of the grid, in the grid's order.
        agreement: of these ranks, by which all replicas skip a step with gradients that are not finite: their scales
            must stay the same where one replica scales a loss that others differentiate.

    Raises:
        ConfigError: there is one stage only, or `seed` is negative.

    Reference: Jari Kolehmainen, Nikolay Blagoev, John Donaghy, Oğuzhan Ersoy, Christopher Nies, "NoLoCo: no-all-reduce
    low communication training method for large models", 2025.
    """

    def __init__(self, grid: Grid, seed: int):
        if grid.stages == 1:
            raise ConfigError(
                "routing must be straight where there is one stage, which has no next one; got random. Leave it out, "
                "or cut the model into several stages."
            )
        if seed < 0:
            raise ConfigError(f"seed of the routing must be at least 0; got {seed}. NumPy refuses negative seeds.")
        self._grid, self._seed = grid, seed
        self.comm, self._column = grid.comm.split(0), grid.outer.split(0)  # all ranks; those of this stage
        self.agreement = Agreement(self.comm)
        self._batch = (-1, -1)  # steps before the latest batch, and batches since the last step

    def sample(self, steps: int, facts: object, boundaries: int, parts: int) -> list[np.ndarray] | None:
        """Collective. Sample the permutations of a batch; None: replicas differ in `facts`, so routes are straight.

        Args:
            steps: number of steps before this batch.
            facts: what must be equal in all replicas' batches: sizes and weights.
            boundaries, parts: numbers of boundaries, and of micro-batches.

        Returns:
            For each boundary an array of shape (parts, replicas): the replica to which each replica's outputs go.
        """
        last_steps, batches_since = self._batch
        self._batch = (steps, batches_since + 1 if steps == last_steps else 0)
        digests = torch.zeros(self._grid.replicas, dtype=torch.int64)
        digests[self._grid.replica] = zlib.crc32(repr(facts).encode())
        self._column.allreduce(digests)
        if len(set(digests.tolist())) > 1:
            return None
        straight = np.tile(np.arange(self._grid.replicas), (parts, 1))
        key = (self._seed, *self._batch)
        return [np.random.default_rng((*key, number)).permuted(straight, axis=1) for number in range(boundaries)]

    def ranks(self, permutations: np.ndarray | None, parts: int, stage: int, *, behind: bool) -> list[int]:
        """Return the rank at the other end of a route, for each micro-batch.

        Args:
            permutations: of shape (parts, replicas); None: the straight route.
            stage: of that rank in the grid.
            behind: that rank receives outputs from this one; False: it sends them.
        """
        replica = self._grid.replica
        if permutations is None:
            others: Sequence[int] = [replica] * parts
        else:
            others = (permutations if behind else permutations.argsort(axis=1))[:, replica].tolist()
        return [other * self._grid.stages + stage for other in others]

    @property
    def traffic(self) -> Traffic:
        return self.comm.trace.traffic + self._column.trace.traffic

    def close(self) -> None:
        self.comm.close()
        self._column.close()


def composed(permutations: Sequence[np.ndarray]) -> np.ndarray:
    """Compose the permutations of all boundaries: from the replica of the first stage to that of the last stage."""
    whole = permutations[0]
    for following in permutations[1:]:
        whole = np.take_along_axis(following, whole, axis=1)
    return whole
