"""Simulation: a cluster described by a few numbers, and runs on its virtual ranks."""
