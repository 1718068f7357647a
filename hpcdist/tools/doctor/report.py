"""The doctor's report: findings, the nodes to exclude, files, and the exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements, listed

MAX_PATIENCE = 4.0  # longest timeouts on busy nodes, relative to idle ones


class Report:
    """The findings so far. `is_reporter`: this process prints them and writes the files."""

    def __init__(self, required: Requirements, is_reporter: bool):
        self.required, self.is_reporter = required, is_reporter
        self.nodes = Nodes((), ())  # empty until known
        self.busy: dict[str, float] = {}  # load / processors of busy nodes
        self.stage = "world"  # current check
        self.findings: list[Finding] = []
        self._measured: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def add(self, findings: Iterable[Finding], measured: Any = None) -> None:
        """Add findings of the current check, and the measured values behind them."""
        if measured is not None:
            self._measured[self.stage] = measured
            self._seconds[self.stage] = time.monotonic() - self._start - sum(self._seconds.values())
        for finding in findings:
            busy_nodes = [name for name in finding.nodes or self.busy if name in self.busy]
            if finding.status == ERROR and busy_nodes:  # it may only be slow
                finding = replace(finding, text=f"{finding.text}. {self._loads(busy_nodes)}")
            self.findings.append(replace(finding, check=self.stage))
            if self.is_reporter:
                self._show(finding.status, finding.text)

    @property
    def patience(self) -> float:
        """Factor for timeouts: above 1 if nodes are busy."""
        return min(MAX_PATIENCE, max(self.busy.values(), default=1.0))

    def warn_of_loads(self, loads: Sequence[float]) -> None:
        """Store the load of each rank's node, and warn about busy nodes."""
        self.busy = {self.nodes.name(rank): load for rank, load in enumerate(loads) if load > 1}
        for name in self.busy:
            text = f"{self._loads([name])}. Measured times may be affected, and timeouts are longer"
            self.add([Finding(WARNING, text, (name,) * (len(self.nodes.names) > 1))])

    def _loads(self, names: Sequence[str]) -> str:
        texts = [f"{name}'s load is {self.busy[name]:g} times its processors" for name in names]
        return f"Other processes are running: {listed(texts)}"

    def conclude(self, cut_short: bool = False) -> int:
        """Choose nodes to exclude, write files, print a last line; return the exit status (1 if checks are missing)."""
        options, names, self.stage = self.required, self.nodes.names, "spare"
        choice = self._choose()
        if options.spare is not None and names:
            self.add([describe_exclusion(choice, names)])
        warned = any(f.status == WARNING and not set(f.nodes) & set(choice.excluded) for f in self.findings)
        status = int(cut_short or bool(choice.errors) or (options.strict and warned))
        self.write_files(status)
        if self.is_reporter:
            counts = {s: sum(f.status == s for f in self.findings) for s in (ERROR, WARNING)}
            worst = next((s for s in (ERROR, WARNING) if counts[s]), OK)
            text = ", ".join(console.count(n, s) for s, n in counts.items())
            self.stage = "all"
            self._show(worst, f"{text}, {time.monotonic() - self._start:.1f} s; exit status {status}")
        return status

    def _show(self, status: str, text: str) -> None:
        console.line(text, f"{status:<8} {self.stage:<9} ")

    def _choose(self) -> Exclusion:
        names = self.nodes.names
        return choose_exclusion(names, self.findings, min(self.required.spare or 0, max(len(names) - 1, 0)))

    def write_files(self, status: int) -> None:
        """On the reporter, write the files that the user asked for, with the findings so far."""
        options, choice = self.required, self._choose()
        content = {"status": status, "seconds": time.monotonic() - self._start, "nodes": self.nodes.names}
        content |= {"excluded": choice.excluded, "findings": [asdict(finding) for finding in self.findings]}
        content |= {"measured": self._measured, "seconds_by_check": self._seconds}
        excluded = ",".join(choice.excluded) + "\n" * bool(choice.excluded)
        for path, text in ((options.exclude_file, excluded), (options.json_path, json.dumps(content, indent=2) + "\n")):
            if self.is_reporter and path is not None:
                try:
                    path.write_text(text)
                except OSError as error:
                    raise ConfigError(f"{path} must be a file that can be written; got {error.strerror}.") from error


# --- nodes to exclude if the allocation has spare ones ----------------------------------------------------------------
class Exclusion(NamedTuple):
    """Nodes to exclude (`excluded`), in the order of `names`; the healthy ones among them; the errors that remain."""

    excluded: tuple[str, ...]
    healthy: tuple[str, ...]
    errors: tuple[Finding, ...]


def choose_exclusion(names: Sequence[str], findings: Sequence[Finding], spare: int) -> Exclusion:
    """Choose `spare` nodes to exclude, one after the other, each time the worst remaining one.

    The worst node has the most errors that earlier choices did not remove, then the most warnings, by weight; ties: the
    last node. Healthy nodes are excluded, too, to fix the number of remaining ones. ConfigError: none would remain.
    """
    if not 0 <= spare < max(len(names), 1):
        raise ConfigError(f"spare must be at least 0 and below the number of nodes, {len(names)}; got {spare}.")
    chosen: list[str] = []
    healthy: list[str] = []
    while len(chosen) < spare:
        rest = [finding for finding in findings if not set(finding.nodes) & set(chosen)]
        worst = max((name for name in names if name not in chosen), key=lambda n: (*_faults(n, rest), names.index(n)))
        if _faults(worst, rest) == (0, 0):
            healthy.append(worst)
        chosen.append(worst)
    errors = tuple(f for f in findings if f.status == ERROR and not set(f.nodes) & set(chosen))
    return Exclusion(tuple(name for name in names if name in chosen), tuple(healthy), errors)


def _faults(name: str, findings: Sequence[Finding]) -> tuple[float, float]:
    """Return the total weights of the errors and of the warnings that excluding this node removes."""
    of_node = [finding for finding in findings if name in finding.nodes]
    errors, warnings = (sum(f.weight for f in of_node if f.status == status) for status in (ERROR, WARNING))
    return errors, warnings


def describe_exclusion(choice: Exclusion, names: Sequence[str]) -> Finding:
    """Return the finding that names the excluded and the remaining nodes."""
    faulty = [name for name in choice.excluded if name not in choice.healthy]
    parts = [listed(faulty)] * bool(faulty)
    parts += [f"{listed(choice.healthy)} (healthy)"] * bool(choice.healthy)
    remaining = [name for name in names if name not in choice.excluded]
    text = f"excludes {' and '.join(parts) or 'no node'}; {len(remaining)} remain: {listed(remaining)}"
    return Finding(OK, text)
