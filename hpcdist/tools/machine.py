"""Say of a machine on which cores its ranks were, and that they shared them with each other or with other work."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.tools.doctor.base import SLACK, counted, listed


def cores_of_ranks(masks: Sequence[Sequence[int]]) -> str:
    """Say which cores the ranks of one host may use, from those of each rank."""
    texts = [counted(mask) for mask in masks]
    if len(set(texts)) == 1:
        return f"{'each rank' if len(texts) > 1 else 'the rank'} may use cores {texts[0]}"
    return f"cores of its ranks {' | '.join(texts)}"


def placement(found: Sequence[tuple[str, list[int]]]) -> list[str]:
    """Say on which cores the ranks are, once for all hosts that are alike, from each rank's `local_cores_of_host`."""
    hosts: dict[str, list[str]] = {}
    for host in dict.fromkeys(host for host, _ in found):
        hosts.setdefault(cores_of_ranks([own for there, own in found if there == host]), []).append(host)
    return [f"{listed(alike)}: {text}" for text, alike in hosts.items()]


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
