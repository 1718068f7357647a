"""Train a job with torch's DistributedDataParallel, over NCCL with GPUs, over Gloo otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcdist.comm.communicator import Communicator
from hpcdist.tools.baselines.base import Library
from hpcdist.torch_backend.default_group import default_group


class TorchDDP(Library):
    """Collective. Average gradients with DistributedDataParallel, with its defaults.

    Reference: Shen Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
    """

    name = "ddp"
    remarks = ("communication happens inside backward() and is part of the computing seconds",)

    def __init__(self, comm: Communicator, device: torch.device):
        self._group, self._devices = ExitStack(), [device] if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._group.enter_context(default_group(comm, "nccl" if device.type == "cuda" else "gloo"))

    def wrap(self, module: nn.Module, optimizer: Optimizer, passes: int) -> tuple[nn.Module, Optimizer]:
        self._module = DistributedDataParallel(module, device_ids=self._devices)
        return self._module, optimizer

    def adding(self) -> AbstractContextManager[object]:
        return self._module.no_sync()

    def close(self) -> None:
        del self._module  # its reducer must not outlive the group
        self._group.close()
