"""A fusion buffer: one buffer for many tensors, to send them by one call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PLANS = 16  # number of divisions of the buffer that are cached

Plan = tuple[Tensor, tuple[Tensor, ...]]


class FusionBuffer:
    """A flat tensor that is reused for several tensors; allocating memory would take as long as the call.

    Its memory grows to the largest size that was requested.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._plans: dict[tuple[torch.device, torch.dtype, tuple[torch.Size, ...]], Plan] = {}

    def take(self, tensors: Sequence[Tensor]) -> Plan:
        """Return a flat, uninitialised tensor, and views of its parts with the shapes of `tensors`, all of one dtype.

        The memory is on their device, or on the host if they are on several; valid until the next call.
        """
        devices, dtype = {each.device for each in tensors}, tensors[0].dtype
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        shapes = tuple([each.shape for each in tensors])
        plan = self._plans.get((device, dtype, shapes))
        if plan is None:
            counts = [math.prod(shape) for shape in shapes]
            memory, total = self._memory.get((device, dtype)), sum(counts)
            if memory is None or len(memory) < total:  # plans with views of the old memory are dropped
                self._plans = {key: plan for key, plan in self._plans.items() if key[:2] != (device, dtype)}
                memory = self._memory[device, dtype] = torch.empty(total, dtype=dtype, device=device)
            flat = memory[:total]
            parts = tuple(part.view(shape) for part, shape in zip(flat.split(counts), shapes))
            while len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[device, dtype, shapes] = flat, parts
        return plan
