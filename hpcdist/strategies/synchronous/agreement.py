"""Agree on a step: which gradients there are, whether they are finite, whether all ranks are at it, and buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MismatchError
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import difference, digests_are_equal
from hpcdist.strategies.base import Strategy, name_of
from hpcdist.strategies.common.replicas import warn_differences

CHANGED_DIFFERENTLY = (
    "gradients must be changed alike on all ranks with {strategy}, which averages them in backward(); between that and "
    "step() the loop has changed them on rank {rank} otherwise than on rank {first}, and parameters now differ. Change "
    "them on all ranks by the same factor, or scale the loss before backward(). Where each rank divides by a count of "
    "its own, such as tokens, call optimizer.set_batch_weight(count) before its forward pass; set_batch_weight(0) "
    "leaves a rank's batch out."
)
_SMALL = 1 << 18  # elements of a buffer whose values are compared: torch counts no changes by its batch norm
_NEWLY_CHANGED = 1 << 32  # in the sum of `check` over ranks: some rank has a changed buffer that is not in `_agreed`


class StepAgreement:
    """Compare the ranks' steps, and average the buffers that have changed.

    Messages: 32 bytes in a step like the last; an int32 for each parameter if a rank has other gradients than in its
    last step, and names of gradients that are not finite. All ranks must make the same calls: return or branch only by
    results that are the same on all ranks, never by a local value.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._changing = ChangingBuffers(strategy.comm, strategy.model)
        self.forget()

    def forget(self) -> None:
        """Reset, after the number of parameters has changed."""
        # Parameters with a gradient in the last step: on this rank, and on any rank.
        self._used = (torch.ones(len(self._strategy.model.slots), dtype=torch.bool),) * 2

    def __call__(self, used: Tensor, bad: Sequence[str]) -> tuple[Tensor, dict[int, list[str]]]:
        """Collective. Return which parameters have a gradient on any rank, and names of non-finite gradients by rank.

        Args:
            used: whether each parameter has a gradient on this rank; bool, shape (parameters,).
            bad: names of the parameters whose gradient on this rank is not finite.

        Raises:
            MismatchError: param_groups, batches, or the loop's changes of averaged gradients differ between ranks.
        """
        strategy = self._strategy
        comm, hyperparameters = strategy.comm, strategy.hyperparameters
        if comm.size == 1:
            return used, {0: list(bad)} if bad else {}
        news = bool(bad) or not torch.equal(used, self._used[0])
        gradients = strategy.model.gradients
        averaged = gradients.on_end is not None  # else by `step`, after the loop's changes
        changed = gradients.changed_by_loop if averaged else 0
        # All-reduced: number of ranks with news, changed buffers, Σd and Σd² of digests d of what must be equal.
        fields = [news, self._changing.check(), *hyperparameters.digests(gradients.batch, changed)]
        message = torch.tensor(fields, dtype=torch.int64)
        comm.allreduce(message)
        news, changing, *sums = message.tolist()
        if not digests_are_equal(sums, comm.size):
            for rank, other_changed in enumerate(comm.gather(changed)):
                if other_changed != changed:
                    ranks = {"rank": max(rank, comm.rank), "first": min(rank, comm.rank)}
                    raise MismatchError(CHANGED_DIFFERENTLY.format(strategy=name_of(strategy), **ranks))
            raise difference(comm, hyperparameters, strategy.steps + 1)
        if changing:
            self._changing.average(changing)
        if news == 0:  # summed over the ranks: all have the same gradients as in the last step
            return self._used[1], {}
        message = torch.cat([used.to(torch.int32), torch.tensor([len(bad)], dtype=torch.int32)])
        comm.allreduce(message)
        self._used = used, message[:-1] > 0
        if int(message[-1]) == 0:
            return self._used[1], {}
        return self._used[1], {rank: names for rank, names in enumerate(comm.gather(list(bad))) if names}


class ChangingBuffers:
    """Finds changed buffers, and sets them on all ranks: to their mean, weighted by samples, or to the first rank's.

    Unchanged buffers (a mask, a table of positions) are never sent. `FlatBuffers.kinds` contains the rule of each
    buffer: "mean" (averaged), "first" (broadcast) or others (local).

    Messages: one all-reduce of averaged buffers, in float64, and a broadcast of each other changed buffer; one more
    exchange if the set of changed buffers grows, and at the 1st, 2nd, 4th, 8th... change of a broadcast buffer.
    """

    def __init__(self, comm: Communicator, model: FlatModel):
        self._comm, self._model = comm, model
        self._changed: list[int] = []  # positions in `buffers.slots` of buffers that `check` found changed here
        self._agreed: list[int] = []  # positions of buffers that have changed on any rank in any step; equal on all
        self._steps = 0  # with changed buffers on any rank
        buffers = model.flat_buffers
        self._kinds = [buffers.kinds[slot.group] for slot in buffers.slots]
        self._common = [position for position, kind in enumerate(self._kinds) if kind in ("mean", "first")]
        self._note()

    def _note(self) -> None:
        """Record the buffers as they are now, for `check`: identity, torch's version, and the values of small ones."""
        tensors = self._model.flat_buffers.tensors()
        common = [tensors[position] for position in self._common]
        self._seen = [(id(t), t._version, t.detach().clone() if t.numel() <= _SMALL else None) for t in common]

    def check(self) -> int:
        """Find changed buffers; return 0 without any, else 1, plus _NEWLY_CHANGED if one has not changed before."""
        tensors, self._changed = self._model.flat_buffers.tensors(), []
        for position, (*stamp, values) in zip(self._common, self._seen, strict=True):
            now = tensors[position]
            if stamp != [id(now), now._version] or (values is not None and not torch.equal(values, now)):
                self._changed.append(position)
        return int(bool(self._changed)) + _NEWLY_CHANGED * (not set(self._changed) <= set(self._agreed))

    def average(self, changes: int) -> None:
        """Collective. Make changed buffers equal on all ranks; `changes`: the sum of `check` over the ranks, not 0."""
        if changes >= _NEWLY_CHANGED:
            local_changes = [*self._agreed, *self._changed]
            self._agreed = sorted(set().union(*self._comm.gather(local_changes)))
        buffers = self._model.flat_buffers
        buffers.restore(averaged=True)  # after a batch of weight 0
        flats, tensors = self._model.buffers, buffers.tensors()  # with those that were replaced
        to_average = [tensors[position] for position in self._agreed if self._kinds[position] == "mean"]
        if to_average:
            self._mean(to_average)
        broadcast = [position for position in self._agreed if self._kinds[position] == "first"]
        self._steps += 1
        if broadcast and self._steps & (self._steps - 1) == 0:  # at the 1st, 2nd, 4th, 8th... change
            counts = self._model.gradients.mean_weight > 0
            warn_differences(self._comm, buffers, flats, range(self._comm.size), counts)
        for position in broadcast:
            slot = buffers.slots[position]
            self._comm.broadcast(flats[slot.group][slot.start : slot.stop], 0)
        self._note()

    def _mean(self, tensors: list[Tensor]) -> None:
        """Collective. Replace buffers by their means, weighted by samples, by one all-reduce in float64."""
        weight = self._model.gradients.mean_weight
        flat = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        flat = flat * weight if weight else torch.zeros_like(flat)  # 0 · NaN is NaN
        self._comm.allreduce(flat)
        flat /= self._comm.size
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
