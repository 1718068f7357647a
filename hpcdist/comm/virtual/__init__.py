"""The virtual cluster: N virtual ranks in one process, under a deterministic scheduler with a virtual clock."""

from hpcdist.comm.virtual.compute import (
    ComputeModel,
    Constant,
    Exponential,
    Jitter,
    Replay,
    SlowSteps,
    Straggler,
)
from hpcdist.comm.virtual.network import Network
from hpcdist.comm.virtual.run import VirtualCommunicator, run_virtual

__all__ = [
    "ComputeModel", "Constant", "Exponential", "Jitter", "Network", "Replay", "SlowSteps", "Straggler",
    "VirtualCommunicator", "run_virtual",
]  # fmt: skip
