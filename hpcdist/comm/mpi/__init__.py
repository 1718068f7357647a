"""Real ranks: the seam over mpi4py, which is imported nowhere else."""
