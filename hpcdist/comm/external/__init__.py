"""Other libraries' sums over the ranks: Horovod, and torch's NCCL and Gloo."""
