"""Agreement of the ranks of a replica: decisions about gradients, and parameters that stages share."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist import collectives
from hpcdist.comm.chunks import as_real, chunks
from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.layers import Chain


class Agreement:
    """Decisions about gradients, by a few numbers that the ranks of a replica exchange in every step.

    Args:
        comm: the ranks of a replica, for this object alone; whoever closes the model closes it. All of them must call
            the same methods in the same order.
        repeated: parameters that a lower rank has too, which counts their gradients in the norm.
        announces: gradients are complete bucket by bucket during the backward pass, so that averaging may overlap it.
    """

    def __init__(self, comm: Communicator, repeated: Iterable[nn.Parameter] = (), *, announces: bool = False):
        self.comm, self._repeated, self.announces = comm, set(map(id, repeated)), announces

    def nonfinite(self, names_of: Mapping[int, list[str]]) -> dict[int, list[str]]:
        """Collective in the replica. Return the names of parameters with a non-finite gradient, of all stages.

        Messages: one number, and the names if there are any.

        Args:
            names_of: this rank's names, by keys such as a strategy's rank; the result merges the ranks' names by key.
        """
        count = torch.tensor([len(names_of)], dtype=torch.int64)
        self.comm.allreduce(count)
        if not count.item():
            return {}
        merged: dict[int, list[str]] = {}
        for of_rank in self.comm.gather(list(names_of.items())):
            for key, names in of_rank:
                names_known = merged.setdefault(key, [])
                names_known += [name for name in names if name not in names_known]
        return merged

    def spread_overflow(self, grads: Iterable[Tensor]) -> None:
        """Collective in the replica. Set a gradient to NaN here if another rank has one that is not finite.

        Then the GradScaler of each rank sees the overflow and skips the step.
        """
        grads = list(grads)
        overflow = any(not torch.isfinite(grad).all() for grad in grads)
        any_overflow = torch.tensor([overflow], dtype=torch.int64)
        self.comm.allreduce(any_overflow)
        if grads and not overflow and any_overflow.item():
            grads[0].fill_(torch.nan)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Collective in the replica. Clip gradients to the 2-norm `max_norm`, over all stages, as torch does.

        Return the norm before, as a float64 on the CPU.
        """
        grads = [p.grad for p in parameters if p.grad is not None and id(p) not in self._repeated]
        squares = [float(torch.linalg.vector_norm(as_real(chunk), dtype=torch.float64)) ** 2 for chunk in chunks(grads)]
        # All-reduce adds only zeros to each rank's element, so that the result does not depend on its order of sums.
        squares_of_ranks = torch.zeros(self.comm.size, dtype=torch.float64)
        squares_of_ranks[self.comm.rank] = math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan
        self.comm.allreduce(squares_of_ranks)
        norm = math.sqrt(sum(squares_of_ranks.tolist()))
        factor = math.nan if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return torch.tensor(norm, dtype=torch.float64)


class PartOfModel(nn.Module, abc.ABC):
    """A rank's part of a model whose parameters are divided among the ranks of a replica."""

    grid: Grid  # the ranks of the replica, and those that hold the same part in other replicas
    agreement: Agreement  # with the other ranks of the replica, about gradients
    optimizers: list[Any]  # the DistributedOptimizers that train these parameters

    def describe_parts(self) -> dict[str, dict[str, Any]]:
        """Describe the tensors that are parts of larger ones, by name; {} if ranks hold whole layers.

        `session.state` computes from it where a part lies in the whole tensor, for checkpoints. `of` is the name of the
        whole tensor and `shape` its global shape. `ranks` lists the ranks of the replica that have parts of it, nested
        like a device mesh; `dims` has for each depth the dimension that is cut there, as by `torch.chunk`, or None if
        all ranks have the same. `dims` itself is None if the tensor was divided in another way.
        """
        return {}

    def traffic(self) -> Traffic:
        """Return the messages and bytes that this rank has exchanged with the others of its replica so far."""
        return self.grid.inner.trace.traffic + self.agreement.comm.trace.traffic

    @abc.abstractmethod
    def share_values(self) -> None:
        """Collective in the replica. Copy parameters that several ranks have from the first of them."""


# --- parameters that several stages share -----------------------------------------------------------------------------
class TiedParameters:
    """Collective. Parameters of this rank's layers that layers of other ranks of the replica share (tied weights).

    Args:
        comm: the ranks of a replica.
        outline: the whole model, on the meta device.
        layers: numbers of the layers of each rank.
        layers_here: this rank's layers.
    """

    def __init__(self, comm: Communicator, outline: Chain, layers: Sequence[Sequence[int]], layers_here: Chain):
        names = [{id(p): name for name, p in outline.part(of_rank).named_parameters()} for of_rank in layers]
        parameters = dict(layers_here.named_parameters())
        shared: dict[tuple[int, ...], list[int]] = {}  # ids of parameters by their ranks, in one order on all ranks
        for parameter in outline.parameters():
            ranks = tuple(rank for rank, of_rank in enumerate(names) if id(parameter) in of_rank)
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(id(parameter))
        self._groups: list[tuple[Communicator, list[nn.Parameter]]] = []
        for ranks, tied in shared.items():
            group = comm.split(0 if comm.rank in ranks else None)
            if group is not None:
                self._groups.append((group, [parameters[names[comm.rank][number]] for number in tied]))
        self._sums = [collectives.load("auto")(group) for group, _ in self._groups]

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def repeated(self) -> list[nn.Parameter]:
        """Parameters that an earlier rank also has."""
        return [parameter for group, parameters in self._groups if group.rank > 0 for parameter in parameters]

    @property
    def traffic(self) -> Traffic:
        return sum((group.trace.traffic for group, _ in self._groups), Traffic())

    def start_gradients(self) -> None:
        """Set the gradients of `repeated` to zero: they hold a sum over all ranks, which only the first rank adds."""
        for parameter in self.repeated:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def sum_gradients(self) -> None:
        """Collective. Sum the gradients of shared parameters over their ranks; None remains if no rank has one."""
        for all_reduce, (_, parameters) in zip(self._sums, self._groups, strict=True):
            for parameter in parameters:
                local_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                has_grad = torch.tensor([parameter.grad is not None], dtype=local_grad.dtype, device=local_grad.device)
                # The last element counts the ranks with a gradient.
                sums = torch.cat([local_grad.detach().reshape(-1), has_grad])
                all_reduce(sums)
                if sums[-1] > 0:
                    local_grad.copy_(sums[:-1].view(parameter.shape))
                    parameter.grad = local_grad

    def share_values(self) -> None:
        """Collective. Copy each shared parameter from its first rank."""
        for group, parameters in self._groups:
            for parameter in parameters:
                value = parameter.detach().contiguous().view(-1)
                group.broadcast(value, 0)
                parameter.detach().copy_(value.view(parameter.shape))

    def close(self) -> None:
        for total, (group, _) in zip(self._sums, self._groups, strict=True):
            total.close()
            group.close()
