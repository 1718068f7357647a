#!/usr/bin/env bash
# Lightning's Fabric.all_reduce: the mean of integers over the ranks is truncated, and the mean of booleans is "any".
#
# Guess: the mean of 7 and 8 is 7.5, as for floating-point numbers; or it is refused, as torch.mean refuses integers.
# Seen: lightning 2.6.6, torch 2.13.0 (CPU, gloo), 2 ranks. "mean" is the default of all_reduce. It sums, divides, and
# copies the quotient into a tensor of the input's type: 7. Of False and True the mean is True. Nothing warns. The sum
# of integers, and the mean of all_gather(count).float(), are right.
# Why it matters: hits, tokens and flags are integers or booleans. An accuracy of 0 on one rank and 1 on the other is
# reported as 0, a mean of token counts is too small, and "half of the ranks have overflowed" reads as all of them.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightning==2.6.6 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
rank = fabric.global_rank
for value in (7 + rank, 7.0 + rank, rank, rank == 1):
    count = torch.tensor(value)
    mean, total = (fabric.all_reduce(count.clone(), reduce_op=name).item() for name in ("mean", "sum"))
    gathered = fabric.all_gather(count).float().mean().item()
    if rank == 0:
        print(count.dtype, "mean", mean, "sum", total, "mean of all_gather", gathered)
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
torch.int64 mean 7 sum 15 mean of all_gather 7.5
torch.float32 mean 7.5 sum 15.0 mean of all_gather 7.5
torch.int64 mean 0 sum 1 mean of all_gather 0.5
torch.bool mean True sum True mean of all_gather 0.5
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
