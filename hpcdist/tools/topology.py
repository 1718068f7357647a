"""Describe a topology: its weights, its spectral gap, its neighbours, a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.errors import ConfigError, require_packages
from hpcdist.topology.base import Topology

SHOWN_STEPS = 3  # of a topology with random matrices
TOLERANCE = 1e-12  # of sums of weights
SAMPLED_STEPS = 16  # to estimate the spectral gap of such a topology
ZERO = 1e-12  # smaller eigenvalues are rounding errors
PANEL_INCHES = 4.0


def steps(topology: Topology) -> range:
    """Return the steps until the matrices repeat, or the first few of a random topology."""
    return range(topology.period or SHOWN_STEPS)


def describe(topology: Topology) -> dict[str, Any]:
    """Return a topology's properties by name, computed from the matrices of its `steps`."""
    matrices = [topology.matrix(step) for step in steps(topology)]
    messages = [np.count_nonzero(matrix, axis=0).max() - 1 for matrix in matrices]
    suffix = " per step, in the mean square" if topology.period is None else f" per step, over {topology.period}"
    return {
        "ranks": topology.size,
        "matrices": "random at each step" if topology.period is None else topology.period,
        "rows sum to 1": _sums(matrices, axis=1),
        "columns sum to 1": _sums(matrices, axis=0),
        "symmetric": "yes" if all(np.allclose(m, m.T, rtol=0, atol=TOLERANCE) for m in matrices) else "no",
        "messages per rank and step, at most": int(max(messages)),
        "spectral gap": f"{spectral_gap(topology):.6f}{'' if topology.static else suffix}",
    }


def _sums(matrices: list[np.ndarray], axis: int) -> str:
    off = max(float(np.abs(matrix.sum(axis=axis) - 1).max()) for matrix in matrices)
    return "yes" if off <= TOLERANCE else f"no: off by up to {off:.3g}"


def adjacency(topology: Topology, step: int) -> list[dict[str, Any]]:
    """Return a dict per rank: its weight for itself, and its neighbours with their weights."""
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


def spectral_gap(topology: Topology) -> float:
    """Compute 1 − r, where each step multiplies the ranks' distance from their mean by r.

    For a constant W, r is the second largest modulus of its eigenvalues. If W repeats after t steps, r^t is that of the
    product of the t matrices. For a random W, r² is the second eigenvalue of E[WᵀW]: if all ranks are sampled alike,
    E[WᵀW] = aI + b11ᵀ and r² = (E‖W‖² − 1)/(p − 1), estimated from SAMPLED_STEPS steps.

    Reference: Lin Xiao, Stephen Boyd, "Fast linear iterations for distributed averaging", 2004; Stephen Boyd, Arpita
    Ghosh, Balaji Prabhakar, Devavrat Shah, "Randomized gossip algorithms", 2006, for random W.
    """
    if topology.period is None:
        squares = np.mean([np.square(topology.matrix(step)).sum() for step in range(SAMPLED_STEPS)])
        return 1 - (max(squares - 1, 0.0) / max(topology.size - 1, 1)) ** 0.5
    product = np.eye(topology.size)
    for step in range(topology.period):
        product = topology.matrix(step) @ product
    return 1 - _second(product) ** (1 / topology.period)


def _second(matrix: np.ndarray) -> float:
    """Return the second largest modulus of a matrix's eigenvalues; 0 if there is only one."""
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return float(moduli[-2]) if len(moduli) > 1 and moduli[-2] > ZERO else 0.0


def draw(topology: Topology, path: Path) -> None:
    """Draw a topology to a file; arrows point from sender to receiver, lines without heads go both ways.

    Raises:
        ConfigError: the file's name ends in neither .svg nor .png, matplotlib is missing, or the file can't be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--output must end in .svg or .png; got {path}. Rename it.")
    require_packages("--output", "plots", "matplotlib")
    from matplotlib.figure import Figure

    drawn = steps(topology)
    figure = Figure(figsize=(PANEL_INCHES * len(drawn), PANEL_INCHES), layout="constrained")
    for step, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        _draw_step(axes, topology, step)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--output must be a file that can be written; got {path}: {error.strerror}.") from error


def _draw_step(axes: Any, topology: Topology, step: int) -> None:
    """Draw the ranks on a circle, and the messages of one step between them."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(topology.size) / topology.size  # clockwise from the top
    positions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    weights = topology.matrix(step)
    for receiver, sender in np.argwhere(weights):
        both = weights[sender, receiver] > 0
        if sender < receiver or (sender != receiver and not both):
            line = {"arrowstyle": "-" if both else "-|>", "shrinkA": 9, "shrinkB": 9, "color": "tab:blue"}
            axes.annotate("", xy=positions[receiver], xytext=positions[sender], arrowprops=line)
    axes.scatter(*positions.T, s=250, facecolor="white", edgecolor="black", zorder=3)
    for rank, (x, y) in enumerate(positions):
        axes.text(x, y, str(rank), ha="center", va="center", zorder=4, fontsize=8)
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal", title="" if topology.static else f"step {step}")
    axes.axis("off")
