"""What every compressor keeps to, whatever it does: new ones are found by themselves."""

from __future__ import annotations

import copy
import inspect
import re
import sys

import pytest
import torch

from harness.cases import each
from hpcdist.checkpoint import tree
from hpcdist.compress import Feedback, Span, available, load
from hpcdist.errors import ConfigError

# Options where the defaults suit larger tensors.
OPTIONS = {"dgc": {"ratio": 0.01}}
every = pytest.mark.parametrize("name", available())
dtypes = each("dtype", [torch.float32, torch.float64])

# A matrix, a vector, a convolution's weights, and another matrix.
SHAPES = ((24, 16), (7,), (6, 4, 3, 3), (32, 9))
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def spans() -> list[Span]:
    found, start = [], 0
    for shape in SHAPES:
        stop = start + torch.Size(shape).numel()
        found.append(Span(start, stop, shape))
        start = stop
    return found


def make(name: str, count: int = COUNT, split: bool = True):
    cls = load(name)
    return cls(cls.Config(**OPTIONS.get(name, {})), count, spans() if split and count == COUNT else ())


def gradient(step: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def decoded(compressor, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((compressor.count,), 7.0, dtype=dtype)
    compressor.decode(message, out)
    return out


def error(dtype: torch.dtype, size: float = 8.0) -> dict:
    return {"rtol": 0, "atol": size * (1e-6 if dtype == torch.float32 else 1e-13)}


@every
@dtypes
@each("split", [True, False])
def test_what_a_message_lacks_is_left(name, dtype, split):
    """before = message + after, at every step."""
    compressor = make(name, split=split)
    residual = torch.zeros(COUNT, dtype=dtype)
    for step in range(8):
        residual += gradient(step, dtype)
        before = residual.clone()
        message = compressor.encode_residual_(residual)
        assert message.dtype == torch.uint8 and message.ndim == 1 and message.is_contiguous()
        torch.testing.assert_close(decoded(compressor, message, dtype) + residual, before, **error(dtype))
        assert not torch.equal(residual, before)


@every
@dtypes
@each("count", [0, 1, COUNT, (1 << 18) + 7])
def test_accumulating_piece_by_piece_changes_no_bit(name, dtype, count):
    once, apart = make(name, count), make(name, count)
    residual, other = torch.zeros(2, count, dtype=dtype)
    for step in range(2):
        tensor = gradient(step, dtype, count)
        message = once.encode_sum_(residual, tensor)
        apart.accumulate(other, tensor)
        assert torch.equal(message, apart.encode_residual_(other)) and torch.equal(residual, other)
        assert torch.equal(tensor, gradient(step, dtype, count))


@every
@dtypes
@each("whole", [False, True])
def test_a_change_taken_back_is_encoded_as_a_tensor_is(name, dtype, whole):
    once, apart = (Feedback(make(name), torch.zeros(COUNT, dtype=dtype)) for _ in range(2))
    for step in range(3):
        old = gradient(step, dtype)
        new = gradient(step + 10, dtype)
        change = (new - old) * 0.5
        message = once.encode_change_(new, old, 0.5, whole)
        assert torch.equal(message, apart.encode(change, whole)) and torch.equal(once.residual, apart.residual)
        assert torch.equal(new, old) and torch.equal(old, gradient(step, dtype))


@every
@dtypes
def test_feedback_loses_nothing(name, dtype):
    """Σ of what was accumulated = Σ messages + residual; a compressor may accumulate more than gradients."""
    feedback = Feedback(make(name), torch.zeros(COUNT, dtype=dtype))
    accumulated, sent = torch.zeros(2, COUNT, dtype=dtype)
    plain = feedback.compressor.accumulate

    def watched(residual, tensor):
        before = residual.clone()
        plain(residual, tensor)
        accumulated.add_(residual - before)

    feedback.compressor.accumulate = watched
    for step in range(30):
        feedback.compressor.add(feedback.encode(gradient(step, dtype)), sent)
    torch.testing.assert_close(accumulated, sent + feedback.residual, **error(dtype, 100))
    assert feedback.residual.isfinite().all()


@every
@dtypes
@each("weight", [1.0, -1.0, 0.5, 1 / 3])
def test_messages_are_added_with_a_weight(name, dtype, weight):
    compressor = make(name)
    message = compressor.encode(gradient(0, dtype))
    alone = decoded(compressor, message, dtype)
    out = gradient(1, dtype)
    compressor.add(message, out, weight)
    torch.testing.assert_close(out, gradient(1, dtype) + weight * alone, **error(dtype))


@every
@dtypes
def test_encoding_leaves_the_tensor_and_reading_the_message(name, dtype):
    compressor, values = make(name), gradient(0, dtype)
    message = compressor.encode(values)
    kept = message.clone()
    assert torch.equal(values, gradient(0, dtype))
    assert torch.equal(decoded(compressor, message, dtype), decoded(compressor, message, dtype))
    assert torch.equal(message, kept)


@every
@dtypes
def test_messages_and_what_they_stand_for_are_the_same_at_each_run(name, dtype):
    """On every rank the same bits are decoded, by a compressor that has seen other gradients."""
    first, second, reader = make(name), make(name), make(name)
    reader.encode(gradient(99, dtype))
    for step in range(4):
        messages = [compressor.encode(gradient(step, dtype)) for compressor in (first, second)]
        assert torch.equal(*messages)
        assert torch.equal(decoded(first, messages[0], dtype), decoded(reader, messages[0], dtype))


@every
@dtypes
def test_a_message_may_have_come_among_others(name, dtype):
    compressor = make(name)
    message = compressor.encode(gradient(0, dtype))
    for before in (1, 4, 8):  # bytes of a message in front
        inside = torch.cat([torch.zeros(before, dtype=torch.uint8), message])[before:]
        assert torch.equal(decoded(compressor, inside, dtype), decoded(compressor, message, dtype))


@every
@dtypes
def test_zeros_stay_zeros(name, dtype):
    compressor, values = make(name), torch.zeros(COUNT, dtype=dtype)
    for _ in range(3):
        message = compressor.encode_residual_(values)
        assert not values.any() and not decoded(compressor, message, dtype).any()
    assert decoded(compressor, compressor.encode_residual_(gradient(0, dtype)), dtype).any(), "it goes on working"


@every
@dtypes
@each("count", [0, 1, 2, 9])
def test_short_tensors(name, dtype, count):
    compressor = make(name, count)
    values = gradient(0, dtype, count)
    for _ in range(3):
        before = values.clone()
        message = compressor.encode_residual_(values)
        torch.testing.assert_close(decoded(compressor, message, dtype) + values, before, **error(dtype))


@every
@dtypes
@each("size", [1e-30, 1e-12, 1e12, 1e30])
def test_sizes_of_any_order_stay_finite(name, dtype, size):
    compressor, values = make(name), size * gradient(0, dtype)
    before = values.clone()
    message = compressor.encode_residual_(values)
    out = decoded(compressor, message, dtype)
    assert out.isfinite().all() and values.isfinite().all()
    # What stands for elements may be larger than they are, as ±1 is.
    torch.testing.assert_close(out + values, before, **error(dtype, 8 * max(size, 1e-25, out.abs().max().item())))


@every
@dtypes
@each("kind", ["largest", "signs", "one", "negative", "mixed", "least", "beyond float32", "row", "half"])
@each("split", [True, False])
def test_what_is_finite_stays_finite(name, dtype, kind, split):
    """Messages, what they stand for, and what they leave, up to the largest numbers; in float32 sums overflow there.

    What can't be sent waits: before = message + after, but for powersgd, whose products must not overflow: where even
    that waits in part, it may end at the largest number.
    """
    most, info = torch.finfo(torch.float32).max, torch.finfo(dtype)
    drawn, values = gradient(0, dtype), torch.zeros(COUNT, dtype=dtype)
    if kind == "largest":
        values.fill_(most)
    elif kind == "signs":
        values.copy_(drawn.sign() * most)
    elif kind == "one":
        values[3] = -most
    elif kind == "negative":
        values.fill_(-most)
    elif kind == "mixed":
        values.copy_(drawn)
        values[::7] = most
        values[::11] = -most
    elif kind == "least":
        values.copy_(drawn.sign() * info.smallest_normal / 4)
    elif kind == "beyond float32":
        values.copy_(drawn.sign() * info.max)
    elif kind == "row":
        values[:16], values[16:32] = most, -most
    else:
        values.copy_(drawn.clamp(-1, 1) * (most / 2))
    compressor, before = make(name, split=split), values.clone()
    for _ in range(3):
        message = compressor.encode_residual_(values)
        out = decoded(compressor, message, dtype)
        assert out.isfinite().all() and values.isfinite().all()
        if name != "powersgd":
            tolerance = 64 * info.eps * torch.maximum(before.abs(), out.abs()).max().item()
            torch.testing.assert_close(out / 2 + values / 2, before / 2, rtol=0, atol=tolerance)
        before = values.clone()


@every
@dtypes
def test_it_goes_on_to_the_bit_from_a_state(name, dtype):
    like = torch.zeros(COUNT, dtype=dtype)
    first = Feedback(make(name), like)
    for step in range(5):
        first.encode(gradient(step, dtype))
    saved = copy.deepcopy(first.state())
    second = Feedback(make(name), like)
    second.load_state(saved)
    for step in range(5, 9):
        assert torch.equal(first.encode(gradient(step, dtype)), second.encode(gradient(step, dtype)))
        assert torch.equal(first.residual, second.residual)


@every
def test_its_state_is_what_checkpoints_hold(name):
    feedback = Feedback(make(name), torch.zeros(COUNT))
    for step in range(3):
        values, tensors, places = tree.encode(feedback.state())
        kept = {key: tensor.clone() for key, tensor in tensors.items()}
        again = Feedback(make(name), torch.zeros(COUNT))
        again.load_state(tree.TreeDecoder(kept.__getitem__, places, "memory").decode(values))
        assert torch.equal(again.encode(gradient(step, torch.float32)), feedback.encode(gradient(step, torch.float32)))


@every
def test_options_are_described_checked_and_named_where_wrong(name):
    config = load(name).Config
    assert all(field.description for field in config.model_fields.values())
    with pytest.raises(ConfigError, match="speling"):
        config(speling=1)


@every
def test_the_docstring_gives_bytes_error_and_source(name):
    cls = load(name)
    text = inspect.getdoc(cls)
    assert "Bytes" in text and "Error" in text
    assert re.search(r'Reference: [^"]+, "[^"]+", [\d-]*\d{4}', re.sub(r"\s+", " ", text))
    assert sys.modules[cls.__module__].__doc__


@pytest.mark.parametrize("name", [name for name in available() if name != "none"])
def test_it_sends_less_than_float32(name):
    cls = load(name)
    compressor = cls(cls.Config(), 4096, [Span(0, 4096, (64, 64))])
    assert len(compressor.encode(gradient(0, torch.float32, 4096))) <= 4 * 4096 / 2
