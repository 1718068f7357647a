"""Describe and drive runs: the command line, reports, comparisons, simulation, Slurm, examination, benchmarks.

`import hpcdist` imports nothing of this folder, and nothing below it does.
"""
