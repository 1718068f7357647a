"""What every compressor keeps to, whatever it does: new ones are found by themselves."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch

from compress import vectors
from compress.vectors import decoded
from harness.cases import each
from hpcdist.checkpoint import tree
from hpcdist.compress import CompressionConfig, Compressor, Feedback, JointCompression, available, load
from hpcdist.errors import ConfigError, UnknownNameError

# By name: options where the defaults suit larger tensors, and those that lead another way through the code.
OPTIONS = {"dgc": {"ratio": 0.01, "ramp_steps": 6}}
VARIANTS = {
    **{name: (name, OPTIONS.get(name, {})) for name in available()},
    "qsgd 2-norm": ("qsgd", {"norm": "2-norm"}),
    "onebit row": ("onebit", {"means": "row"}),
    "threshold tau": ("threshold", {"tau": 0.7}),
    "topk fp16": ("topk", {"ratio": 0.3, "values": "fp16"}),
    "chunk_topk 2bit": ("chunk_topk", {"ratio": 0.2, "side": 8, "values": "2bit", "decay": 0.9}),
    "chunk_topk fp16": ("chunk_topk", {"ratio": 0.1, "side": 16, "values": "fp16"}),
    "bins of 4 bits": ("bins", {"bits": 4}),
}
each_variant, each_name = each("variant", VARIANTS), each("name", available())
BOTH = [torch.float32, torch.float64]
dtypes = each("dtype", BOTH)

# A matrix, a vector, a convolution's weights, and another matrix.
SPANS = vectors.spans_of((24, 16), (7,), (6, 4, 3, 3), (32, 9))
COUNT = SPANS[-1].stop


def make(variant: str, count: int = COUNT, split: bool = True):
    name, options = VARIANTS[variant]
    return vectors.make(name, count, SPANS if split and count == COUNT else (), **options)


def gradient(step: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return vectors.normal(count, step, dtype)


def error(dtype: torch.dtype, size: float = 8.0) -> dict:
    return {"rtol": 0, "atol": size * (1e-6 if dtype == torch.float32 else 1e-13)}


@each_variant
@dtypes
@each("split", [True, False])
def test_what_a_message_lacks_is_left(variant, dtype, split):
    """before = message + after, at every step."""
    compressor = make(variant, split=split)
    residual = torch.zeros(COUNT, dtype=dtype)
    for step in range(5):
        residual += gradient(step, dtype)
        before = residual.clone()
        message = compressor.encode_residual_(residual)
        assert message.dtype == torch.uint8 and message.ndim == 1 and message.is_contiguous()
        torch.testing.assert_close(decoded(compressor, message, dtype) + residual, before, **error(dtype))
        assert not torch.equal(residual, before)


@each_variant
@each("case", [(0, torch.float32), (1, torch.float64), *((COUNT, d) for d in BOTH), ((1 << 18) + 7, torch.float32)])
def test_accumulating_piece_by_piece_changes_no_bit(variant, case):
    count, dtype = case
    once, apart = make(variant, count), make(variant, count)
    residual, other = torch.zeros(2, count, dtype=dtype)
    for step in range(2):
        tensor = gradient(step, dtype, count)
        message = once.encode_sum_(residual, tensor)
        apart.accumulate(other, tensor)
        assert torch.equal(message, apart.encode_residual_(other)) and torch.equal(residual, other)
        assert torch.equal(tensor, gradient(step, dtype, count))


@each_variant
@dtypes
@each("whole", [False, True])
def test_a_change_taken_back_is_encoded_as_a_tensor_is(variant, dtype, whole):
    once, apart = (Feedback(make(variant), torch.zeros(COUNT, dtype=dtype)) for _ in range(2))
    for step in range(3):
        old = gradient(step, dtype)
        new = gradient(step + 10, dtype)
        change = (new - old) * 0.5
        message = once.encode_change_(new, old, 0.5, whole)
        assert torch.equal(message, apart.encode(change, whole)) and torch.equal(once.residual, apart.residual)
        assert torch.equal(new, old) and torch.equal(old, gradient(step, dtype))


@each_variant
@dtypes
def test_messages_are_added_with_a_weight_wherever_they_lie_in_memory(variant, dtype):
    compressor, values = make(variant), gradient(0, dtype)
    message = compressor.encode(values)
    kept, alone = message.clone(), decoded(compressor, message, dtype)
    assert torch.equal(values, gradient(0, dtype)), "encoding has changed the tensor"
    for weight in (1.0, -1.0, 0.5, 1 / 3):
        out = gradient(1, dtype)
        compressor.add(message, out, weight)
        torch.testing.assert_close(out, gradient(1, dtype) + weight * alone, **error(dtype))
    for before in (0, 1, 4, 8):  # bytes of another message in front
        inside = torch.cat([torch.zeros(before, dtype=torch.uint8), message])[before:]
        assert torch.equal(decoded(compressor, inside, dtype), alone)
    assert torch.equal(message, kept)


@each_variant
@dtypes
def test_messages_are_the_same_at_each_run_and_for_each_reader(variant, dtype):
    """On every rank the same bits are decoded, by a compressor that has seen other gradients."""
    first, second, reader = make(variant), make(variant), make(variant)
    reader.encode(gradient(99, dtype))
    for step in range(4):
        messages = [compressor.encode(gradient(step, dtype)) for compressor in (first, second)]
        assert torch.equal(*messages)
        assert torch.equal(decoded(first, messages[0], dtype), decoded(reader, messages[0], dtype))


@each_variant
@dtypes
def test_zeros_stay_zeros(variant, dtype):
    compressor, values = make(variant), torch.zeros(COUNT, dtype=dtype)
    for _ in range(3):
        message = compressor.encode_residual_(values)
        assert not values.any() and not decoded(compressor, message, dtype).any()
    assert decoded(compressor, compressor.encode_residual_(gradient(0, dtype)), dtype).any(), "it goes on working"


@each_variant
@dtypes
@each("case", [*((count, 1.0) for count in (0, 1, 2, 9)), *((COUNT, size) for size in (1e-30, 1e-12, 1e12, 1e30))])
def test_short_tensors_and_numbers_of_any_size(variant, dtype, case):
    count, size = case
    compressor, values = make(variant, count), size * gradient(0, dtype, count)
    for _ in range(3):
        before = values.clone()
        out = decoded(compressor, compressor.encode_residual_(values), dtype)
        assert out.isfinite().all() and values.isfinite().all()
        # What stands for elements may be larger than they are, as ±1 is.
        most = max([size, 1e-25, *out.abs().tolist()])
        torch.testing.assert_close(out + values, before, **error(dtype, 8 * most))


KINDS = ["largest", "signs", "one", "negative", "mixed", "least", "beyond float32", "row", "half"]


def extreme(kind: str, dtype: torch.dtype) -> torch.Tensor:
    most, info = torch.finfo(torch.float32).max, torch.finfo(dtype)
    drawn, values = gradient(0, dtype), torch.zeros(COUNT, dtype=dtype)
    if kind == "one":
        values[3] = -most
    elif kind == "mixed":
        values.copy_(drawn)
        values[::7], values[::11] = most, -most
    elif kind == "row":
        values[:16], values[16:32] = most, -most
    else:
        values = {
            "largest": torch.full_like(drawn, most),
            "signs": drawn.sign() * most,
            "negative": torch.full_like(drawn, -most),
            "least": drawn.sign() * info.smallest_normal / 4,
            "beyond float32": drawn.sign() * info.max,
            "half": drawn.clamp(-1, 1) * (most / 2),
        }[kind]
    return values


@each_variant
@dtypes
@each("case", [*((kind, True) for kind in KINDS), ("mixed", False), ("largest", False)])
def test_what_is_finite_stays_finite(variant, dtype, case):
    """Messages, what they stand for, and what they leave, up to the largest numbers; in float32 sums overflow there.

    What can't be sent waits: before = message + after, but for powersgd, whose products must not overflow: where even
    that waits in part, it may end at the largest number.
    """
    (kind, split), info = case, torch.finfo(dtype)
    values = extreme(kind, dtype)
    compressor, before = make(variant, split=split), values.clone()
    for _ in range(3):
        message = compressor.encode_residual_(values)
        out = decoded(compressor, message, dtype)
        assert out.isfinite().all() and values.isfinite().all()
        if variant != "powersgd":
            tolerance = 64 * info.eps * torch.maximum(before.abs(), out.abs()).max().item()
            torch.testing.assert_close(out / 2 + values / 2, before / 2, rtol=0, atol=tolerance)
        before = values.clone()


@each_variant
def test_what_a_saved_state_lacks_stays_as_it_is(variant):
    """Another compressor has saved it."""
    coder = make(variant)
    coder.encode(gradient(0, torch.float32))
    before = coder.state_dict()
    coder.load_state_dict({"of another one": 1})
    assert all(value is before[name] for name, value in coder.state_dict().items())


def through_a_checkpoint(state):
    values, tensors, places = tree.encode(state)
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    return tree.TreeDecoder(kept.__getitem__, places, "memory").decode(values)


@each_variant
@dtypes
def test_it_goes_on_to_the_bit_from_a_state_in_a_checkpoint(variant, dtype):
    like = torch.zeros(COUNT, dtype=dtype)
    for taken in (0, 3):  # a state from before the first step is one, too
        first, second = Feedback(make(variant), like), Feedback(make(variant), like)
        for step in range(taken):
            first.encode(gradient(step, dtype))
        second.load_state_dict(through_a_checkpoint(first.state_dict()))
        for step in range(taken, taken + 4):
            assert torch.equal(first.encode(gradient(step, dtype)), second.encode(gradient(step, dtype)))
            assert torch.equal(first.residual, second.residual)


@each("name", ["state", "load_state"])
def test_one_that_saves_what_it_remembers_by_itself_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^Own must not define '{name}', .*; write: remembers = \(\"start\",\)$"):
        type(Compressor)("Own", (Compressor,), {name: lambda self: {}})


WRONG = [
    *[("dgc", options) for options in ({"momentum": 1.0}, {"ramp_steps": -1}, {"clip_norm": 0.0})],
    *[("threshold", options) for options in ({"tau": 0.0}, {"tau": -1.0}, {"density": 0.0}, {"density": 1.5})],
    *[("topk", options) for options in ({"ratio": 0.0}, {"ratio": 1.01}, {"values": "fp8"})],
    *[("terngrad", {"clip": clip}) for clip in (0.0, -1.0)],
]


@each("wrong", WRONG)
def test_options_are_checked(wrong):
    name, options = wrong
    with pytest.raises(ConfigError, match="must be"):
        load(name).Config(**options)


@each_name
def test_options_and_docstrings_are_whole(name):
    cls = load(name)
    assert all(field.description for field in cls.Config.model_fields.values())
    with pytest.raises(ConfigError, match="speling"):
        cls.Config(speling=1)
    text = inspect.getdoc(cls)
    assert "Bytes" in text and "Error" in text
    assert re.search(r'Reference: [^"]+, "[^"]+", [\d-]*\d{4}', re.sub(r"\s+", " ", text))
    assert sys.modules[cls.__module__].__doc__


@each_name
def test_it_sends_less_than_float32(name):
    if name != "none":
        compressor = vectors.make(name, 4096, vectors.spans_of((64, 64)))
        assert len(compressor.encode(gradient(0, torch.float32, 4096))) <= 4 * 4096 / 2


# --- error feedback; compressors by name ------------------------------------------------------------------------------
@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each("enabled", [True, False])
def test_what_a_message_lacks_comes_with_the_next_one_and_without_feedback_is_forgotten(enabled, dtype):
    gradients = torch.tensor([[1.0, 3.0], [2.5, 3.0]], dtype=dtype)
    feedback = Feedback(vectors.make("topk", 2, ratio=0.5), gradients[0], enabled=enabled)
    full = torch.float64 if dtype == torch.float64 else torch.float32
    before, found = gradients.clone(), []
    for gradient in gradients:
        out = torch.zeros(2, dtype=full)
        feedback.compressor.add(feedback.encode(gradient), out)
        found.append((out.tolist(), feedback.residual.tolist() if enabled else None))
    assert torch.equal(gradients, before) and (not enabled or feedback.residual.dtype == full)
    assert found == ([([0, 3], [1, 0]), ([3.5, 0], [0, 3])] if enabled else [([0, 3], None)] * 2)


@each("name", ["signsgd", "terngrad"])
def test_those_that_go_without_feedback_say_so(name):
    assert not JointCompression.model_validate(name).error_feedback and CompressionConfig(name="topk").error_feedback
    with pytest.raises(ConfigError, match=f"error_feedback must be false with {name}, .* got true. Remove it, or"):
        JointCompression(name=name, error_feedback=True)


def test_names_and_options_that_there_are_not_are_refused():
    with pytest.raises(UnknownNameError, match="must be one of .*threshold.*; got 'treshold'"):
        load("treshold")
    for options, message in (
        ({"name": "treshold"}, "got 'treshold'"),
        ({"name": "topk", "ration": 0.5}, r"strategy\.compression.*ration"),
        ({"ratio": 0.5}, "with option ratio; got none"),
        ({"name": "topk", "warmup_ranks": 2}, "warmup_ranks must be omitted without warmup_steps, .*; got 2"),
        (
            {"name": "chunk_topk", "decay": 0.9, "error_feedback": False},
            "decay must be omitted .* is false, .*; got 0.9",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            CompressionConfig(**options)
