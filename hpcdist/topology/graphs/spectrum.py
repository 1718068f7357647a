"""The spectral gap: the speed at which a topology's ranks agree."""

from __future__ import annotations

import numpy as np

from hpcdist.topology.base import Topology

SAMPLED_STEPS = 16  # of matrices that are drawn
ZERO = 1e-12  # below it an eigenvalue is rounding


def spectral_gap(topology: Topology) -> float:
    """Compute 1 − r, r being the factor by which the ranks' distance from their mean shrinks per step.

    r is the second largest modulus of W's eigenvalues. Where W repeats after t steps it is that of their product, to
    the power 1/t. Where W is drawn, r² is that of E[WᵀW]. A draw that treats all ranks alike has E[WᵀW] = aI + b11ᵀ, so
    that r² follows from the trace: r² = (E‖W‖² − 1)/(p − 1), from the mean over SAMPLED_STEPS steps.

    Reference: Lin Xiao, Stephen Boyd, "Fast linear iterations for distributed averaging", 2004; Stephen Boyd, Arpita
    Ghosh, Balaji Prabhakar, Devavrat Shah, "Randomized gossip algorithms", 2006, for random W.
    """
    if topology.period is None:
        squares = np.mean([np.square(topology.matrix(step)).sum() for step in range(SAMPLED_STEPS)])
        return 1 - (max(squares - 1, 0.0) / max(topology.size - 1, 1)) ** 0.5
    product = np.eye(topology.size)
    for step in range(topology.period):
        product = topology.matrix(step) @ product
    return 1 - _second(product) ** (1 / topology.period)


def _second(matrix: np.ndarray) -> float:
    """Compute the second largest modulus of a matrix's eigenvalues; 0 where there is only one."""
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return float(moduli[-2]) if len(moduli) > 1 and moduli[-2] > ZERO else 0.0
