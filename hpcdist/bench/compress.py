"""How fast compressors code, and what a step costs with all-reduce compressed by each."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from hpcdist.bench.gossip import compare
from hpcdist.bench.steps import ALONE, MODELS, Side
from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, Feedback, Span

ELEMENTS = 10_000_000
SETTLING = 3  # rounds until what is left over by a message is as large as it stays
CONFIGS = {
    "threshold_0.1%": {"name": "threshold", "density": 0.001},
    "threshold_1%": {"name": "threshold", "density": 0.01},
    "topk_0.1%": {"name": "topk", "ratio": 0.001},
    "topk_1%": {"name": "topk", "ratio": 0.01},
    "dgc_0.1%": {"name": "dgc", "ratio": 0.001, "ramp_steps": 0},
    "onebit": {"name": "onebit"},
    "qsgd": {"name": "qsgd"},
    "powersgd_1": {"name": "powersgd", "rank": 1},
    "powersgd_4": {"name": "powersgd", "rank": 4},
    "fp16": {"name": "fp16"},
    "bf16": {"name": "bf16"},
}
SIDES = (
    Side(ALONE),
    Side("allreduce", "allreduce"),
    *(Side(name, "allreduce", {"compression": config}) for name, config in CONFIGS.items()),
)


def measure_coding(elements: int = ELEMENTS, rounds: int = 9) -> list[dict]:
    """Times the coding of a float32 gradient with error feedback, and the decoding of its message.

    The gradient is Gaussian and new at each round; a copy of it is timed beside.

    Returns:
        Rows: name, bytes (of the gradient), message_bytes, ratio, encode_s, decode_s (medians), bytes_per_s (of the
        gradient, through both together).
    """
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(elements, generator=generator) for _ in range(3)]
    out, n_bytes = torch.zeros(elements), 4 * elements
    side = max(1, round(elements**0.5))
    spans = [Span(0, side * side, (side, side)), Span(side * side, elements, (elements - side * side,))]  # for powersgd
    made = {
        name: Feedback(CompressionConfig.from_mapping(config).make(elements, spans), out)
        for name, config in CONFIGS.items()
    }
    copied_s: list[float] = []
    encoded_s: dict[str, list[float]] = {name: [] for name in made}
    decoded_s: dict[str, list[float]] = {name: [] for name in made}
    sizes = {}
    for number in range(SETTLING + rounds):
        gradient = gradients[number % len(gradients)]
        copied_s.append(_timed(lambda: out.copy_(gradient))[0])
        for name, feedback in made.items():
            taken_s, message = _timed(lambda: feedback.encode(gradient))
            encoded_s[name].append(taken_s)
            decoded_s[name].append(_timed(lambda: feedback.add(message, out))[0])
            sizes[name] = len(message)
    rows = [_row("copy", n_bytes, n_bytes, median(copied_s), 0.0)]
    for name, size in sizes.items():
        times = (median(taken_s[name][SETTLING:]) for taken_s in (encoded_s, decoded_s))
        rows.append(_row(name, n_bytes, size, *times))
    return rows


def _row(name: str, n_bytes: int, size: int, encode_s: float, decode_s: float) -> dict:
    speed = n_bytes / (encode_s + decode_s)
    row = {"name": name, "bytes": n_bytes, "message_bytes": size, "ratio": n_bytes / size}
    return {**row, "encode_s": encode_s, "decode_s": decode_s, "bytes_per_s": speed}


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def measure_steps(comm: Communicator, names: list[str] | None = None, rounds: int = 9, steps: int = 5) -> list[dict]:
    """Collective. Times training steps with all-reduce dense and compressed. Rows as `gossip.measure`'s."""
    return [row for model in names or list(MODELS) for row in compare(comm, model, SIDES, rounds, steps)]
