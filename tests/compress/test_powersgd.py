"""PowerSGD: exact up to its rank, a projection, and the same from every rank's point of view."""

from __future__ import annotations

import torch

from compress import vectors
from harness.cases import each
from hpcdist.compress.powersgd import orthogonalised

SPANS = vectors.spans_of((30, 20), (11,), (16, 3, 9), (2, 2))
MATRICES = SPANS[0], SPANS[2]
COUNT = SPANS[-1].stop


def make(rank: int):
    return vectors.make("powersgd", COUNT, SPANS, rank=rank)


def random(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return vectors.normal(COUNT, seed, dtype)


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose matrices have this rank."""
    tensor = random(1, dtype)
    for span in MATRICES:
        matrix = tensor[span.start : span.stop].view(span.shape[0], -1)
        matrix.copy_(random(2, dtype)[: len(matrix) * rank].view(-1, rank) @ matrix[:rank])
    return tensor


@each("case", [(torch.float32, 4, 1e-5), (torch.float64, 8, 1e-12)])
def test_matrices_of_its_rank_are_sent_exactly_in_the_bytes_of_the_docstring(case):
    dtype, size, error = case
    assert len(make(2).encode(random(1, dtype))) == size * (2 * (30 + 20) + 11 + 2 * (16 + 27) + 4)
    for rank in (1, 2, 3):
        tensor = of_rank(rank, dtype)
        _, out, left = vectors.coded(make(rank), tensor)
        torch.testing.assert_close(out, tensor, rtol=0, atol=error * float(tensor.abs().max()))
        assert left.abs().max() <= error * tensor.abs().max()


def test_at_full_rank_all_is_sent_as_it_is():
    compressor = make(20)
    message = compressor.encode(random(1))
    assert len(message) == 8 * COUNT and torch.equal(vectors.decoded(compressor, message), random(1))


@each("case", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@each("kind", ["random", "equal rows", "nearly equal rows", "zeros", "tiny", "huge"])
def test_a_basis_is_orthonormal(kind, case):
    dtype, error = case
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


def test_a_warm_start_finds_the_best_approximation():
    """Power iteration: the error of one matrix sent again and again tends to the least that rank 2 can leave."""
    compressor, tensor = make(2), random(1)
    for _ in range(200):
        *_, left = vectors.coded(compressor, tensor)
    for span in MATRICES:
        least = torch.linalg.svdvals(tensor[span.start : span.stop].view(span.shape[0], -1))[2:].square().sum()
        torch.testing.assert_close(left[span.start : span.stop].square().sum(), least, rtol=1e-4, atol=0)


@each("first", [0.0, 1e-30])
def test_no_direction_is_lost_after_a_matrix_without_it(first):
    """Zeros, as for a parameter without a gradient, and equal rows, which give the next step one direction."""
    compressor, tensor = make(2), of_rank(2, torch.float32)
    compressor.encode_residual_(torch.full((COUNT,), first))
    for _ in range(2):
        *_, left = vectors.coded(compressor, tensor)
    assert left.abs().max() <= 1e-5 * tensor.abs().max()


def test_each_step_starts_from_the_directions_of_the_last():
    one, other = make(2), make(2)
    one.encode(random(1))
    other.load_state_dict(one.state_dict())
    other.load_state_dict({"start": torch.ones(3)})  # of other matrices: the start stays
    assert not torch.equal(other.encode(random(2)), make(2).encode(random(2)))
