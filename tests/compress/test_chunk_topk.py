"""Top-k of each chunk: which elements are sent, what their messages take, how the rest fades."""

from __future__ import annotations

import pytest
import torch

from compress import vectors
from harness.cases import each
from hpcdist.compress import Feedback

pytestmark = pytest.mark.computes


def sent(compressor, values):
    return vectors.decoded(compressor, compressor.encode(values), values.dtype)


def test_every_block_of_a_matrix_sends_its_largest():
    """By hand, on blocks of 4 × 3 of a matrix of 8 × 9."""
    matrix = vectors.normal(72, 1).view(8, 9)
    compressor = vectors.make("chunk_topk", 72, vectors.spans_of((8, 9)), side=4, ratio=2 / 12, values="fp64")
    found = sent(compressor, matrix.reshape(-1)).view(8, 9)
    for top in (0, 4):
        for left in (0, 3, 6):
            block, theirs = (of[top : top + 4, left : left + 3] for of in (matrix, found))
            least = block.abs().reshape(-1).topk(2).values.min()
            assert torch.equal(theirs, torch.where(block.abs() >= least, block, 0.0))


@each("shape", [(7, 11), (1, 1), (13,), (6, 4, 3, 3), (64, 64), (128, 3), (0,), ()])
def test_parameters_of_any_shape_send_at_least_one_element_of_each_chunk(shape):
    count = torch.Size(shape).numel()
    compressor = vectors.make("chunk_topk", count, vectors.spans_of(shape), ratio=1e-6, side=8)
    chunks = {(7, 11): 11, (1, 1): 1, (13,): 13, (6, 4, 3, 3): 6, (64, 64): 64, (128, 3): 16, (0,): 0, (): 1}
    assert sent(compressor, vectors.normal(count, 2)).count_nonzero() == chunks[shape]


def test_with_one_chunk_it_is_topk():
    values = vectors.normal(600, 3, torch.float32)
    whole = vectors.make("chunk_topk", 600, ratio=0.05, side=600)
    assert torch.equal(sent(whole, values), sent(vectors.make("topk", 600, ratio=0.05), values))


def test_zeros_are_never_sent_and_all_of_a_chunk_leaves_nothing():
    values = torch.zeros(64)
    values[5] = 2.0
    assert len(vectors.make("chunk_topk", 64).encode(torch.zeros(64))) == 0
    compressor = vectors.make("chunk_topk", 64, ratio=1.0)
    _, found, error = vectors.coded(compressor, values)
    assert torch.equal(found, values) and not error.any()


def test_what_waits_fades():
    values, decay = torch.tensor([1.0, 0.01]), 0.9
    feedback = Feedback(vectors.make("chunk_topk", 2, ratio=0.5, decay=decay), values)
    for step in range(1, 60):
        feedback.encode(values)
        expected = 0.01 * (1 - decay**step) / (1 - decay)
        assert feedback.residual.tolist() == pytest.approx([0.0, expected], abs=1e-6)


def test_two_bits_send_each_parameters_choice_as_four_means():
    spans = vectors.spans_of((64, 64), (64,))
    values = torch.cat([vectors.normal(4096, 5, torch.float32), 50 + vectors.normal(64, 6, torch.float32)])
    exact = sent(vectors.make("chunk_topk", 4160, spans, ratio=1 / 16), values)
    found = sent(vectors.make("chunk_topk", 4160, spans, ratio=1 / 16, values="2bit"), values)
    for part in (slice(0, 4096), slice(4096, 4160)):
        assert torch.equal(found[part] != 0, exact[part] != 0)
        assert 1 <= len(found[part].unique()) - 1 <= 4
        assert found[part].sum() == pytest.approx(exact[part].sum().item(), rel=1e-5)


def test_bytes_of_a_message():
    """64 of 4,096 elements of two bits, with 12-bit indices, are 0.219 bits per element; entropy codes need less."""
    spans = vectors.spans_of((1024, 1024))
    compressor = vectors.make("chunk_topk", 1 << 20, spans, values="2bit")
    bits = 8 * len(compressor.encode(vectors.normal(1 << 20, 7, torch.float32))) / (1 << 20)
    assert bits < 0.16
