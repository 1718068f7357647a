"""This rank's blocking MPI calls, and how the job continues without ranks that died.

Each call records its peer and its deadline, for messages and for the watchdog. Deaths are survived by MPI's User-Level
Failure Mitigation (ULFM) of Open MPI 5 (`mpirun --with-ft ulfm`).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from mpi4py import MPI

from hpcdist.comm.capabilities import Failures
from hpcdist.comm.mpi.stuck import RankState, Wait
from hpcdist.comm.transfer import Traffic
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, DeadlineError, RankFailedError
from hpcdist.faults.reporter import SILENT_S

T = TypeVar("T")
GIVE_WAY_S = 2.0  # how long mpirun may take to end the other ranks of a job
LAST_S = SILENT_S + 5.0  # how long a rank that ends waits for the others that end
DETECTION_S = 30.0  # how much later than a broken connection MPI may report the death that caused it


def barrier(mpi: MPI.Intracomm) -> None:
    """Collective among the surviving ranks. Wait until all have called it; MPI's barrier may hang after a death."""
    while True:
        dead = mpi.Get_failed()
        mpi.Ack_failed(dead.size)
        dead.Free()
        try:
            mpi.Agree(1)
            return
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:  # otherwise: another rank has detected a further death
                raise


def failed_ranks(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of a communicator that MPI has detected as dead (with ULFM only)."""
    dead, everyone = mpi.Get_failed(), mpi.Get_group()
    ranks = MPI.Group.Translate_ranks(dead, None, everyone)
    dead.Free()
    everyone.Free()
    return tuple(sorted(ranks))


clock = time.perf_counter  # of real ranks
ALL_RANKS, ANY_RANK = -1, -2  # instead of the rank that a call waits for
EXIT, BROADCAST = "exit", "broadcast"
RECEIVES = ("irecv", "probe")
MESSAGE_S = 5.0  # after waiting this long, a message can't still be in flight: lost packets have been sent again
GENERATION = 2**32  # offset between the call counts before and after a death
MAX_NAMED = 16  # number of ranks that a message names individually
_DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


@dataclass(slots=True)
class Call:
    """The call that a rank is blocked in.

    Attributes:
        what: name of the call.
        peer: a rank of the communicator, ALL_RANKS or ANY_RANK.
        since: start time.
        deadline_s: infinite if the call itself checks the deadline.
        by: for a wait for a change in memory, the ranks that can cause it; empty: unknown. For a call of ALL_RANKS, the
            ranks that must call it; empty: all ranks of the communicator.
        ready: for a wait for a change in memory, whether it has happened.
    """

    what: str
    peer: int
    since: float
    deadline_s: float
    by: Collection[int] = ()
    ready: Callable[[], bool] = bool


class RankLocation(NamedTuple):
    """A description of where a rank is, and whether the rank itself replied."""

    text: str
    replied: bool
    state: RankState | None = None


class Calls:
    """Runs the MPI calls of one communicator, and records the call that this rank is blocked in.

    Args:
        failures: the communicator's ranks, and its deadline.
        name: name of the communicator in messages.
        world_ranks: the ranks' numbers in the job.
        traffic: counts the transfers.
    """

    def __init__(self, failures: FaultTolerance, name: str, world_ranks: Sequence[int], traffic: Traffic):
        self.failures, self.name = failures, name
        self.rank = failures.all.Get_rank()
        self.traffic, self.world_ranks = traffic, world_ranks
        self.current: Call | None = None  # the call that this rank is blocked in
        self.count = 0  # collective calls started; ranks in step have equal counts
        self.inside = 0  # nesting depth of collective calls that consist of messages
        self.sending = 0  # sends in flight
        self.abandoned: list[Any] = []  # requests in flight that the caller has dropped
        self._memory = threading.Lock()  # held while another thread reads memory that this rank waits on

    def __enter__(self) -> None:
        """Enter a collective call that consists of messages."""
        self.count += 1
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    @contextmanager
    def blocked(self, what: str, peer: int, deadline_s: float, by: Collection[int] = ()) -> Iterator[None]:
        """Context of a blocking call: records it for the watchdog."""
        outer, self.current = self.current, Call(what, peer, clock(), deadline_s, by)
        try:
            yield
        finally:
            self.current = outer

    def communicate(self, what: str, peer: int, function: Callable, *args: Any) -> None:
        """Run an MPI call that moves data; count its time as communicating."""
        start = clock()
        outer, self.current = self.current, Call(what, peer, start, self.failures.deadline_s)
        try:
            function(*args)
        except MPI.Exception as error:
            raise self.failure(what, peer, error) from error
        finally:
            self.current = outer
            self.traffic.communicating_s += clock() - start

    def attempt(self, what: str, peer: int, function: Callable, *args: Any) -> Any:
        """Start a non-blocking MPI call; return its result."""
        try:
            return function(*args)
        except MPI.Exception as error:
            raise self.failure(what, peer, error) from error

    def await_until(
        self, ready: Callable[[], bool], call: str, what: str, peer: int, deadline_s: float | None = None,
        sleep: Callable[[float], bool] | None = None, by: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Block until `ready()` is true; count the time as waiting.

        Args:
            call: name of the waiting call, for messages of other ranks.
            what: description of the awaited event.
            peer: the rank that causes it, ALL_RANKS or ANY_RANK.
            deadline_s: by default the communicator's; then the error also says where all ranks are.
            sleep: see `wait_until`.
            by: the ranks of which one must act for `ready()` to become true; the watchdog's thread then calls it, too.
        """
        limit_s = self.failures.deadline_s if deadline_s is None else deadline_s
        outer, self.current = self.current, Call(call, peer, clock(), math.inf, by, ready)
        try:
            self.traffic.waiting_s += wait_until(ready, limit_s, lambda: f"rank {self.rank}: {what}", sleep=sleep)
        except DeadlineError as error:
            if deadline_s is not None:
                raise
            raise DeadlineError(f"{error}{self.failures.locate_ranks()}") from None
        finally:
            with self._memory:
                self.current = outer

    def waits(self, patience_s: float) -> Wait | None:
        """Return the call that blocks this rank for at least `patience_s`; None if it is unknown whom it waits for.

        Any thread may call this.
        """
        count, call = self.count, self.current  # in this order: a call that starts in between has a higher number
        if call is None or call.what == EXIT or (call.by and call.peer == ALL_RANKS):
            return None  # in a call of only some ranks the call counts don't show who is late
        needs_all = self.inside > 0 or call.peer == ALL_RANKS or call.what == BROADCAST
        by = () if needs_all else call.by or ((call.peer,) if call.peer >= 0 and call.what in RECEIVES else ())
        if not needs_all and not by:
            return None  # a send may be in flight to memory that the other rank has already provided
        waited_s = clock() - call.since
        if waited_s < (patience_s if needs_all or call.by else max(patience_s, MESSAGE_S)):
            return None
        if call.by and not needs_all:
            with self._memory:  # the memory exists as long as this rank waits
                if self.current is not call or call.ready():
                    return None
        # Messages of a collective call differ by rank, and need a common name to show that the ranks are in one call.
        what = "all-reduce" if self.inside and call.peer != ALL_RANKS else call.what
        ranks = None if needs_all else tuple(self.world_ranks[rank] for rank in by)
        whom = self.peer_name(call.peer) if ranks is None else " or ".join(f"rank {rank}" for rank in ranks[:MAX_NAMED])
        whom += f" or {len(by) - MAX_NAMED} more" * (len(by) > MAX_NAMED)
        return Wait(self.name, what, count, ranks, f"for {whom} {self.describe(call)}", call.since, waited_s)

    # --- messages -------------------------------------------------------------------------------------------------
    def failure(self, what: str, peer: int, error: MPI.Exception) -> CommunicationError:
        """Convert an MPI exception to a CommunicationError."""
        died = self.failures.tolerant and error.Get_error_class() in _DEATHS
        return (RankFailedError if died else CommunicationError)(self._explain(what, peer, error))

    def _explain(self, what: str, peer: int, error: MPI.Exception) -> str:
        """Return the message for an MPI error: call, peer, reason, and what to do."""
        whom = "" if peer < 0 else f" with rank {peer}"
        hint = ""
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            hint = " A message was longer than the tensor it was received into: lengths and dtypes must agree."
        if dead := self.failures.failed():
            ranks = f"ranks {', '.join(map(str, dead))} have" if len(dead) > 1 else f"rank {dead[0]} has"
            hint = f" {ranks} died; this call needs all of them. Resume from the last checkpoint."
        return f"{what}{whom} on {self.name} failed on rank {self.rank}: {error.Get_error_string()}.{hint}"

    def describe(self, call: Call) -> str:
        """Describe a call by its name, communicator and count."""
        return f"in {call.what} on {self.name} (call {self.count % GENERATION})"

    def peer_name(self, peer: int) -> str:
        """Name the rank that a call waits for, by its number in the job."""
        if peer < 0:
            return "any rank" if peer == ANY_RANK else "every rank"
        return f"rank {self.world_ranks[peer]}"


def world_ranks(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Return the numbers of a communicator's ranks in MPI's world."""
    group, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    return tuple(ranks)


class FaultTolerance(Failures):
    """Tracks the surviving ranks of a communicator; after a death ranks agree on it and repeat the interrupted call.

    A transfer with a dead rank raises RankFailedError. A collective raises it on some ranks only; others wait for those
    ranks (so a rank that fails revokes the communicator of the surviving ranks, which ends these waits) or get
    incomplete data without an error, as from Open MPI 5.0's MPI_Allgatherv. So a result is valid only after all ranks
    have agreed that none has died. Messages between the surviving ranks, and windows, continue to work on the original
    communicator; only collectives need a communicator of just the surviving ranks.

    Args:
        mpi: MPI's communicator of all ranks.
        tolerant: the MPI library survives and reports the death of a rank.
        deadline_s: seconds after which a blocking call ends the run with a message.
        locate: returns where each rank of the job is, by its number in the job; empty if unknown.
        name, world_ranks, traffic: as for `Calls`.

    Reference: Wesley Bland et al., "Post-failure recovery of MPI communication capability: design and rationale", 2013.
    """

    def __init__(
        self, mpi: MPI.Intracomm, tolerant: bool, deadline_s: float, locate: Callable[[], Mapping[int, RankLocation]],
        name: str, world_ranks: Sequence[int], traffic: Traffic,
    ):  # fmt: skip
        super().__init__(mpi.Get_size(), deadline_s)
        self.all, self.tolerant = mpi, tolerant
        # For collectives; messages outlive its revocation.
        self.surviving: MPI.Intracomm = mpi.Dup() if tolerant else mpi
        self.calls = self.collective = Calls(self, name, world_ranks, traffic)
        self._locate = locate

    def failed(self) -> tuple[int, ...]:
        if not self.tolerant:
            return ()
        with suppress(MPI.Exception):  # making progress detects deaths, and may raise
            self.all.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return failed_ranks(self.all)

    def has_died(self, rank: int) -> bool:
        """Return whether `rank` has died, after its connection broke; MPI may report a death a moment later."""
        with suppress(DeadlineError):
            wait_until(lambda: rank in self.failed(), DETECTION_S if self.tolerant else 0.0, str)
            return True
        return False

    def locate_ranks(self) -> str:
        locations = self._locate()
        if not locations:
            return ""
        lines = []
        for rank, number in enumerate(self.calls.world_ranks):
            as_launched = "" if rank == number else f" (rank {number} of the job)"
            lines.append((locations[number].replied, f"  rank {rank}{as_launched}: {locations[number].text}"))
        lines.sort(key=lambda line: line[0])  # ranks without a reply first
        listed = [text for _, text in lines[:MAX_NAMED]]
        listed += [f"  and {len(lines) - MAX_NAMED} more"] * (len(lines) > MAX_NAMED)
        return "\n".join(["", "Where the ranks are:", *listed])

    def shrink(self) -> None:
        if self.tolerant:
            self._agree(True)

    def abandon(self) -> None:
        """Revoke this communicator: other ranks' calls that wait for this rank fail.

        Only if the job tolerates deaths; otherwise a death ends the job.
        """
        for mpi in (self.all, self.surviving):
            mpi.Revoke()

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        """See `Failures`. After each attempt all survivors must reach `_agree`: so a rank that failed revokes first."""
        if not self.tolerant:
            return action()
        self.shrink()
        while True:
            alive_before, error = self.alive, None
            try:
                result = action()
            except Exception as failure:  # any type: incomplete data may have caused it
                error = failure
                for failures in (self, *others):
                    if isinstance(failures, FaultTolerance):
                        failures.surviving.Revoke()
            done = self._agree(error is None)
            if self.alive == alive_before:
                break
        if not done:
            raise error or CommunicationError(
                f"a call of all ranks on {self.calls.name} succeeded on rank {self.calls.rank} and failed on "
                "another, though none has died. That rank's message says why."
            )
        return result

    def end_alone(self, status: int) -> None:
        """End only this process if another rank has died: the surviving ranks continue.

        Return if none has died. Lower ranks then had time to end the job, and MPI to detect a death: Open MPI's mpirun
        hangs, or returns the exit status 0, if several ranks abort a job, or if a rank aborts after another has died.

        Others may wait for this rank, and Open MPI reports a death by a signal only, no exit with a status. But where
        all ranks are killed mpirun returns 0. So the last rank exits with `status`; the highest waits to be the last.
        """
        rank, size = self.calls.rank, self.all.Get_size()
        with suppress(DeadlineError):
            wait_until(lambda: bool(self.failed()), GIVE_WAY_S * min(rank, 3), str)
            sys.stdout.flush()
            sys.stderr.flush()
            if set(range(rank + 1, size)) <= set(self.failed()):
                with suppress(DeadlineError):
                    wait_until(lambda: len(self.failed()) == size - 1, LAST_S, str)
                    os._exit(status)
            os.kill(os.getpid(), signal.SIGKILL)

    def _agree(self, done: bool) -> bool:
        """Collective among the surviving ranks. Return whether all are `done`; shrink the group to these ranks."""
        calls = self.calls
        calls.count += 1
        with calls.blocked("shrink", ALL_RANKS, self.deadline_s):
            while True:
                dead = self.failed()
                self.all.Ack_failed(len(dead))
                intact = not set(dead) & set(self.alive) and not self.surviving.Is_revoked()
                try:
                    flags = self.all.Agree(done | intact << 1)  # two flags; bitwise and over all ranks
                    break
                except MPI.Exception as error:  # another rank has detected a further death
                    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                        raise calls.failure("shrink", ALL_RANKS, error) from error
            if not flags & 2:
                alive_before, self.surviving = self.alive, cast(MPI.Intracomm, self.all.Shrink())
                barrier(self.all)  # Open MPI 5.0 crashes if a communicator is revoked while another rank creates it
                group = self.surviving.Get_group()
                self.alive = tuple(MPI.Group.Translate_ranks(group, None, self.all.Get_group()))
                self.lost += tuple(rank for rank in alive_before if rank not in self.alive)
                calls.count = (calls.count // GENERATION + 1) * GENERATION  # ranks may have failed in different calls
        return bool(flags & 1)
