"""Adasum: combines gradients to their sum if they are orthogonal, and to their mean if they are equal."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.collectives.calls import Collectives


def adasum(calls: Collectives, tensor: Tensor) -> None:
    """Collective. Replace a tensor by the ranks' combination: of pairs of ranks, then pairs of pairs, and so on.

    Tensors of ranks beyond the largest power of two are first combined with those of the first ranks. Sums are in
    float64; memory: ranks times the tensor.

    Reference: Saeed Maleki, Madan Musuvathi, Todd Mytkowicz, Olli Saarikivi, Tianju Xu, Vadim Eksarevskiy, Jaliya
    Ekanayake, Emad Barsoum, "Scaling distributed training with adaptive summation", 2021.
    """
    rows = tensor.new_empty(calls.size, tensor.numel())
    calls.all_gather(rows, tensor)
    addends = list(rows.double())
    power = 1 << (calls.size.bit_length() - 1)
    for index in range(power, calls.size):
        addends[index - power] = _pair(addends[index - power], addends[index])
    addends = addends[:power]
    while len(addends) > 1:
        addends = [_pair(a, b) for a, b in zip(addends[::2], addends[1::2])]
    tensor.copy_(addends[0].view(tensor.shape))


def _pair(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two vectors, each less half of its projection onto the other one; zeros have no effect."""
    dot, square_a, square_b = (torch.dot(x, y).item() for x, y in ((a, b), (a, a), (b, b)))
    return a * (1 - dot / (2 * square_a) if square_a else 1) + b * (1 - dot / (2 * square_b) if square_b else 1)
