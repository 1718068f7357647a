"""Messages and collectives: one contract for virtual and real ranks, and what only real ones have."""

from __future__ import annotations

import math
import time

import pytest
import torch

from comm.dtypes import DTYPES
from harness.cases import each
from hpcdist.collectives.calls import Collectives
from hpcdist.comm.communicator import ANY, TAG_LIMIT
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DeadlineError,
    MismatchError,
    UnknownNameError,
)

pytestmark = pytest.mark.sizes(1, 2, 3)


@pytest.fixture
def ranks(ranks):
    """Where ranks are virtual, and one, a rank without MPI runs the body, too."""

    def run(body, **simulation):
        if not ranks.real and ranks.size == 1:
            body(SingleRankCommunicator(deadline_s=0.05))
        return ranks(body, **simulation)

    run.real, run.size = ranks.real, ranks.size
    return run


MOVED = [*DTYPES, torch.bool, torch.float8_e4m3fn]


def numbered(count: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    return (torch.arange(start, start + count) % 13).to(dtype)


def any_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """NaNs with any payload, and zeros of both signs, among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype) if dtype != torch.bool else drawn > 99


def ring(comm) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# --- point to point ---------------------------------------------------------------------------------------------------
@each("dtype", MOVED)
def test_every_dtype_travels_bit_by_bit(ranks, dtype):
    def body(comm):
        after, before = ring(comm)
        for count in (0, 1, 7, 20_000):  # empty, short, and longer than MPI sends at once
            own, theirs = any_bits(count, dtype, comm.rank), any_bits(count, dtype, before)
            first, second = torch.zeros(2, count, dtype=dtype)
            comm.sendrecv(own, after, first, before, tag=count % 5)
            receiving = comm.irecv(second, before, tag=3)
            sending = comm.isend(own, after, tag=3)
            receiving.wait()
            sending.wait()
            assert receiving.done() and sending.done()
            for out in (first, second):
                assert torch.equal(out.view(torch.uint8), theirs.view(torch.uint8))

    ranks(body)


def test_messages_are_matched_by_source_and_tag_and_do_not_overtake(ranks):
    def body(comm):
        after, before = ring(comm)
        sends = [comm.isend(torch.tensor([i]), after, tag=i % 2) for i in range(6)]
        got = [torch.zeros(1, dtype=torch.int64) for _ in range(6)]
        for place, tag in enumerate((1, 1, 0, 1, 0, 0)):
            comm.irecv(got[place], before, tag).wait()
        for send in sends:
            send.wait()
        return [int(g) for g in got]

    assert ranks(body) == [[1, 3, 0, 5, 2, 4]] * ranks.size


def test_probe_tells_what_has_arrived_and_leaves_it_there(ranks):
    def body(comm):
        assert comm.probe(block=False) is None
        comm.barrier()
        sends = [comm.isend(torch.zeros(comm.rank + 1, dtype=torch.int16), 0, tag=7)]
        seen = set()
        for _ in range(comm.size if comm.rank == 0 else 0):
            envelope = comm.probe(ANY, 7)
            assert comm.probe(envelope.source, envelope.tag) == envelope
            out = torch.ones(envelope.n_bytes // 2, dtype=torch.int16)
            comm.irecv(out, envelope.source, envelope.tag).wait()
            seen.add((envelope.source, envelope.tag, len(out), int(out.sum())))
        sends[0].wait()
        sent, got = comm.isend(torch.tensor([comm.rank]), 0, tag=comm.rank), torch.zeros(comm.size, dtype=torch.int64)
        for tensor in got.split(1) if comm.rank == 0 else ():
            comm.irecv(tensor).wait()  # from any, with any tag
        sent.wait()
        return seen, sorted(got.tolist())

    seen, got = ranks(body)[0]
    assert seen == {(rank, 7, rank + 1, 0) for rank in range(ranks.size)} and got == list(range(ranks.size))


def test_a_message_longer_than_its_tensor_is_an_error(ranks):
    """Open MPI 5.0.11 does not notice it when it is asked whether the receive is done, if the message came later."""

    def body(comm):
        for asks in (False, True)[: 1 + ranks.real]:
            send = comm.isend(torch.zeros(9), comm.rank, tag=1)
            comm.probe(comm.rank, 1)
            late = comm.irecv(torch.zeros(4), comm.rank, 1)
            message = (
                r"(?s)irecv with rank \d .* failed .* longer than the tensor"
                if asks
                else ("engths and dtypes must agree|as long as the message")
            )
            with pytest.raises(CommunicationError, match=message):
                while asks and not late.done():
                    pass
                late.wait()
            send.wait()

    ranks(body)


@pytest.mark.mpi(min_size=2)
@each("count", [5, 6, 10, 23])
@pytest.mark.sizes(2, 3)
def test_counts_that_mpi_has_no_number_for_are_carried_by_a_type_or_in_parts(ranks, count):
    """MPI counts up to 2^31 - 1; here up to 5."""

    def body(comm):
        comm = comm.apart("rma")
        comm.staging.longest = 5
        after, before = ring(comm)
        own, theirs = numbered(count, torch.int16, comm.rank), numbered(count, torch.int16, before)
        out, late, first = (torch.zeros(count, dtype=torch.int16) for _ in range(3))
        comm.sendrecv(own, after, out, before)
        sending = comm.isend(own, after)
        assert comm.probe(before).n_bytes == own.nbytes
        comm.irecv(late, before).wait()
        sending.wait()
        first.copy_(own)
        comm.broadcast(first, 1)
        assert torch.equal(out, theirs) and torch.equal(late, theirs)
        assert torch.equal(first, numbered(count, torch.int16, 1))
        for dtype in (torch.float32, torch.float16):
            summed = numbered(count, dtype, comm.rank)
            comm.allreduce(summed)
            assert torch.equal(summed, sum(numbered(count, dtype, rank) for rank in range(comm.size)))
        assert comm.gather(bytes([comm.rank]) * (count + comm.rank)) == [
            bytes([rank]) * (count + rank) for rank in range(comm.size)
        ]
        of_all = torch.stack([numbered(count, torch.int16, rank) for rank in range(comm.size)])
        shown, swapped = torch.zeros_like(of_all).view(-1), torch.zeros_like(of_all).view(-1)
        comm.all_gather(shown, own)
        comm.all_to_all(swapped, own.repeat(comm.size))
        assert torch.equal(shown, of_all.view(-1)) and torch.equal(swapped, of_all.view(-1))
        around, received = comm.neighbourhood([before], [after]), torch.zeros_like(own)
        around.start(own, received).wait()
        assert torch.equal(received, theirs)
        around.close()
        window = comm.window(count, torch.int16)
        window.put(own, after)
        comm.barrier()
        window.get(out, after)
        assert torch.equal(window.local, theirs) and torch.equal(out, own)
        window.close()
        comm.close()

    ranks(body)


REFUSED = [
    (lambda c, t: c.sendrecv(t, 0, t, -1), r"source must be a rank in .* got -1"),
    (lambda c, t: c.sendrecv(t, 0, t, 0, -1), r"tag must be in .* got -1"),
    (lambda c, t: c.sendrecv(t, c.size, t, 0), r"dest must be a rank in 0\.\.\d; got \d"),
    (lambda c, t: c.isend(t, -2), r"dest must be a rank in .* got -2"),
    (lambda c, t: c.irecv(t, c.size), r"source must be a rank in"),
    (lambda c, t: c.probe(c.size, block=False), r"source must be a rank in"),
    (lambda c, t: c.broadcast(t, c.size), r"root must be a rank in"),
    (lambda c, t: c.isend(t, 0, TAG_LIMIT), r"tag must be in 0\.\.32767; got 32768"),
    (lambda c, t: c.irecv(t, 0, -2), r"tag must be in .* got -2"),
    (lambda c, t: c.probe(0, TAG_LIMIT, block=False), r"tag must be in"),
    (lambda c, t: c.isend(t.view(2, 3), 0), r"flat \(1 dimension\) and contiguous; got shape \(2, 3\)"),
    (lambda c, t: c.irecv(t[::2], 0), r"contiguous; got shape \(3,\), strides \(2,\)"),
    (lambda c, t: c.sendrecv(t[::2], 0, t, 0), r"flat .* contiguous"),
    (lambda c, t: c.allreduce(t[::2]), r"flat .* contiguous"),
    (lambda c, t: c.broadcast(t.view(2, 3)), r"flat .* contiguous"),
    (lambda c, t: c.allreduce(t > 0), r"dtype of a sum must be numeric; got torch.bool. Convert the tensor"),
    (lambda c, t: c.allreduce(t.to(torch.float8_e4m3fn)), r"dtype of a sum must be numeric; got torch.float8_e4m3fn"),
    (lambda c, t: c.split(-1), r"color must be an integer of at least 0, or None; got -1"),
    (lambda c, t: c.window(-1), r"count of a window must be at least 0; got -1"),
]


def test_bad_arguments_are_refused_before_anything_is_sent(ranks):
    def body(comm):
        for call, message in REFUSED:
            with pytest.raises(CommunicationError, match=message):
                call(comm, torch.zeros(6))
            assert comm.probe(block=False) is None, "something was sent"
            comm.barrier()

    ranks(body)


# --- collectives ------------------------------------------------------------------------------------------------------
@each("dtype", DTYPES)
def test_allreduce_sums(ranks, dtype):
    def body(comm):
        for count in (0, 1, 5, 3000):
            tensor = numbered(count, dtype, comm.rank).requires_grad_(dtype.is_floating_point)
            comm.allreduce(tensor)
            assert tensor.is_leaf, "it leaves the graph alone"
            tensor = tensor.detach()
            wide = torch.complex128 if dtype.is_complex else torch.float64
            expected = sum(numbered(count, dtype, r).to(wide) for r in range(comm.size))
            assert tensor.dtype == dtype and torch.equal(tensor.to(wide), expected)

    ranks(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_16_bit_floats_are_rounded_once(ranks):
    def body(comm):
        for dtype, one_ulp in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
            tensor = torch.tensor([1.0 if comm.rank == 0 else one_ulp / 2], dtype=dtype)
            comm.allreduce(tensor)
            exact = torch.tensor([1.0 + (comm.size - 1) * one_ulp / 2])
            assert torch.equal(tensor, exact.to(dtype)), "summed in 16 bits each half would be lost"

    ranks(body)


@pytest.mark.sizes(1, 2, 7)
def test_broadcast_from_every_root(ranks):
    def body(comm):
        for root in range(comm.size):
            tensor = torch.full((300,), comm.rank, dtype=torch.bfloat16)
            comm.broadcast(tensor, root)
            assert (tensor == root).all()
            if comm.rank == root:
                tensor.fill_(-1)  # too late to be seen by others

    ranks(body)


def test_split_orders_by_key_and_keeps_messages_apart(ranks):
    def body(comm):
        part = comm.split(comm.rank % 2, key=-comm.rank)
        members = [int(r) for r in part.gather(str(comm.rank).encode())]
        assert members == sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
        assert [comm.nodes[r] == comm.nodes[comm.rank] for r in members] == [
            n == part.nodes[part.rank] for n in part.nodes
        ]
        copy, out = comm.split(0), torch.zeros(1)
        after, before = ring(comm)
        first, second = comm.isend(torch.tensor([1.0]), after), copy.isend(torch.tensor([2.0]), after)
        copy.irecv(out, before).wait()
        assert out == 2
        comm.irecv(out, before).wait()
        assert out == 1
        first.wait()
        second.wait()
        copy.close()
        part.close()
        assert (comm.split(None) is None) and (comm.split(0 if comm.rank == 0 else None) is None) == (comm.rank > 0)

    ranks(body)


@pytest.mark.mpi
def test_a_thousand_splits_leave_nothing_behind(ranks):
    """MPI has some thousands of communicators at most; each must be freed."""

    def body(comm):
        for _ in range(300):
            part = comm.split(0)
            part.memory.node_mpi()
            part.close()

    ranks(body)


def test_no_call_of_a_closed_communicator_reaches_mpi_which_would_end_the_job(ranks):
    """Nor do collective calls, which are prepared in shared memory."""

    def body(comm):
        if isinstance(comm, SingleRankCommunicator):
            return  # it holds nothing that could be gone
        copy, calls, word = comm.split(0), Collectives(comm), torch.ones(1)
        calls.all_reduce(word), calls.all_reduce(word)
        copy.close(), calls.close()
        uses = (
            lambda: copy.allreduce(word), lambda: copy.allreduce(word.char()), lambda: copy.broadcast(word),
            lambda: copy.gather(1), lambda: copy.isend(word, 0), lambda: copy.irecv(word, 0),
            lambda: copy.probe(block=False), lambda: copy.sendrecv(word, 0, word, 0), lambda: copy.split(0),
            lambda: copy.window(1), lambda: copy.neighbourhood([], []), lambda: calls.all_reduce(word),
            lambda: calls.all_reduce(word, async_op=True), calls.barrier, copy.barrier,
        )  # fmt: skip
        for use in uses:
            with pytest.raises(CommunicationError, match="a communicator must not be used once it is closed"):
                use()
        assert word.item() == comm.size**2

    ranks(body)


@pytest.mark.mpi
def test_ranks_of_one_machine_share_a_node_unless_told_otherwise(ranks):
    def body(comm):
        assert comm.nodes == (0,) * comm.size
        apart = comm.apart("tcp")
        assert apart.nodes == tuple(range(comm.size)) and apart.memory.can_attach == (comm.size == 1)
        assert apart.memory.internode == (None if comm.size == 1 else "tcp") and comm.memory.internode is None
        part = apart.split(comm.rank % 2)
        assert part.nodes == tuple(range(part.size)) and part.memory.internode in ("tcp", None)
        part.close()
        apart.close()
        with pytest.raises(CommunicationError, match=r"nodes must have one index for each of the \d ranks; got 0"):
            comm.apart(nodes=())

    ranks(body)


@pytest.mark.mpi
def test_a_wait_for_a_message_that_never_comes_ends_at_the_deadline(ranks):
    def body(comm):
        comm.failures.deadline_s = 0.05
        with pytest.raises(DeadlineError, match=rf"rank {comm.rank}: a message from rank 0 on .* within 0.05 s"):
            comm.probe(0, 9)
        with pytest.raises(DeadlineError, match="a message from any rank"):
            comm.probe()
        comm.failures.deadline_s = 60.0

    ranks(body)


# --- accounts ---------------------------------------------------------------------------------------------------------
@pytest.mark.mpi
def test_traffic_counts_bytes_and_messages(ranks):
    def body(comm):
        after, before = ring(comm)
        counts = []

        def counted(call):
            start = comm.trace.traffic.copy()
            call()
            spent = comm.trace.traffic - start
            assert spent.communicating_s >= 0 and spent.waiting_s >= 0
            counts.append((spent.bytes_sent, spent.messages_sent))

        four, out = torch.zeros(4), torch.zeros(4)
        counted(lambda: comm.sendrecv(four, after, out, before))
        counted(lambda: (comm.isend(four, after), comm.probe(before), comm.irecv(out, before).wait()))
        counted(lambda: comm.allreduce(torch.zeros(10 * comm.size, dtype=torch.bfloat16)))
        counted(lambda: comm.broadcast(four, 0))
        counted(lambda: comm.gather(b"12345"))
        counted(comm.barrier)
        return counts

    for rank, counts in enumerate(ranks(body)):
        p = ranks.size
        root = (16, 1) if rank == 0 and p > 1 else (0, 0)
        ring_bytes = 2 * 40 * p * (p - 1) // p  # summed in float32
        assert counts == [(16, 1), (16, 1), (ring_bytes, 2 * (p - 1)), root, (5 * (p - 1), p - 1), (0, 0)]


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_waiting_is_told_from_communicating(ranks):
    def body(comm):
        arrived = comm.window(1, torch.int64)
        if comm.rank > 0:
            arrived.fetch_add(1, 0)
        else:
            arrived.wait(lambda count: count[0] == comm.size - 1)
            time.sleep(0.5)
        start = comm.trace.traffic.copy()
        comm.barrier()
        spent = comm.trace.traffic - start
        arrived.close()
        return spent.waiting_s, spent.communicating_s

    for waiting_s, communicating_s in ranks(body)[1:]:
        assert waiting_s > 0.1 and communicating_s == 0


# --- memory that is there already -------------------------------------------------------------------------------------
def test_attached_memory_is_read_and_written_in_place(ranks):
    def body(comm):
        if isinstance(comm, SingleRankCommunicator):
            return  # its memory is its windows'
        if not comm.memory.can_attach:
            pytest.skip("the kernel lets no process read another's memory")
        tensor = torch.full((5,), float(comm.rank), dtype=torch.bfloat16, requires_grad=True)
        window, out = comm.memory.attach(tensor), torch.zeros(2, dtype=torch.bfloat16)
        assert window.local is tensor
        after, _before = ring(comm)
        window.get(out, after, 3)
        assert (out == after).all()
        comm.barrier()
        window.put(out + 10, after, 1)
        comm.barrier()
        assert tensor.tolist() == [comm.rank, comm.rank + 10, comm.rank + 10, comm.rank, comm.rank] and tensor.is_leaf
        for offset in (4, -1):
            with pytest.raises(CommunicationError, match=rf"within rank 0's 5 elements; got \[{offset}, "):
                window.get(out, 0, offset)
        comm.barrier()
        window.close()

    ranks(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_tensors_attached_together_have_one_length(ranks):
    def body(comm):
        if comm.memory.can_attach:
            with pytest.raises(MismatchError, match=r"same number of bytes on every rank; got \[4, 8"):
                comm.memory.attach(torch.zeros(comm.rank + 1))
        comm.barrier()

    ranks(body)


def test_values_and_bytes_arrive_in_rank_order(ranks):
    def body(comm):
        values = comm.gather({"rank": comm.rank, "list": [1, 2.5, None, "é"], "best": math.inf})
        much = comm.gather(bytes([comm.rank]) * (100_000 * comm.rank))
        assert much == [bytes([rank]) * (100_000 * rank) for rank in range(comm.size)]
        given = list(values)
        values.clear()  # each rank has a list of its own
        return given, comm.gather(None if comm.rank else "only rank 0")

    for values, words in ranks(body):
        assert values == [{"rank": r, "list": [1, 2.5, None, "é"], "best": math.inf} for r in range(ranks.size)]
        assert words == ["only rank 0"] + [None] * (ranks.size - 1)


@pytest.mark.sizes(3)
def test_where_work_fails_all_fail_alike_and_the_first_is_named(ranks):
    """Also by an error that is made of more than a message: it is told as its kind."""

    def body(comm):
        assert comm.raise_on_all_ranks(lambda: comm.rank + 7) == comm.rank + 7

        def work():
            if comm.rank > 0:
                raise CheckpointError(f"the file of rank {comm.rank} is damaged")

        def refused():
            if comm.rank == 2:
                raise UnknownNameError("colour", "blau", ["blue"])

        with pytest.raises(CheckpointError) as caught:
            comm.raise_on_all_ranks(work)
        with pytest.raises(ConfigError, match=r"colour must be one of blue; got 'blau'") as kind:
            comm.raise_on_all_ranks(refused)
        return str(caught.value), str(kind.value).startswith("on rank 2: ")

    first, *others = ranks(body)
    assert first == ("on rank 1: the file of rank 1 is damaged", True)
    assert others == [(f"the file of rank {rank} is damaged", rank < 2) for rank in range(1, ranks.size)]


def test_a_part_inherits_settings_and_counts_its_own_traffic(ranks):
    def body(comm):
        comm.failures.deadline_s = 30.0
        comm.gather(bytes(5))
        part = comm.split(0)
        found = part.failures.deadline_s, not ranks.real or (part.memory.internode, part.staging.device_aware)
        sent = part.trace.traffic.bytes_sent
        part.close()
        return *found, ranks.real or sent  # real ranks have told each other their nodes by it

    assert set(ranks(body)) == {(30.0, not ranks.real or (None, False), ranks.real)}
