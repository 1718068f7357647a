"""Lay a model out in flat memory: parameters, gradients, buffers, buckets, and the optimiser's state along them."""

from hpcdist.model.flat import FlatModel

__all__ = ["FlatModel"]
