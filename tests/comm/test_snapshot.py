"""Consistent one-sided reads, under writers that publish all the time."""

from __future__ import annotations

import time

import pytest
import torch

from harness.cases import each
from hpcdist.comm.snapshot import Publication
from hpcdist.comm.virtual import Constant, Exponential, Network, run_virtual
from hpcdist.errors import DeadlineError, RankFailedError

NETWORK = Network(1e-3, 4e3)  # a read of 64 bytes takes some 16 ms: writers overtake it
WORDS = 8


def like() -> list[torch.Tensor]:
    return [torch.zeros(WORDS), torch.zeros(2 * WORDS, dtype=torch.bfloat16), torch.zeros(0)]


def filled(clock: int) -> list[torch.Tensor]:
    """Every element tells the clock."""
    return [torch.full_like(t, clock % 100) for t in like()]


def whole(tensors: list[torch.Tensor]) -> bool:
    return all((tensor == tensors[0][0]).all() for tensor in tensors)


def read_torn(published: Publication, out: list[torch.Tensor], rank: int) -> int:
    return published.use_torn(lambda tensors: [own.copy_(theirs) for own, theirs in zip(out, tensors)], out, rank)


def publish_and_read(comm, read: str, times: int = 30) -> list[tuple[int, bool, int]]:
    """Rank 0 publishes at every step, the others read: (the clock, whether all is of one publication, of which)."""
    published, found = Publication(comm, like(), publishes=comm.rank == 0), []
    for clock in range(1, times):
        comm.compute()
        if comm.rank == 0:
            published.publish(filled(clock), clock)
        else:
            out = like()
            told = published.read(out, 0) if read == "whole" else read_torn(published, out, 0)
            found.append((told, whole(out), int(out[0][0])))
    comm.barrier()
    retries = published.retries
    published.close()
    return [*found, (-2, True, retries)]


@each("size", [2, 4])
@each("seed", range(2))
def test_a_torn_read_happens_and_a_whole_read_never_mixes(size, seed):
    options = {"seed": seed, "network": NETWORK, "compute": Exponential(0.02)}
    torn = run_virtual(lambda comm: publish_and_read(comm, "torn"), size, **options)
    assert any(not one for rank in torn[1:] for _, one, _ in rank), "no read was torn: the next check proves nothing"
    read = run_virtual(lambda comm: publish_and_read(comm, "whole"), size, **options)
    for *found, _ in read[1:]:
        assert all(one and clock % 100 == value for clock, one, value in found)
        clocks = [clock for clock, _, _ in found]
        assert clocks == sorted(clocks), "publications were seen out of order"
    assert any(retries > 0 for *_, (_, _, retries) in read[1:]), "no read was ever overtaken"


@pytest.mark.parametrize("way", ["node", "tcp", "rma"])
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_whole_reads_while_the_writer_never_stops(ranks, way):
    """Longer tensors, so that a read takes about as long as a publication."""

    def body(comm):
        place = comm if way == "node" else comm.apart(way)
        tensors = [torch.zeros(50_000), torch.zeros(20_000, dtype=torch.bfloat16)]
        published = Publication(place, tensors, publishes=comm.rank == 0)
        done, clock, seen = comm.window(1, torch.int64), 0, []
        until = time.perf_counter() + 0.5
        while comm.rank == 0 and int(done.local[0]) < comm.size - 1 and time.perf_counter() < until + 20:
            clock += 1
            for tensor in tensors:
                tensor.fill_(clock % 100)
            published.publish(tensors, clock)
            if way != "node":  # where a read takes longer than two publications it is always overtaken
                time.sleep(0.1)
        while comm.rank > 0 and time.perf_counter() < until + 20 * (len(set(seen)) < 2):
            seen.append(published.read(tensors, 0))
            assert whole(tensors) and tensors[0][0] == seen[-1] % 100
        if comm.rank > 0:
            done.fetch_add(1, 0)
        comm.barrier()
        published.close()
        done.close()
        if place is not comm:
            place.close()
        return seen

    for seen in ranks(body)[1:]:
        assert seen == sorted(seen) and len(set(seen)) > 1


@pytest.mark.sizes(1, 2, 3)
def test_every_rank_publishes_and_reads_its_own_too(ranks):
    def body(comm):
        published, out = Publication(comm, like(), publishes=True), like()
        for clock in (0, 7, 8):
            published.publish(filled(comm.rank + clock), clock)
            assert all(map(torch.equal, published.local(), filled(comm.rank + clock)))
            comm.barrier()
            for peer in range(comm.size):
                assert published.read(out, peer) == clock
                assert whole(out) and out[0][0] == peer + clock
                assert read_torn(published, out, peer) == 1 + (0, 7, 8).index(clock)
            comm.barrier()
        published.close()

    ranks(body)


@pytest.mark.sizes(2)
def test_a_reader_waits_for_the_first_publication(ranks):
    def body(comm):
        published, out = Publication(comm, like(), publishes=comm.rank == 0), like()
        if comm.rank == 0:
            comm.compute()
            published.publish(filled(5), 5)
        clock = published.read(out, 0)
        comm.barrier()
        published.close()
        return clock, published.retries

    found = ranks(body, compute=Constant(1.0))
    assert [clock for clock, _ in found] == [5] * len(found)


def test_a_reader_that_is_always_overtaken_ends_at_the_deadline():
    def body(comm):
        published = Publication(comm, like(), publishes=comm.rank == 0)
        if comm.rank == 0:
            for clock in range(1000):
                published.publish(filled(clock), clock)
                comm.compute()
        else:
            comm.failures.deadline_s = 0.5
            with pytest.raises(DeadlineError, match=r"rank 1: a consistent read of rank 0's .* 0.5 s and \d+ attempts"):
                published.read(like(), 0)
            assert published.retries > 3

    run_virtual(body, 2, network=NETWORK, compute=Constant(1e-3))


# --- readings in place ------------------------------------------------------------------------------------------------
@each("seed", range(2))
def test_what_was_used_and_overtaken_is_undone_and_used_again(seed):
    def body(comm):
        published = Publication(comm, like(), publishes=comm.rank == 0)
        total, undone, found = [torch.zeros_like(t) for t in like()], [], []

        def add(tensors):
            for own, theirs in zip(total, tensors, strict=True):
                own.add_(theirs)

        def undo():
            undone.append(whole(total))
            for own in total:
                own.zero_()

        for clock in range(1, 30):
            comm.compute()
            if comm.rank == 0:
                published.publish(filled(clock), clock)
            else:
                told = published.use(add, like(), 0, undo)
                found.append((told, whole(total), int(total[0][0])))
                for own in total:
                    own.zero_()
        comm.barrier()
        retries = published.retries
        published.close()
        return found, undone, retries

    options = {"seed": seed, "network": NETWORK, "compute": Exponential(0.02)}
    for found, undone, retries in run_virtual(body, 3, **options)[1:]:
        assert all(one and clock % 100 == value for clock, one, value in found)
        assert len(undone) == retries > 0, "no reading was overtaken: this proves nothing"


def test_a_reading_that_fails_is_undone():
    def body(comm):
        published, undone = Publication(comm, like(), publishes=comm.rank == 0), []
        if comm.rank == 1:
            comm.failures.deadline_s = 0.5
            with pytest.raises(DeadlineError, match="the first publication of rank 0"):
                published.use(lambda tensors: None, like(), 0, lambda: undone.append(True))

            def fail(tensors):
                raise RankFailedError("rank 0 has died.")

            with pytest.raises(RankFailedError):
                published.use(fail, like(), 0, lambda: undone.append(True))
        return len(undone)

    assert run_virtual(body, 2, network=NETWORK)[1] == 2
