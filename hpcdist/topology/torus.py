"""Two-dimensional torus: each rank averages with the ranks above, below, left and right."""

from __future__ import annotations

import math
from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, uniform


@final
class Torus(Topology):
    """Average with four neighbours on a grid of ranks that wraps around; weights 1/5 for the rank and each neighbour.

    Ranks fill the grid row by row. With fewer than 3 rows or columns some neighbours coincide; distinct ranks then have
    equal weights, and one row is a ring. With at least 3 rows and 3 columns the spectral gap is ⅖(1 − cos(2π/n)) for
    the longer side n.

    Args:
        size: number of ranks.
        rows: a divisor of `size`; by default the largest one that is at most its square root.

    Raises:
        ConfigError: `rows` is not a divisor of `size`.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology={"name": "torus", "rows": 2})

    Reference: Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, "Exponential graph is provably
    efficient for decentralized deep training", 2021, which compares it with others.
    """

    symmetric = True

    def __init__(self, size: int, *, rows: int | None = None):
        super().__init__(size)
        if rows is None:
            rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
        if rows < 1 or size % rows:
            raise ConfigError(f"rows must be a divisor of the number of ranks, {size}; got {rows}. Leave it out.")
        self.rows, self.columns = rows, size // rows

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        row, column = divmod(rank, self.columns)
        moves = (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)
        return uniform((row + r) % self.rows * self.columns + (column + c) % self.columns for r, c in moves)
