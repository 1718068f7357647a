"""A topology as a picture: ranks on a circle, one panel per step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology
from hpcdist.topology.graphs.description import steps

PANEL_INCHES = 4.0


def draw(topology: Topology, path: Path) -> None:
    """Draw a topology to a file; arrows point from sender to receiver, lines without heads go both ways.

    Raises:
        ConfigError: the file's name ends in neither .svg nor .png, matplotlib is missing, or the file can't be
            written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--output must end in .svg or .png; got {path}. Rename it.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--output must be given where matplotlib is installed; got none. Run: pip install 'hpcdist[plots]'"
        ) from error
    shown = steps(topology)
    figure = Figure(figsize=(PANEL_INCHES * len(shown), PANEL_INCHES), layout="constrained")
    for step, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0], strict=True):
        _draw_step(axes, topology, step)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--output must be a file that can be written; got {path}: {error.strerror}.") from error


def _draw_step(axes, topology: Topology, step: int) -> None:
    angles = np.pi / 2 - 2 * np.pi * np.arange(topology.size) / topology.size  # clockwise from the top
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    weights = topology.matrix(step)
    for receiver, sender in np.argwhere(weights):
        both = weights[sender, receiver] > 0
        if sender < receiver or (sender != receiver and not both):
            line = {"arrowstyle": "-" if both else "-|>", "shrinkA": 9, "shrinkB": 9, "color": "tab:blue"}
            axes.annotate("", xy=places[receiver], xytext=places[sender], arrowprops=line)
    axes.scatter(*places.T, s=250, facecolor="white", edgecolor="black", zorder=3)
    for rank, (x, y) in enumerate(places):
        axes.text(x, y, str(rank), ha="center", va="center", zorder=4, fontsize=8)
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal", title="" if topology.static else f"step {step}")
    axes.axis("off")
