"""Say of a machine that its ranks had no cores of their own, or shared them with other work."""

from __future__ import annotations

SLACK = 0.5  # of a load average, which nobody notices


def remarks(ranks: int, cores: int, processors: int, load: float) -> list[str]:
    """Say what makes times untrustworthy.

    Args:
        ranks: of one host.
        cores: that these may use.
        processors: that the host has.
        load: its load average over a minute, the highest that was seen.
    """
    said = []
    if ranks > cores:
        said.append(
            f"{ranks} ranks shared {cores} core{'s' * (cores > 1)}: times are not those of ranks with their own."
        )
    if load > max(processors, ranks) + SLACK:
        said.append(
            f"The machine was busy: its load average was {load:.1f}, of {processors} processors and {ranks} "
            f"rank{'s' * (ranks > 1)}. Times may be those of other work; repeat them on an idle machine."
        )
    return said
