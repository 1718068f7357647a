"""One buffer for many tensors, which then travel by one call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PLANS = 16  # ways to cut the buffer that are kept

Plan = tuple[Tensor, tuple[Tensor, ...]]


class FusionBuffer:
    """Lends one flat tensor for several: its memory stays, as new memory for each call would take as long as the call.

    Its memory is as long as the longest that was asked for.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._plans: dict[tuple[torch.device, torch.dtype, tuple[torch.Size, ...]], Plan] = {}

    def take(self, tensors: Sequence[Tensor]) -> Plan:
        """Return a flat tensor, and its parts, which are shaped as these tensors of one dtype; of any content.

        It is on their device, or on the host where they are on several; valid until the next call.
        """
        devices, dtype = {one.device for one in tensors}, tensors[0].dtype
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        shapes = tuple([one.shape for one in tensors])
        plan = self._plans.get((device, dtype, shapes))
        if plan is None:
            counts = [math.prod(shape) for shape in shapes]
            flat = self._flat(device, dtype, sum(counts))
            parts = tuple(part.view(shape) for part, shape in zip(flat.split(counts), shapes))
            while len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[device, dtype, shapes] = flat, parts
        return plan

    def _flat(self, device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
        memory = self._memory.get((device, dtype))
        if memory is None or len(memory) < count:
            self._plans = {key: plan for key, plan in self._plans.items() if key[:2] != (device, dtype)}
            memory = self._memory[device, dtype] = torch.empty(count, dtype=dtype, device=device)
        return memory[:count]
