"""An examination from start to end: the start-up check, the world, then every check, then which nodes to leave out."""

from __future__ import annotations

import faulthandler
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
from hpcdist.tools.doctor.report import ExaminationOptions, Report, choose_exclusion

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator
    from hpcdist.comm.mpi.first_messages import FirstMessages

START_S = 10.0  # how long MPI may take to start where something is wrong with the nodes
WAIT_S = 10.0  # how long ranks wait for one another at most
AFTER_S, STEP_S = 2.0, 0.05  # how much later than the first rank the others speak, should it not
BACKSTOP_S = 5.0  # so much after the limit the process ends even where a call lets no other thread run
_ending = threading.Lock()


def examine(required: Requirements, options: ExaminationOptions) -> int:
    """Collective. Examine, print a line per finding on the first rank, and return the exit status, alike on all ranks.

    Where ranks don't answer or all takes too long it does not return: it ends all of them, with status 1, or with the
    launcher's own for a job that was ended.

    Raises:
        ConfigError: no node would remain, or a file can't be written.
        WorldError: the launcher contradicts itself.
    """
    own = task(required.environ)
    report = Report(options, speaks=own is None or own.rank == 0)
    limit = TimeLimit(options.limit_s, lambda: _end(report, required, [_late(report)]))
    try:
        messages = _start_mpi(required, report, limit)
        if not _is_right_world(messages.size, required, report):
            return 1
        _check_ranks(messages, required, report)
        limit.stretch(report.patience)
        return _examine(_join(WAIT_S * report.patience), required, report)
    except Unanswered as error:
        _end(report, required, startup.unanswered(error, report.nodes, report.stage))
    finally:
        limit.cancel()


# --- the start --------------------------------------------------------------------------------------------------------
def _start_mpi(required: Requirements, report: Report, limit: TimeLimit) -> FirstMessages:
    """Start MPI, which may wait for ever for a rank: past the limit this process ends, and one rank says why."""

    def tell(text: str) -> None:
        is_first, report.speaks = report.speaks, True
        report.add([Finding(ERROR, text)])
        if is_first:  # the others leave the files to it
            report.conclude(cut_short=True)

    wrong = _check_nodes(required, report)  # and has said what follows
    with start.limited(
        START_S if wrong else round(limit.left_s(), 1),
        task(required.environ),
        where="MPI's start",
        advice=" Check the last output of each rank, and that their nodes run",
        report=(lambda text: None) if wrong else tell,
        ends=limit.sooner,
    ):
        from hpcdist.comm.mpi.first_messages import FirstMessages  # imports MPI, which starts it
    return FirstMessages()


def _check_nodes(required: Requirements, report: Report) -> bool:
    """Report nodes that are absent or don't reach each other by TCP; return True if there are, on the first rank."""
    names = tuple(base.allocated(required.environ)) if startup.takes_part(required.environ) else ()
    found = startup.check_nodes(required.environ, names) if len(names) > 1 else startup.NOTHING
    if not found.absent and not found.unreachable:
        return False
    report.nodes, report.stage = Nodes(names, ()), "muster"  # as the output and the JSON file call it
    why = f"no TCP connection came about within {startup.REACH_S:g} s"
    report.add(startup.absent_nodes([names[node] for node in found.absent], names[0], startup.ANSWER_S))
    unreachable = startup.unreachable_pairs(found.unreachable, report.nodes, why)
    report.add(replace(finding, status=WARNING) for finding in unreachable)  # MPI may have another network
    text = f"MPI is started all the same, for it may have another network; if that takes longer than {START_S:g} s, "
    report.add([Finding(OK, f"{text}all ends here")])
    report.write_files(status=1)  # in case that the next stage does not come back
    report.stage = "world"
    return True


def _is_right_world(size: int, required: Requirements, report: Report) -> bool:
    """Tell whether MPI's world is the one that was started; if not, report it, and end ranks that would wait."""
    from hpcdist.comm.mpi import library

    wrong = world.disagreement(size, library.version(), required)
    if wrong is None:
        return True
    if size > 1:
        _end(report, required, [Finding(ERROR, wrong)])
    if report.speaks:
        report.add([Finding(ERROR, wrong)])
        report.conclude()
    else:
        time.sleep(AFTER_S)  # a launcher ends all when one of them leaves with a failure: the first is to speak
    return False


def _check_ranks(messages: FirstMessages, required: Requirements, report: Report) -> None:
    """Collective. Find the nodes by MPI's first messages; end all ranks where some are absent or unreachable."""

    def pairs(introductions: Mapping[int, str]) -> list[startup.Pair]:
        """List the pairs of the nodes' first ranks; none where a rank is absent, for then all ends."""
        if len(introductions) < messages.size:
            return []
        report.nodes = base.introduced_nodes(introductions)
        report.warn_of_loads(base.introduced_loads(introductions))
        messages.reach_s *= report.patience
        first = report.nodes.leaders
        return [(first[a], first[b]) for a, b in startup.pairs_to_try(len(first))]

    found = startup.check(messages, base.introduction(required.environ), pairs)
    if found.absent:
        expected = base.allocated(required.environ)
        report.nodes = Nodes(tuple(expected), ())
        hosts = {rank: text.split("\n")[0] for rank, text in found.introductions.items()}
        _end(report, required, startup.absent_ranks(hosts, found.absent, expected, messages.answer_s))
    nodes = report.nodes
    if found.unreachable:  # the first call that is collective would wait for ever
        report.stage, why = "links", f"MPI's first message did not come within {messages.reach_s:g} s"
        unreachable = [(nodes.of[a], nodes.of[b]) for a, b in found.unreachable]
        _end(report, required, startup.unreachable_pairs(unreachable, nodes, why))


def _join(deadline_s: float) -> Communicator:
    """Collective. Make the communicator of all ranks."""
    from hpcdist import session  # imports torch, which takes seconds

    try:
        return session.init(deadline_s=deadline_s, run=False)
    except MismatchError:  # of versions, whose check tells more
        from hpcdist.comm.mpi.world import world as all_ranks

        return all_ranks()


# --- the checks -------------------------------------------------------------------------------------------------------
def _examine(comm: Communicator, required: Requirements, report: Report) -> int:
    """Collective. Run every check; return the exit status."""
    from hpcdist.session import world as session

    comm.failures.deadline_s = WAIT_S * report.patience
    report.nodes = nodes = base.find_nodes(comm, base.host_name(required.environ))
    choose_exclusion(nodes.names, [], report.options.spare or 0)  # is refused before anything is measured
    report.speaks = comm.rank == 0
    checks = catalogue("checks")
    names = base.gather(comm, checks.available())  # a package may add some on a few nodes only
    common = [name for name in names[0] if all(name in theirs for theirs in names)]
    for name in sorted(common, key=lambda name: name != "world"):  # that comes first
        report.stage, check = name, checks.load(name)
        measured = check.measure(comm, nodes, required)
        if comm.rank == 0:
            report.add(check.judge(measured, nodes, required), measured)
    status = base.gather(comm, report.conclude() if comm.rank == 0 else None)[0]
    session.leave()
    return status


# --- the end where not all ranks can take part in it ------------------------------------------------------------------
def _late(report: Report) -> Finding:
    """Say that the time is over, and in which stage."""
    text = f"the examination must end within {report.options.limit_s:g} s; got no end of {report.stage!r} on "
    return Finding(ERROR, f"{text}{platform.node()}. Look there at processes that hang, and at the network")


def _end(report: Report, required: Requirements, found: Sequence[Finding]) -> NoReturn:
    """Report what is wrong and end all ranks. The first one that can does so for all."""
    with _ending:
        if not report.speaks:
            own = task(required.environ)
            time.sleep(AFTER_S + STEP_S * (own.rank if own else 0))
        report.speaks = True
        report.add(found)
        status = report.conclude(cut_short=True)
        if "hpcdist.comm.mpi.first_messages" in sys.modules:  # which has started MPI
            from hpcdist.comm.mpi.library import end

            end(status)
        os._exit(status)  # this process alone


# --- the time limit, wherever it hangs --------------------------------------------------------------------------------
class TimeLimit:
    """End the job from a thread of its own unless `cancel` is called within `seconds`.

    Args:
        expire: called by that thread; ends all ranks.
    """

    def __init__(self, seconds: float, expire: Callable[[], None]):
        self._expire, self._start, self._seconds = expire, time.monotonic(), seconds
        self._timer = threading.Timer(seconds, expire)
        self.stretch(1.0)

    def stretch(self, times: float) -> None:
        """Make the limit so many times as long."""
        self._timer.cancel()
        self._seconds *= times
        self._timer = threading.Timer(self.left_s(), self._expire)
        self._timer.name, self._timer.daemon = "hpcdist-doctor-limit", True
        self._timer.start()
        self._set_backstop(self.left_s())

    @contextmanager
    def sooner(self, seconds: float) -> Iterator[None]:
        """End this process without a word after so long inside the context, where no other thread may run."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                self._set_backstop(self.left_s())

    def _set_backstop(self, seconds: float) -> None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True, file=sys.__stderr__)

    def left_s(self) -> float:
        """Return the seconds until then."""
        return max(self._start + self._seconds - time.monotonic(), 0.0)

    def cancel(self) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
