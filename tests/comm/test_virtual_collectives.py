"""Collective calls of virtual ranks: results, order of summation, sub-communicators, calls that don't match."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.comm.virtual import Jitter, Network, run_virtual
from hpcdist.errors import MismatchError

SIZES = (1, 2, 3, 4, 7, 16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)


def values(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 10.0**rank).to(dtype)


# --- allreduce --------------------------------------------------------------------------------------------------------
@each("dtype", (*FLOATS, torch.complex64))
@each("size", (*SIZES, 128))
def test_allreduce_adds_in_rank_order_to_the_bit(dtype, size):
    size = min(size, {torch.float16: 4, torch.float64: 128}.get(dtype, 16))  # more would overflow
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    expected = values(dtype, 50, 0).to(wide)
    for rank in range(1, size):
        expected = expected + values(dtype, 50, rank)
    expected = expected.to(dtype)

    def body(comm):
        comm.compute()  # they arrive in another order
        tensor = values(dtype, 50, comm.rank)
        comm.allreduce(tensor)
        return tensor

    for result in run_virtual(body, size, network=Network(1e-6, 1e9), compute=Jitter(1.0, 1.0)):
        assert result.dtype == dtype and torch.equal(result, expected)


@each("dtype", INTEGERS)
def test_allreduce_of_integers_is_exact_and_wraps(dtype):
    info, size, count = torch.iinfo(dtype), 5, 33
    columns = zip(*(values(dtype, count, rank).tolist() for rank in range(size)))
    expected = [(sum(column) - info.min) % 2**info.bits + info.min for column in columns]

    def body(comm):
        tensor = values(dtype, count, comm.rank)
        comm.allreduce(tensor)
        return tensor.tolist()

    assert run_virtual(body, size) == [expected] * size


def test_allreduce_leaves_the_graph_alone():
    def body(comm):
        tensor = torch.ones(2, requires_grad=True)
        (tensor * 3).sum().backward()
        comm.allreduce(tensor.grad)
        comm.allreduce(tensor)
        return tensor.grad.tolist(), tensor.tolist(), tensor.is_leaf

    assert run_virtual(body, 3) == [([9, 9], [3, 3], True)] * 3


# --- barrier ----------------------------------------------------------------------------------------------------------
@each("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(size):
    log = []

    def body(comm):
        for step in range(3):
            comm.compute()
            log.append(("came", step))
            comm.barrier()
            log.append(("left", step))

    run_virtual(body, size, compute=Jitter(1.0, 1.0))
    assert log == [(what, step) for step in range(3) for what in ("came", "left") for _ in range(size)]


# --- split ------------------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=9))
def test_split_groups_by_colour_and_orders_by_key_and_rank(choices):
    def body(comm):
        color, key = choices[comm.rank]
        part = comm.split(color, key)
        if part is None:
            return None
        total = torch.tensor([1, comm.rank])
        part.allreduce(total)
        members = [data[0] for data in part.gather(bytes([comm.rank]))]
        return part.rank, part.size, total.tolist(), members

    for rank, result in enumerate(run_virtual(body, len(choices))):
        color = choices[rank][0]
        members = sorted((r for r in range(len(choices)) if choices[r][0] == color), key=lambda r: (choices[r][1], r))
        expected = (members.index(rank), len(members), [len(members), sum(members)], members)
        assert result == (None if color is None else expected)


def test_a_part_inherits_the_deadline_and_counts_its_own_traffic():
    def body(comm):
        comm.failures.deadline_s = 7.0
        comm.gather(bytes(5))
        part = comm.split(0)
        return part.failures.deadline_s, part.trace.traffic.bytes_sent, part.trace.traffic.messages_sent

    assert run_virtual(body, 2) == [(7.0, 0, 0)] * 2


# --- calls that don't match -------------------------------------------------------------------------------------------
SUM = (lambda c: c.allreduce(torch.zeros(3)), "allreduce of 3 x torch.float32")
DIFFERENT = [  # pairs of calls, each with the words that errors have for it
    (SUM, (lambda c: c.barrier(), "barrier")),
    (SUM, (lambda c: c.allreduce(torch.zeros(4)), "allreduce of 4 x torch.float32")),
    (SUM, (lambda c: c.allreduce(torch.zeros(3).double()), "allreduce of 3 x torch.float64")),
    (
        (lambda c: c.broadcast(torch.zeros(3), 0), "broadcast of 3 x torch.float32 from root 0"),
        (lambda c: c.broadcast(torch.zeros(3), 1), "broadcast of 3 x torch.float32 from root 1"),
    ),
    ((lambda c: c.window(1), "window of torch.float32"), (lambda c: c.window(1, torch.int8), "window of torch.int8")),
    (
        (lambda c: c.memory.attach(torch.zeros(3)), "attach of 3 x torch.float32"),
        (lambda c: c.memory.attach(torch.zeros(2)), "attach of 2 x torch.float32"),
    ),
    ((lambda c: c.split(0), "split"), (lambda c: c.gather(b""), "gather")),
    ((lambda c: c.close(), "close"), (lambda c: c.window(0).close(), "window of torch.float32")),
]


@each("calls", DIFFERENT)
@each("size", [2, 3])
def test_calls_that_do_not_match_are_refused_with_both_and_their_lines(calls, size):
    (ours, our_name), (theirs, their_name) = calls
    with pytest.raises(MismatchError) as raised:
        run_virtual(lambda comm: (ours if comm.rank < size - 1 else theirs)(comm), size)
    line = f"at {__file__}:"
    first, second = str(raised.value).split(" and ", 1)
    assert first.startswith(f"collective calls must be the same on all ranks; got {our_name} on rank 0, {line}")
    assert second.startswith(f"{their_name} on rank {size - 1}, {line}")
    assert second.endswith("Make the same calls in the same order, with the same lengths and dtypes, on every rank.")
