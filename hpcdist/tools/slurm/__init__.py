"""Slurm jobs: a job's specification and a site's profile are rendered to a batch script, checked, submitted and
watched.

Only `check`, `watch` and `arrays` import torch, to read the job's file; rendering and queries are fast on a login node.
"""
