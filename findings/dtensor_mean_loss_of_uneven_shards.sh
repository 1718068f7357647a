#!/usr/bin/env bash
# DTensor's mean losses: the mean of the shards' means, also where the shards differ in length.
#
# Guess: mse_loss of a sharded DTensor is the mean over its elements, as `x.mean()` is, whatever the length of the
# shards.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks. mse_loss, smooth_l1_loss and binary_cross_entropy_with_logits with the
# default reduction="mean" take the mean of each shard, and average these with equal weights (the placement is
# Partial("avg")). 5 elements lie as 3 and 2, so the loss is not that of the whole tensor, and neither is its gradient.
# x.mean() of the same tensor is right, as is every loss with 4 elements. Nothing warns.
# Why it matters: the last batch of an epoch, or a dimension that the mesh does not divide, silently weighs samples
# unequally, and the loss of a run then depends on the number of ranks.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss

mesh = init_device_mesh("cpu", (2,))
for size in (4, 5):
    whole = torch.arange(float(size))
    sharded = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    for loss in (mse_loss, smooth_l1_loss, binary_cross_entropy_with_logits):
        plain = loss(whole, torch.zeros_like(whole)).item()
        spread = loss(sharded, torch.zeros_like(sharded)).full_tensor().item()
        if dist.get_rank() == 0:
            print(size, loss.__name__, f"plain {plain:.4f} sharded {spread:.4f}")
    mean, variable = sharded.mean().full_tensor().item(), sharded.clone().requires_grad_()
    mse_loss(variable, torch.zeros_like(variable)).backward()
    gradient = variable.grad.full_tensor()
    if dist.get_rank() == 0:
        print(size, "mean()", mean, "gradient / plain gradient", (gradient / (2 * whole / size))[1:].tolist())
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
4 mse_loss plain 3.5000 sharded 3.5000
4 smooth_l1_loss plain 1.1250 sharded 1.1250
4 binary_cross_entropy_with_logits plain 1.7955 sharded 1.7955
4 mean() 1.5 gradient / plain gradient [2.0, 2.0, 2.0]
5 mse_loss plain 6.0000 sharded 7.0833
5 smooth_l1_loss plain 1.6000 sharded 1.8333
5 binary_cross_entropy_with_logits plain 2.2400 sharded 2.4556
5 mean() 2.0 gradient / plain gradient [1.6666667461395264, 1.6666667461395264, 2.5, 2.5]
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
