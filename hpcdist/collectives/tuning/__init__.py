"""Tuning of the all-reduce: timing, the measured table, running one beside the computation."""
