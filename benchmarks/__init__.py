"""Measurements side by side in one run: `hpcdist bench`."""
