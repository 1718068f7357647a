"""End a run whose numbers go to infinity: where skipping does not help, and before anything is judged or saved."""

from __future__ import annotations

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.records import StepRecord
from hpcdist.records.summary import is_skipped
from hpcdist.strategies import Strategy

ADVICE = "Lower the learning rate or clip the gradients, and go on from the last checkpoint"


class SkippedSteps:
    """A count of this rank's steps in a row that were left out for a NaN or infinite gradient.

    Args:
        most: so many in a row end the run.
    """

    def __init__(self, most: int):
        self._most, self._in_a_row = most, 0

    def count(self, record: StepRecord) -> None:
        """Count a worker's record; raise NonFiniteError at the last step that may be skipped."""
        if not record.samples:
            return
        self._in_a_row = self._in_a_row + 1 if is_skipped(record) else 0
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"steps in a row whose gradient is NaN or infinite must be fewer than max_skipped, {self._most}; got "
                f"as many up to step {record.step}. {ADVICE}, or raise max_skipped."
            )


def require_finite(strategy: Strategy, comm: Communicator, step: int) -> None:
    """Collective among the living. Check that all parameters are finite.

    A gradient may be finite, and its update not: 1e37 times a rate of 100.

    Raises:
        NonFiniteError: a parameter is NaN or infinite; on all ranks alike.
    """
    if strategy.config.on_nonfinite == "ignore":
        return
    bad = []
    if not all(torch.isfinite(params.sum()) for params in strategy.model.params):  # may also have overflowed
        bad = [name for name, p in strategy.model.module.named_parameters() if not torch.isfinite(p).all()]
    bad_of = comm.gather(bad[:1] and [bad[0], len(bad)])
    for rank in comm.failures.living:
        if bad_of[rank]:
            name, count = bad_of[rank]
            raise NonFiniteError(
                f"parameters must be finite; got NaN or infinity on rank {rank} after step {step}: {name}"
                f"{f' and {count - 1} more' * (count > 1)}. {ADVICE}, which is from before."
            )
