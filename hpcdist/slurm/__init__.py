"""Jobs for Slurm: a specification and a site's profile become a batch script, which is checked, submitted and watched.

Nothing here imports torch: rendering and asking Slurm take no time on a login node.
"""
