"""Error feedback around any compressor."""

from __future__ import annotations

import pytest
import torch

from compress.vectors import make
from harness.cases import each
from hpcdist.compress import CompressionConfig, Feedback, available, load
from hpcdist.errors import ConfigError, UnknownNameError


def test_what_a_message_lacks_comes_with_the_next_one():
    feedback = Feedback(make("topk", 2, ratio=0.5), torch.zeros(2))
    out = torch.zeros(2)
    feedback.compressor.add(feedback.encode(torch.tensor([1.0, 3.0])), out)
    assert out.tolist() == [0, 3] and feedback.residual.tolist() == [1, 0]
    feedback.compressor.add(feedback.encode(torch.tensor([2.5, 3.0])), out)
    assert out.tolist() == [3.5, 3] and feedback.residual.tolist() == [0, 3]


def test_without_feedback_it_is_forgotten():
    feedback = Feedback(make("topk", 2, ratio=0.5), torch.zeros(2), enabled=False)
    out = torch.zeros(2)
    for _ in range(3):
        feedback.compressor.add(feedback.encode(torch.tensor([2.0, 3.0])), out)
    assert out.tolist() == [0, 9]


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_residual_is_held_in_full_precision_and_the_tensor_stays(dtype):
    gradient = torch.tensor([1.0, 2.0], dtype=dtype)
    feedback = Feedback(make("topk", 2, ratio=0.5), gradient)
    feedback.encode(gradient)
    assert feedback.residual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert feedback.residual.tolist() == [1, 0] and gradient.tolist() == [1, 2]


def test_it_converges_where_the_compressor_alone_does_not():
    """One parameter's gradient is large and of changing sign, so that the other's is never the largest."""
    found = {}
    for enabled in (True, False):
        x = torch.zeros(2)
        feedback = Feedback(make("topk", 2, ratio=0.5), x, enabled)
        for step in range(2000):
            gradient = torch.tensor([10.0 * (-1) ** step, float(x[1]) - 1])
            feedback.compressor.add(feedback.encode(gradient), x, weight=-0.01)
        found[enabled] = x[1].item()
    assert found[False] == 0
    assert found[True] == pytest.approx(1, abs=0.15)


# --- which compressor, by name ----------------------------------------------------------------------------------------
def test_a_compressor_is_chosen_by_name():
    assert not CompressionConfig()
    assert CompressionConfig.model_validate("bf16").name == "bf16"
    config = CompressionConfig(name="topk", ratio=0.5)
    assert config and isinstance(config.make(10), load("topk"))
    assert config.make(10).config.ratio == 0.5


def test_names_and_options_that_there_are_not_are_refused():
    with pytest.raises(UnknownNameError, match="must be one of .*threshold.*; got 'treshold'"):
        load("treshold")
    for options, message in (
        ({"name": "treshold"}, "got 'treshold'"),
        ({"name": "topk", "ration": 0.5}, r"strategy\.compression.*ration"),
        ({"ratio": 0.5}, "with option ratio; got none"),
        ({"name": "topk", "warmup_ranks": 2}, "warmup_ranks must be left out without warmup_steps, .*; got 2"),
        (
            {"name": "chunk_topk", "decay": 0.9, "error_feedback": False},
            "decay must be left out .* is false, .*; got 0.9",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            CompressionConfig(**options)


def test_all_are_found_by_their_files():
    assert {"none", "threshold", "topk", "dgc", "fp16", "bf16"} <= set(available())
    assert "feedback" not in available() and "base" not in available()
