"""Tests on a real Slurm: see `cluster.kit`."""
