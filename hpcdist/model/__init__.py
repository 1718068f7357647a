"""A model in flat memory: parameters, gradients, buffers, buckets, and the optimiser's state."""

from hpcdist.model.flat import FlatModel
