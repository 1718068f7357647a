#!/usr/bin/env bash
# DTensor's amax(keepdim=True): the maximum of the first rank's shard; and the gradient of amax() is infinite.
#
# Guess: a reduction over all dimensions gives the same number with keepdim=True as without, and has the gradient that
# it has for a plain tensor.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks, a tensor of 4 elements in two shards. amax() is right. amax(keepdim=True)
# reduces each shard and says that the result is still sharded (a tensor of 1 element, held by rank 0), so all ranks
# see the maximum of rank 0's shard; amin and sum(dim=[], keepdim=True) do the same. An explicit list of dimensions
# is right. The gradient of amax() counts its maxima by such a sum: if the maximum is on rank 1 the gradient is NaN and
# infinity, and if there are equal maxima on both ranks, it is too large. Nothing warns.
# Why it matters: x.abs().amax(keepdim=True) is how the scale of a quantized weight is found, and x / x.abs().amax() a
# usual normalization. They are right where the largest element lies in the first shard, as tests may have it.
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


def values(tensor):
    return [number + 0.0 for number in tensor.full_tensor().flatten().tolist()]


mesh = init_device_mesh("cpu", (2,))
for whole in ([3.0, 1.0, 2.0, 5.0], [5.0, 1.0, 2.0, 3.0], [5.0, 1.0, 2.0, 5.0]):
    x = distribute_tensor(torch.tensor(whole), mesh, [Shard(0)]).requires_grad_()
    results = [x.amax(), x.amax(keepdim=True), x.amax(dim=[0], keepdim=True), x.sum(dim=[], keepdim=True)]
    x.amax().backward()
    seen = [values(result)[0] for result in results] + [values(x.grad)]
    if dist.get_rank() == 0:
        print(*whole, "amax {} with keepdim {} with dim=[0] {} sum with keepdim {} gradient of amax {}".format(*seen))
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
3.0 1.0 2.0 5.0 amax 5.0 with keepdim 3.0 with dim=[0] 5.0 sum with keepdim 4.0 gradient of amax [nan, nan, nan, inf]
5.0 1.0 2.0 3.0 amax 5.0 with keepdim 5.0 with dim=[0] 5.0 sum with keepdim 6.0 gradient of amax [1.0, 0.0, 0.0, 0.0]
5.0 1.0 2.0 5.0 amax 5.0 with keepdim 5.0 with dim=[0] 5.0 sum with keepdim 6.0 gradient of amax [1.0, 0.0, 0.0, 1.0]
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
