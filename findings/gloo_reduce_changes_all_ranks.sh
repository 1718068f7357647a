#!/usr/bin/env bash
# torch.distributed.reduce with gloo: the tensors of the other ranks hold partial sums afterwards.
#
# Guess: reduce(tensor, dst=0) changes the tensor of rank 0 alone, as MPI_Reduce does, and as the documentation says
# ("Only the process with rank dst is going to receive the final result").
# Seen: torch 2.13.0 (CPU, gloo), 3 ranks that hold 1, 10 and 100. Rank 0 has 111. On ranks 1 and 2 some elements are
# their own, some are the sum of two ranks and some that of all, and which is which depends on the length. A tensor that
# is used again goes wrong: the second of two reduces counts some ranks twice. PyTorch's issue 76527 (2022) says it of 2
# ranks, and is open.
# Why it matters: a loss or a count is reduced to rank 0 for the log, and used further on each rank: for a running mean,
# early stopping, or a learning rate. The other ranks then decide by numbers that are neither theirs nor the sum.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for size in (1, 4, 1000):
    count = torch.full((size,), 10 ** dist.get_rank())
    dist.reduce(count, dst=0)
    once = [None] * 3
    dist.all_gather_object(once, sorted(set(count.tolist())))
    count = torch.full((size,), 10 ** dist.get_rank())
    dist.reduce(count, dst=0)
    if dist.get_rank() == 0:
        count.fill_(1)
    dist.reduce(count, dst=0)
    if dist.get_rank() == 0:
        print(size, "elements: rank 0", *once[0], "| rank 1", *once[1], "| rank 2", *once[2], end=" | ")
        print("reduced again", *sorted(set(count.tolist())))
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
1 elements: rank 0 111 | rank 1 110 | rank 2 100 | reduced again 211
4 elements: rank 0 111 | rank 1 110 111 | rank 2 100 101 | reduced again 211 213
1000 elements: rank 0 111 | rank 1 10 110 111 | rank 2 100 101 111 | reduced again 122 211 213
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
