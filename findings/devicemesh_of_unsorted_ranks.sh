#!/usr/bin/env bash
# DeviceMesh([1, 0]): an uneven shard loses an element on its way through the mesh.
#
# Guess: a mesh lists its ranks in the order in which they hold the shards, as MPI_Group_incl does; so a tensor that is
# distributed over it and gathered again is the same tensor.
# Seen: torch 2.13.0 (CPU, gloo), 2 ranks. A rank's coordinate is its place in the list: rank 0 has coordinate 1. But
# process groups sort their ranks (new_group([1, 0]) has the ranks [0, 1]), and rank 0 gets the first shard. The length
# of a shard follows the coordinate, though. So of 5 elements rank 0 keeps 2, rank 1 has 2 and one of padding, and
# full_tensor() has a zero in place of element 2. With 4 elements the tensor is whole, but lies in the sorted order.
# Why it matters: meshes are built from lists of ranks to follow the network (ring orders, node by node); uneven
# parameters then change silently.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
ranks = dist.get_process_group_ranks(dist.new_group([1, 0]))
if dist.get_rank() == 0:
    print("new_group([1, 0]) has", ranks)
for order in ([0, 1], [1, 0]):
    mesh = DeviceMesh("cpu", order)
    for size in (4, 5):
        sharded = distribute_tensor(torch.arange(size), mesh, [Shard(0)])
        shards = [None, None]
        dist.all_gather_object(shards, (mesh.get_coordinate(), sharded.to_local().tolist()))
        full = sharded.full_tensor().tolist()
        if dist.get_rank() == 0:
            print("mesh", order, "coordinates and shards", *shards, "full", full)
dist.destroy_process_group()
PYTHON
cat >"$folder/expected" <<'EXPECTED'
new_group([1, 0]) has [0, 1]
mesh [0, 1] coordinates and shards ((0,), [0, 1]) ((1,), [2, 3]) full [0, 1, 2, 3]
mesh [0, 1] coordinates and shards ((0,), [0, 1, 2]) ((1,), [3, 4]) full [0, 1, 2, 3, 4]
mesh [1, 0] coordinates and shards ((1,), [0, 1]) ((0,), [2, 3]) full [0, 1, 2, 3]
mesh [1, 0] coordinates and shards ((1,), [0, 1]) ((0,), [3, 4, 0]) full [0, 1, 0, 3, 4]
EXPECTED
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
