"""Train a job with Horovod's DistributedOptimizer."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcdist.tools.baselines.base import Library


class HorovodOptimizer(Library):
    """Collective. Average gradients with Horovod's DistributedOptimizer, with its defaults.

    Raises:
        ConfigError: Horovod was not built for this environment's torch and MPI.

    Reference: Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
    2018.
    """

    name = "horovod"
    remarks = ("communication overlapped with backward() is part of the computing seconds, synchronize() is not",)

    @staticmethod
    def why_not() -> str | None:
        package = importlib.util.find_spec("horovod")
        if package is None or package.origin is None:  # a mere folder of that name
            return "Horovod is not installed. `hpcdist horovod build` builds it."
        return None

    def __init__(self, comm: Any, device: torch.device):
        from hpcdist.comm.external import horovod  # starts MPI: not at import

        self._release = horovod.release
        running, _ = horovod.join(comm, horovod.Tuning.of(None, None))
        self._hvd = running.hvd

    def wrap(self, module: nn.Module, optimizer: Optimizer, passes: int) -> tuple[nn.Module, Optimizer]:
        self._hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        # No broadcast_optimizer_state: a new optimizer has no state, and Horovod would take a step to create it.
        named = module.named_parameters()
        self._optimizer = self._hvd.DistributedOptimizer(optimizer, named, backward_passes_per_step=passes)
        return module, self._optimizer

    def synchronize(self) -> None:
        self._optimizer.synchronize()

    def stepping(self) -> AbstractContextManager[object]:
        return self._optimizer.skip_synchronize()

    def close(self) -> None:
        self._release()
