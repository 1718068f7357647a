"""Distributed L-BFGS: a coordinator of numbers, shards of vectors, workers of portions."""
