"""An examination from start to end: the world, then every check, then what to leave out."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from hpcdist.comm.launch import task
from hpcdist.doctor import base, checks, muster, spare, world
from hpcdist.doctor.base import ERROR, OK, WARNING, Asked, Finding, Nodes, Unanswered
from hpcdist.doctor.limit import TimeLimit
from hpcdist.doctor.report import Options, Report
from hpcdist.errors import MismatchError

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

START_S = 10.0  # how long MPI may take to start where something is wrong with the nodes
WAIT_S = 10.0  # how long ranks wait for one another at most
AFTER_S, STEP_S = 2.0, 0.05  # how much later than the first rank the others speak, should it not
_ending = threading.Lock()


def examine(asked: Asked, options: Options) -> int:
    """Collective. Examines, prints a line per finding on the first rank, and tells the exit status, alike on all ranks.

    Where ranks don't answer or all takes too long it does not return: it ends all of them, with status 1, or with the
    launcher's own for a job that was ended.

    Raises:
        ConfigError: no node would remain, or a file can't be written.
        WorldError: the launcher contradicts itself.
    """
    report = Report(options, speaks=_number(asked.environ) == 0)
    limit = TimeLimit(options.limit_s, lambda: _end(report, asked, [_late(report)]))
    try:
        if _muster(asked, report):
            with limit.sooner(START_S):
                from hpcdist.comm import mpi_rollcall  # noqa: F401, starts MPI
        comm = _join(asked, report)
        return 1 if comm is None else _examine(comm, asked, report)
    except Unanswered as error:
        _end(report, asked, _unanswered(error, report))
    finally:
        limit.cancel()


def _number(environ: Mapping[str, str]) -> int:
    """The number of this process according to its launcher; 0 without one."""
    found = task(environ)
    return found.rank if found else 0


def _muster(asked: Asked, report: Report) -> bool:
    """Tells what is wrong before MPI starts, for that may not come back. True if something is, on the first rank."""
    names = tuple(world.allocated(asked.environ)) if muster.takes_part(asked.environ) else ()
    found = muster.hold(asked.environ, names) if len(names) > 1 else None
    if not found or not any(found):
        return False
    report.nodes, report.stage = Nodes(names, ()), "muster"
    why = f"no TCP connection came about within {muster.TRY_S:g} s"
    report.add(world.absence([names[node] for node in found.absent], names[0], muster.COME_S))
    report.add(replace(f, status=WARNING) for f in world.severed(found.severed, report.nodes, why))
    text = f"MPI is started all the same, for it may have another network; if that takes longer than {START_S:g} s, "
    report.add([Finding(OK, f"{text}all ends here")])
    report.foresee()
    report.stage = "world"
    return True


def _join(asked: Asked, report: Report) -> Communicator | None:
    """The communicator of all ranks; None where the world is not the one that was started: then it has been told."""
    from hpcdist.comm import mpi_rollcall  # starts MPI

    size = mpi_rollcall.size()
    wrong = world.disagreement(size, mpi_rollcall.library(), asked)
    if wrong is not None and size > 1:
        _end(report, asked, [Finding(ERROR, wrong)])
    if wrong is not None:
        if report.speaks:
            report.add([Finding(ERROR, wrong)])
            report.conclude()
        else:
            time.sleep(AFTER_S)  # a launcher ends all when one of them leaves with a failure: the first is to speak
        return None
    roll = mpi_rollcall.call(world.introduction(asked.environ), world.ANSWER_S)
    if roll.missing:
        expected = world.allocated(asked.environ)
        report.nodes = Nodes(tuple(expected), ())
        hosts = {rank: said.split("\n")[0] for rank, said in roll.said.items()}
        _end(report, asked, world.silence(hosts, roll.missing, expected, world.ANSWER_S))
    report.nodes = nodes = world.introduced(roll.said)
    pairs = [(nodes.leaders[a], nodes.leaders[b]) for a, b in world.tried(len(nodes.names))]
    severed = mpi_rollcall.severed(pairs, world.PASS_S)
    if severed:  # the first call that is collective would wait for ever
        report.stage, why = "links", f"MPI's first message did not come within {world.PASS_S:g} s"
        _end(report, asked, world.severed([(nodes.of[a], nodes.of[b]) for a, b in severed], nodes, why))
    from hpcdist import session  # imports torch, which takes seconds

    try:
        return session.init(deadline_s=WAIT_S)
    except MismatchError:  # which the check of versions tells better
        from hpcdist.comm import mpi

        return mpi.world()


def _examine(comm: Communicator, asked: Asked, report: Report) -> int:
    from hpcdist.session import world as session

    comm.deadline_s = WAIT_S
    nodes = base.find_nodes(comm, world.host_name(asked.environ))
    report.nodes = nodes
    spare.choose(nodes.names, [], report.options.spare or 0)  # is refused before anything is measured
    report.speaks = comm.rank == 0
    for name in ("world", *checks.available()):
        report.stage = name
        check = world if name == "world" else checks.load(name)
        measured = check.measure(comm, nodes, asked)
        if comm.rank == 0:
            report.add(check.judge(measured, nodes, asked), measured)
    status = base.gather(comm, report.conclude() if comm.rank == 0 else None)[0]
    session.leave()
    return status


# --- the end where not all ranks can take part in it ------------------------------------------------------------------
def _unanswered(error: Unanswered, report: Report) -> list[Finding]:
    """By node, where they are known; of two that wait for each other their link is told."""
    nodes, stuck = report.nodes, {rank for pair in error.pairs for rank in pair}
    why = f"its measurement did not end within {error.seconds:g} s"
    found = world.severed([(nodes.of[a], nodes.of[b]) for a, b in error.pairs], nodes, why)
    ranks = [rank for rank in error.ranks if rank not in stuck]
    for name in dict.fromkeys(nodes.name(rank) for rank in ranks):
        theirs = [rank for rank in ranks if nodes.name(rank) == name]
        text = f"{Unanswered(theirs, error.seconds)} All must answer at {report.stage!r}"
        found.append(Finding(ERROR, text, (name,) * (len(nodes.names) > 1)))
    return found


def _late(report: Report) -> Finding:
    text = f"the examination must end within {report.options.limit_s:g} s; got no end of {report.stage!r} on "
    return Finding(ERROR, f"{text}{platform.node()}. Look there at processes that hang, and at the network")


def _end(report: Report, asked: Asked, findings: Sequence[Finding]) -> NoReturn:
    """Tells what is wrong and ends all ranks. The first one that can does so for all."""
    with _ending:
        if not report.speaks:
            time.sleep(AFTER_S + STEP_S * _number(asked.environ))
        report.speaks = True
        report.add(findings)
        _leave(report.conclude(cut_short=True))


def _leave(status: int) -> NoReturn:
    started = sys.modules.get("hpcdist.comm.mpi_rollcall")
    if started is not None:
        started.end(status)
    os._exit(status)
