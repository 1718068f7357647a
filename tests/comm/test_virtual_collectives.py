"""Collective calls of virtual ranks: barriers, graphs, calls that don't match; sums are in tests/collectives."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Jitter, run_virtual
from hpcdist.errors import MismatchError

SIZES = (1, 2, 7)


# --- allreduce --------------------------------------------------------------------------------------------------------


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
