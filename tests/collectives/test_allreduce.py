"""Every algorithm: the right sum, the same bits on all ranks, for every length, dtype and number of ranks."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import addend, bits, make, summed_in_rank_order

from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist import collectives
from hpcdist.collectives import available, direct, hierarchical, load, ring, shared_memory
from hpcdist.collectives.calls import Collectives
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.errors import CommunicationError, ConfigError, MismatchError, UnknownNameError

NAMES = available()
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
UP_TO_9 = pytest.mark.sizes(1, 2, 4, 9)
SOME = pytest.mark.sizes(3, 4)
FEW = pytest.mark.sizes(1, 4)


def reduced(ranks, name: str, cache_dir, given, **network) -> list:
    """Each rank's tensors after one object has reduced them one by one; `given(comm)` makes them."""

    def body(comm):
        reduce = make(name, comm, cache_dir)
        tensors = given(comm)
        for tensor in tensors:
            assert reduce(tensor) is None
        reduce.close()
        return [(tensor.dtype, len(tensor), bits(tensor)) for tensor in tensors]

    return ranks(body, **network)


def check_sums(found: list, size: int) -> None:
    """Check results of `reduced` whose tensors were `addend`s: integers exact, floats of the same bits on all ranks."""
    assert all(results == found[0] for results in found)
    for dtype, count, of_bits in found[0]:
        total = torch.frombuffer(bytearray(of_bits), dtype=dtype) if count else torch.empty(0, dtype=dtype)
        if dtype in INTEGERS:
            addends = np.stack([addend(r, count, dtype).numpy() for r in range(size)])
            np.testing.assert_array_equal(total.numpy(), addends.sum(axis=0, dtype=addends.dtype))
        else:
            exact = summed_in_rank_order(count, torch.complex128 if dtype.is_complex else torch.float64, size)
            tolerance = 4 * size * torch.finfo(dtype).eps
            np.testing.assert_allclose(total.to(exact.dtype).numpy(), exact.numpy(), rtol=tolerance, atol=tolerance)


@UP_TO_9
@each("name", NAMES)
def test_sums_of_all_lengths_and_dtypes(ranks, name, cache_dir):
    """Integers wrap around."""
    lengths = sorted({0, 1, ranks.size - 1, ranks.size, ranks.size + 1, 2, 31, 101, 1000})
    cases = [(count, torch.float64) for count in lengths]
    if ranks.size < 9:
        cases += [(count, dtype) for dtype in INTEGERS + FLOATS for count in (1, ranks.size + 1, 257)]
    given = lambda comm: [addend(comm.rank, *case) for case in cases]  # noqa: E731
    check_sums(reduced(ranks, name, cache_dir, given), ranks.size)


@SOME
@each("name", sorted({*NAMES} - {"native", "auto"}))  # MPI promises nothing about NaN
def test_nan_and_infinity_have_the_same_bits_on_all_ranks(ranks, name, cache_dir):
    def given(comm):
        tensor = addend(comm.rank, 40, torch.float32)
        tensor[comm.rank] = torch.inf
        tensor[10] = torch.inf if comm.rank % 2 else -torch.inf
        payload = torch.tensor([0x7FC00001 + comm.rank, -0x400000 + comm.rank], dtype=torch.int32)
        tensor[20:22] = payload.view(torch.float32)  # NaNs that differ from rank to rank, in sign and payload
        return [tensor]

    found = reduced(ranks, name, cache_dir, given)
    assert all(results == found[0] for results in found)
    total = torch.frombuffer(bytearray(found[0][0][2]), dtype=torch.float32)
    assert total[20:22].isnan().all()
    assert total[: ranks.size].isposinf().all()
    assert total[10].isnan() if ranks.size > 1 else total[10].isneginf()


@UP_TO_9
@each("name", ["direct", "hierarchical", "shared_memory", "native", "auto"])
def test_shared_memory_and_virtual_native_sum_in_rank_order_to_the_bit(ranks, name, cache_dir):
    if name in ("native", "auto") and ranks.real:
        return
    node = {} if name in ("native", "auto") else {"network": Network(1e-6, 1e9, ranks_per_node=9)}
    found = reduced(ranks, name, cache_dir, lambda comm: [addend(comm.rank, 1009, dtype) for dtype in FLOATS], **node)
    expected = [bits(summed_in_rank_order(1009, dtype, ranks.size)) for dtype in FLOATS]
    assert [[of_bits for *_, of_bits in results] for results in found] == [expected] * ranks.size


@settings(max_examples=50)
@given(
    name=st.sampled_from(NAMES),
    size=st.integers(1, 9),
    ranks_per_node=st.integers(1, 5),
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    dtype=st.sampled_from(INTEGERS + FLOATS),
    segment_bytes=st.sampled_from([16, 64, 1 << 20]),
)
def test_any_ranks_nodes_lengths_dtypes_and_segments(
    name, size, ranks_per_node, counts, dtype, segment_bytes, cache_dir, monkeypatch
):
    """One object, lengths in any order: its memory grows and is used again."""
    for module in (ring, direct, hierarchical, shared_memory):
        monkeypatch.setattr(module, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(hierarchical, "SHORT_BYTES", 32)
    network = Network(1e-6, 1e9, ranks_per_node=ranks_per_node)
    given = lambda comm: [addend(comm.rank, count, dtype) for count in counts]  # noqa: E731
    check_sums(reduced(VirtualRanks(size), name, cache_dir, given, network=network), size)


@FEW
@each("name", NAMES)
def test_long_tensors_pass_in_several_segments(ranks, name, cache_dir):
    count = 1_500_001  # 6 MB: several segments per chunk, the last ones shorter

    def body(comm):
        tensor = torch.arange(count, dtype=torch.int32) * (comm.rank + 1)
        reduce = make(name, comm, cache_dir)
        reduce(tensor)
        reduce.close()
        return bool((tensor == torch.arange(count, dtype=torch.int32) * sum(range(1, comm.size + 1))).all())

    assert all(ranks(body))


@FEW
@each("name", NAMES)
@each("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_sum_divided_to_the_bit(ranks, name, dtype, cache_dir):
    def body(comm):
        total, mean = (addend(comm.rank, 70_001, dtype) for _ in range(2))
        reduce = make(name, comm, cache_dir)
        reduce(total)
        reduce.mean(mean)
        reduce.close()
        return bits(mean) == bits(total.div_(comm.size))

    assert all(ranks(body))


@SOME
@each("name", NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_the_mean_of_float16_may_have_a_sum_beyond_its_range(ranks, name, cache_dir):
    def body(comm):
        own, parts = (torch.full(shape, 40_000.0, dtype=torch.float16) for shape in [(70_001,), (9, 2)])
        reduce = make(name, comm, cache_dir)
        reduce.mean(own)
        reduce.mean(torch.view_as_complex(parts))
        reduce.close()
        return [*own.unique().tolist(), *parts.unique().tolist()]

    # Where messages carry float16, addends are divided first, and rounded, as those of DistributedDataParallel.
    assert all(found == pytest.approx([40_000.0] * 2, rel=2**-8) for found in ranks(body))


@pytest.mark.sizes(1, 3)
@each("name", ["auto", "direct"])
@each("count", [1009, 700_001])
def test_tensors_that_all_have_mapped_are_summed_in_place_to_the_same_bits(ranks, name, count, cache_dir):
    def body(comm):
        reduce = make(name, comm, cache_dir)
        tensor = comm.memory.zeros(count + 2, torch.float32)
        found = []
        for call in (reduce, reduce.mean):
            tensor[1:-1] = addend(comm.rank, count, torch.float32)
            call(tensor[1:-1])
            found.append(bits(tensor[1:-1]))
        around, in_place = (tensor[0].item(), tensor[-1].item()), bool(comm.memory.mapped(tensor)) and count > 1009
        reduce.close()
        return found, around, in_place

    total = summed_in_rank_order(count, torch.float32, ranks.size)
    results = ranks(body, network=Network(1e-6, 1e9, ranks_per_node=9))
    assert all(around == (0.0, 0.0) and found == results[0][0] for found, around, _ in results)
    if name == "direct" or results[0][2]:  # others may add in another order
        assert results[0][0] == [bits(total), bits(total.div(ranks.size))]


@FEW
@each("name", NAMES)
def test_what_lies_around_a_tensor_and_other_messages_are_left_alone(ranks, name, cache_dir):
    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        early, found = torch.tensor([comm.rank]), torch.tensor([-1])
        sending = comm.isend(early, right, tag=0)
        tensor = torch.full((30,), float(comm.rank + 1))
        reduce = make(name, comm, cache_dir)
        reduce(tensor[7:23])
        comm.irecv(found, left, tag=0).wait()
        sending.wait()
        reduce.close()
        return int(found), tensor

    total = sum(range(1, ranks.size + 1))
    for rank, (found, tensor) in enumerate(ranks(body)):
        assert found == (rank - 1) % ranks.size
        assert (tensor[7:23] == total).all()
        assert (tensor[:7] == rank + 1).all() and (tensor[23:] == rank + 1).all()


def test_allreduce_by_name_and_again_and_again(ranks):
    def body(comm):
        calls, tensor = Collectives(comm), torch.ones(5)
        for _ in range(3):
            calls.all_reduce(tensor, algorithm="hierarchical")
        before = calls.comm.trace.traffic.messages_sent
        calls.all_reduce(tensor, algorithm="ring")
        sent = calls.comm.trace.traffic.messages_sent - before
        assert sent == 2 * (comm.size - 1), "ranks do not compare what they call"
        if not ranks.real:  # else it would measure, and keep the times in the user's folder
            calls.all_reduce(tensor, algorithm="auto")
        works = [calls.all_reduce([tensor, tensor], "mean", algorithm="ring", async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        for options in ({"op": "max"}, {"factor": 2.0}):
            with pytest.raises(ConfigError, match="op must be sum or mean, without factor, for algorithm 'ring'"):
                calls.all_reduce(tensor, algorithm="ring", **options)
        calls.close()
        return tensor.tolist()

    assert ranks(body) == [[float(ranks.size ** (4 if ranks.real else 5))] * 5] * ranks.size


# --- refusals -----------------------------------------------------------------------------------------------------
@FEW
@each("name", NAMES)
def test_what_has_no_sum_or_is_not_flat_is_refused(ranks, name, cache_dir):
    def body(comm):
        reduce = make(name, comm, cache_dir)
        for dtype in (torch.bool, torch.float8_e4m3fn):
            message = f"dtype must be a floating-point, complex or integer .*; got {dtype}"
            with pytest.raises(ConfigError, match=message):
                reduce(torch.zeros(4, dtype=dtype))
        for tensor in (torch.zeros(2, 3), torch.zeros(10)[::2], torch.tensor(1.0)):
            with pytest.raises(CommunicationError, match=r"tensor must be flat .* got shape .* Call \.reshape"):
                reduce(tensor)
        reduce.close()

    ranks(body)


def test_direct_is_refused_where_memory_can_not_be_attached_and_for_device_memory(ranks):
    def body(comm):
        if not ranks.real and comm.size > 1:
            comm.memory.host = lambda tensor, *, write=True: nullcontext(tensor)
            with pytest.raises(ConfigError, match="must be in host memory; got one on meta. Use native"):
                load("direct")(comm)(torch.ones(4, device="meta"))
        comm.memory.can_attach = False
        assert not load("direct").suits(comm)
        with pytest.raises(ConfigError, match="direct all-reduce must be on one node .* Use another algorithm"):
            load("direct")(comm)

    ranks(body)


def test_an_unknown_name_lists_the_known_ones():
    known = "all-reduce algorithm must be one of auto, direct, halving_doubling, .*; got 'butterfly'"
    with pytest.raises(UnknownNameError, match=known):
        load("butterfly")
    with pytest.raises(UnknownNameError, match=known):
        run_virtual(lambda comm: Collectives(comm).all_reduce(torch.zeros(1), algorithm="butterfly"), 1)


# --- the catalogue ------------------------------------------------------------------------------------------------
def test_every_algorithm_is_documented_and_named_after_its_module():
    for name in NAMES:
        algorithm = load(name)
        assert algorithm.__module__ == f"{collectives.__name__}.{name}"
        assert re.search(r"Reference: .+\s\d{4}", algorithm.__doc__, re.DOTALL), name
    expected = {"ring", "recursive_doubling", "halving_doubling", "tree", "hierarchical", "direct", "native", "auto"}
    assert expected | {"shared_memory"} <= set(NAMES), "those of the literature"


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_lengths_that_differ_are_refused_in_shared_memory(ranks):
    def body(comm):
        reduce, tensor, longer = load("shared_memory")(comm), torch.ones(3), torch.ones(4)
        reduce(tensor)
        message = "the same length and dtype on all ranks; got, in rank order, 3 of float32, 4 of float32"
        for mine in (longer.clone(), longer, tensor.double()):
            with pytest.raises(MismatchError, match=message if mine.dtype is torch.float32 else "3 of float64"):
                reduce(tensor if comm.rank == 0 else mine)
        reduce(tensor)
        reduce.close()
        return tensor.tolist()

    assert ranks(body) == [[float(ranks.size) ** 2] * 3] * ranks.size
