"""Run all checks: the start-up check, MPI's start, the checks of `checks/`, then choose the nodes to exclude."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from hpcdist.comm.launch import task
from hpcdist.comm.mpi import start
from hpcdist.errors import MismatchError
from hpcdist.registry import catalogue
from hpcdist.tools.doctor import base, startup
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements, Unanswered
from hpcdist.tools.doctor.checks import world
from hpcdist.tools.doctor.report import Report, choose_exclusion

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator
    from hpcdist.comm.mpi.first_messages import FirstMessages

START_S = 10.0  # timeout of MPI's start if a node has a problem
WAIT_S = 10.0  # timeout of ranks that wait for each other
AFTER_S, STEP_S = 2.0, 0.05  # delay before another rank reports instead of rank 0
BACKSTOP_S = 5.0  # after the limit the process ends, even if a call holds the GIL
_ending = threading.Lock()  # the time limit's thread calls `_end`, too


def examine(required: Requirements) -> int:
    """Collective. Run all checks, print the findings on the first rank; return the same exit status on all ranks.

    If ranks don't reply, or the time limit is exceeded, all ranks are ended, with status 1 or the launcher's status
    for an aborted job. Raises ConfigError if no node would remain or a file can't be written, and WorldError if the
    launcher's variables contradict each other.
    """
    launched = task(required.environ)
    report = Report(required, is_reporter=launched is None or launched.rank == 0)
    limit = TimeLimit(required.limit_s, lambda: _end(report, [_late(report)]))
    try:
        messages = _start_mpi(report, limit)
        if not _is_right_world(messages.size, report):
            return 1
        _check_ranks(messages, report)
        limit.stretch(report.patience)
        return _examine(_join(WAIT_S * report.patience), report)
    except Unanswered as error:
        _end(report, startup.unanswered(error, report.nodes, report.stage))
    finally:
        limit.cancel()


# --- start-up ---------------------------------------------------------------------------------------------------------
def _start_mpi(report: Report, limit: TimeLimit) -> FirstMessages:
    """Start MPI, which may wait forever for a rank: after the limit this process ends, and one rank reports why."""

    def report_late(text: str) -> None:
        """Print the message on this rank, rank 0 or not; called in the process that `start.limited` forks."""
        was_reporter, report.is_reporter = report.is_reporter, True
        report.add([Finding(ERROR, text)])
        if was_reporter:  # it alone writes the files
            report.conclude(cut_short=True)

    is_reported = _check_nodes(report)
    with start.limited(
        START_S if is_reported else round(limit.remaining_s(), 1),
        task(report.required.environ),
        where="MPI's start",
        advice=" Check the last output of each rank, and that their nodes run",
        report=(lambda text: None) if is_reported else report_late,
        ends=limit.hard_limit,
    ):
        from hpcdist.comm.mpi.first_messages import FirstMessages  # importing it starts MPI
    return FirstMessages()


def _check_nodes(report: Report) -> bool:
    """Report nodes that are absent or can't connect by TCP; return whether there are any, on rank 0 only."""
    environ = report.required.environ
    names = tuple(base.allocated(environ)) if startup.takes_part(environ) else ()
    checked = startup.check_nodes(environ, names) if len(names) > 1 else startup.NOTHING
    if not checked.absent and not checked.unreachable:
        return False
    report.nodes, report.stage = Nodes(names, ()), "muster"  # name in the output and the JSON file
    reason = f"no TCP connection within {startup.REACH_S:g} s"
    report.add(startup.absent_nodes([names[node] for node in checked.absent], names[0], startup.ANSWER_S))
    unreachable = startup.unreachable_pairs(checked.unreachable, report.nodes, reason)
    report.add(replace(finding, status=WARNING) for finding in unreachable)  # MPI may use another network
    text = f"MPI is started nevertheless, as it may use another network; if that takes longer than {START_S:g} s, "
    report.add([Finding(OK, f"{text}all ranks end")])
    report.write_files(status=1)  # the next stage may never return
    report.stage = "world"
    return True


def _is_right_world(size: int, report: Report) -> bool:
    """Return whether MPI's world has the expected size; otherwise report it and end the ranks."""
    from hpcdist.comm.mpi import library

    problem = world.disagreement(size, library.version(), report.required)
    if problem is None:
        return True
    if size > 1:
        _end(report, [Finding(ERROR, problem)])
    if report.is_reporter:
        report.add([Finding(ERROR, problem)])
        report.conclude()
    else:
        time.sleep(AFTER_S)  # a launcher ends all ranks when one fails: let the first one report
    return False


def _check_ranks(messages: FirstMessages, report: Report) -> None:
    """Collective. Determine the nodes by MPI's first messages; end all ranks if some are absent or unreachable."""

    def pairs(introductions: Mapping[int, str]) -> list[startup.Pair]:
        """Store the nodes and their loads in the report. Return pairs of leaders; none if a rank is absent."""
        if len(introductions) < messages.size:
            return []
        report.nodes, loads = base.introduced(introductions)
        report.warn_of_loads(loads)
        messages.reach_s *= report.patience
        leaders = report.nodes.leaders
        return [(leaders[a], leaders[b]) for a, b in startup.pairs_to_try(len(leaders))]

    checked = startup.check(messages, base.introduction(report.required.environ), pairs)
    if checked.absent:
        expected = base.allocated(report.required.environ)
        report.nodes = Nodes(tuple(expected), ())
        hosts = {rank: json.loads(text)[0] for rank, text in checked.introductions.items()}
        _end(report, startup.absent_ranks(hosts, checked.absent, expected, messages.answer_s))
    nodes = report.nodes
    if checked.unreachable:  # the first collective call would never return
        report.stage, reason = "links", f"MPI's first message did not arrive within {messages.reach_s:g} s"
        unreachable = [(nodes.of[a], nodes.of[b]) for a, b in checked.unreachable]
        _end(report, startup.unreachable_pairs(unreachable, nodes, reason))


def _join(deadline_s: float) -> Communicator:
    """Collective. Return the communicator of all ranks."""
    from hpcdist import session  # imports torch, which takes seconds

    try:
        return session.init(deadline_s=deadline_s, run=False)
    except MismatchError:  # different versions: the check reports more
        from hpcdist.comm.mpi.world import world as all_ranks

        return all_ranks()


# --- the checks -------------------------------------------------------------------------------------------------------
def _examine(comm: Communicator, report: Report) -> int:
    """Collective. Run every check; return the exit status."""
    required = report.required
    from hpcdist.session import world as session

    comm.failures.deadline_s = WAIT_S * report.patience
    report.nodes = nodes = base.find_nodes(comm, base.host_name(required.environ))
    choose_exclusion(nodes.names, [], report.required.spare or 0)  # raises ConfigError if no node would remain
    report.is_reporter = comm.rank == 0
    checks = catalogue("checks")
    names = base.gather(comm, checks.available())  # plug-ins may be installed on some nodes only
    common = [name for name in names[0] if all(name in available for available in names)]
    for name in sorted(common, key=lambda name: name != "world"):  # world first
        report.stage, check = name, checks.load(name)
        measured = check.measure(comm, nodes, required)
        if comm.rank == 0:
            report.add(check.judge(measured, nodes, required), measured)
    status = base.gather(comm, report.conclude() if comm.rank == 0 else None)[0]
    session.leave()
    return status


# --- end without all ranks --------------------------------------------------------------------------------------------
def _late(report: Report) -> Finding:
    """Return the finding that the examination's time limit is exceeded; it names the current stage and this node."""
    text = f"the examination must end within {report.required.limit_s:g} s; got no end of {report.stage!r} on "
    return Finding(ERROR, f"{text}{platform.node()}. Look there at processes that hang, and at the network")


def _end(report: Report, findings: Sequence[Finding]) -> NoReturn:
    """Report findings and end all ranks. Rank 0 does so immediately; the others wait, in case it can't."""
    with _ending:
        if not report.is_reporter:
            launched = task(report.required.environ)
            time.sleep(AFTER_S + STEP_S * (launched.rank if launched else 0))
        report.is_reporter = True
        report.add(findings)
        status = report.conclude(cut_short=True)
        if "hpcdist.comm.mpi.first_messages" in sys.modules:  # MPI was started
            from hpcdist.comm.mpi.library import end

            end(status)
        os._exit(status)  # this process only


# --- time limit -------------------------------------------------------------------------------------------------------
class TimeLimit:
    """Call `expire`, which ends all ranks, in a background thread unless `cancel` is called within `seconds`."""

    def __init__(self, seconds: float, expire: Callable[[], None]):
        self._expire, self._start, self._seconds = expire, time.monotonic(), seconds
        self._timer = threading.Timer(seconds, expire)  # not started: `stretch` replaces it
        self.stretch(1.0)

    def stretch(self, times: float) -> None:
        """Multiply the time limit by `times`."""
        self._timer.cancel()
        self._seconds *= times
        self._timer = threading.Timer(self.remaining_s(), self._expire)
        self._timer.name, self._timer.daemon = "hpcdist-doctor-limit", True
        self._timer.start()
        self._set_backstop(self.remaining_s())

    @contextmanager
    def hard_limit(self, seconds: float) -> Iterator[None]:
        """Within the context, end this process silently after `seconds`, even if a call holds the GIL."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                self._set_backstop(self.remaining_s())

    def _set_backstop(self, seconds: float) -> None:
        """End this process with a traceback BACKSTOP_S after `seconds`, without the GIL, which the timer needs."""
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True, file=sys.__stderr__)

    def remaining_s(self) -> float:
        return max(self._start + self._seconds - time.monotonic(), 0.0)

    def cancel(self) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
