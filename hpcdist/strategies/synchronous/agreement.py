"""Agree on a step: which parameters have gradients, whether these are finite, and whether all are at the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.errors import MismatchError
from hpcdist.model.hyperparameters import difference, digests_are_equal
from hpcdist.strategies.base import Strategy, name_of
from hpcdist.strategies.synchronous.buffers import ChangingBuffers

CHANGED_DIFFERENTLY = (
    "gradients must be changed alike on all ranks with {strategy}, which averages them in backward(); between that and "
    "step() the loop has changed them on rank {rank} otherwise than on rank {first}, and parameters now differ. Change "
    "them on all ranks by the same factor, or scale the loss before backward(). Where each rank divides by a count of "
    "its own, such as tokens, call optimizer.set_batch_weight(count) before its forward pass; set_batch_weight(0) "
    "leaves a rank's batch out."
)


class StepAgreement:
    """Compare the ranks' steps, and average the buffers that have changed.

    Messages: 32 bytes in a step like the last; an int32 for each parameter if a rank has other gradients than in its
    last step, and names of gradients that are not finite.
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
