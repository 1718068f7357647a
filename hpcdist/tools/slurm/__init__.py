"""Jobs for Slurm: a specification and a site's profile become a batch script, which is checked, submitted and watched.

Only `check` and `watch` import torch, when they read the job's file, and `arrays`, for a comparison: rendering and
asking Slurm take no time on a login node.
"""
