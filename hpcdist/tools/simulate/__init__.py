"""Comparisons on virtual ranks: a cluster that is described by numbers, and the runs that are made on it."""
