"""This rank's blocking calls of MPI, and going on without ranks that died.

Each call leaves a note of its peer and its deadline, for messages and for the watchdog. Deaths are survived by
User-Level Failure Mitigation, as Open MPI 5 has it (`mpirun --with-ft ulfm`).
"""

from __future__ import annotations

import math
import os
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

T = TypeVar("T")
GIVE_WAY_S = 2.0  # how long mpirun may take to end the other ranks of a job
NEWS_S = 30.0  # how much later than a broken connection MPI may tell of the death behind it


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
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:  # somebody knew of another death
                raise


def failed_ranks(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of a communicator that MPI knows to have died, where it survives that."""
    dead, everyone = mpi.Get_failed(), mpi.Get_group()
    ranks = MPI.Group.Translate_ranks(dead, None, everyone)
    dead.Free()
    everyone.Free()
    return tuple(sorted(ranks))


clock = time.perf_counter  # of real ranks
EVERYONE, ANYONE = -1, -2  # in place of the rank that a call waits for
EXIT, BROADCAST = "exit", "broadcast"
RECEIVES = ("irecv", "probe")
MESSAGE_S = 5.0  # a message that is awaited for so long is no longer on its way: even one that was lost is sent again
GENERATION = 2**32  # between the counts of calls before a death and after
SHOWN = 16  # ranks that a message names one by one
_DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


@dataclass(slots=True)
class Call:
    """The call that a rank is blocked in.

    `peer` is a rank of the communicator, EVERYONE or ANYONE; `deadline_s` is infinite where the call itself minds it.
    A wait for a change in memory ends when `ready()` is true; only the ranks `by` can make it so (none: it isn't said).
    Where the peer is EVERYONE all of them must come (none: all ranks of the communicator).
    """

    what: str
    peer: int
    since: float
    deadline_s: float
    by: Collection[int] = ()
    ready: Callable[[], bool] = bool


class Place(NamedTuple):
    """A description of where a rank is, and whether that is the rank's own answer."""

    text: str
    answers: bool
    state: RankState | None = None


class Calls:
    """Make the calls of MPI for one communicator, and note the one that this rank is blocked in.

    Args:
        failures: the communicator's ranks, and its deadline.
        name: how messages call the communicator.
        world_ranks: the ranks' numbers in the job.
        traffic: the account of the calls.
    """

    def __init__(self, failures: FaultTolerance, name: str, world_ranks: Sequence[int], traffic: Traffic):
        self.failures, self.name = failures, name
        self.rank = failures.all.Get_rank()
        self.traffic, self.world_ranks = traffic, world_ranks
        self.current: Call | None = None  # what this rank is blocked in
        self.count = 0  # collective calls begun; ranks in step have equal counts
        self.inside = 0  # collective calls that are made of messages, and under way
        self.sending = 0  # messages begun and not completed
        self._memory = threading.Lock()  # held while another thread looks at memory that this rank waits on

    def __enter__(self) -> None:
        """Begin a collective call that is made of messages."""
        self.count += 1
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    @contextmanager
    def blocked(self, what: str, peer: int, deadline_s: float, by: Collection[int] = ()) -> Iterator[None]:
        """Note, inside the context, the call that this rank is blocked in, for the watchdog."""
        outer, self.current = self.current, Call(what, peer, clock(), deadline_s, by)
        try:
            yield
        finally:
            self.current = outer

    def communicate(self, what: str, peer: int, function: Callable, *args: Any) -> None:
        """Make a call that moves data; its time counts as communicating."""
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
        """Make a call that returns at once; return its result."""
        try:
            return function(*args)
        except MPI.Exception as error:
            raise self.failure(what, peer, error) from error

    def await_until(
        self,
        ready: Callable[[], bool],
        call: str,
        what: str,
        peer: int,
        deadline_s: float | None = None,
        sleep: Callable[[float], bool] | None = None,
        by: Collection[int] = (),
    ) -> None:
        """Block until `ready()` is true; the time counts as waiting.

        Args:
            call: the name of the call that waits, for other ranks' messages.
            what: a description of the awaited event.
            deadline_s: by default the communicator's, past which the error says where all ranks are.
            sleep: see `wait_until`.
            by: the ranks of which one must act for `ready()` to become true; the watchdog's thread then calls it too.
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
        """Return the call that this rank is blocked in, for so long at least, if it needs certain ranks to come.

        Any thread may ask.
        """
        count, call = self.count, self.current  # in this order: a call that begins meanwhile has a higher number
        if call is None or call.what == EXIT or (call.by and call.peer == EVERYONE):
            return None  # of some ranks alone no count of calls tells who is late
        everyone = self.inside > 0 or call.peer == EVERYONE or call.what == BROADCAST
        by = () if everyone else call.by or ((call.peer,) if call.peer >= 0 and call.what in RECEIVES else ())
        if not everyone and not by:
            return None  # what is sent may be on its way into memory that the other rank has offered
        waited_s = clock() - call.since
        if waited_s < (patience_s if everyone or call.by else max(patience_s, MESSAGE_S)):
            return None
        if call.by and not everyone:
            with self._memory:  # which is there as long as this rank waits
                if self.current is not call or call.ready():
                    return None
        what = "all-reduce" if self.inside and call.peer != EVERYONE else call.what
        ranks = None if everyone else tuple(self.world_ranks[rank] for rank in by)
        whom = self.peer_name(call.peer) if ranks is None else " or ".join(f"rank {rank}" for rank in ranks[:SHOWN])
        whom += f" or {len(by) - SHOWN} more" * (len(by) > SHOWN)
        return Wait(self.name, what, count, ranks, f"for {whom} {self.place(call)}", call.since, waited_s)

    # --- messages -------------------------------------------------------------------------------------------------
    def failure(self, what: str, peer: int, error: MPI.Exception) -> CommunicationError:
        """Convert an error of MPI to one of the seam's."""
        died = self.failures.tolerant and error.Get_error_class() in _DEATHS
        return (RankFailedError if died else CommunicationError)(self._explain(what, peer, error))

    def _explain(self, what: str, peer: int, error: MPI.Exception) -> str:
        whom = "" if peer < 0 else f" with rank {peer}"
        hint = ""
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            hint = " A message was longer than the tensor it was received into: lengths and dtypes must agree."
        if dead := self.failures.failed():
            ranks = f"ranks {', '.join(map(str, dead))} have" if len(dead) > 1 else f"rank {dead[0]} has"
            hint = f" {ranks} died; this call needs all of them. Resume from the last checkpoint."
        return f"{what}{whom} on {self.name} failed on rank {self.rank}: {error.Get_error_string()}.{hint}"

    def place(self, call: Call) -> str:
        """Name a call with its communicator and its count."""
        return f"in {call.what} on {self.name} (call {self.count % GENERATION})"

    def peer_name(self, peer: int) -> str:
        """Name the rank that a call waits for, as the launcher numbers ranks."""
        if peer < 0:
            return "any rank" if peer == ANYONE else "every rank"
        return f"rank {self.world_ranks[peer]}"


def world_ranks(mpi: MPI.Intracomm) -> tuple[int, ...]:
    """Return the numbers that the ranks of a communicator have in MPI's world."""
    group, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    return tuple(ranks)


class FaultTolerance(Failures):
    """The ranks of a communicator that live, and what is done where one dies: agreement, and repetition of calls.

    A transfer with a rank that has died raises RankFailedError. A collective does so on some ranks only, and others
    wait for these (whoever fails revokes the communicator of the surviving ranks, so that all leave) or get what is
    incomplete without an error, as from Open MPI 5.0's MPI_Allgatherv. So nothing counts before all agree that none has
    died. Messages between the surviving ranks, and windows, work on the communicator that a rank died in; only
    collectives need one of the surviving ranks alone.

    Args:
        mpi: MPI's communicator of all ranks.
        tolerant: the library survives a rank that dies, and tells.
        deadline_s: seconds after which a blocking call ends the run with a message.
        places: tells where each rank of the job is, by its number there; nothing where nobody can.
        name, world_ranks, traffic: those of `Calls`.

    Reference: Wesley Bland et al., "Post-failure recovery of MPI communication capability: design and rationale", 2013.
    """

    def __init__(
        self,
        mpi: MPI.Intracomm,
        tolerant: bool,
        deadline_s: float,
        places: Callable[[], Mapping[int, Place]],
        name: str,
        world_ranks: Sequence[int],
        traffic: Traffic,
    ):
        super().__init__(mpi.Get_size(), deadline_s)
        self.all, self.tolerant = mpi, tolerant
        # For collectives; messages outlive its revocation.
        self.surviving: MPI.Intracomm = mpi.Dup() if tolerant else mpi
        self.calls = self.collective = Calls(self, name, world_ranks, traffic)
        self._places = places

    def failed(self) -> tuple[int, ...]:
        if not self.tolerant:
            return ()
        with suppress(MPI.Exception):  # it notices a death by making progress, and may complain of it
            self.all.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return failed_ranks(self.all)

    def has_died(self, rank: int) -> bool:
        """Tell whether a connection to `rank` broke because it died, which MPI may report a moment later."""
        with suppress(DeadlineError):
            wait_until(lambda: rank in self.failed(), NEWS_S if self.tolerant else 0.0, str)
            return True
        return False

    def locate_ranks(self) -> str:
        places = self._places()
        if not places:
            return ""
        lines = []
        for rank, number in enumerate(self.calls.world_ranks):
            as_launched = "" if rank == number else f" (rank {number} of the job)"
            lines.append((places[number].answers, f"  rank {rank}{as_launched}: {places[number].text}"))
        lines.sort(key=lambda line: line[0])  # first those that say nothing
        listed = [text for _, text in lines[:SHOWN]]
        listed += [f"  and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
        return "\n".join(["", "Where the ranks are:", *listed])

    def shrink(self) -> None:
        if self.tolerant:
            self._agree(True)

    def abandon(self) -> None:
        """Let other ranks' calls of this communicator fail, which wait for this rank: it makes none any more.

        Only where ranks outlive others: else a death ends the job.
        """
        for mpi in (self.all, self.surviving):
            mpi.Revoke()

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        if not self.tolerant:
            return action()
        self.shrink()
        while True:
            before, error = self.alive, None
            try:
                result = action()
            except Exception as failure:  # whatever it is: incomplete data may have been used
                error = failure
                for failures in (self, *others):
                    if isinstance(failures, FaultTolerance):
                        failures.surviving.Revoke()
            done = self._agree(error is None)
            if self.alive == before:
                break
        if not done:
            raise error or CommunicationError(
                f"a call of all ranks on {self.calls.name} succeeded on rank {self.calls.rank} and failed on "
                "another, though none has died. That rank's message says why."
            )
        return result

    def end_alone(self, status: int) -> None:
        """End this rank alone where another one has died; ranks that fail alike do the same, others go on.

        Where none has, leave it to lower ranks for a while to end the job, and to news of a death to come. For Open
        MPI's mpirun hangs, or has the exit status 0, where several ranks end a job at once, or one in which another has
        died.
        """
        with suppress(DeadlineError):
            wait_until(lambda: bool(self.failed()), GIVE_WAY_S * min(self.calls.rank, 3), str)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _agree(self, done: bool) -> bool:
        """Collective among the surviving ranks. Return whether all are `done`; shrink the group to these ranks."""
        calls = self.calls
        calls.count += 1
        with calls.blocked("shrink", EVERYONE, self.deadline_s):
            while True:
                dead = self.failed()
                self.all.Ack_failed(len(dead))
                whole = not set(dead) & set(self.alive) and not self.surviving.Is_revoked()
                try:
                    agreed = self.all.Agree(done | whole << 1)  # of each bit whether all ranks have it
                    break
                except MPI.Exception as error:  # somebody knew of another death
                    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                        raise calls.failure("shrink", EVERYONE, error) from error
            if not agreed & 2:
                before, self.surviving = self.alive, cast(MPI.Intracomm, self.all.Shrink())
                barrier(
                    self.all
                )  # Open MPI 5.0 crashes where a communicator is revoked that another rank is still making
                group = self.surviving.Get_group()
                self.alive = tuple(MPI.Group.Translate_ranks(group, None, self.all.Get_group()))
                self.lost += tuple(rank for rank in before if rank not in self.alive)
                calls.count = (calls.count // GENERATION + 1) * GENERATION  # ranks may have failed in different ones
        return bool(agreed & 1)
