"""The report of an examination: findings as they come, the nodes to leave out, the files, and the exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, listed

MOST_PATIENCE = 4.0  # times the waits on idle nodes


@dataclass(frozen=True)
class ExaminationOptions:
    """Options of an examination and its report. `limit_s`: how long the examination may take."""

    spare: int | None = None
    exclude_file: Path | None = None
    strict: bool = False
    json_path: Path | None = None
    limit_s: float = 30.0


class Report:
    """Collect findings. `speaks`: this process is the one that shows them and writes the files."""

    def __init__(self, options: ExaminationOptions, speaks: bool):
        self.options, self.speaks = options, speaks
        self.nodes = Nodes((), ())  # as far as they are known
        self.busy: dict[str, float] = {}  # how many times its processors a node's load is, where it is above them
        self.stage = "world"  # what is being examined
        self.findings: list[Finding] = []
        self._measured: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def add(self, findings: Iterable[Finding], measured: Any = None) -> None:
        """Take findings of the present stage, and the values that they come from."""
        if measured is not None:
            self._measured[self.stage] = measured
            self._seconds[self.stage] = time.monotonic() - self._start - sum(self._seconds.values())
        for finding in findings:
            slowed = [name for name in finding.nodes or self.busy if name in self.busy]
            if finding.status == ERROR and slowed:  # which may be nothing but late
                finding = replace(finding, text=f"{finding.text}. {self._loads(slowed)}")
            self.findings.append(replace(finding, check=self.stage))
            if self.speaks:
                self._show(finding.status, finding.text)

    @property
    def patience(self) -> float:
        """How many times as long as on idle nodes ranks wait for each other."""
        return min(MOST_PATIENCE, max(self.busy.values(), default=1.0))

    def warn_of_loads(self, loads: Sequence[float]) -> None:
        """Note the load of each rank's node, and warn of nodes that other work keeps busy."""
        self.busy = {self.nodes.name(rank): load for rank, load in enumerate(loads) if load > 1}
        for name in self.busy:
            text = f"{self._loads([name])}. Times below may be those of other work, and waits are longer"
            self.add([Finding(WARNING, text, (name,) * (len(self.nodes.names) > 1))])

    def _loads(self, names: Sequence[str]) -> str:
        texts = [f"{name}'s load is {self.busy[name]:g} times its processors" for name in names]
        return f"Other work is running: {listed(texts)}"

    def conclude(self, cut_short: bool = False) -> int:
        """Choose the nodes to leave out, write the files; return the exit status, 1 where not all was examined.

        Raises:
            ConfigError: a file can't be written.
        """
        options, names, self.stage = self.options, self.nodes.names, "spare"
        choice = self._choose()
        if options.spare is not None and names:
            self.add([describe_exclusion(choice, names)])
        warned = any(f.status == WARNING and not set(f.nodes) & set(choice.out) for f in self.findings)
        status = int(cut_short or bool(choice.errors) or (options.strict and warned))
        self.write_files(status)
        if self.speaks:
            counts = {s: sum(f.status == s for f in self.findings) for s in (ERROR, WARNING)}
            worst = next((s for s in (ERROR, WARNING) if counts[s]), OK)
            text = ", ".join(f"{n} {s}{'s' * (n != 1)}" for s, n in counts.items())
            self.stage = "all"
            self._show(worst, f"{text}, {time.monotonic() - self._start:.1f} s; exit status {status}")
        return status

    def _show(self, status: str, text: str) -> None:
        console.line(text, f"{status:<8} {self.stage:<9} ")

    def _choose(self) -> Exclusion:
        names = self.nodes.names
        return choose_exclusion(names, self.findings, min(self.options.spare or 0, max(len(names) - 1, 0)))

    def write_files(self, status: int) -> None:
        """Write the files that the user wants, by what is known so far."""
        options, choice = self.options, self._choose()
        content = {"status": status, "seconds": time.monotonic() - self._start, "nodes": self.nodes.names}
        content |= {"excluded": choice.out, "findings": [asdict(finding) for finding in self.findings]}
        content |= {"measured": self._measured, "seconds_by_check": self._seconds}
        excluded = ",".join(choice.out) + "\n" * bool(choice.out)
        for path, text in ((options.exclude_file, excluded), (options.json_path, json.dumps(content, indent=2) + "\n")):
            if self.speaks and path is not None:
                try:
                    path.write_text(text)
                except OSError as error:
                    raise ConfigError(f"{path} must be a file that can be written; got {error.strerror}.") from error


# --- the nodes to leave out, where the allocation has some to spare ---------------------------------------------------
class Exclusion(NamedTuple):
    """Nodes to leave out, in the order of `names`; those of them that nothing is wrong with; the errors that stay."""

    out: tuple[str, ...]
    healthy: tuple[str, ...]
    errors: tuple[Finding, ...]


def choose_exclusion(names: Sequence[str], findings: Sequence[Finding], spare: int) -> Exclusion:
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
    errors, warnings = (sum(f.weight for f in own if f.status == status) for status in (ERROR, WARNING))
    return errors, warnings


def describe_exclusion(choice: Exclusion, names: Sequence[str]) -> Finding:
    """Say which nodes are left out, and why."""
    sick = [name for name in choice.out if name not in choice.healthy]
    parts = [listed(sick)] * bool(sick)
    parts += [f"{listed(choice.healthy)}, with which nothing is wrong"] * bool(choice.healthy)
    remain = [name for name in names if name not in choice.out]
    text = f"leaves out {' and '.join(parts) or 'no node'}; {len(remain)} remain: {listed(remain)}"
    return Finding(OK, text)
