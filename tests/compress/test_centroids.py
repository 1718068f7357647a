"""Few bits per value: bins and their means, the entropy code, the two compressors that have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress import vectors
from harness.cases import each
from hpcdist.compress.coding.centroids import decode_codes, encode_codes, quantise

pytestmark = pytest.mark.computes


def reference(values: torch.Tensor, bins: int) -> torch.Tensor:
    """The rule, in torch: bins of width 6σ/B around the mean, and the mean of the values of each."""
    width = 6 * values.std() / bins
    codes = ((values - values.mean()) / width + bins / 2).round().clamp(0, bins - 1)
    return torch.stack([values[codes == code].mean() for code in codes])


@each("bits", [2, 4, 8])
def test_each_value_becomes_the_mean_of_its_bin(bits):
    values = vectors.normal(3000, 1)
    compressor = vectors.make("bins", 3000, bits=bits)
    found = vectors.decoded(compressor, compressor.encode(values))
    torch.testing.assert_close(found, reference(values, 1 << bits), rtol=1e-6, atol=1e-7)
    assert found.mean() == pytest.approx(values.mean().item(), abs=1e-7), "the mean is kept"


def test_parameters_have_bins_of_their_own():
    spans = vectors.spans_of((50, 20), (30,))
    values = torch.cat([vectors.normal(1000, 2) * 1e-3, vectors.normal(30, 3) + 100])
    compressor = vectors.make("bins", 1030, spans)
    found = vectors.decoded(compressor, compressor.encode(values))
    torch.testing.assert_close(found[:1000], reference(values[:1000], 4), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found[1000:], reference(values[1000:], 4), rtol=1e-5, atol=1e-9)


@each("values", [[3.5], [-2.0, -2.0, -2.0], [0.0, 0.0], [1.0, -1.0], [4.0, 0.5, -3.0, 8.0]])
def test_few_or_equal_values_are_exact(values):
    codes, means = quantise(np.array(values), 4)
    assert means[codes].tolist() == values


@each("counts", [[0, 0, 0, 0], [0, 9, 0, 0], [1, 0, 0, 1], [5, 1000, 700, 3]])
def test_codes_come_back(counts):
    codes = np.random.default_rng(0).permutation(np.repeat(np.arange(4), counts)).astype(np.int32)
    assert np.array_equal(decode_codes(encode_codes(codes, 4), 4), codes)


def test_bytes_are_those_of_the_entropy():
    values = vectors.normal(200_000, 4, torch.float32)
    message = vectors.make("bins", len(values)).encode(values)
    share = np.bincount(quantise(values.numpy(), 4)[0], minlength=4) / len(values)
    entropy_bytes = -(share * np.log2(share)).sum() * len(values) / 8
    assert entropy_bytes < len(message) < 1.001 * entropy_bytes + 4 * 4 * 2 + 4
    assert len(message) < 0.8 * 2 * len(values) / 8, "fewer than two bits"
