"""Tuning of the all-reduce: timing, and the measured table."""
