"""The choice of the nodes to leave out, where the allocation has some to spare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcdist.errors import ConfigError
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, listed


class Exclusion(NamedTuple):
    """Nodes to leave out, in the order of `names`; those of them that nothing is wrong with; the errors that stay."""

    out: tuple[str, ...]
    healthy: tuple[str, ...]
    errors: tuple[Finding, ...]


def choose(names: Sequence[str], findings: Sequence[Finding], spare: int) -> Exclusion:
    """Choose `spare` nodes to leave out, one after the other, the worst of the rest each time.

    That is the one with most errors that no other choice has settled yet, then with the gravest warnings, then the last
    one, so that as many remain whatever was found.

    Raises:
        ConfigError: none would remain.
    """
    if not 0 <= spare < max(len(names), 1):
        raise ConfigError(f"spare must be at least 0 and below the number of nodes, {len(names)}; got {spare}.")
    out: list[str] = []
    healthy: list[str] = []
    while len(out) < spare:
        left = [finding for finding in findings if not set(finding.nodes) & set(out)]
        worst = max((name for name in names if name not in out), key=lambda n: (*_faults(n, left), names.index(n)))
        if _faults(worst, left) == (0, 0):
            healthy.append(worst)
        out.append(worst)
    errors = tuple(f for f in findings if f.status == ERROR and not set(f.nodes) & set(out))
    return Exclusion(tuple(name for name in names if name in out), tuple(healthy), errors)


def _faults(name: str, findings: Sequence[Finding]) -> tuple[float, float]:
    """Sum the weights of the errors, and of the warnings, that leaving out this node settles."""
    own = [finding for finding in findings if name in finding.nodes]
    return tuple(sum(f.weight for f in own if f.status == status) for status in (ERROR, WARNING))


def describe(choice: Exclusion, names: Sequence[str]) -> Finding:
    """Say which nodes are left out, and why."""
    sick = [name for name in choice.out if name not in choice.healthy]
    parts = [listed(sick)] * bool(sick)
    parts += [f"{listed(choice.healthy)}, with which nothing is wrong"] * bool(choice.healthy)
    remain = [name for name in names if name not in choice.out]
    text = f"leaves out {' and '.join(parts) or 'no node'}; {len(remain)} remain: {listed(remain)}"
    return Finding(OK, text)
