"""Workers train independently, each pulled towards a common centre, which follows them: elastic averaging SGD."""

from __future__ import annotations

from typing import final

from hpcdist.strategies.server.elastic import ElasticStrategy


@final
class EASGD(ElasticStrategy):
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
