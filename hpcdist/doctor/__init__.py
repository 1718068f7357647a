"""Preflight: what is wrong with these nodes, before a run finds out. `commands.py` has `hpcdist doctor`."""
