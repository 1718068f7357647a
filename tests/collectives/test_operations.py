"""Every collective call beside a loop over the ranks, for every operation, dtype and shape; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from making import bits

from harness.cases import each
from hpcdist.collectives.calls import Collectives, exchange, operations, prepared
from hpcdist.collectives.calls.reduction import OPERATIONS, reduction
from hpcdist.errors import CommunicationError, ConfigError, MismatchError, UnknownNameError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
SIZES = pytest.mark.sizes(1, 3, 4)
FEW = pytest.mark.sizes(2, 4)
NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float64, *NARROW]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
COUNTS = (0, 1, 257)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a rank: small, of both signs where the dtype has them, no two ranks' alike."""
    numbers = torch.from_numpy(np.random.default_rng([rank, count]).integers(-5, 9, count))
    if dtype is torch.bool:
        return numbers > 0
    if dtype in INTEGERS:
        return (numbers % 12).to(torch.int64).to(dtype)
    real = (numbers + torch.from_numpy(np.random.default_rng([count, rank]).random(count))).double()
    return torch.complex(real, real.flip(0)).to(dtype) if dtype.is_complex else real.to(dtype)


def read(found: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(found), dtype=dtype) if found else torch.empty(0, dtype=dtype)


def combined(operation: str, dtype: torch.dtype, size: int, count: int) -> torch.Tensor:
    """What a loop over the ranks finds, in numpy, and in float32 where the dtype is a narrow float."""
    given = [values(rank, count, dtype) for rank in range(size)]
    if dtype is torch.bool:
        operation = {"sum": "or", "product": "and", "min": "and", "max": "or"}.get(operation, operation)
    wide = {torch.complex32: torch.complex64, **dict.fromkeys(NARROW, torch.float32)}.get(dtype, dtype)
    arrays = [one.to(wide).numpy() for one in given]
    function = {
        "sum": np.add, "mean": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[operation]  # fmt: skip
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = function(total, array)
    found = torch.from_numpy(total)
    return (found / size if operation == "mean" else found).to(dtype)


def allowed(operation: str, dtype: torch.dtype) -> bool:
    try:
        reduction(operation, dtype)
    except ConfigError:
        return False
    return True


CASES = [(operation, dtype) for operation in OPERATIONS for dtype in DTYPES if allowed(operation, dtype)]


def done(ranks, body):
    def with_collectives(comm):
        found = Collectives(comm)
        result = body(found)
        found.close()
        return result

    return ranks(with_collectives)


# --- reductions -------------------------------------------------------------------------------------------------------
@pytest.mark.sizes(1, 3)
@each("how", ["whole", "in slices"])
def test_every_operation_on_every_dtype(ranks, how, monkeypatch):
    monkeypatch.setattr(operations, "WHOLE_BYTES", {"whole": 1 << 16, "in slices": 0}[how])
    monkeypatch.setattr(prepared, "SLICED_BYTES", {"whole": 1 << 16, "in slices": 0}[how])

    def body(found):
        results = []
        for operation, dtype in CASES:
            for count in COUNTS:
                tensor = values(found.rank, count, dtype)
                assert found.all_reduce(tensor, operation) is None
                results.append(bits(tensor))
        return results

    results = done(ranks, body)
    assert all(one == results[0] for one in results)
    expected = [combined(operation, dtype, ranks.size, count) for operation, dtype in CASES for count in COUNTS]
    for found, one in zip(results[0], expected, strict=True):
        if one.dtype.is_complex:  # libraries round products of complex numbers differently
            wide = [torch.view_as_real(x.to(torch.complex128)) for x in (read(found, one.dtype), one)]
            torch.testing.assert_close(*wide, rtol=2e-3, atol=1e-3, equal_nan=True)
        elif one.is_floating_point() and not getattr(ranks, "sums_in_rank_order", True):
            torch.testing.assert_close(read(found, one.dtype), one, equal_nan=True)
        else:
            assert found == bits(one)


@SIZES
def test_reductions_to_a_root_and_in_parts(ranks):
    def body(found):
        size, rank = found.size, found.rank
        root, own = size - 1, values(rank, 100, torch.float32)
        found.reduce(own, root, "max")
        equal, uneven = torch.empty(5), torch.empty(rank + 1, dtype=torch.bfloat16)
        found.reduce_scatter(equal, values(rank, 5 * size, torch.float32), "mean")
        found.reduce_scatter(uneven, [values(rank + 9 * r, r + 1, torch.bfloat16) for r in range(size)])
        return own, equal, uneven

    for rank, (own, equal, uneven) in enumerate(done(ranks, body)):
        size = ranks.size
        wanted = combined("max", torch.float32, size, 100) if rank == size - 1 else values(rank, 100, torch.float32)
        assert torch.equal(own, wanted)
        assert torch.equal(equal, combined("mean", torch.float32, size, 5 * size).view(size, 5)[rank])
        addends = [values(r + 9 * rank, rank + 1, torch.bfloat16).float() for r in range(size)]
        assert torch.equal(uneven, sum(addends[1:], addends[0]).bfloat16())


@SIZES
def test_results_in_the_memory_of_what_is_given(ranks):
    def body(found):
        given, size = values(found.rank, 3 * found.size, torch.float64), found.size
        found.reduce_scatter(part := given.view(size, 3)[found.rank], given)
        swapped = torch.arange(2.0 * size) + 10 * found.rank
        found.all_to_all(swapped, swapped)
        return part.clone(), swapped

    size = ranks.size
    for rank, (part, swapped) in enumerate(done(ranks, body)):
        assert torch.equal(part, combined("sum", torch.float64, size, 3 * size).view(size, 3)[rank])
        assert swapped.tolist() == [n + 10 * r for r in range(size) for n in (2.0 * rank, 2.0 * rank + 1)]


@FEW
def test_long_sums(ranks, monkeypatch):
    monkeypatch.setattr(operations, "WHOLE_BYTES", 0)
    monkeypatch.setattr(operations, "LONG_BYTES", 1 << 10)
    dtypes = (torch.float32, torch.int64, torch.complex64, torch.bfloat16)
    cases = [case for case in CASES if case[0] in ("sum", "mean", "max") and case[1] in dtypes]

    def body(found):
        results = [values(found.rank, 5000, dtype) for _, dtype in cases]
        for tensor, (operation, _) in zip(results, cases, strict=True):
            found.all_reduce(tensor, operation, factor=2 if operation == "sum" else None)
        return results

    results = done(ranks, body)
    assert all(bits(one) == bits(first) for of in results for one, first in zip(of, results[0], strict=True))
    for (operation, dtype), found in zip(cases, results[0], strict=True):
        expected = combined(operation, dtype, ranks.size, 5000) * (2 if operation == "sum" else 1)
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


@FEW
def test_a_factor_is_of_each_rank(ranks):
    def body(found):
        tensor, own, part = torch.ones(1), torch.ones(1), torch.empty(1)
        found.all_reduce(tensor, factor=found.rank + 1.0)
        found.reduce(own, 0, factor=2.0)
        found.reduce_scatter(part, torch.ones(found.size), factor=0.5)
        return tensor.item(), part.item(), own.item()

    size = ranks.size
    for rank, results in enumerate(done(ranks, body)):
        assert results == (size * (size + 1) / 2, size / 2, 1.0 if rank else 2.0 * size)


# --- copies -----------------------------------------------------------------------------------------------------------
@SIZES
@each("segment", [16 * 8 * 7, 1 << 20])  # bytes, of which each of seven ranks has 16 elements of complex numbers
def test_copies_of_every_dtype(ranks, segment, monkeypatch):
    monkeypatch.setattr(operations, "SLOT_BYTES", 64 * segment)
    monkeypatch.setattr(exchange, "MESSAGE_BYTES", segment)

    def body(found):
        size, rank, results = found.size, found.rank, []
        for dtype in DTYPES:
            own = [values(rank * size + r, r + 2 * rank, dtype) for r in range(size)]
            root, results_of = size - 1, []
            copied = values(rank, 300, dtype)
            found.broadcast(copied, root)
            gathered = [torch.empty(2 + 3 * r, dtype=dtype) for r in range(size)]
            found.all_gather(gathered, values(rank, 2 + 3 * rank, dtype))
            into = [torch.empty(rank + 2 * r, dtype=dtype) for r in range(size)]
            found.all_to_all(into, own)
            to_root = [torch.empty(r, dtype=dtype) for r in range(size)] if rank == root else None
            found.gather(to_root, values(rank, rank, dtype), root)
            part = torch.empty(rank + 4, dtype=dtype)
            found.scatter(part, [values(r, r + 4, dtype) for r in range(size)] if rank == root else None, root)
            results_of += [copied, *gathered, *into, part, *(to_root or ())]
            results.append([bits(one) for one in results_of])
        return results

    size = ranks.size
    for rank, results in enumerate(done(ranks, body)):
        for dtype, found in zip(DTYPES, results, strict=True):
            expected = [values(size - 1, 300, dtype), *(values(r, 2 + 3 * r, dtype) for r in range(size))]
            expected += [values(r * size + rank, rank + 2 * r, dtype) for r in range(size)]
            expected.append(values(rank, rank + 4, dtype))
            expected += [values(r, r, dtype) for r in range(size)] if rank == size - 1 else []
            assert found == [bits(one) for one in expected]


# --- tensors as users have them ---------------------------------------------------------------------------------------
@FEW
def test_shapes_and_strides(ranks):
    def body(found):
        matrix, scalar, empty = torch.arange(12.0).view(3, 4), torch.tensor(2.0), torch.empty(3, 0)
        conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
        column, every_other = matrix.clone().t(), torch.arange(10)[::2]
        for tensor in (column, scalar, empty, conjugate, every_other):
            found.all_reduce(tensor)
        rows = torch.zeros(found.size, 3, 2).transpose(1, 2)
        found.all_gather([rows[r] for r in range(found.size)], torch.full((2, 3), float(found.rank)))
        several = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(4)]
        for _ in range(2):
            found.all_reduce(several)  # those of one dtype together
        found.broadcast(several, 1)
        leaf = torch.ones(2, requires_grad=True)
        found.all_reduce(leaf)
        return column, scalar, conjugate.resolve_conj(), every_other, rows[:, 0, 0], several, leaf.tolist()

    size = ranks.size
    for column, scalar, conjugate, every_other, rows, several, leaf in done(ranks, body):
        assert torch.equal(column, size * torch.arange(12.0).view(3, 4).t()) and scalar.item() == 2 * size
        assert conjugate.tolist() == [size * (1 - 2j), size * (3 + 1j)]
        assert every_other.tolist() == [size * n for n in (0, 2, 4, 6, 8)] and rows.tolist() == list(range(size))
        assert [one.tolist() for one in several] == [[size**2] * n for n in (2, 3, 4)] and leaf == [size] * 2


@FEW
def test_works_are_done_in_their_order(ranks):
    def body(found):
        tensor = torch.full((200_000,), 1.0)
        works = [found.all_reduce(tensor, async_op=True) for _ in range(4)]
        found.broadcast(copy := tensor.clone())
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        ended = found.barrier(async_op=True)
        found.barrier()
        assert ended.is_completed()
        failed = found.all_reduce(torch.ones(2), "mean" if found.rank else "sum", async_op=True)
        with pytest.raises(MismatchError):
            failed.wait()
        return tensor[0].item(), copy.shape

    assert done(ranks, body) == [(ranks.size**4, (200_000,))] * ranks.size


@SIZES
def test_calls_that_are_made_again(ranks):
    """Short calls inside a node go another way from the second time on, whatever others' tensors are like."""

    def body(found):
        size, rank, results = found.size, found.rank, []
        for turn in range(6):
            given = (torch.arange(3.0 * size) + 100 * rank + turn).view(size, 3)
            if turn == 2 and rank == 0:
                given = given.t().contiguous().t()  # of other strides than elsewhere
            form = list if turn > 2 and rank == 0 else torch.Tensor.detach  # on one rank a list, of the same memory
            total, copied = given.clone() if turn != 2 else given, given.clone()
            gathered, part, swapped = torch.empty(size, size, 3), torch.empty(3), torch.empty(size, 3)
            found.all_reduce(total)
            found.broadcast(copied, size - 1)
            found.all_gather(form(gathered), copied + rank)
            found.reduce_scatter(part, form(given if turn != 2 else copied), "max")
            found.all_to_all(form(swapped), form(copied + rank))
            results.append([one.tolist() for one in (total, copied, gathered, part, swapped)])
        uneven = [torch.empty(1 + r + rank) for r in range(size)]
        found.all_to_all(uneven, [torch.full((1 + r + rank,), float(rank)) for r in range(size)])
        assert [one[0].item() for one in uneven] == list(range(size))
        return results

    size = ranks.size
    for rank, results in enumerate(done(ranks, body)):
        for turn, (total, copied, gathered, part, swapped) in enumerate(results):
            given = [(torch.arange(3.0 * size) + 100 * r + turn).view(size, 3) for r in range(size)]
            last = given[-1]
            assert total == sum(given[1:], given[0]).tolist() and copied == last.tolist()
            assert gathered == [(last + r).tolist() for r in range(size)]
            assert part == last[rank].tolist() and swapped == [(last[rank] + r).tolist() for r in range(size)]


@FEW
def test_calls_on_the_same_tensors_as_before_on_one_rank_only(ranks):
    """Where a rank has made a call on a tensor before and another one has not, they still do the same."""

    def body(found):
        results = []
        for count in (100, 300_000, 400_000):  # of float32: up to 1.6 MB, about where another algorithm is taken
            kept = torch.empty(count)
            for turn in range(5):
                tensor = kept if found.rank == 0 else torch.empty(count + turn)[turn:]
                tensor.fill_(found.rank + turn)
                found.all_reduce(tensor)
                results.append((tensor[0].item(), tensor[-1].item()))
        return results

    size = ranks.size
    wanted = [float(sum(range(size)) + turn * size) for turn in range(5)] * 3
    assert done(ranks, body) == [[(total, total) for total in wanted]] * size


MANY = [  # elements of a part: in one place, in several, and more than a slot holds
    (6, torch.float32), (6, torch.bfloat16), (5000, torch.bfloat16), (50_000, torch.float32)
]  # fmt: skip


@pytest.mark.sizes(2, 3)
@each("case", MANY)
def test_every_call_on_the_same_tensors_many_times(ranks, case, monkeypatch):
    count, dtype = case
    monkeypatch.setattr(operations, "SLOT_BYTES", 1 << 17)
    calls = 70 if count == 5000 else 6

    def body(found):
        size, rank = found.size, found.rank
        given, total, copied = (torch.empty(size, count, dtype=dtype) for _ in range(3))
        gathered, swapped, part = torch.empty_like(given), torch.empty_like(given), torch.empty(count, dtype=dtype)
        wanted = torch.arange(float(size))[:, None]
        for turn in range(calls):
            for tensor in (given, total, copied):
                tensor.copy_((wanted + rank + turn).expand(size, count))
            found.all_reduce(total)
            found.broadcast(copied, size - 1)
            found.reduce_scatter(part, given)
            found.all_gather(gathered, given[rank])
            found.all_to_all(swapped, given)
            everyone = size * (wanted + turn) + sum(range(size))
            assert torch.equal(total, everyone.expand(size, count).to(dtype))
            assert torch.equal(copied, (wanted + turn + size - 1).expand(size, count).to(dtype))
            assert torch.equal(part, everyone[rank].expand(count).to(dtype))
            assert torch.equal(gathered, (2 * wanted + turn).expand(size, count).to(dtype))
            assert torch.equal(swapped, (wanted + rank + turn).expand(size, count).to(dtype))
        return True

    assert done(ranks, body) == [True] * ranks.size


@FEW
@pytest.mark.filterwarnings("error")
def test_sums_that_overflow_do_so_without_a_warning(ranks):
    def body(found):
        tensor, other = torch.full((3,), 3e38), torch.tensor([float("inf")])
        for _ in range(3):
            found.all_reduce(tensor)
            found.all_reduce(other.fill_(float("inf") if found.rank else -float("inf")))
        return tensor.tolist(), other.isnan().tolist()

    assert done(ranks, body) == [([float("inf")] * 3, [True])] * ranks.size


@FEW
def test_what_differs_in_a_call_that_is_made_again_is_refused(ranks):
    def body(found):
        tensor, size = torch.ones(2), found.size
        parts = torch.ones(size, 2)
        for _ in range(2):
            found.all_reduce(tensor)
            found.all_to_all(parts, torch.ones(size, 2))
        with pytest.raises(
            MismatchError,
            match="all ranks must make the same collective call; got all_reduce: .*; broadcast: .*root 0 on",
        ):
            found.broadcast(tensor) if found.rank else found.all_reduce(tensor)
        with pytest.raises(MismatchError, match="got 2 elements on rank 0 for rank 1, which expects 3 elements"):
            many = 2 + (found.rank == 1)
            found.all_to_all(torch.ones(size, many), torch.ones(size, many))
        found.all_reduce(tensor)
        return tensor.tolist()

    assert done(ranks, body) == [[float(ranks.size) ** 3] * 2] * ranks.size


# --- refusals ---------------------------------------------------------------------------------------------------------
ONES = torch.ones(4)
DIFFERENT = [  # calls of which one rank makes another one
    (lambda c: c.all_reduce(torch.ones(4 + (c.rank == 1))),
     r"got all_reduce: float32 \(4,\), sum on ranks? 0.*; all_reduce: float32 \(5,\), sum on rank 1\."),
    (lambda c: c.all_reduce(ONES.double() if c.rank else ONES),
     r"float32 \(4,\), sum on rank 0; all_reduce: float64 \(4,\), sum on ranks? 1"),
    (lambda c: c.all_reduce(ONES, "min" if c.rank else "max"),
     r"float32 \(4,\), max on rank 0; all_reduce: float32 \(4,\), min on"),
    (lambda c: c.broadcast(ONES, min(c.rank, 1)), r"root 0 on rank 0; broadcast: float32 \(4,\), root 1 on ranks? 1"),
    (lambda c: c.reduce(ONES, min(c.rank, 1)), r"sum, root 0 on rank 0; reduce: float32 \(4,\), sum, root 1 on"),
    (lambda c: c.barrier() if c.rank else c.all_reduce(ONES), "got all_reduce: .* on rank 0; barrier on ranks? 1"),
    (lambda c: c.all_gather([ONES[: 2 + (c.rank > 0)]] * c.size, ONES[: 2 + (c.rank > 0)]),
     r"all_gather: float32 \(2,\), .* on rank 0; all_gather: float32 \(3,\)"),
    (lambda c: c.reduce_scatter(torch.ones(2 - (c.rank > 0)), torch.ones((2 - (c.rank > 0)) * c.size)),
     r"reduce_scatter: float32 \(\d+,\), sum on rank 0; reduce_scatter"),
    (lambda c: c.all_to_all([torch.ones(2)] * c.size, [torch.ones(2 + (c.rank == 1))] * c.size),
     "all_to_all: .* got 3 elements on rank 1 for rank 0, which expects 2 elements"),
    (lambda c: c.gather([torch.ones(3)] * c.size if c.rank == 0 else None, ONES),
     "gather: .* got 4 elements on rank 0 for rank 0, which expects 3 elements. Check the shapes"),
    (lambda c: c.scatter(ONES, [ONES] * c.size if c.rank < 2 else None, min(c.rank, 1)),
     "scatter: float32, root 0 on rank 0; scatter: float32, root 1 on"),
]  # fmt: skip


@FEW
def test_what_differs_is_refused_on_all_ranks_before_anything_is_changed(ranks):
    def body(found):
        for call, message in DIFFERENT:
            with pytest.raises(MismatchError, match=message):
                call(found)
            found.barrier()
        return ONES.tolist()

    assert done(ranks, body) == [[1.0] * 4] * ranks.size


ODD = [
    (lambda c: c.all_reduce(torch.ones(2), "total"), UnknownNameError, "operation must be one of and, max"),
    (lambda c: c.all_reduce(torch.ones(2), "and"), ConfigError, "'and' must have integers or booleans; got tor"),
    (lambda c: c.all_reduce(torch.ones(2).int(), "mean"), ConfigError, "'mean' must have floating-point or complex"),
    (lambda c: c.all_reduce(torch.ones(2) * 1j, "max"), ConfigError, "'max' must have numbers that have an order"),
    (lambda c: c.all_gather(torch.ones(3), torch.ones(1)), ConfigError, "out must have the same number"),
    (lambda c: c.all_gather([torch.ones(3)], torch.ones(3)), ConfigError,
     "out must be a tensor for each of 2 ranks, all of one dtype; got 1"),
    (lambda c: c.all_gather(torch.ones(4), torch.ones(3)), ConfigError, "tensor must match this rank's part"),
    (lambda c: c.all_to_all(torch.ones(2), torch.ones(2, dtype=torch.float64)), ConfigError,
     "inputs must have the dtype of out, float32; got float64. Convert them"),
    (lambda c: c.broadcast(torch.ones(2), 2), CommunicationError, "root must be a rank in 0..1; got 2"),
]  # fmt: skip


@pytest.mark.sizes(2)
def test_arguments_that_fit_nothing_are_refused(ranks):
    def body(found):
        for call, error, message in ODD:
            with pytest.raises(error, match=message):
                call(found)
        return True

    assert done(ranks, body) == [True] * ranks.size
