"""Sums of what ranks send compressed: the same on all of them, and nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from compress.vectors import spans_of
from harness.cases import each
from hpcdist.compress import Compressor, JointCompression, Linear, Recoded, Reduction, available, load
from hpcdist.compress.coding.reduction import gather

pytestmark = pytest.mark.computes

OPTIONS = {
    "dgc": {"ratio": 0.1},
    "powersgd": {"rank": 1},
    "threshold": {"density": 0.1},
    "topk": {"ratio": 0.1},
}  # what small tensors, or compressors without defaults, need
SPANS = [spans_of((12, 20), (7,)), spans_of((64,))]
STEPS = 4

every = each("name", available())
conserving = each("name", [name for name in available() if name != "dgc" and load(name).feeds_back])  # it sends momenta


def config(name: str, **more) -> JointCompression:
    return JointCompression.from_mapping({"name": name, **OPTIONS.get(name, {}), **more})


def make(comm, name: str, dtype: torch.dtype = torch.float64, **more) -> Reduction:
    like = [torch.zeros(own[-1].stop, dtype=dtype) for own in SPANS]
    return Reduction(comm, config(name, **more), like, SPANS)


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(own[-1].stop, generator=generator, dtype=torch.float64).to(dtype) for own in SPANS]


def total(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(tensors).sum(dim=0) for tensors in zip(*parts, strict=True)]


def _run(comm, name: str, dtype: torch.dtype = torch.float64, steps: int = STEPS, **more):
    """Sums of each step, what is left, and over how many ranks each step was."""
    reduction = make(comm, name, dtype, **more)
    sums, ranks = [], []
    for step in range(steps):
        tensors = inputs(comm.rank, step, dtype)
        ranks.append(reduction(tensors))
        sums.append([tensor.clone() for tensor in tensors])
    left = [feedback.residual.clone() for feedback in reduction.feedbacks]
    reduction.close()
    return sums, left, ranks


@every
@pytest.mark.sizes(1, 3)
@each("dtype", [torch.float32, torch.float64])
def test_sums_are_the_same_to_the_bit_on_all_ranks_and_what_goes_in_comes_out_or_is_left(ranks, name, dtype):
    found = ranks(lambda comm: _run(comm, name, dtype))
    for sums, _, _ in found:
        for mine, first in zip(sums, found[0][0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))
    if dtype == torch.float64 and name != "dgc" and load(name).feeds_back:
        _nothing_is_lost(found, len(found), STEPS)


def _nothing_is_lost(found, senders: int, steps: int) -> None:
    given = total([inputs(rank, step) for rank in range(senders) for step in range(steps)])
    out, left = total(found[0][0]), total([left for _, left, _ in found])
    for a, b, c in zip(given, out, left, strict=True):
        torch.testing.assert_close(a, b + c, rtol=0, atol=1e-12)


@each("name", [name for name in available() if not issubclass(load(name), (Linear, Recoded))])
@pytest.mark.sizes(1, 3)
def test_the_sum_is_that_of_what_messages_stand_for_and_the_bytes_are_theirs(ranks, name):
    size = ranks.size
    feedbacks = [_feedbacks(name, rank, size) for rank in range(size)]
    messages = [[f.encode(t) for f, t in zip(feedbacks[rank], inputs(rank, 0), strict=True)] for rank in range(size)]
    expected = [torch.zeros_like(tensor) for tensor in inputs(0, 0)]
    for rank in range(size):
        for feedback, message, out in zip(feedbacks[rank], messages[rank], expected, strict=True):
            feedback.add(message, out)

    def body(comm):
        reduction, tensors = make(comm, name), inputs(comm.rank, 0)
        comm.barrier()
        before = comm.trace.traffic.bytes_sent
        reduction(tensors)
        n_bytes = comm.trace.traffic.bytes_sent - before
        reduction.close()
        return n_bytes, tensors

    for rank, (n_bytes, tensors) in enumerate(ranks(body)):
        assert n_bytes == (size - 1) * (sum(map(len, messages[rank])) + 4)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def _feedbacks(name: str, rank: int, size: int):
    """Those of a rank's reduction."""
    return config(name).feedbacks(SimpleNamespace(rank=rank, size=size), inputs(0, 0), SPANS)


@pytest.mark.virtual
@each("name", ["bf16", "fp16", *(name for name in available() if issubclass(load(name), Linear))])
@pytest.mark.sizes(2, 4)  # on which all lengths are reduced by the same algorithm
def test_the_bytes_of_an_all_reduce_are_those_of_the_messages(ranks, name):
    def body(comm):
        reduction, dense = make(comm, name), make(comm, name, warmup_steps=1)
        moved = []
        for call in (reduction, dense):
            before = comm.trace.traffic.bytes_sent
            call(inputs(comm.rank, 0))
            moved.append(comm.trace.traffic.bytes_sent - before)
            call.close()
        return moved

    message = sum(len(f.encode(tensor)) for f, tensor in zip(_feedbacks(name, 0, 1), inputs(0, 0), strict=True))
    compressed, dense = (sum(moved) for moved in zip(*ranks(body), strict=True))
    assert compressed / dense == pytest.approx(message / sum(8 * own[-1].stop for own in SPANS))


@every
@pytest.mark.sizes(1, 3)
def test_the_first_steps_may_be_dense(ranks, name):
    found = ranks(lambda comm: _run(comm, name, steps=3, warmup_steps=3))
    for sums, left, over in found:
        assert over == [len(found)] * 3 and all((part == 0).all() for part in left)
        for step, tensors in enumerate(sums):
            # Of dgc what is summed are velocities.
            before = range(step + 1) if name == "dgc" else [step]
            expected = total(
                [[0.9 ** (step - s) * t for t in inputs(rank, s)] for rank in range(len(found)) for s in before]
            )
            for a, b in zip(tensors, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@conserving
@pytest.mark.sizes(1, 4)
def test_in_the_first_steps_fewer_ranks_may_send(ranks, name):
    found = ranks(lambda comm: _run(comm, name, steps=2, warmup_steps=2, warmup_ranks=2))
    senders = min(2, len(found))
    _nothing_is_lost(found, senders, 2)
    for rank, (sums, left, over) in enumerate(found):
        assert over == [senders] * 2
        if not issubclass(load(name), Recoded):  # what the code of a sum lacks is left to any rank
            assert rank < senders or all((part == 0).all() for part in left)
        assert all(torch.equal(a, b) for x, y in zip(sums, found[0][0], strict=True) for a, b in zip(x, y, strict=True))


# --- sums that are coded again ----------------------------------------------------------------------------------------
@each("name", ["fp16", "bf16"])
@pytest.mark.sizes(3)
def test_rounded_sums_lose_nothing_over_many_steps(ranks, name):
    """Relatively to 1e-12, of gradients of any size; and each sum is the exact one, rounded once or twice."""
    sizes = torch.tensor([1e-6, 1e-3, 1.0, 1e3], dtype=torch.float64).repeat(62)[:247]

    def given(rank, step):
        return [own * size for own, size in zip(inputs(rank, step), (sizes, 1.0), strict=True)]

    def body(comm, steps=range(30), **options):
        reduction, out = make(comm, name, **options), []
        for step in steps:
            reduction(tensors := given(comm.rank, step))
            out.append(tensors)
        left = [feedback.residual.clone() for feedback in reduction.feedbacks]
        reduction.close()
        return total(out), left

    once, twice = (ranks(lambda comm, n=n: body(comm, [0] * n, error_feedback=False)[0])[0] for n in (1, 2))
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice)), "without feedback what rounding takes is forgotten"
    found = ranks(body)
    expected = total([given(rank, step) for rank in range(len(found)) for step in range(30)])
    left = total([left for _, left in found])
    largest = [sizes * len(found) * 30, torch.tensor(len(found) * 30.0)]
    for a, b, c, most in zip(expected, found[0][0], left, largest, strict=True):
        assert ((a - b - c).abs() <= 1e-12 * most).all()
        assert c.any() and (c.abs() < most / 30).all(), "little is left"


@pytest.mark.sizes(1, 3)
@each("count", [0, 1, 2, 5])
@each("name", [name for name in available() if issubclass(load(name), Recoded)])
def test_some_ranks_may_have_no_piece(ranks, name, count):
    def body(comm):
        reduction = Reduction(comm, config(name), [torch.zeros(count)], [spans_of((count,))])
        tensor = torch.arange(1.0, count + 1)
        reduction([tensor])
        reduction.close()
        return tensor / comm.size

    for found in ranks(body):
        assert torch.equal(found, torch.ones(count) if name == "signsgd" else torch.arange(1.0, count + 1))


# --- messages of any lengths ------------------------------------------------------------------------------------------
LENGTHS = [[0], [5], [0, 0], [3, 0, 1], [1, 70_000, 2]]


def _messages(rank: int, lengths: list[int]) -> list[torch.Tensor]:
    return [torch.full((length * (rank + 1),), 10 * rank + k, dtype=torch.uint8) for k, length in enumerate(lengths)]


@pytest.mark.sizes(1, 3, 8)
@each("lengths", LENGTHS)
@each("senders", [1, None])
def test_every_rank_gets_the_messages_of_all_senders_in_order(ranks, lengths, senders):
    def body(comm):
        who = range(senders or comm.size)
        sends = comm.rank in who
        before = comm.trace.traffic.bytes_sent
        found = gather(comm, _messages(comm.rank, lengths) if sends else [], len(lengths), who)
        comm.barrier()
        assert len(found) == len(who)
        for source, messages in zip(who, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(messages, _messages(source, lengths), strict=True))
        mine = sum(lengths) * (comm.rank + 1) + 4 * (len(lengths) - 1)
        return comm.trace.traffic.bytes_sent - before == (comm.size - 1) * mine * sends

    assert all(ranks(body))


# --- means over senders -----------------------------------------------------------------------------------------------
CHOOSE = {
    "topk": {"ratio": 0.25, "values": "fp64"},
    "dgc": {"ratio": 0.25, "momentum": 0.0, "values": "fp64"},
    "threshold": {"tau": 0.5},
    "chunk_topk": {"ratio": 0.25, "side": 4, "values": "fp64"},
}


def test_those_that_choose_elements_say_which_they_send():
    assert {name for name in available() if load(name).count_sent is not Compressor.count_sent} == CHOOSE.keys()


@each("name", CHOOSE)
@pytest.mark.sizes(3)
def test_a_mean_is_over_the_ranks_that_have_sent_an_element_be_it_0(ranks, name):
    """Blocks of 4 of which one element is sent, or all four. The last rank has no samples: it has sent zeros."""
    rows = torch.tensor([[4.0, 1, 0, 0, 0, 0, 0, 0], [0, 2, 3, 0, 0, 0, 6, 1], [0] * 8], dtype=torch.float64)
    per_block = [[[0], [4, 5, 6, 7]], [[2], [6]], [range(4), range(4, 8)]]  # the rank's block of zeros has been sent
    given = {"topk": [[0, 1], [2, 6], range(8)], "threshold": [[0, 1], [1, 2, 6, 7], []]}
    given["dgc"], given["chunk_topk"] = given["topk"], [sum(map(list, blocks), []) for blocks in per_block]
    sent, senders = torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3, 8)
    for rank, places in enumerate(given[name]):
        senders[rank, list(places)] = 1
        sent[rank] = (rows[rank].clamp(max=0.5) if name == "threshold" else rows[rank]) * senders[rank]

    def body(comm):
        like, chosen = (
            [torch.zeros(8, dtype=torch.float64)],
            JointCompression.from_mapping({"name": name, **CHOOSE[name]}),
        )
        reduction = Reduction(comm, chosen, like, [spans_of((8,))], over_senders=True)
        tensor = rows[comm.rank].clone()
        assert reduction([tensor]) == 1
        reduction.close()
        return tensor

    expected = sent.sum(dim=0) / senders.sum(dim=0).clamp(min=1)
    assert all(torch.equal(own, expected) for own in ranks(body)), expected


@each("values", ["fp16", "2bit"])
@pytest.mark.sizes(2)
def test_what_is_sent_as_0_has_been_sent(ranks, values):
    """An element too small for float16, and one in a bin whose mean is 0."""

    def body(comm):
        options = {"name": "chunk_topk", "ratio": 1.0, "values": values}
        like = [torch.zeros(4, dtype=torch.float64)]
        reduction = Reduction(comm, JointCompression.from_mapping(options), like, [spans_of((4,))], over_senders=True)
        tensor = torch.tensor([1.0, 1e-12, 0.0, -1.0] if comm.rank else [1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
        reduction([tensor])
        reduction.close()
        return tensor.tolist()

    assert ranks(body) == [[1.0, pytest.approx(0.5), 0.5, -1.0]] * 2
