"""QSGD: unbiased, of bounded variance, and packed in the fewest whole bits."""

from __future__ import annotations

import functools

import pytest
import torch

from compress import vectors
from compress.vectors import normal
from harness.cases import each
from hpcdist.compress import CompressionConfig
from hpcdist.compress.qsgd import _pack, _unpack
from hpcdist.errors import ConfigError

make = functools.partial(vectors.make, "qsgd")


@each("bits", range(1, 9))
def test_packing_is_undone_by_unpacking(bits):
    numbers = torch.randint(1 << bits, (136,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
    packed, out = _pack(numbers, bits), torch.zeros(136, dtype=torch.uint8).numpy()
    _unpack(packed, bits, out)
    assert len(packed) == 17 * bits and (out == numbers).all()


@each("norm", ["max", "2-norm"])
@each("case", [(1, 64), (7, 128), (127, 512)])
def test_it_is_unbiased_and_its_variance_bounded(norm, case):
    (levels, bucket), draws = case, 400
    tensor = normal(4 * bucket, 3)
    compressor = make(4 * bucket, levels=levels, bucket=bucket, norm=norm)
    total, squares = torch.zeros_like(tensor), torch.zeros(4, dtype=torch.float64)
    for _ in range(draws):
        *_, error = vectors.coded(compressor, tensor)
        total += error
        squares += error.view(4, -1).square().sum(dim=1)
    own = tensor.view(4, -1).square().sum(dim=1)
    variance = squares / draws
    assert (variance <= 1.05 * min(bucket / (4 * levels**2), bucket**0.5 / levels) * own).all()
    spread = (variance.sum() / draws).sqrt()  # of the mean error's norm, were the errors' means 0
    assert 0.7 * spread < (total / draws).norm() < 1.3 * spread


@each("count", [1, 8, 129, 200_003])
@each("case", [(1, 2), (3, 3), (10, 5), (127, 8)])
def test_the_bytes_are_those_of_the_docstring(count, case):
    levels, bits = case
    compressor, tensor = make(count, levels=levels), normal(count, dtype=torch.float32)
    message, out, error = vectors.coded(compressor, tensor)
    assert len(message) == bits * -(-count // 8) + 4 * -(-count // min(128, -(-count // 8) * 8))
    torch.testing.assert_close(out + error, tensor)
    assert (error.abs() <= tensor.abs().max() / levels * 1.0001).all()


def test_streams_and_messages_draw_apart():
    tensor, first = normal(5000, dtype=torch.float32), make(5000)
    messages = [first.encode(tensor) for _ in range(2)]
    assert not torch.equal(*messages)
    for other in (make(5000, seed=1), make(5000, stream=1)):
        assert not torch.equal(messages[0], other.encode(tensor))
    other.load_state_dict(first.state_dict())
    assert not torch.equal(other.encode(tensor), first.encode(tensor))


def test_settings_whose_error_may_grow_are_refused_with_feedback():
    message = r"levels must satisfy .* < 1 .*; got s = 3, d = 512. Set levels = 12, smaller buckets, or"
    with pytest.raises(ConfigError, match=message):
        CompressionConfig.from_mapping({"name": "qsgd", "levels": 3, "bucket": 512})
    assert CompressionConfig.from_mapping({"name": "qsgd", "levels": 12, "bucket": 512})
    assert CompressionConfig.from_mapping({"name": "qsgd", "levels": 3, "bucket": 512, "error_feedback": False})
