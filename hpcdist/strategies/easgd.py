"""Elastic averaging SGD: workers explore on their own, and are drawn to a centre that is drawn to them."""

from __future__ import annotations

from typing import final

from hpcdist.strategies.families.elastic import Elastic


@final
class EASGD(Elastic):
    """Each worker trains by itself; every `period` steps it and the centre move towards each other.

    With x the worker's parameters before its step and c the centre: e = a(x − c), x ← x − e − (its optimiser's step at
    the old x), c ← c + e, where a = beta/p for p workers. Without gradients c + Σx stays what it is, in any order of
    arrival; with beta = 0 the workers are independent. The centre, which lies on the servers, is what the ranks stand
    for together. On one rank there is no centre: the optimiser runs alone.

    Bytes per worker and exchange: one parameter vector each way.

    Reference: Sixin Zhang, Anna Choromanska, Yann LeCun, "Deep learning with elastic averaging SGD", 2015, algorithm 1.
    """

    class Config(Elastic.Config):
        """Options of easgd."""
