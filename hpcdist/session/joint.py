"""Describe the joint batch of all workers, of which each computes portions."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.data.sharding import EpochPlan
from hpcdist.strategies.lbfgs.portions import JointBatch


def joint_batch(plan: EpochPlan, step: int, worker: int, config: Any) -> tuple[np.ndarray, JointBatch]:
    """Return the samples of all workers in a step, and their description for one of them.

    Args:
        config: of the strategy; its `overlap` is the share of a batch that the next one has too.
    """
    indices, head, tail = plan.joint(step, config.overlap)
    share = plan.sizes(step)[worker]
    return indices, JointBatch(len(indices), share, head, tail, whole=len(indices) == plan.n_samples)
