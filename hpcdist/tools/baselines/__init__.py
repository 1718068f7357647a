"""Train a job with other libraries, for comparison: one file per library.

    mpirun -n 4 hpcdist train jobs/digits.py --baseline ddp --output runs/ddp --set epochs=4

A baseline uses the settings of `hpcdist train`, except the strategy's, and the same batches, and writes the same files.
"""
