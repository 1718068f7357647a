"""The description of a topology: checks of its weights, its spectral gap, who sends to whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.topology.base import Topology
from hpcdist.topology.graphs.spectrum import spectral_gap

SHOWN_STEPS = 3  # of matrices that are drawn
TOLERANCE = 1e-12


def steps(topology: Topology) -> range:
    """List the steps whose matrices differ, or the first few where all do."""
    return range(topology.period or SHOWN_STEPS)


def describe(topology: Topology) -> dict[str, Any]:
    """Describe a topology by facts that are computed from its matrices, by their names."""
    matrices = [topology.matrix(step) for step in steps(topology)]
    messages = [np.count_nonzero(matrix, axis=0).max() - 1 for matrix in matrices]
    average = " per step, in the mean square" if topology.period is None else f" per step, over {topology.period}"
    return {
        "ranks": topology.size,
        "matrices": "drawn at each step" if topology.period is None else topology.period,
        "rows sum to 1": _sums(matrices, axis=1),
        "columns sum to 1": _sums(matrices, axis=0),
        "symmetric": "yes" if all(np.allclose(m, m.T, rtol=0, atol=TOLERANCE) for m in matrices) else "no",
        "messages per rank and step, at most": int(max(messages)),
        "spectral gap": f"{spectral_gap(topology):.6f}{'' if topology.static else average}",
    }


def _sums(matrices: list[np.ndarray], axis: int) -> str:
    off = max(float(np.abs(matrix.sum(axis=axis) - 1).max()) for matrix in matrices)
    return "yes" if off <= TOLERANCE else f"no: off by up to {off:.3g}"


def adjacency(topology: Topology, step: int) -> list[dict[str, Any]]:
    """List a row per rank: its own weight, and its neighbours with their weights."""
    return [
        {
            "rank": rank,
            "own weight": topology.in_neighbours(rank, step)[rank],
            "receives from": _list(rank, topology.in_neighbours(rank, step)),
            "sends to": _list(rank, topology.out_neighbours(rank, step)),
        }
        for rank in range(topology.size)
    ]


def _list(rank: int, neighbours: dict[int, float]) -> str:
    return ", ".join(f"{peer} ({weight:.3g})" for peer, weight in neighbours.items() if peer != rank)
