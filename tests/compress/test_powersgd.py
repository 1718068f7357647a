"""PowerSGD: exact up to its rank, a projection, and the same from every rank's point of view."""

from __future__ import annotations

import pytest
import torch

from hpcdist.compress import CompressionConfig, Span
from hpcdist.compress.powersgd import orthogonalised

SHAPES = [(30, 20), (11,), (16, 3, 9), (2, 2)]
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def spans() -> list[Span]:
    found, at = [], 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        found.append(Span(at, at + size, shape))
        at += size
    return found


def make(rank: int):
    return CompressionConfig.from_mapping({"name": "powersgd", "rank": rank}).make(COUNT, spans())


def random(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose matrices have this rank."""
    tensor = random(1, dtype)
    for span in (spans()[0], spans()[2]):
        matrix = tensor[span.start : span.stop].view(span.shape[0], -1)
        matrix.copy_(random(2, dtype)[: len(matrix) * rank].view(-1, rank) @ matrix[:rank])
    return tensor


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_the_bytes_are_those_of_the_docstring(dtype, size):
    assert len(make(2).encode(random(1, dtype))) == size * (2 * (30 + 20) + 11 + 2 * (16 + 27) + 4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_matrices_of_its_rank_are_sent_exactly(rank, dtype, error):
    tensor = of_rank(rank, dtype)
    compressor, out = make(rank), torch.zeros(COUNT, dtype=dtype)
    left = tensor.clone()
    compressor.add(compressor.encode_residual_(left), out, weight=0.5)
    torch.testing.assert_close(2 * out, tensor, rtol=0, atol=error * float(tensor.abs().max()))
    assert left.abs().max() <= error * tensor.abs().max()


def test_at_full_rank_all_is_sent_as_it_is():
    tensor, out = random(1), torch.zeros(COUNT, dtype=torch.float64)
    compressor = make(20)
    message = compressor.encode(tensor)
    compressor.decode(message, out)
    assert len(message) == 8 * COUNT and torch.equal(out, tensor)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["random", "equal rows", "nearly equal rows", "zeros", "tiny", "huge"])
def test_a_basis_is_orthonormal(kind, dtype, error):
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(1), dtype=dtype)
    if "equal" in kind:
        rows = rows[:1] + (1e-6 if "nearly" in kind else 0) * rows
    rows = rows * {"zeros": 0, "tiny": 1e-37, "huge": 1e37}.get(kind, 1)
    basis = orthogonalised(rows)
    torch.testing.assert_close((basis @ basis.T), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    short = basis.to(dtype)
    torch.testing.assert_close(short @ short.T, torch.eye(5, dtype=dtype), rtol=0, atol=error)
    inside = rows.double() - rows.double() @ basis.T @ basis
    assert inside.abs().max() <= 1e-12 * rows.double().abs().max(), "the basis doesn't span the rows"


def test_what_is_left_is_orthogonal_to_what_is_sent():
    compressor, tensor = make(2), random(1)
    left = tensor.clone()
    compressor.encode_residual_(left)
    for span in (spans()[0], spans()[2]):
        error = left[span.start : span.stop].view(span.shape[0], -1)
        sent = (tensor - left)[span.start : span.stop].view(span.shape[0], -1)
        assert (sent.T @ error).abs().max() < 1e-12 and torch.linalg.matrix_rank(sent) == 2
    assert all((left[span.start : span.stop] == 0).all() for span in (spans()[1], spans()[3]))


def test_a_warm_start_finds_the_best_approximation():
    """Power iteration: the error of one matrix sent again and again tends to the least that rank 2 can leave."""
    compressor, tensor = make(2), random(1)
    for _ in range(200):
        left = tensor.clone()
        compressor.encode_residual_(left)
    for span in (spans()[0], spans()[2]):
        least = torch.linalg.svdvals(tensor[span.start : span.stop].view(span.shape[0], -1))[2:].square().sum()
        torch.testing.assert_close(left[span.start : span.stop].square().sum(), least, rtol=1e-4, atol=0)


@pytest.mark.parametrize("first", [0.0, 1e-30])
def test_no_direction_is_lost_after_a_matrix_without_it(first):
    """Zeros, as for a parameter without a gradient, and equal rows, which give the next step one direction."""
    compressor, tensor = make(2), of_rank(2, torch.float32)
    compressor.encode_residual_(torch.full((COUNT,), first))
    for _ in range(2):
        left = tensor.clone()
        compressor.encode_residual_(left)
    assert left.abs().max() <= 1e-5 * tensor.abs().max()


def test_a_saved_state_goes_on():
    one, other = make(2), make(2)
    one.encode(random(1))
    other.load_state(one.state())
    assert torch.equal(one.encode(random(2)), other.encode(random(2)))
    assert not torch.equal(other.encode(random(2)), make(2).encode(random(2)))
