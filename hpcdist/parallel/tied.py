"""Keep parameters that several stages share equal: their gradients are summed, their values stay the first one's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.parallel.layers import Chain


class TiedParameters:
    """Collective. The parameters of this rank's layers that other ranks of the replica have in theirs, too.

    Args:
        comm: the ranks of a replica.
        outline: the whole model.
        layers: numbers of the layers of each rank.
        own: this rank's layers.
    """

    def __init__(self, comm: Communicator, outline: Chain, layers: Sequence[Sequence[int]], own: Chain):
        names = [{id(p): name for name, p in outline.part(mine).named_parameters()} for mine in layers]
        parameters = dict(own.named_parameters())
        self._groups: list[tuple[Communicator, list[nn.Parameter]]] = []
        for ranks, tied in _shared(outline, names).items():
            group = comm.split(0 if comm.rank in ranks else None)
            if group is not None:
                self._groups.append((group, [parameters[names[comm.rank][number]] for number in tied]))
        self._sums = [collectives.load("auto")(group) for group, _ in self._groups]

    def __bool__(self) -> bool:
        """Tell whether there are some."""
        return bool(self._groups)

    @property
    def repeated(self) -> list[nn.Parameter]:
        """Return those that a rank before this one has, too."""
        return [parameter for group, parameters in self._groups if group.rank > 0 for parameter in parameters]

    @property
    def traffic(self) -> Traffic:
        """Return the account of what has been exchanged so far."""
        return sum((group.trace.traffic for group, _ in self._groups), Traffic())

    def begin_gradients(self) -> None:
        """Leave the sums of earlier batches to the first of the ranks, before further gradients are added to them."""
        for parameter in self.repeated:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def sum_gradients(self) -> None:
        """Collective. Give each parameter the sum of the gradients that it has on the ranks that share it.

        One that has no gradient on any of them, such as a frozen one, has none afterwards either.
        """
        for total, (_, parameters) in zip(self._sums, self._groups, strict=True):
            for parameter in parameters:
                has = parameter.grad is not None
                own = parameter.grad if has else torch.zeros_like(parameter)
                gradient = torch.cat([_flat(own), _count(parameter, has)])
                total(gradient)
                if gradient[-1] == 0:
                    continue
                if not has:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(gradient[:-1].view(parameter.shape))

    def share_values(self) -> None:
        """Collective. Give each parameter the value that it has on the first of the ranks that share it."""
        for group, parameters in self._groups:
            for parameter in parameters:
                value = _flat(parameter)
                group.broadcast(value, 0)
                parameter.detach().copy_(value.view(parameter.shape))

    def close(self) -> None:
        """Collective. Release communicators."""
        for total, (group, _) in zip(self._sums, self._groups, strict=True):
            total.close()
            group.close()


def _count(parameter: Tensor, has: bool) -> Tensor:
    return torch.tensor([float(has)], dtype=parameter.dtype, device=parameter.device)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _shared(outline: Chain, names: Sequence[dict[int, str]]) -> dict[tuple[int, ...], list[int]]:
    """Return the ids of parameters that several ranks have, by these ranks; the same order on all."""
    shared: dict[tuple[int, ...], list[int]] = {}
    for parameter in outline.parameters():
        ranks = tuple(rank for rank, of_rank in enumerate(names) if id(parameter) in of_rank)
        if len(ranks) > 1:
            shared.setdefault(ranks, []).append(id(parameter))
    return shared
