"""The speed of compressors: coding a gradient, and decoding its message."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.runner import Row, Run, Side, check, finish, table
from hpcdist.comm.single_rank import SingleRankCommunicator
from hpcdist.compress import Feedback, JointCompression, Span, available, load

ELEMENTS = 10_000_000
SETTLING = 3  # rounds until what is left over by a message is as large as it stays
COLUMNS = ("name", "bytes", "message_bytes", "ratio", "encode_s", "decode_s", "bytes_per_s")
SETTINGS: dict[str, dict[str, Any]] = {
    "density": {"0.1%": 0.001, "1%": 0.01},
    "ratio": {"0.1%": 0.001, "1%": 0.01},
    "rank": {"1": 1, "4": 4},
}  # of compressors with such an option; the others are measured as they are by default


def _configs(name: str) -> dict[str, dict[str, Any]]:
    """List the settings in which a compressor is measured, by their rows' names."""
    option = next((option for option in SETTINGS if option in load(name).Config.model_fields), None)
    if option is None:
        return {name: {"name": name}}
    return {f"{name}_{label}": {"name": name, option: value} for label, value in SETTINGS[option].items()}


CONFIGS = {label: config for name in available() if name != "none" for label, config in _configs(name).items()}


def measure_coding(
    elements: int = ELEMENTS,
    rounds: int = 9,
    device: torch.device | str = "cpu",
    configs: Mapping[str, Mapping[str, Any]] = CONFIGS,
) -> list[Row]:
    """Time the coding of a float32 gradient with error feedback, and the decoding of its message.

    The gradient is Gaussian and new at each round; a copy of it is timed beside.

    Args:
        device: where the gradient lies, and the tensor to which its message is added.
        configs: compressors with their options, by their rows' names.

    Returns:
        Rows: name, bytes (of the gradient), message_bytes, ratio, encode_s, decode_s (medians), bytes_per_s (of the
        gradient, through both together).
    """
    comm = SingleRankCommunicator()
    check(comm, rounds)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(elements, generator=generator).to(device) for _ in range(3)]
    out = torch.zeros(elements, device=device)
    side = max(1, round(elements**0.5))
    spans = [Span(0, side * side, (side, side)), Span(side * side, elements, (elements - side * side,))]  # for powersgd

    def until_done(call: Callable[[Tensor], Any], tensor: Tensor) -> tuple[float, Any]:
        start = time.perf_counter()
        found = call(tensor)
        finish(out)
        return time.perf_counter() - start, found

    def coding(encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], object] | None) -> Run:
        """Encode one gradient after the other, and decode the message of each."""
        source = itertools.cycle(gradients)

        def run(steps: int) -> dict[str, float]:
            encode_s = decode_s = 0.0
            for _ in range(steps):
                taken_s, message = until_done(encode, next(source))
                encode_s += taken_s
                decode_s += until_done(decode, message)[0] if decode else 0.0
            figures = {"median_s": encode_s + decode_s, "encode_s": encode_s, "decode_s": decode_s}
            return {name: taken_s / steps for name, taken_s in figures.items()} | {"message_bytes": len(message)}

        return run

    sides = [Side("copy", coding(lambda gradient: out.copy_(gradient).view(torch.uint8), None))]
    for name, config in configs.items():
        feedback = Feedback(JointCompression.from_mapping(config).create(elements, spans), out)
        sides.append(Side(name, coding(feedback.encode, partial(feedback.add, out=out))))
    runner.warm_up(comm, sides, *[1] * SETTLING)
    rows = runner.measure(comm, sides, rounds)
    for row in rows:
        n_bytes, message_bytes = out.nbytes, int(row["message_bytes"])
        row |= {"bytes": n_bytes, "message_bytes": message_bytes, "ratio": n_bytes / message_bytes}
        row["bytes_per_s"] = n_bytes / (row["encode_s"] + row["decode_s"])
    return table(rows, COLUMNS)
