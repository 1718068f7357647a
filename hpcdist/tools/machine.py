"""Describe a host's use: the cores of its ranks, and whether ranks or other processes shared them."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.tools.doctor.base import SLACK, counted, listed


def describe_cores(cores_by_rank: Sequence[tuple[str, list[int]]]) -> list[str]:
    """Format the cores of all ranks, with identical hosts on one line, from (host, cores) of each rank."""
    hosts_of: dict[str, list[str]] = {}
    for host in dict.fromkeys(host for host, _ in cores_by_rank):
        masks = [counted(cores) for name, cores in cores_by_rank if name == host]
        who = "each rank" if len(masks) > 1 else "the rank"
        same = len(set(masks)) == 1
        text = f"{who} may use cores {masks[0]}" if same else f"cores of its ranks {' | '.join(masks)}"
        hosts_of.setdefault(text, []).append(host)
    return [f"{listed(names)}: {text}" for text, names in hosts_of.items()]


def timing_warnings(ranks: int, cores: int, processors: int, load: float) -> list[str]:
    """Return warnings about untrustworthy times.

    Args:
        ranks: on one host.
        cores: that these ranks may use.
        processors: of the host.
        load: highest load average seen, over one minute.
    """
    warnings = []
    if ranks > cores:
        warnings.append(f"{ranks} ranks shared {cores} core{'s' * (cores > 1)}: times would be lower otherwise.")
    if load > max(processors, ranks) + SLACK:
        warnings.append(
            f"The machine was busy: its load average was {load:.1f}, of {processors} processors and {ranks} "
            f"rank{'s' * (ranks > 1)}. Other processes may have slowed the runs; repeat them on an idle machine."
        )
    return warnings
