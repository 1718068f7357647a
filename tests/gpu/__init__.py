"""Measuring on machines with GPUs: `tests/gpu.sh`."""
