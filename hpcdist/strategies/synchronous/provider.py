"""Choose the library that sums gradients over the ranks, and its own options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from hpcdist.comm.communicator import Communicator, mpi_of
from hpcdist.comm.external.base import OutsideSum
from hpcdist.config import Named
from hpcdist.errors import ConfigError

OWN = "hpcdist"


class ProviderConfig(Named):
    """The choice of a library that sums gradients, and its options."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["hpcdist", "horovod", "nccl", "gloo"] = Field(
        OWN, description="what sums gradients: hpcdist over MPI, horovod, or torch.distributed's nccl or gloo"
    )
    op: Literal["average", "sum", "adasum"] = Field(
        "average", description="horovod: the mean of gradients, their sum, or Adasum, another mathematics"
    )
    compression: Literal["none", "fp16"] = Field("none", description="horovod: what travels is in half precision")
    fusion_mb: int | None = Field(None, ge=0, description="horovod: MiB of tensors that are sent together")
    cycle_time_ms: float | None = Field(None, gt=0, description="horovod: pause between two rounds of sending")
    interface: str | None = Field(None, description="nccl, gloo: network interface or network to meet on, as ib0")

    @model_validator(mode="after")
    def _has_its_options(self) -> ProviderConfig:
        own = {"horovod": {"op", "compression", "fusion_mb", "cycle_time_ms"}}
        torchs = {"nccl": {"interface"}, "gloo": {"interface"}}
        others = sorted(self.model_fields_set - {"name"} - {**own, **torchs}.get(self.name, set()))
        if others:
            raise ValueError(
                f"strategy.provider.{others[0]} must be left out with {self.name}, which has no such option; got "
                f"{getattr(self, others[0])}. `hpcdist strategies` says which library has it."
            )
        return self

    def __bool__(self) -> bool:
        """Tell whether another library than hpcdist itself is chosen."""
        return self.name != OWN

    @property
    def exact(self) -> bool:
        """Tell whether the result is the mean, to rounding in the gradients' own type."""
        return self.op == "average" and self.compression == "none"

    def make(self, comm: Communicator, grads: Sequence[Tensor]) -> OutsideSum:
        """Collective. Make the library's sum over the ranks of `comm`, or its other reduction as `op` says.

        Args:
            grads: tensors like those to be summed later; refused now if the library can't sum them.

        Raises:
            ConfigError: the library is not there, or can't do it on these ranks or with these tensors.
        """
        if mpi_of(comm) is None:
            raise ConfigError(
                f"strategy.provider must be hpcdist on virtual ranks, which no other library knows; got {self.name}. "
                "Leave it out, or launch real ranks with mpirun."
            )
        if self.name == "horovod":
            from hpcdist.comm.external.horovod import Horovod

            reduce: OutsideSum = Horovod(
                comm,
                op="adasum" if self.op == "adasum" else "sum",  # the mean's division is done where ours is
                compression=self.compression,
                fusion_bytes=None if self.fusion_mb is None else self.fusion_mb << 20,
                cycle_time_ms=self.cycle_time_ms,
            )
        else:
            from hpcdist.comm.external.process_group import ProcessGroup

            reduce = ProcessGroup(comm, self.name, self.interface or "")
        for flat in grads:
            reduce.check(flat)
        return reduce
