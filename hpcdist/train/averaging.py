"""Average the iterates of a run on one rank: the control that tells what averaging alone brings."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel

ETA = 3  # the larger, the less the first steps count: with 3 the second half has 15/16 of the weight


class IterateAverage:
    """Keep the average of a model's parameters and buffers over its steps, in which later ones count more.

    w̄ₜ = (1 − a) w̄ₜ₋₁ + a wₜ with a = (η + 1)/(t + η), so that the number of steps need not be known.

    Reference: Ohad Shamir, Tong Zhang, "Stochastic gradient descent for non-smooth optimization: convergence results
    and optimal averaging schemes", 2013, section 4.

    Args:
        comm: the ranks that each hold the same part of a replica of the model.

    Raises:
        ConfigError: there are several replicas.
    """

    def __init__(self, model: FlatModel, comm: Communicator):
        if comm.size > 1:
            raise ConfigError(
                f"average_iterates must be false on more than one rank; got true on {comm.size}. It is a control that "
                "tells what averaging brings by itself: leave it out."
            )
        self._model, self.steps = model, 0
        self.params = [tensor.detach().clone() for tensor in model.params]
        self.buffers = [tensor.detach().clone() for tensor in model.buffers]

    def add(self) -> None:
        """Add the model as it is after a step."""
        self.steps += 1
        part = (ETA + 1) / (self.steps + ETA)
        pairs = zip((*self.params, *self.buffers), (*self._model.params, *self._model.buffers), strict=True)
        for average, now in pairs:
            if average.is_floating_point():
                average.lerp_(now.detach(), part)
            else:
                average.copy_(now)  # a count, such as batch normalisation's

    def swapped_in(self) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's values."""
        return self._model.swapped(self.params, self.buffers)
