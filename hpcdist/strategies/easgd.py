"""Workers train independently, each pulled towards a common centre, which follows them: elastic averaging SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Update
from hpcdist.strategies.server.elastic import ElasticConfig, Motion, tie_to_centre
from hpcdist.strategies.server.strategy import ServerStrategy


class Plain(Motion):
    """Motion by the local optimiser; the model holds x."""

    def __init__(self, model: FlatModel):
        self._model = model

    def position(self) -> Sequence[Tensor]:
        return self._model.params

    def step(self, update: Update) -> None:
        update()


@final
class EASGD(ServerStrategy):
    """Train each worker independently; every `period` steps the worker and the centre move towards each other.

    With x the worker's parameters before its step and c the centre: e = a(x − c), x ← x − e − (its optimiser's step
    from the old x, weight decay included), c ← c + e, where a = beta/p for p workers. Without gradients c + Σx stays
    constant, in any order of arrival; with beta = 0 the workers are independent. The centre, on the servers, is the
    trained model. On one rank only the optimiser runs.

    With `synchronous` all workers exchange at the same steps: c ← c + a Σ(x − c) = (1 − beta)c + beta · mean of x.

    Bytes per worker and exchange: one parameter vector in each direction.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "easgd", period=4, beta=0.9)

    Reference: Sixin Zhang, Anna Choromanska, Yann LeCun, "Deep learning with elastic averaging SGD", 2015, algorithm 1;
    for the synchronous form, equations 3 and 4.
    """

    class Config(ElasticConfig):
        """Options of easgd."""

    up, down = "values", "moves"
    contract = replace(
        ServerStrategy.contract, averages="parameters", updates="here", parameters="kept", consensus="elsewhere"
    )
    steps_on_workers = True

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        tie_to_centre(self, config, lambda: Plain(model))
